"""`tpkernels bench`: what overlap buys on these machines, per op and shape.

Owns: the command's arguments, starting ranks (local ones, or in the network lab; under torchrun it is a rank itself),
and the order of work on a rank: verify, time, then record timelines.
Refuses: to time what is wrong (each way of doing the op must first pass the elementwise fp64 bound), to leave out
anything without its reason, and to wait for ever: each step of a case has `--case-timeout` seconds, after which the
process ends and names it; what was measured before is in the result file by then.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels import config, flags
from tpkernels.comm import startup, timeline
from tpkernels.comm.groups import resolve
from tpkernels.measure import bench_table, compare, fitting, html_report, links, report, suites
from tpkernels.measure.cases import DTYPES, FUSED_OPS, Shape, TimedCase
from tpkernels.measure.deadline import deadline
from tpkernels.measure.gathered import from_all_ranks
from tpkernels.measure.netlab import Netlab, NetlabUnavailable
from tpkernels.measure.progress import remaining
from tpkernels.measure.report import CaseResult
from tpkernels.measure.rivals import RIVALS, Rival
from tpkernels.measure.suites import SUITES
from tpkernels.measure.timing import measure
from tpkernels.measure.trace import RankTrace, trace_overlap, write_chrome_trace
from tpkernels.measure.usual_dtype import AUTO, usual_dtype
from tpkernels.ops.agreed_call import exchange

_SAMPLE_S = 0.002
# A sample shorter than this is mostly timer and barrier noise; several calls then make one sample.
_MIN_SAMPLE_S = 0.005
_MAX_CALLS_PER_SAMPLE = 50
_QUICK_DIVISOR = 32

# What setting up and calling another library may raise: it is then left out, with that as the reason.
_RIVAL_ERRORS = (AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, OSError, RuntimeError,
                 TypeError, ValueError)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What every rank measures; crosses process boundaries.

    dtype: a name, or "auto" (:func:`usual_dtype`), which the ranks replace, as they do repeats and case_timeout_s, and
    sizes where they may_divide them (`tpkernels.measure.fitting`).
    tp: sizes of the groups, each made of the first ranks; none: all ranks. json: file to which the results so far are
    written after every case, with what `environment` says. out: folder for the table and the figure, which are also
    drawn when a group of several is done, under `title`.
    """

    problems: tuple[tuple[str, Shape], ...]
    dtype: str = "bf16"
    device: str = "cpu"
    repeats: int = 9
    warmup: int = 2
    trace: bool = False
    timeout_s: float = 1800.0
    case_timeout_s: float | None = None
    may_divide: bool = False
    tp: tuple[int, ...] = ()
    json: str | None = None
    out: str | None = None
    title: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """Of one case; until the ranks have chosen, the usual one."""
        return self.case_timeout_s or min(self.timeout_s, fitting.USUAL_LIMIT_S)


