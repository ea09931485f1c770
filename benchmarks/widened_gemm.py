"""What it gains to multiply bf16 and fp16 in fp32 on this CPU (`tpkernels/gemm/widened.py`), on one core.

    python benchmarks/widened_gemm.py --json benchmarks/results/FILE.json
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/widened_gemm.py     a core without units for bf16

Results are held against the bound in fp64 first. Then the library's GEMM and the widened one take turns on one core, to
which this process is pinned. A sample is the mean of as many calls as last 20 ms: one call of a small shape is shorter
than what an interrupt takes, and two runs of single calls differed by a factor of three. Operands stay in the caches as
far as they fit. "least rows" is the number from which tpkernels takes the widened GEMM here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpkernels.gemm import widened
from tpkernels.measure import report
from tpkernels.measure.timing import measure
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.payload import payload

SIZES = ((1, 1024, 1024), (16, 1024, 1024), (128, 1024, 1024), (1024, 1024, 2048), (1024, 4096, 4096))  # M, K, N
SAMPLE_S = 0.02
BUDGET_S = 40  # of a shape: without units for bf16 the library takes seconds for a call of the largest one


def row_of(dtype: torch.dtype, m: int, k: int, n: int, repeats: int) -> dict[str, Any]:
    x, weight, out = payload((m, k), dtype), payload((n, k), dtype, name="w"), torch.empty(m, n, dtype=dtype)
    ways: dict[str, Callable[[], object]] = {
        "library": lambda: torch.mm(x, weight.t(), out=out),
        "widened": lambda: widened.multiply(x, weight.t(), out),
    }
    bound = Bounded.sum_of_products([x], [weight], dtype=dtype, partials_rounded=False).rounded(dtype)
    for name, way in ways.items():
        way()
        bound.check(out, f"{name} {dtype} {m}x{k}x{n}")
    start = time.perf_counter()
    for way in ways.values():
        way()
    calls = max(1, round(2 * SAMPLE_S / (time.perf_counter() - start)))
    times = measure(ways, repeats=repeats, calls_per_sample=calls, budget_s=BUDGET_S)
    ratio = report.Ratio.of(times["library"], times["widened"])
    assert ratio is not None
    return {
        "dtype": str(dtype).removeprefix("torch."), "shape_MxKxN": f"{m}x{k}x{n}", "calls_per_sample": calls,
        "least_rows": widened.least_rows(dtype, 1), "speedup": ratio.value,
        "speedup_quartiles": [ratio.low, ratio.high],
        "noise": ratio.is_noise, "repeats": len(times["widened"].seconds),
        "times": {name: report.measurement_to_json(one) for name, one in times.items()},
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    library, own = (
        f"{1e3 * row['times'][name]['median_ms']:>10.0f} ±{500 * row['times'][name]['interquartile_range_ms']:<6.0f}"
        for name in ("library", "widened")
    )
    low, high = row["speedup_quartiles"]
    mark = report.NOISE if row["noise"] else " "
    return f"  {row['shape_MxKxN']:<16}{library}{own}{row['speedup']:>8.2f}x {mark} ({low:.2f} to {high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the core to run on")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {args.core})
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dtype in widened.DTYPES:
        print(f"{str(dtype).removeprefix('torch.')}: least rows {widened.least_rows(dtype, 1)}")
        print(f"  {'M x K x N':<16}{'library us':>12}{'widened us':>18}{'speed-up':>14}   (quartiles)", flush=True)
        for size in SIZES:
            rows.append(row_of(dtype, *size, args.repeats))
            print(line(rows[-1]), flush=True)
    print(f"medians ± half the interquartile range of at most {args.repeats} samples; {report.NOISE} noise")
    os.sched_setaffinity(0, cores)  # the file names all of the machine's
    if args.json:
        setup = {
            "threads": 1, "repeats": args.repeats, "core": args.core,
            "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        }  # fmt: skip
        content = {**report.describe_environment(setup), "results": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
