"""Is "auto" ever slower than the unfused op, and does its model foresee times?  Targets P7 and P9.

    python benchmarks/never_slower.py --json benchmarks/results/FILE.json          one host and the network lab (root)
    python benchmarks/never_slower.py --place host --world 2

P7  auto / unfused over 63 problems x {one host, two or four hosts at 1 Gbit/s} x world {2, 4}:
    median <= 1.0, worst <= 1.03 beyond noise
P9  estimate / measured time of the implementation that auto chose, over the same grid: within 15 % on 90 %

The problems are the three fused ops on weights from 512 x 512 to 2048 x 8192 and from one row to 1,024, one of them
uneven.  All ways of doing a problem take turns in one run, after each was verified.  A ratio is the median of those of
the repeats, in each of which both ran once; its interval holds the true median with a
probability of at least 95 % (order statistics), and a problem is slower beyond noise if the whole interval lies above
1.03.  At world 4 two ranks share a core here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tpkernels as tpk
from tpkernels.measure import bench_rank, report
from tpkernels.measure.cases import FUSED_OPS, Shape
from tpkernels.measure.netlab import NetlabUnavailable, run_in_netlab
from tpkernels.measure.report import CaseResult

ROWS = (1, 8, 64, 257, 1024)
WEIGHTS = ((512, 512), (1024, 4096), (2048, 8192), (4096, 1024))
"""K and N of an all-gather; N and K of an op that reduces."""
TALL = Shape(2048, 1024, 1024)
PLACES = ("host", "netlab")
SLOWER, CLOSE, SHARE = 1.03, 0.15, 0.90
_LIMIT_S = 1500


def problems() -> tuple[tuple[str, Shape], ...]:
    found = []
    for op in FUSED_OPS:
        pairs = WEIGHTS if op == "all_gather_matmul" else [(n, k) for k, n in WEIGHTS]
        found += [(op, Shape(m, k, n)) for k, n in pairs for m in ROWS] + [(op, TALL)]
    return tuple(found)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval between order statistics that covers the median with at least ``confidence``, if n allows it."""
    ordered, n = sorted(values), len(values)
    outside, low = 0.0, 0
    for index in range(n // 2):
        outside += 2 * math.comb(n, index) / 2**n
        if outside > 1 - confidence:
            break
        low = index
    return ordered[low], ordered[n - 1 - low]


def row(place: str, result: CaseResult) -> dict[str, Any]:
    """What one problem says of both targets."""
    auto, unfused = (result.times[name].seconds for name in ("auto", "unfused"))
    ratios = [a / u for a, u in zip(auto, unfused, strict=True)]
    low, high = median_interval(ratios)
    chosen = result.times[result.chosen].median
    return {
        "place": place,
        "world_size": result.world_size,
        "op": result.op,
        "shape_MxKxN": result.shape,
        "chosen": result.chosen,
        "fastest": min(result.estimates_us, key=lambda name: result.times[name].median),
        "auto_over_unfused": statistics.median(ratios),
        "interval": [low, high],
        "estimate_over_measured": result.estimates_us[result.chosen] * 1e-6 / chosen,
        "auto_over_fastest": statistics.median(auto) / min(result.times[n].median for n in result.estimates_us),
        "times": {name: report.measurement_to_json(measurement) for name, measurement in result.times.items()},
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["auto_over_unfused"] for row in rows]
    slower = [row for row in rows if row["interval"][0] > SLOWER]
    close = [row for row in rows if abs(row["estimate_over_measured"] - 1) <= CLOSE]
    return {
        "problems": len(rows),
        "median": statistics.median(ratios),
        "worst": max(ratios),
        "slower_beyond_noise": len(slower),
        "P7_met": statistics.median(ratios) <= 1.0 and not slower,
        "auto_is_fastest_or_within_3_percent": sum(row["auto_over_fastest"] <= SLOWER for row in rows),
        "estimates_within_15_percent": len(close) / len(rows),
        "P9_met": len(close) >= SHARE * len(rows),
    }


def run_rank(repeats: int, limit: int) -> list[CaseResult]:
    return bench_rank.run_rank(bench_rank.Plan(problems()[:limit], repeats=repeats, timeout_s=_LIMIT_S)).results


def measured(place: str, world_size: int, args: argparse.Namespace) -> list[CaseResult]:
    if place == "host":
        return tpk.launch(run_rank, world_size, args.repeats, args.limit, timeout=_LIMIT_S)[0]
    results: list[list[CaseResult]] = run_in_netlab(
        run_rank, world_size, args.repeats, args.limit, rate=args.rate, timeout=_LIMIT_S
    )
    return results[0]


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    found = summary(rows)
    print(
        f"{title}: {found['problems']} problems, auto / unfused median {found['median']:.3f}, worst "
        f"{found['worst']:.3f}, slower beyond noise {found['slower_beyond_noise']} "
        f"(P7 {'met' if found['P7_met'] else 'NOT MET'}); estimates within 15 %: "
        f"{found['estimates_within_15_percent']:.0%} (P9 {'met' if found['P9_met'] else 'NOT MET'})"
    )
    for one in rows:
        low, high = one["interval"]
        print(
            f"  {one['op']} {one['shape_MxKxN']}: {one['auto_over_unfused']:.3f} [{low:.3f}, {high:.3f}] "
            f"{one['chosen']} (fastest {one['fastest']}), estimate / measured {one['estimate_over_measured']:.2f}"
            + ("  SLOWER" if low > SLOWER else "")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", action="append", choices=PLACES, help="repeatable; default: both")
    parser.add_argument("--world", action="append", type=int, help="repeatable; default: 2 and 4")
    parser.add_argument("--rate", default="1gbit", help="of the network lab (default 1gbit)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--limit", type=int, default=len(problems()), metavar="N", help="only the first N problems")
    parser.add_argument("--json", metavar="FILE", help="keeps what it holds of other places and worlds")
    args = parser.parse_args()
    if args.repeats < 6:
        parser.error("--repeats must be at least 6, for an interval of 95 %")
    for place in args.place or PLACES:
        for world_size in args.world or (2, 4):
            try:
                results = measured(place, world_size, args)
            except NetlabUnavailable as error:
                print(f"skipped: {error}", file=sys.stderr)
                return 1
            wrong = {f"{r.op} {r.shape}": r.failures for r in results if r.failures}
            if wrong:
                raise AssertionError(f"wrong results on {place}, world {world_size}: {wrong}")
            rows = [row(place, result) for result in results]
            show(f"{place}, {world_size} ranks", rows)
            if args.json:
                _add(Path(args.json), f"{place}-{world_size}", rows, args)
    return 0


def _add(path: Path, key: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Each part of the grid keeps the description of its own run."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    setup = {"rate": args.rate, "repeats": args.repeats, "dtype": "bf16", "threads_per_rank": 1}
    content[key] = {**report.describe_environment(setup), "summary": summary(rows), "results": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
