"""What one rank of `tpkernels bench` does: verify, time, then record timelines, case after case.

Refuses: to time what is wrong (each way of doing the op must first pass the elementwise fp64 bound), to leave out
anything without its reason, and to wait for ever: each step of a case has `--case-timeout` seconds, after which the
process ends and names it; what was measured before is in the result file by then.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm import startup, timeline
from tpkernels.comm.groups import resolve
from tpkernels.measure import bench_table, fitting, report
from tpkernels.measure.cases import DTYPES, Shape, TimedCase
from tpkernels.measure.deadline import deadline
from tpkernels.measure.progress import remaining
from tpkernels.measure.report import CaseResult
from tpkernels.measure.rivals import RIVALS, Rival
from tpkernels.measure.timing import measure
from tpkernels.measure.trace import RankTrace
from tpkernels.measure.usual_dtype import AUTO, usual_dtype
from tpkernels.ops.agreed_call import exchange

__all__ = ["Plan", "RankOutput", "record_call", "run_rank", "time_case", "titled"]

# A sample shorter than this is mostly timer and barrier noise; several calls then make one sample.
_MIN_SAMPLE_S = 0.005
_MAX_CALLS_PER_SAMPLE = 50

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


def titled(plan: Plan, results: Sequence[CaseResult]) -> str:
    """With the repeats that were timed, which are fewer where a case would have exceeded its time."""
    counts = {len(one.seconds) for result in results for one in result.times.values()}
    divisor = plan.environment.get("sizes_divided_by", 1) if plan.may_divide else 1
    return (
        plan.title
        + (f", sizes / {divisor}" if divisor > 1 else "")
        + f", n={min(counts)}"
        + (f" to {max(counts)}" if len(counts) > 1 else "")
    )


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
            bench_table.write_table_and_figure(plan.out, output.results, f"{titled(plan, output.results)} (so far)")
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