@dataclass
class RankOutput:
    results: list[CaseResult] = field(default_factory=list)
    traces: list[RankTrace] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    """The plan's, with what the ranks have chosen."""


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
        help="of the operands (default auto: bf16, or fp32 on cores that multiply that faster)",
    )  # fmt: skip
    flags.add_device(parser)
    links.add_arguments(parser)
    parser.add_argument("--repeats", type=flags.at_least(1), metavar="N", help="timed calls of each way (default 9)")
    parser.add_argument("--warmup", type=flags.at_least(0), default=2, metavar="N", help="calls before (default 2)")
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
        "--timeout", type=flags.positive, default=1800.0, metavar="SECONDS", help="for the whole measurement"
    )
    parser.add_argument(
        "--case-timeout", type=flags.positive, metavar="SECONDS",
        help=f"for one case (default {fitting.USUAL_LIMIT_S:g}, or more on slow ranks)",
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


def _titled(plan: Plan, results: Sequence[CaseResult]) -> str:
    """With the repeats that were timed, which are fewer where a case would have exceeded its time."""
    counts = {len(one.seconds) for result in results for one in result.times.values()}
    divisor = plan.environment.get("sizes_divided_by", 1) if plan.may_divide else 1
    return (
        plan.title
        + (f", sizes / {divisor}" if divisor > 1 else "")
        + f", n={min(counts)}"
        + (f" to {max(counts)}" if len(counts) > 1 else "")
    )


def _group_sizes(args: argparse.Namespace, nproc: int) -> tuple[int, ...]:
    wanted = tuple(args.tp or (suites.STANDARD_TP if args.suite == "standard" and not args.shape else ()))
    possible = tuple(size for size in wanted if 1 <= size <= nproc)
    absent = ", ".join(str(size) for size in wanted if size not in possible)
    if args.tp and absent:
        raise ValueError(f"--tp {absent} must be between 1 and the number of ranks ({nproc})")
    if absent:
        print(f"groups of {absent} left out: there are {nproc} rank(s)", file=sys.stderr)
    return possible or (nproc,)


def run_rank(plan: Plan) -> RankOutput:
    """What one rank does; the entry point of every way of starting ranks."""
    tpk.init(device=plan.device, timeout=plan.limit_s)
    device = torch.device(plan.device, torch.cuda.current_device()) if plan.device == "cuda" else torch.device("cpu")
    everybody = _store_group(dist.get_world_size(), plan.timeout_s)
    if plan.dtype == AUTO:
        name, why = usual_dtype(plan.device, everybody)
        plan = replace(plan, dtype=name)
        if why and dist.get_rank() == 0:
            print(f"measuring {why}", file=sys.stderr, flush=True)
    plan = _fitted(plan, everybody)
    output, count = RankOutput(environment=dict(plan.environment)), len(plan.problems)
    watch, all_cases = fitting.Watch(plan.timeout_s), count * max(1, len(plan.tp))
    for group, control in _groups(plan):
        for index, (op, shape) in enumerate(plan.problems):
            if not watch.allows_another(control, left=count - index):
                output.environment["cases_left_out"] = all_cases - len(output.results)
                break
            what = f"[{index + 1}/{count}] {op} {shape}, {group.size()} ranks"
            if group.rank() == 0:
                left = remaining(len(output.results), all_cases, watch.elapsed_s())
                print(what + left, file=sys.stderr, flush=True)
            with torch.no_grad(), deadline(plan.limit_s, f"rank {group.rank()}: {what}"):
                case = TimedCase(op, shape, DTYPES[plan.dtype], group, device, seed=index)
                output.results.append(time_case(case, plan, control))
                if plan.trace:
                    output.traces += [record_call(case, name) for name in case.implementations()]
            if group.rank() == 0 and plan.json:
                report.write_json(plan.json, {**plan.environment, "complete": False}, output.results)
        if group.rank() == 0 and plan.out and len(plan.tp) > 1:
            bench_table.write_table_and_figure(plan.out, output.results, f"{_titled(plan, output.results)} (so far)")
    dist.barrier(everybody)  # ranks of no group wait here for the others, as long as the whole may take
    return output


def _fitted(plan: Plan, everybody: dist.ProcessGroup) -> Plan:
    """With what ends in time on these ranks; a collective call."""
    found = fitting.fit(
        plan.problems, fitting.seconds_on(everybody, plan.device, DTYPES[plan.dtype]), repeats=plan.repeats,
        warmup=plan.warmup, groups=max(1, len(plan.tp)), timeout_s=plan.timeout_s, limit_s=plan.case_timeout_s,
        divides=plan.may_divide,
    )  # fmt: skip
    if dist.get_rank() == 0 and found.says:
        print("\n".join(found.says), file=sys.stderr, flush=True)
    return replace(
        plan, problems=found.problems, repeats=found.repeats, case_timeout_s=found.limit_s,
        environment=plan.environment | found.environment,
    )  # fmt: skip


def _groups(plan: Plan) -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """This rank's groups, each with one of the same ranks on which Python objects are exchanged."""
    made = [
        (size, startup.new_group(range(size), plan.device, plan.limit_s), _store_group(size, plan.timeout_s))
        for size in plan.tp or (dist.get_world_size(),)
    ]
    yield from ((group, control) for size, group, control in made if dist.get_rank() < size)


def _store_group(size: int, timeout_s: float) -> Any:
    return dist.new_group(list(range(size)), backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))


