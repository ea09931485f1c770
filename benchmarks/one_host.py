"""What the ranks of one host pay for their collectives: targets P4, P5 and P6.

    python benchmarks/one_host.py --json benchmarks/results/FILE.json

P4  M 2048, K 4096, N 4096, bf16, 2 ranks: fused / GEMM-only; AG+GEMM <= 1.03, GEMM+RS <= 1.06
P5  all-reduce of 2 x 4096 and of 2048 x 4096 (16 MB), bf16: gloo / ours >= 10 and >= 4
P6  a decoding step (M 1 and 8) of an MLP block, d 1024, ff 4096, bf16:
    ours / DTensor's parallelize_module on gloo <= 0.6, ours / the local GEMMs alone <= 1.2.  The GEMMs alone are
    torch's, "gemm"; "our_gemm" are those that our layers make, by whichever GEMM was measured to be faster: what ours
    takes longer than these is the sum over the ranks

Baselines in the same run, taking turns: gloo's collective and `F.linear` (torch), our `unfused` and `chunked` over
gloo, and our own collective over shared memory followed by `F.linear` (unfused_shared): what fusing adds on one host.
Every result is verified before it is timed.  One rank per core, one thread each; gloo's own threads may use all cores,
because bound to its rank's core gloo's small all-reduce takes about three times as long.  Where DeepSpeed is installed
(`pip install deepspeed`), P5 has its all-reduce over shared memory as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tpkernels as tpk
from tpkernels.comm import gloo_threads
from tpkernels.gemm import few_rows
from tpkernels.measure import report
from tpkernels.measure.cases import Shape, TimedCase
from tpkernels.measure.timing import Measurement, measure
from tpkernels.testing.numeric import Bounded

WORLD_SIZE = 2
DTYPE = torch.bfloat16
GEMM_SHAPE = Shape(2048, 4096, 4096)
GEMM_TARGETS = {"all_gather_matmul": 1.03, "matmul_reduce_scatter": 1.06}
REDUCE_SHAPES = {(2, 4096): 10.0, (2048, 4096): 4.0}
D_MODEL, D_FF, DECODE_ROWS = 1024, 4096, (1, 8)
DECODE_TARGETS = {"dtensor": 0.6, "gemm": 1.2}

Ratio = tuple[str, str, str, float | None]
"""Numerator, denominator, relation to the target, and the target, if there is one."""


def fused_case(op: str, group: dist.ProcessGroup, repeats: int) -> dict[str, Any]:
    case = TimedCase(op, GEMM_SHAPE, DTYPE, group, torch.device("cpu"))

    def unfused_shared() -> Tensor:
        if case.gathers:
            return F.linear(tpk.all_gather(case.x, group, implementation="shared_memory"), case.weight)
        return tpk.reduce_scatter(F.linear(case.x, case.weight), group, implementation="shared_memory")

    candidates: dict[str, Callable[[], object]] = {
        "gemm": case.gemm_only,
        "torch": case.torch_baseline,
        "unfused_shared": unfused_shared,
        **{name: case.ours(name) for name in (*case.implementations(), "auto")},
    }
    times = measure(candidates, repeats=repeats, verify=case.verify, group=group)
    return _row("P4", f"{op} {GEMM_SHAPE}", times, [("shared_memory", "gemm", "<=", GEMM_TARGETS[op])])


def reduce_case(shape: tuple[int, int], group: dist.ProcessGroup, repeats: int) -> dict[str, Any]:
    parts = [torch.randn(*shape, generator=torch.Generator().manual_seed(r)).to(DTYPE) for r in range(group.size())]
    x = parts[group.rank()]
    exact = torch.stack([part.double() for part in parts]).sum(0)
    rounding = torch.finfo(DTYPE).eps / 2 * exact.abs() * 1.01

    def gloo() -> Tensor:
        with gloo_threads.as_torch_made_them():
            y = x.clone()  # ours leaves its input alone, too
            dist.all_reduce(y, group=group)
            return y

    candidates: dict[str, Callable[[], object]] = {
        "copy": lambda: x.clone(),
        "torch": gloo,
        "unfused": lambda: tpk.all_reduce(x, group, implementation="unfused"),
        "shared_memory": lambda: tpk.all_reduce(x, group, implementation="shared_memory"),
    }

    peer = deepspeed_all_reduce(group)
    if peer is not None:
        candidates["deepspeed"] = lambda: peer(x.clone())

    def verify(name: str, result: object) -> None:
        assert isinstance(result, Tensor)
        if name != "copy":
            Bounded(exact, rounding).check(result, f"all_reduce {name}")

    calls = max(1, 2_000_000 // x.numel() // 4)
    times = measure(candidates, repeats=repeats, warmup=5, calls_per_sample=calls, verify=verify, group=group)
    ratio = ("torch", "shared_memory", ">=", REDUCE_SHAPES[shape])
    return _row("P5", f"all_reduce {shape[0]}x{shape[1]}", times, [ratio])


@cache
def deepspeed_all_reduce(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor] | None:
    """DeepSpeed's all-reduce over shared memory, in place, where the package is installed; compiled on first use."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    os.environ["LOCAL_SIZE"] = str(group.size())
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    for turn in range(group.size()):  # one rank compiles, the others find it done
        if turn == group.rank():
            module = ShareMemCommBuilder().load(verbose=False)
        dist.barrier(group)
    module.initialize(group.size(), group.rank())
    op: Callable[[Tensor], Tensor] = torch.ops.deepspeed.inference_all_reduce_
    return op


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D_MODEL, D_FF, bias=False, dtype=DTYPE)
        self.down = nn.Linear(D_FF, D_MODEL, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


def decode_case(rows: int, mesh: Any, repeats: int) -> dict[str, Any]:
    group: dist.ProcessGroup = mesh.get_group()
    torch.manual_seed(0)
    mlp = Mlp()
    x = torch.randn(rows, D_MODEL).to(DTYPE)
    ours = tpk.nn.ParallelMLP.from_linears(mlp.up, mlp.down, mesh, activation="gelu")
    half = D_FF // group.size()
    # The very weights that our layers hold: two copies would not fit into the caches that one fits into.
    up, down = (layer.weight.detach().to_local() for layer in (ours.up, ours.down))
    hidden = Bounded.sum_of_products([x], [mlp.up.weight.detach()], dtype=DTYPE).activation("gelu", dtype=DTYPE)
    hidden = hidden.rounded(DTYPE)
    slices = [slice(r * half, (r + 1) * half) for r in range(group.size())]
    bound = Bounded.sum_of_products(
        [Bounded(hidden.value[:, s], hidden.error[:, s]) for s in slices],
        [mlp.down.weight.detach()[:, s] for s in slices],
        dtype=DTYPE,
        partials_rounded=True,
    ).rounded(DTYPE)
    dtensor = parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def verify(name: str, result: object) -> None:
        assert isinstance(result, Tensor)
        if name not in ("gemm", "our_gemm"):  # this rank's part of the sum
            bound.check(result, f"decode {name}")

    def by_dtensor() -> Tensor:
        with gloo_threads.as_torch_made_them():
            return _ready(dtensor(x))

    def our_linear(rows: Tensor, weight: Tensor) -> Tensor:
        y = few_rows.linear(rows, weight, None)
        return F.linear(rows, weight) if y is None else y

    candidates: dict[str, Callable[[], object]] = {
        "gemm": lambda: F.linear(F.gelu(F.linear(x, up)), down),
        "our_gemm": lambda: our_linear(F.gelu(our_linear(x, up)), down),
        "dtensor": by_dtensor,
        "shared_memory": lambda: ours(x),
    }
    with torch.no_grad():
        times = measure(candidates, repeats=repeats, warmup=10, calls_per_sample=20, verify=verify, group=group)
    ratios: list[Ratio] = [("shared_memory", name, "<=", bound) for name, bound in DECODE_TARGETS.items()]
    return _row("P6", f"MLP block M {rows}", times, [*ratios, ("shared_memory", "our_gemm", "", None)])


def _ready(y: Tensor) -> Tensor:
    """DTensor returns before its all-reduce has ended."""
    return y.wait() if isinstance(y, AsyncCollectiveTensor) else y


def _row(target: str, what: str, times: dict[str, Measurement], ratios: list[Ratio]) -> dict[str, Any]:
    checked: list[dict[str, Any]] = []
    for numerator, denominator, relation, bound in ratios:
        value = times[numerator].median / times[denominator].median
        if bound is None:
            checked.append({"ratio": f"{numerator} / {denominator}", "value": value, "target": None, "met": None})
            continue
        met = value <= bound if relation == "<=" else value >= bound
        checked.append(
            {"ratio": f"{numerator} / {denominator}", "value": value, "target": f"{relation} {bound:g}", "met": met}
        )
    return {
        "target": target,
        "what": what,
        "ratios": checked,
        "times": {name: report.measurement_to_json(measurement) for name, measurement in times.items()},
    }


def run_rank(repeats: int, only: str | None) -> list[dict[str, Any]]:
    own_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    mesh = tpk.init(tp=WORLD_SIZE, device="cpu", timeout=120)["tp"]  # starts gloo's threads
    os.sched_setaffinity(0, own_core)
    group = mesh.get_group()
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *(("P4", lambda op=op: fused_case(op, group, repeats)) for op in GEMM_TARGETS),
        *(("P5", lambda shape=shape: reduce_case(shape, group, 3 * repeats)) for shape in REDUCE_SHAPES),
        *(("P6", lambda rows=rows: decode_case(rows, mesh, 3 * repeats)) for rows in DECODE_ROWS),
    ]
    return [case() for target, case in cases if only in (None, target)]


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        times = "  ".join(f"{name} {1e3 * t['median_ms']:,.1f}" for name, t in row["times"].items())
        print(f"{row['target']}  {row['what']}   (us) {times}")
        for ratio in row["ratios"]:
            verdict = {True: "met", False: "NOT MET", None: "no target"}[ratio["met"]]
            wanted = "" if ratio["target"] is None else f"target {ratio['target']}: "
            print(f"      {ratio['ratio']} = {ratio['value']:.3f}  ({wanted}{verdict})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--only", choices=["P4", "P5", "P6"])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = tpk.launch(run_rank, WORLD_SIZE, args.repeats, args.only, timeout=1200)[0]
    _print(rows)
    if args.json:
        setup = {"world_size": WORLD_SIZE, "threads": 1, "repeats": args.repeats, "dtype": "bf16"}
        content = {**report.describe_environment(setup), "results": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
