"""`tpkernels bench`: what overlap buys on these machines, per op and shape.

Owns: the command's arguments, starting ranks (local ones, or in the network lab; under torchrun it is a rank itself),
and the order of work on a rank: verify, time, then record timelines.
Refuses: to time what is wrong. Each way of doing the op must first pass the elementwise fp64 bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels import config
from tpkernels.comm import timeline
from tpkernels.measure import report
from tpkernels.measure.cases import DTYPES, FUSED_OPS, Case, Shape
from tpkernels.measure.netlab import Netlab, NetlabUnavailable
from tpkernels.measure.report import CaseResult
from tpkernels.measure.timing import measure
from tpkernels.measure.trace import RankTrace, trace_overlap, write_chrome_trace

_SAMPLE_S = 0.002
# A sample shorter than this is mostly timer and barrier noise; several calls then make one sample.
_MIN_SAMPLE_S = 0.005
_MAX_CALLS_PER_SAMPLE = 50

# MxKxN per op. "scorecard": the shapes of the project's targets. GPUs get the sizes of known models in "standard".
SUITES: dict[str, dict[str, list[str]]] = {
    "small": {
        "all_gather_matmul": ["64x256x512", "512x512x1024"],
        "matmul_reduce_scatter": ["64x512x256", "512x1024x512"],
        "matmul_all_reduce": ["64x512x256", "512x1024x512"],
    },
    "standard": {
        "all_gather_matmul": ["1x1024x4096", "16x2048x8192", "256x2048x8192", "1024x1024x4096", "2048x2048x8192"],
        "matmul_reduce_scatter": ["1x4096x1024", "16x8192x2048", "256x8192x2048", "1024x4096x1024", "2048x8192x2048"],
        "matmul_all_reduce": ["1x4096x1024", "16x8192x2048", "256x8192x2048", "1024x4096x1024", "2048x8192x2048"],
    },
    "standard-cuda": {
        "all_gather_matmul": ["8192x4096x11008", "8192x4096x14336", "8192x8192x28672"],
        "matmul_reduce_scatter": ["8192x11008x4096", "8192x14336x4096", "8192x28672x8192"],
        "matmul_all_reduce": ["16x14336x4096", "256x14336x4096", "8192x14336x4096"],
    },
    "scorecard": {
        "all_gather_matmul": ["4096x2048x8192", "2048x4096x4096"],
        "matmul_reduce_scatter": ["4096x8192x2048", "2048x4096x2048"],
        "matmul_all_reduce": ["2x4096x4096", "2048x4096x4096"],
    },
}


@dataclass(frozen=True)
class Plan:
    """What every rank measures; crosses process boundaries."""

    problems: tuple[tuple[str, Shape], ...]
    dtype: str = "bf16"
    device: str = "cpu"
    repeats: int = 9
    warmup: int = 2
    trace: bool = False
    timeout_s: float = 600.0


@dataclass
class RankOutput:
    results: list[CaseResult] = field(default_factory=list)
    traces: list[RankTrace] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", action="append", choices=FUSED_OPS, help="repeatable; default: all three")
    parser.add_argument(
        "--shape", action="append", metavar="MxKxN", help="global sizes; repeatable; instead of --suite"
    )
    parser.add_argument("--suite", choices=("small", "standard", "scorecard"), default="small")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--nproc", type=int, help="ranks to start (default: 2 on CPU, all GPUs on CUDA)")
    parser.add_argument(
        "--netlab", metavar="RATE", help="ranks on hosts of their own, joined at RATE, e.g. 1gbit; root"
    )
    parser.add_argument("--delay", metavar="TIME", help="with --netlab: one-way delay of a link, e.g. 0.1ms")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", metavar="FILE", help="write all samples with hardware, versions, command and date")
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto timeline of one call of each")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for the whole measurement")


def main(args: argparse.Namespace) -> int:
    """Run the benchmark that `args` (see `add_arguments`) describe; returns the exit status.

    Raises: ValueError for arguments that contradict each other; what the ranks raise, a wrong result included.
    """
    place = config.torchrun_environment()
    if place is not None and (args.netlab or args.nproc):
        raise ValueError("--netlab and --nproc start ranks themselves; leave them out under torchrun")
    if args.delay and not args.netlab:
        raise ValueError("--delay is a property of the network lab; give --netlab RATE too")
    plan = make_plan(args)
    nproc = place.world_size if place is not None else args.nproc or _default_nproc(plan.device)
    if place is not None:
        outputs = _all_outputs(run_rank(plan))
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
    _report(args, plan, nproc, outputs)
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    ops = tuple(args.op or FUSED_OPS)
    suite = "standard-cuda" if args.suite == "standard" and device == "cuda" else args.suite
    problems = [(op, Shape.parse(text)) for op in ops for text in args.shape or SUITES[suite][op]]
    return Plan(
        tuple(problems),
        dtype=args.dtype,
        device=device,
        repeats=args.repeats,
        warmup=args.warmup,
        trace=args.trace is not None,
        timeout_s=args.timeout,
    )


def run_rank(plan: Plan) -> RankOutput:
    """What one rank does; the entry point of every way of starting ranks."""
    mesh = tpk.init(device=plan.device, timeout=plan.timeout_s)
    group = mesh["tp"].get_group()
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    output = RankOutput()
    with torch.no_grad():
        for index, (op, shape) in enumerate(plan.problems):
            if group.rank() == 0:
                print(f"[{index + 1}/{len(plan.problems)}] {op} {shape}", file=sys.stderr, flush=True)
            case = Case(op, shape, DTYPES[plan.dtype], group, device, seed=2 * index)
            output.results.append(time_case(case, plan))
            if plan.trace:
                output.traces += [record_call(case, name) for name in case.implementations()]
    return output


def time_case(case: Case, plan: Plan) -> CaseResult:
    """Verify, then time, all ways of doing one op on one shape."""
    shape = case.shape
    candidates: dict[str, Callable[[], object]] = {"gemm": case.gemm_only}
    notes = {}
    if case.world_size > 1:
        candidates["comm"] = case.comm_only
    if case.torch_refusal is None:
        candidates["torch"] = case.torch_baseline
    else:
        notes["torch"] = case.torch_refusal
    names = case.implementations()
    candidates |= {name: case.ours(name) for name in [*names, "auto"]}
    times = measure(
        candidates,
        repeats=plan.repeats,
        warmup=plan.warmup,
        calls_per_sample=_calls_per_sample(case),
        verify=case.verify,
        group=case.group,
        device=case.device,
    )
    return CaseResult(
        case.op,
        str(shape),
        plan.dtype,
        case.world_size,
        times,
        wire_bytes=case.problem.wire_bytes,
        chosen=case.explanation.chosen,
        chunks=case.problem.num_chunks,
        notes=notes,
    )


def _calls_per_sample(case: Case) -> int:
    """So many that a sample lasts `_MIN_SAMPLE_S`; the slowest rank decides, for all."""
    case.gemm_only()
    start = time.perf_counter()
    case.gemm_only()
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=case.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=case.group)
    return max(1, min(_MAX_CALLS_PER_SAMPLE, round(_MIN_SAMPLE_S / max(seconds.item(), 1e-6))))


def record_call(case: Case, implementation: str) -> RankTrace:
    """The timeline of one call, after a warm-up call."""
    call = case.ours(implementation)
    call()
    dist.barrier(case.group)
    start = timeline.now()
    with timeline.recording() as recorded:
        call()
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
    label = f"{case.op} {case.shape} {implementation}"
    return RankTrace(case.rank, label, start, timeline.now(), recorded.events)


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


def _all_outputs(mine: RankOutput) -> list[RankOutput]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _default_nproc(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 2


def _report(args: argparse.Namespace, plan: Plan, nproc: int, outputs: Sequence[RankOutput]) -> None:
    link = (
        f"network lab at {args.netlab}" + (f", delay {args.delay}" if args.delay else "") if args.netlab else "no lab"
    )
    results = outputs[0].results
    report.print_results(results, f"{nproc} ranks, {plan.device}, {link}, n={plan.repeats}")
    if args.json:
        setup = {"nproc": nproc, "device": plan.device, "netlab": args.netlab, "delay": args.delay,
                 "repeats": plan.repeats, "warmup": plan.warmup}  # fmt: skip
        report.write_json(args.json, report.describe_environment(setup), results)
        print(f"samples: {args.json}")
    if args.trace:
        traces = [trace for output in outputs for trace in output.traces]
        write_chrome_trace(args.trace, traces)
        print(f"timeline: {args.trace} (open in https://ui.perfetto.dev)")
        for trace in traces:
            if trace.samples:
                print(
                    f"  rank {trace.rank} {trace.label}: {trace_overlap(trace):.0%} of the bytes crossed under a GEMM"
                )
