"""What it gains to multiply bf16 and fp16 in fp32 on this CPU (`tpkernels/gemm/widened.py`), on one core.

    python benchmarks/widened_gemm.py --json benchmarks/results/FILE.json
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/widened_gemm.py     a core without units for bf16

Results are held against the bound in fp64 first. Then the library's GEMM and the widened one take turns; a time is the
median. "least rows" is the number from which tpkernels takes the widened one here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from tpkernels.gemm import widened
from tpkernels.measure import report
from tpkernels.measure.timing import measure
from tpkernels.testing.numeric import Bounded
from tpkernels.testing.payload import payload

SIZES = ((1, 1024, 1024), (16, 1024, 1024), (128, 1024, 1024), (1024, 2048, 1024), (1024, 4096, 4096))  # M, K, N


def row_of(dtype: torch.dtype, m: int, k: int, n: int, repeats: int) -> dict[str, object]:
    x, weight, out = payload((m, k), dtype), payload((n, k), dtype, name="w"), torch.empty(m, n, dtype=dtype)
    widened.multiply(x, weight.t(), out)
    bound = Bounded.sum_of_products([x], [weight], dtype=dtype, partials_rounded=False)
    bound.rounded(dtype).check(out, f"{dtype} {m}x{k}x{n}")
    times = measure(
        {
            "library": lambda: torch.mm(x, weight.t(), out=out),
            "widened": lambda: widened.multiply(x, weight.t(), out),
        },
        repeats=repeats,
    )
    milliseconds = {name: 1e3 * time.median for name, time in times.items()}
    ratio = milliseconds["library"] / milliseconds["widened"]
    return {"dtype": str(dtype), "shape_MxKxN": f"{m}x{k}x{n}", "ms": milliseconds, "library over widened": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in widened.DTYPES:
        print(f"{str(dtype).removeprefix('torch.')}: least rows {widened.least_rows(dtype, 1)}")
        print(f"  {'M x K x N':<16}{'library ms':>12}{'widened ms':>12}{'library / widened':>20}")
        for size in SIZES:
            row = row_of(dtype, *size, args.repeats)
            rows.append(row)
            library, own = row["ms"]["library"], row["ms"]["widened"]  # type: ignore[index]
            print(f"  {row['shape_MxKxN']:<16}{library:>12.2f}{own:>12.2f}{row['library over widened']:>19.2f}x")
    if args.json:
        content = {**report.describe_environment({"threads": 1, "repeats": args.repeats}), "results": rows}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
