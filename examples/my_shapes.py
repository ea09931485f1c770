"""Time the linears of your own model: torch's collective and GEMM, unfused and fused, checked before they are timed.

    torchrun --nproc-per-node 2 examples/my_shapes.py --tokens 4096 --width 4096 --hidden 14336

`tpkernels bench --shape MxKxN` measures more carefully and in more ways; this is to be changed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tpkernels as tpk


def torch_way(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return F.linear(torch.cat(parts), w)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="over all ranks, a multiple of their number")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096, help="over all ranks, a multiple of their number")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()

    tp = tpk.init()["tp"]
    ranks, dtype = tp.size(), getattr(torch, args.dtype)
    torch.manual_seed(tp.get_local_rank())
    x = torch.randn(args.tokens // ranks, args.width, dtype=dtype, device=tp.device_type)
    w = torch.randn(args.hidden // ranks, args.width, dtype=dtype, device=tp.device_type)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "torch": lambda: torch_way(x, w),
        "unfused": lambda: tpk.all_gather_matmul(x, w, tp, implementation="unfused"),
        "auto": lambda: tpk.all_gather_matmul(x, w, tp),
    }

    # First right, then fast: against fp64, relative to the largest value.
    exact = torch_way(x.double(), w.double())
    bound = 64 * torch.finfo(dtype).eps
    for name, way in ways.items():
        error = ((way().double() - exact).abs().max() / exact.abs().max()).item()
        assert error <= bound, f"{name} is off by {error:.2e}, more than {bound:.2e}"

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        for name, way in ways.items():  # in turns, so that what disturbs the machine disturbs all of them
            dist.barrier()
            start = time.perf_counter()
            way()
            if tp.device_type == "cuda":
                torch.cuda.synchronize()
            slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=tp.device_type)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(1e3 * slowest.item())
    if tp.get_local_rank() == 0:
        print(f"all_gather_matmul {args.tokens}x{args.width}x{args.hidden} {args.dtype} on {ranks} ranks")
        for name, found in times.items():
            low, middle, high = statistics.quantiles(found, n=4)
            print(f"{name:8} {middle:9.3f} ms +-{(high - low) / 2:.3f}")


if __name__ == "__main__":
    main()
