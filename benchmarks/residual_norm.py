"""What does a row layer's op gain from taking the residual and the norm along?  Two ranks of one host.

    python benchmarks/residual_norm.py --json benchmarks/results/FILE.json

One op, `tpk.matmul_all_reduce(..., residual=, norm_weight=)` or its reduce-scatter, against the same op followed by
`+ residual` and `F.rms_norm`, on one row (a decoding step), few and many, in bf16 and fp32, forward; and with gradients
forward and backward. Both are compared, elementwise, before they are timed; they take turns in one run, one thread per
rank and a core of its own for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import tpkernels as tpk
from tpkernels.measure import report
from tpkernels.measure.timing import measure

ROWS = {"matmul_all_reduce": (1, 16, 256, 2048), "matmul_reduce_scatter": (256, 2048)}
COLUMNS, K = 2048, 1024  # K of one rank
EPS = 1e-6
SAMPLE_S = 0.002


def candidates(op: str, rows: int, dtype: torch.dtype, backward: bool) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(backward)

    x, weight = random(2, rows, K)[rank].detach().clone(), random(2, COLUMNS, K)[rank].detach().clone() * K**-0.5
    for leaf in (x, weight):
        leaf.requires_grad_(backward)
    own = rows if op == "matmul_all_reduce" else tpk.array_split(torch.empty(rows), 2)[rank].shape[0]
    residual, norm_weight, upstream = random(own, COLUMNS), random(COLUMNS), random(own, COLUMNS).detach()
    group, fused = dist.group.WORLD, getattr(tpk, op)

    def in_one() -> tuple[Tensor, Tensor]:
        return fused(x, weight, group, residual=residual, norm_weight=norm_weight, eps=EPS)

    def single() -> tuple[Tensor, Tensor]:
        sums = residual + fused(x, weight, group)
        return F.rms_norm(sums, (COLUMNS,), norm_weight, EPS), sums

    def step(forward: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        results = forward()
        if not backward:
            return results
        leaves = (x, weight, residual, norm_weight)
        return (*results, *torch.autograd.grad(results, leaves, (upstream, upstream)))

    return {"one op": lambda: step(in_one), "single ops": lambda: step(single)}


def run(rows: int, op: str, dtype: torch.dtype, backward: bool, repeats: int) -> dict[str, Any]:
    both = candidates(op, rows, dtype, backward)
    agree(both, gradients_of_norm_complete=op == "matmul_all_reduce")
    seconds = measure(both, repeats=3, warmup=2)["single ops"].median
    calls = max(1, round(SAMPLE_S / seconds))
    times = measure(both, repeats=repeats, warmup=2, calls_per_sample=calls)
    pairs = zip(times["single ops"].seconds, times["one op"].seconds, strict=True)
    ratios = [single / one for single, one in pairs]
    return {
        "op": op, "rows": rows, "dtype": str(dtype).removeprefix("torch."), "columns": COLUMNS, "k_per_rank": K,
        "passes": "forward + backward" if backward else "forward", "calls_per_sample": calls,
        "speedup": statistics.median(ratios), "speedup_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "times": {name: report.measurement_to_json(time) for name, time in times.items()},
    }  # fmt: skip


def agree(both: dict[str, Callable[[], tuple[Tensor, ...]]], *, gradients_of_norm_complete: bool) -> None:
    """Equal but for the last roundings; without our op a rank has only its part of the norm weight's gradient."""
    found = [[one.detach() for one in results()] for results in both.values()]
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        if index == 5 and not gradients_of_norm_complete:
            other = tpk.all_reduce(other, dist.group.WORLD)
        limit = 16 * torch.finfo(one.dtype).eps
        off = (one - other).abs().max() / (1 + other.abs().max())
        assert float(off) <= limit, f"result {index} differs by {float(off):.2e} of the largest, at most {limit:.2e}"


def ranked(repeats: int) -> list[dict[str, Any]]:
    """`launch` has given each rank a core of its own."""
    tpk.init(device="cpu")
    torch.set_num_threads(1)
    cases = [
        (rows, op, dtype, backward)
        for op in ROWS
        for dtype in (torch.bfloat16, torch.float32)
        for backward in (False, True)
        for rows in ROWS[op]
    ]
    return [run(*case, repeats) for case in cases]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = tpk.launch(ranked, 2, args.repeats)[0]
    print(f"{'op':<24}{'dtype':<10}{'passes':<20}{'rows':>6}{'single ops us':>15}{'one op us':>11}{'speed-up':>10}")
    for row in rows:
        single, one = (row["times"][name]["median_ms"] * 1e3 for name in ("single ops", "one op"))
        print(
            f"{row['op']:<24}{row['dtype']:<10}{row['passes']:<20}{row['rows']:>6}{single:>15.1f}{one:>11.1f}"
            f"{row['speedup']:>9.2f}x"
        )
    if args.json:
        setup = {"world_size": 2, "threads": 1, "repeats": args.repeats}
        content = {**report.describe_environment(setup), "results": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
