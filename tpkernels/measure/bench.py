"""`tpkernels bench`: what overlap buys on these machines, per op and shape.

Owns: the command's arguments, starting ranks (local ones, or in the network lab; under torchrun it is a rank itself),
and what is printed and written of their results.  What a rank does is in `bench_rank`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import tpkernels as tpk
from tpkernels import config, flags
from tpkernels.measure import bench_table, compare, fitting, html_report, links, report, suites
from tpkernels.measure.bench_rank import Plan, RankOutput, run_rank, titled
from tpkernels.measure.cases import DTYPES, FUSED_OPS, Shape
from tpkernels.measure.gathered import from_all_ranks
from tpkernels.measure.netlab import Netlab, NetlabUnavailable
from tpkernels.measure.suites import SUITES
from tpkernels.measure.trace import trace_overlap, write_chrome_trace
from tpkernels.measure.usual_dtype import AUTO

_SAMPLE_S = 0.002
_QUICK_DIVISOR = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", action="append", choices=FUSED_OPS, help="repeatable; default: all three")
    parser.add_argument(
        "--shape", action="append", type=_shape, metavar="MxKxN", help="global sizes; repeatable; instead of --suite"
    )
    parser.add_argument(
        "--suite", choices=(*SUITES, suites.FIRST_NODE), default="small",
        help="standard: linears of known models in groups of 2, 4 and 8 ranks, writes --out; first-node: checks, then"
        " times everything on a node that nobody has tried yet, one file to attach to a report (default: small)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help=f"sizes of the suite / {_QUICK_DIVISOR} and 3 repeats: tries the command, measures nothing worth keeping",
    )  # fmt: skip
    parser.add_argument(
        "--tp", action="append", type=flags.at_least(1), metavar="N",
        help="ranks of a group; repeatable: as many are started as the largest takes (default: 2, all GPUs on CUDA)",
    )  # fmt: skip
    parser.add_argument("--nproc", "--world", type=flags.at_least(1), metavar="N", help=argparse.SUPPRESS)
    parser.add_argument(
        "--dtype", choices=(AUTO, *DTYPES), default=AUTO,
        help="dtype of the operands (default auto: bf16, or fp32 on cores that multiply that faster)",
    )  # fmt: skip
    flags.add_device(parser)
    links.add_arguments(parser)
    parser.add_argument("--repeats", type=flags.at_least(1), metavar="N", help="timed calls of each way (default 9)")
    parser.add_argument(
        "--warmup", type=flags.at_least(0), default=2, metavar="N", help="calls before that are not timed (default 2)"
    )
    parser.add_argument(
        "--out",
        type=flags.new_folder,
        metavar="DIR",
        help="write bench.json (all samples, after every case), bench.txt, bench.png and the page bench.html "
        "(standard: to bench-standard)",
    )
    flags.add_json(parser, "write all samples with hardware, versions, command and date")
    parser.add_argument(
        "--trace", type=flags.new_file, metavar="FILE", help="write a Chrome/Perfetto timeline of one call of each"
    )
    parser.add_argument(
        "--compare", type=flags.existing_file, metavar="OLD.json",
        help="say what became faster or slower than in an earlier --json, beyond noise",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=flags.positive, default=1800.0, metavar="SECONDS", help="limit of the whole measurement"
    )
    parser.add_argument(
        "--case-timeout", type=flags.positive, metavar="SECONDS",
        help=f"limit of one case (default {fitting.USUAL_LIMIT_S:g}, or more on slow ranks)",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the benchmark that `args` (see `add_arguments`) describe; returns the exit status, 1 if a result was wrong.

    Raises: ValueError for arguments that contradict each other; what the ranks raise.
    """
    place = config.job_environment()
    if place is not None and (args.netlab or args.nproc is not None):
        raise ValueError("--netlab and --nproc start ranks themselves; leave them out under torchrun")
    if args.delay and not args.netlab:
        raise ValueError("--delay is a property of the network lab; give --netlab RATE too")
    if args.suite == "standard" and not (args.shape or args.out or args.json):
        args.out = "bench-standard"
    usual = max(args.tp or [2 if args.device == "cpu" else torch.cuda.device_count()])
    nproc = place.world_size if place is not None else usual if args.nproc is None else args.nproc
    plan = make_plan(args, nproc)
    if args.compare:
        compare.read(args.compare)  # a file that is none is refused before anything is measured
    for folder in [args.out, plan.json and str(Path(plan.json).parent)]:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
    if place is not None:
        outputs = from_all_ranks(run_rank(plan))
        if place.rank != 0:
            return 0
    elif args.netlab:
        try:
            outputs = _run_in_netlab(plan, nproc, args)
        except NetlabUnavailable as error:
            print(f"skipped: {error}", file=sys.stderr)
            return 1
    else:
        outputs = tpk.launch(run_rank, nproc, plan, timeout=args.timeout)
    _report(args, plan, outputs)
    return 1 if any(result.failures for result in outputs[0].results) else 0