def time_case(case: TimedCase, plan: Plan, control: dist.ProcessGroup | None = None) -> CaseResult:
    """Verify, then time, all ways of doing one op on one shape; on `control` the ranks agree on who takes part."""
    candidates, notes, failures = _verified(case, control or case.group)
    times = measure(
        candidates,
        repeats=plan.repeats,
        warmup=plan.warmup,
        calls_per_sample=_calls_per_sample(case),
        group=case.group,
        device=case.device,
        budget_s=plan.limit_s / 2,  # the other half is for the checks before and the timeline behind
    )
    fewest = min(len(one.seconds) for one in times.values())
    if fewest < plan.repeats and case.group.rank() == 0:
        print(f"{fewest} repeats instead of {plan.repeats}, to end within --case-timeout", file=sys.stderr, flush=True)
    return CaseResult(
        case.op,
        str(case.shape),
        plan.dtype,
        case.world_size,
        times,
        wire_bytes=case.problem.wire_bytes,
        chosen=case.explanation.chosen,
        chunks=case.problem.num_chunks,
        notes=notes,
        failures=failures,
        estimates_us={c.name: c.estimate_us for c in case.explanation.candidates if c.estimate_us is not None},
    )


def _verified(
    case: TimedCase, control: dist.ProcessGroup
) -> tuple[dict[str, Callable[[], object]], dict[str, str], dict[str, str]]:
    """What can be timed; who was left out and why; whose results were wrong."""
    roofs: dict[str, Callable[[], object]] = {"gemm": case.gemm_only}
    if case.world_size > 1:
        roofs["comm"] = case.comm_only
    notes, failures, right = case.refusals(), {}, dict(roofs)
    for name in [*case.implementations(), "auto"]:
        call = case.ours(name)
        wrong = _agreed(_check(case, name, call, (AssertionError,)), control)
        if wrong is None:
            right[name] = call
        else:
            failures[name] = wrong
    torch_itself = Rival("torch", lambda _: case.torch_refusal, lambda _: case.torch_baseline)
    for rival in (torch_itself, *RIVALS):
        made: dict[str, Callable[[], object]] = {}
        reason = _agreed(rival.refuses(case) or _try(case, rival, made), control)
        if reason is None:
            right |= made
        else:
            notes[rival.name] = reason
    return right, notes, failures


def _try(case: TimedCase, rival: Rival, made: dict[str, Callable[[], object]]) -> str | None:
    def run() -> object:
        made[rival.name] = rival.make(case)
        return made[rival.name]()

    return _check(case, rival.name, run, _RIVAL_ERRORS)


def _check(case: TimedCase, name: str, call: Callable[[], object], errors: tuple[type[Exception], ...]) -> str | None:
    """What is wrong with a first call, or None."""
    try:
        case.verify(name, call())
    except errors as error:
        return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
    return None


def _agreed(reason: str | None, control: dist.ProcessGroup) -> str | None:
    """The first rank's reason, if any has one: whoever is left out is left out everywhere."""
    reasons = [said["reason"] for said in exchange(resolve(control), "bench: what went wrong", {"reason": reason})]
    return next((f"rank {rank}: {one}" if control.size() > 1 and len({*reasons}) > 1 else one
                 for rank, one in enumerate(reasons) if one is not None), None)  # fmt: skip


def _calls_per_sample(case: TimedCase) -> int:
    """So many that a sample lasts `_MIN_SAMPLE_S`; the slowest rank decides, for all.

    One on CUDA, where events resolve half a microsecond and a second call would find the weight in the cache.
    """
    if case.device.type == "cuda":
        return 1
    case.gemm_only()
    start = time.perf_counter()
    case.gemm_only()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=case.group)
    return max(1, min(_MAX_CALLS_PER_SAMPLE, round(_MIN_SAMPLE_S / max(seconds.item(), 1e-6))))


def record_call(case: TimedCase, implementation: str) -> RankTrace:
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


def _report(args: argparse.Namespace, plan: Plan, outputs: Sequence[RankOutput]) -> None:
    results, traces = outputs[0].results, [trace for output in outputs for trace in output.traces]
    plan = replace(plan, environment=outputs[0].environment)
    title = _titled(plan, results)
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
