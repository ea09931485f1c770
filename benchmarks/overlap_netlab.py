"""Does overlap hide a real network? Targets P1, P2 and P3, two hosts in the network lab (root).

    python benchmarks/overlap_netlab.py --rate 1gbit --json benchmarks/results/FILE.json

P1  all_gather_matmul     M4096 K2048 N8192   fused / max(GEMM-only, comm-only)            <= 1.05
P2  matmul_reduce_scatter M4096 K8192 N2048   fused / max(GEMM-only, ideal transfer)       <= 1.10
                                              gloo unfused (`torch`) / fused               >= 1.8
P3  MLP block, forward + backward, M2048      fused / max(GEMM-only, one-way transfers)    <= 1.08
    d 2048, ff 8192, sequence-parallel

All candidates take turns in one run; each time is the slowest rank's, each ratio one between medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import tpkernels as tpk
from tpkernels.measure import bench_rank, bench_table, report
from tpkernels.measure.cases import DTYPES, Shape
from tpkernels.measure.netlab import NetlabUnavailable, run_in_netlab
from tpkernels.measure.report import CaseResult
from tpkernels.measure.timing import measure

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mlp_block import MlpBlock

OPS = {"P1": ("all_gather_matmul", Shape(4096, 2048, 8192)), "P2": ("matmul_reduce_scatter", Shape(4096, 8192, 2048))}
BLOCK = {"m": 2048, "d": 2048, "ff": 8192}
TARGETS = {"P1": 1.05, "P2": 1.10, "P3": 1.08}


def run_rank(names: list[str], dtype: str, repeats: int) -> list[CaseResult]:
    problems = tuple(OPS[name] for name in names if name in OPS)
    plan = bench_rank.Plan(problems, dtype=dtype, repeats=repeats)
    results = bench_rank.run_rank(plan).results
    return results + ([_time_block(dtype, repeats)] if "P3" in names else [])


def _time_block(dtype: str, repeats: int) -> CaseResult:
    group = tpk.init(device="cpu")["tp"].get_group()
    block = MlpBlock(**BLOCK, dtype=DTYPES[dtype], group=group)
    names = ["unfused", "chunked", "auto"]
    candidates = {"gemm": block.gemm_only, "comm": block.comm_only, "torch": block.torch_baseline}
    candidates |= {name: block.ours(name) for name in names}
    candidates["regather"] = block.ours("chunked", save_gathered=False)  # the default: less memory, a fifth transfer
    times = measure(candidates, repeats=repeats, warmup=1, verify=block.verify, group=group)
    explanation = tpk.explain("all_gather_matmul", m=block.m, n=block.ff, k=block.d, dtype=block.dtype, group=group)
    wire = 4 * block.m // group.size() * block.d * block.dtype.itemsize * (group.size() - 1)
    label = f"{block.m}x{block.d}x{block.ff}"
    return CaseResult(
        "mlp_block", label, dtype, group.size(), times, wire_bytes=wire, chosen=explanation.chosen, chunks=0
    )


def summary(name: str, result: CaseResult) -> dict[str, object]:
    """The target's ratio, and what it is made of."""
    return {
        "target": name,
        "fused_over_roof": result.fused_over_roof,
        "auto_over_roof": (result.median("auto") or 0) / (result.roof or 1),
        "unfused_over_roof": (result.median("unfused") or 0) / (result.roof or 1),
        "torch_over_roof": (result.median("torch") or 0) / (result.roof or 1),
        "bound": TARGETS[name],
        "met": (result.fused_over_roof or 99) <= TARGETS[name],
        "torch_over_fused": result.speedup_over("torch"),
        "unfused_over_fused": result.speedup_over("unfused"),
        "comm_over_gemm": (result.median("comm") or 0) / (result.median("gemm") or 1),
        "n": len(result.times["gemm"].seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--only", action="append", choices=tuple(TARGETS), help="repeatable; default: all")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    names = args.only or list(TARGETS)
    try:
        results = run_in_netlab(run_rank, 2, names, args.dtype, args.repeats, rate=args.rate, timeout=1500)[0]
    except NetlabUnavailable as error:
        print(f"skipped: {error}", file=sys.stderr)
        return 1
    bench_table.print_results(results, f"2 hosts in the network lab at {args.rate}, one core each, n={args.repeats}")
    summaries = [summary(name, result) for name, result in zip(sorted(names), results, strict=True)]
    for line in summaries:
        verdict = "met" if line["met"] else "NOT met"
        print(
            f"{line['target']}: fused / roof {line['fused_over_roof']:.3f} (target {line['bound']}: {verdict}), "
            f"auto {line['auto_over_roof']:.3f}, unfused {line['unfused_over_roof']:.3f}, "
            f"torch {line['torch_over_roof']:.3f}; torch / fused {line['torch_over_fused']:.2f}, "
            f"unfused / fused {line['unfused_over_fused']:.2f}; comm / GEMM {line['comm_over_gemm']:.2f}"
        )
    if args.json:
        setup = {"rate": args.rate, "hosts": 2, "dtype": args.dtype, "repeats": args.repeats, "threads_per_rank": 1}
        content = {
            **report.describe_environment(setup),
            "summary": summaries,
            "results": [result.to_json() for result in results],
        }
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