def _shape(text: str) -> str:
    try:
        Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def make_plan(args: argparse.Namespace, nproc: int) -> Plan:
    ops, device = tuple(args.op or FUSED_OPS), args.device
    divisor = _QUICK_DIVISOR if args.quick else 1
    given = [(op, Shape.parse(text)) for op in ops for text in args.shape or ()]
    setup = {"nproc": nproc, "device": device, "netlab": args.netlab, "delay": args.delay, "suite": args.suite,
             "sizes_divided_by": divisor, "repeats": args.repeats, "warmup": args.warmup}  # fmt: skip
    repeats = args.repeats or (3 if args.quick else 9)
    return Plan(
        tuple(given or suites.problems(args.suite, ops, divisor)),
        dtype=args.dtype,
        device=device,
        repeats=repeats,
        warmup=args.warmup,
        trace=args.trace is not None or args.out is not None,
        timeout_s=args.timeout,
        case_timeout_s=args.case_timeout and min(args.timeout, args.case_timeout),
        may_divide=not (args.shape or args.quick),
        tp=_group_sizes(args, nproc),
        json=args.json or (str(Path(args.out, "bench.json")) if args.out else None),
        out=args.out,
        title=_title(args, nproc, device),
        environment=report.describe_environment({**setup, "repeats": repeats}),
    )


def _title(args: argparse.Namespace, nproc: int, device: str) -> str:
    link = "no lab" if not args.netlab else f"network lab at {args.netlab}"
    link += f", delay {args.delay}" if args.delay else ""
    return f"{nproc} ranks, {device}, {link}" + (", quick" if args.quick else "")


def _group_sizes(args: argparse.Namespace, nproc: int) -> tuple[int, ...]:
    wanted = tuple(args.tp or (suites.STANDARD_TP if args.suite == "standard" and not args.shape else ()))
    possible = tuple(size for size in wanted if 1 <= size <= nproc)
    absent = ", ".join(str(size) for size in wanted if size not in possible)
    if args.tp and absent:
        raise ValueError(f"--tp {absent} must be between 1 and the number of ranks ({nproc})")
    if absent:
        print(f"groups of {absent} left out: there are {nproc} rank(s)", file=sys.stderr)
    return possible or (nproc,)


def _run_in_netlab(plan: Plan, nproc: int, args: argparse.Namespace) -> list[RankOutput]:
    if plan.device != "cpu":
        raise ValueError(f"--netlab joins CPU ranks; got device {plan.device}")
    sampling = _SAMPLE_S if plan.trace else None
    with Netlab(nproc, rate=args.netlab, delay=args.delay, sample_interval_s=sampling) as lab:
        outputs: list[RankOutput] = lab.run(run_rank, plan, timeout=args.timeout)
    for output in outputs:
        for trace in output.traces:
            trace.samples = lab.samples[trace.rank]
    return outputs


def _report(args: argparse.Namespace, plan: Plan, outputs: Sequence[RankOutput]) -> None:
    results, traces = outputs[0].results, [trace for output in outputs for trace in output.traces]
    plan = replace(plan, environment=outputs[0].environment)
    title = titled(plan, results)
    bench_table.print_results(results, title)
    if args.compare:
        print("\n".join(compare.lines(args.compare, plan.environment, results)))
    if plan.json:
        complete = "cases_left_out" not in plan.environment
        report.write_json(plan.json, {**plan.environment, "complete": complete}, results)
        print(f"samples: {plan.json}")
    if args.out:
        for written in bench_table.write_table_and_figure(args.out, results, title):
            print(written)
        sections = html_report.bench_sections(results, title, traces)
        print(html_report.write(Path(args.out, "bench.html"), title, plan.environment, sections))
    if args.trace:
        write_chrome_trace(args.trace, traces)
        print(f"timeline: {args.trace} (open in https://ui.perfetto.dev)")
        for trace in traces:
            if trace.samples:
                print(
                    f"  rank {trace.rank} {trace.label}: {trace_overlap(trace):.0%} of the bytes crossed under a GEMM"
                )
