"""What an op costs the host at world size 1, over the `F.linear` that it is there (target P8).

    python benchmarks/op_overhead.py --json benchmarks/results/FILE.json

P8  no grad <= 8 us, with grad <= 15 us (forward that records a graph). Forward + backward is printed beside it.

One thread, tiny shapes, so that the arithmetic vanishes. Ours and F.linear take turns; a sample is the mean of many
calls in a row, a figure the median of the samples' differences.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import tpkernels as tpk
from tpkernels.measure import report
from tpkernels.measure.cases import FUSED_OPS
from tpkernels.measure.timing import Measurement, measure

SIZES = ((4, 16, 16), (8, 64, 64))  # M, K, N
TARGET_US = {"no grad": 8.0, "grad": 15.0}


def _calls(op: str, m: int, k: int, n: int, mode: str, group: object) -> dict[str, Callable[[], object]]:
    x = torch.randn(m, k, requires_grad=mode != "no grad")
    weight = torch.randn(n, k, requires_grad=mode != "no grad")
    dy = torch.randn(m, n)
    fused = getattr(tpk, op)
    forwards = {"F.linear": lambda: F.linear(x, weight), "ours": lambda: fused(x, weight, group)}
    if mode != "forward + backward":
        return dict(forwards)
    return {
        name: lambda forward=forward: torch.autograd.grad(forward(), (x, weight), dy)
        for name, forward in forwards.items()
    }


def measure_op(op: str, size: tuple[int, int, int], mode: str, group: object, repeats: int, calls: int) -> dict:
    with torch.set_grad_enabled(mode != "no grad"):
        times = measure(_calls(op, *size, mode, group), repeats=repeats, warmup=calls, calls_per_sample=calls)
    differences = _differences_us(times)
    return {
        "op": op,
        "shape_MxKxN": "x".join(map(str, size)),
        "mode": mode,
        "overhead_us": statistics.median(differences),
        "overhead_us_interquartile": statistics.quantiles(differences, n=4)[::2],
        "target_us": TARGET_US.get(mode),
        "calls_per_sample": calls,
        "times": {name: report.measurement_to_json(measurement) for name, measurement in times.items()},
    }


def _differences_us(times: dict[str, Measurement]) -> list[float]:
    pairs = zip(times["ours"].seconds, times["F.linear"].seconds, strict=True)
    return [(ours - linear) * 1e6 for ours, linear in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=61)
    parser.add_argument("--calls", type=int, default=300, help="calls per sample")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    group = tpk.init(device="cpu")["tp"].get_group()
    rows = []
    print(f"{'op':<24}{'M x K x N':<12}{'mode':<20}{'F.linear us':>12}{'ours us':>10}{'overhead us':>13}  target")
    for op in FUSED_OPS:
        for size in SIZES:
            for mode in (*TARGET_US, "forward + backward"):
                row = measure_op(op, size, mode, group, args.repeats, args.calls)
                rows.append(row)
                linear, ours = (row["times"][name]["median_ms"] * 1e3 for name in ("F.linear", "ours"))
                target = "" if row["target_us"] is None else f"<= {row['target_us']:g}"
                print(
                    f"{op:<24}{row['shape_MxKxN']:<12}{mode:<20}{linear:>12.2f}{ours:>10.2f}"
                    f"{row['overhead_us']:>13.2f}  {target}"
                )
    if args.json:
        setup = {"world_size": 1, "threads": 1, "repeats": args.repeats, "calls_per_sample": args.calls}
        content = {**report.describe_environment(setup), "results": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
