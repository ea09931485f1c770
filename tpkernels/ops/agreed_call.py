"""One op call on a group: agree, select, run, and turn failures into errors that name their culprit.

Every op goes through :func:`run`.  The first call of a signature exchanges it with all ranks through the group's store
and selects the implementation from agreed facts; later calls of the same signature go straight to the backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from tpkernels import config, dispatch, partition
from tpkernels.comm import agreement, monitor, resources, transport
from tpkernels.comm.groups import Group
from tpkernels.comm.trail import fingerprint, short_text
from tpkernels.dispatch import Costs, Explanation, Implementation, Problem
from tpkernels.errors import CommunicationError, GroupMismatch, PeerLost, UnsupportedProblem
from tpkernels.gemm import widened
from tpkernels.ops.agreed_costs import agreed_costs
from tpkernels.ops.contract import Context, RepeatedSum, widened_call
from tpkernels.ops.signatures import Compared, Signature

__all__ = [
    "CheckedCall",
    "Compared",
    "Signature",
    "checked_call",
    "exchange",
    "explain",
    "facts_of",
    "fail",
    "raise_end",
    "run",
    "run_checked",
    "start",
]

_T = TypeVar("_T")
# A call that names its implementation may still choose how to cut its GEMM, on a CPU. One of so many operations on a
# rank takes some milliseconds on a core, and a group's costs take a few tens to measure, once.
_MEASURED_FLOPS = 1e9


@dataclass(frozen=True)
class _Plan:
    id: int
    implementation: Implementation
    num_chunks: int
    forced_chunks: bool
    explanation: Explanation
    text: str
    fingerprint: int
    agreed: Any

    def context(self, group: Group, call: int, compared: Compared | None = None) -> Context:
        identity, text, number = self.id, self.text, self.fingerprint
        if compared is not None:
            identity ^= compared.digest % transport.MAX_SIGNATURES
            number ^= compared.digest
            text = short_text(str(compared), number)
        return Context(
            group,
            transport.call_tag(call, identity),
            self.num_chunks,
            text,
            number,
            self.explanation.problem,
            self.explanation.costs,
            self.forced_chunks,
            self.agreed,
        )

    def arguments(self, arguments: Any) -> Any:
        """What the implementation is given of the op's arguments."""
        return widened_call(arguments) if self.explanation.costs.widens else arguments


class CheckedCall:
    """A call whose arguments this rank has checked; ``group.checked`` keeps it for calls of equal facts."""

    __slots__ = ("is_asked", "plan", "repetition", "signature")

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.plan: _Plan | None = None
        """How it runs, once the ranks have agreed on it."""
        self.repetition: RepeatedSum | None = None
        """What makes it again with less, see :mod:`tpkernels.ops.fast_path`."""
        self.is_asked = False
        """Whether the backend was asked for a repetition."""


def facts_of(
    op: str, implementation: str, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *rest: object
) -> Hashable:
    """All that an op's checks look at in these arguments: calls of equal facts need no second look."""
    return (
        op, implementation, x.shape, x.dtype, x.device,
        None if weight is None else (weight.shape, weight.dtype, weight.device),
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        *[(one.shape, one.dtype, one.device) if isinstance(one, Tensor) else one for one in rest],
    )  # fmt: skip


def checked_call(group: Group, facts: Hashable, op: str, check: Callable[[], Signature]) -> CheckedCall:
    """The call of equal facts that was made before; else a new one, if its arguments pass ``check``.

    Raises:
        ValueError: that of ``check``; the peers are told, and the group goes on.
    """
    known: CheckedCall | None = group.checked.get(facts)
    if known is None:
        try:
            known = CheckedCall(check())
        except ValueError as error:
            agreement.refuse(group, op, str(error))
            raise
        group.keep_checked(facts, known)
    return known


def run(
    group: Group,
    signature: Signature,
    local: int,
    arguments: Any,
    device: torch.device,
    compared: Compared | None = None,
) -> Any:
    """Run one call of ``signature.op``; returns what the implementation's ``run`` returns.

    ``local`` is the size of the GEMM dimension that only this rank knows (its columns of the weights when gathering,
    its contraction when reducing); the largest of all ranks enters the selection.  ``compared``: what else the ranks
    must have in common in this very call.

    Raises:
        GroupMismatch, PeerLost, CollectiveTimeout: see :mod:`tpkernels.errors`; the group is poisoned.
        GroupPoisoned: an earlier call on this group failed.
        UnsupportedProblem: the forced implementation cannot run this.
    """
    return run_checked(group, CheckedCall(signature), local, arguments, device, compared)


def run_checked(
    group: Group,
    checked: CheckedCall,
    local: int,
    arguments: Any,
    device: torch.device,
    compared: Compared | None = None,
) -> Any:
    """:func:`run` of a call of :func:`checked_call`, which keeps its plan."""
    signature = checked.signature
    said = signature if compared is None else compared
    if checked.plan is None:
        checked.plan = group.agreed.get(signature)
        if checked.plan is None:
            _check(group, str(signature), device.type)
    with group.lock:  # what _guarded does, without its calls: each costs microseconds in a call that finds cold caches
        if group.poison is not None or group.verdict is not None:
            raise_end(group)
        outer, call, since = group.in_flight, group.calls, group.since
        group.calls = call + 1
        if group.trail is not None:
            number = checked.plan.fingerprint if checked.plan else fingerprint(str(signature))
            group.trail.add(call, said, number if compared is None else number ^ compared.digest)
        try:
            plan = checked.plan or group.agreed.get(signature)
            if plan is None:
                group.since = time.monotonic()
                plan = _agree(group, call, signature, local, device, said)
            checked.plan = plan
            group.enter(call, said)
            result = plan.implementation.run(plan.context(group, call, compared), plan.arguments(arguments))
            if group.verdict is not None:  # the device was stopped: what a wait for it found there is void
                raise_end(group)
            return result
        except BaseException as error:  # noqa: BLE001 - fail raises what it means
            fail(group, call, said, error)
        finally:
            group.leave(outer)
            group.since = since


def start(
    group: Group, signature: Signature, local: int, arguments: Any, device: torch.device, *, at_once: bool = False
) -> Callable[[], Any]:
    """Like :func:`run` for an op whose ``run`` returns a function to wait with: the wait fails as the call would.

    ``at_once``: it is called next, so that both are one call with one time-out.
    """
    with group.lock:
        started, known, made = group.calls, signature in group.agreed, time.monotonic()
        finish = run(group, signature, local, arguments, device)
        group.started[started] = signature

    def work(call: int) -> Any:
        del group.started[call]
        group.enter(call, signature)
        group.since = made if at_once and not known else None
        return finish()

    return lambda: _guarded(group, signature, work, started)


def _guarded(group: Group, signature: Hashable, work: Callable[[int], _T], started: int | None = None) -> _T:
    """Run ``work`` as the group's next call, or as a part of the one that has ``started``, possibly inside another.

    Any failure poisons the group and leaves a note for the peers.
    """
    with group.lock:
        if group.poison is not None or group.verdict is not None:
            raise_end(group)
        outer, since = group.in_flight, group.since
        call = group.calls if started is None else started
        group.calls += started is None
        if group.trail is not None and started is None:
            group.trail.add(call, signature, fingerprint(str(signature)))
        try:
            if started is None:
                group.since = time.monotonic()
            result = work(call)
            if group.verdict is not None:
                raise_end(group)
            return result
        except BaseException as error:  # noqa: BLE001 - fail raises what it means
            fail(group, call, signature, error)
        finally:
            group.leave(outer)
            group.since = since


def raise_end(group: Group) -> NoReturn:
    """What a call gets that comes after the group's end, or first hears of it."""
    group.raise_if_poisoned()
    assert group.verdict is not None
    raise agreement.fail(group, group.verdict)


def fail(group: Group, call: int, signature: Hashable, error: BaseException) -> NoReturn:
    """Inside ``except``: raise what the user gets for ``error``, and poison the group."""
    try:
        raise error
    except CommunicationError as named:
        raise agreement.fail(group, named) from named.__cause__
    except transport.TransportFailure as failure:
        raise agreement.fail(group, agreement.diagnose(group, call, str(signature), failure)) from failure
    except UnsupportedProblem:
        raise  # every rank refuses alike, and nothing was sent
    except BaseException as other:
        if group.verdict is not None and isinstance(other, Exception):  # it stumbled over what it found on the device
            raise agreement.fail(group, group.verdict) from other
        # Whatever it is, the peers may be waiting for chunks that will not come.
        agreement.fail(group, PeerLost(f"rank {group.rank}, call {call}: {other!r}", ranks=(group.rank,)))
        raise
    finally:
        del error  # its traceback holds this frame: such a cycle would keep the process group until a collection


def _check(group: Group, what: str, device: str) -> None:
    """A malformed variable, or tensors that cannot be sent: raises here, the peers are told, and the group goes on."""
    try:
        config.load()
        unserved = group.backends.why_not(device)
        if unserved is not None:
            raise ValueError(f"{what} cannot run on group {group.name!r}: {unserved}")
    except ValueError as error:
        agreement.refuse(group, what, str(error))
        raise


def _agree(
    group: Group, call: int, signature: Signature, local: int, device: torch.device, said: Signature | Compared
) -> _Plan:
    resources.check_setup(group, str(signature), device)
    monitor.ensure_running()
    agreement.meet(group, call, device)
    settings = config.load()
    own_settings = {
        "tpk.init(deterministic=...)": config.is_deterministic(),
        "TPKERNELS_NUM_CHUNKS": settings.num_chunks,
        "TPKERNELS_CALIBRATE": settings.calibrate,
    }
    facts = {
        "local": local, "settings": own_settings | resources.settings() | {"same_bits": group.same_bits},
        "resources": [kind.name for kind in resources.kinds()],
        "widens": _told(signature.op, signature.dtype, signature.out_dtype, device),
    }  # fmt: skip
    records = agreement.exchange_records(group, call, agreement.Record(str(said), facts))
    resources.check_kinds(group, call, [record.facts["resources"] for record in records])
    _check_settings(group, call, [record.facts["settings"] for record in records])
    resources.ensure(group, call, device)
    problem = _problem(group, signature, max(record.facts["local"] for record in records), device)
    cuts = device.type == "cpu" and problem.flops >= _MEASURED_FLOPS
    measure = (signature.implementation == "auto" or cuts) and settings.calibrate and group.size > 1
    widens = _widens(problem, records)
    costs = agreed_costs(group, call, signature.dtype, device, widens) if measure else Costs(widens=widens)
    implementation, explanation = dispatch.select(problem, signature.implementation, costs)
    layout = signature.layout
    chunks = settings.num_chunks or partition.num_chunks(layout.max_shard_rows, problem.row_bytes)
    group.agreements += 1
    identity = 1 + group.agreements % (transport.MAX_SIGNATURES - 1)
    text = str(signature)
    number = fingerprint(text)
    text = short_text(text, number)
    chunks = min(chunks, max(1, layout.max_shard_rows))
    forced = settings.num_chunks is not None
    agreed = None if implementation.agree is None else implementation.agree(group, call, problem, layout)
    plan = _Plan(identity, implementation, chunks, forced, explanation, text, number, agreed)
    group.remember(signature, plan)
    return plan


def _check_settings(group: Group, call: int, settings: Sequence[Mapping[str, Any]]) -> None:
    """``settings``: each rank's, by the names of the variables."""
    for name in settings[0]:
        values = [one[name] for one in settings]
        if len(set(values)) > 1:
            raise GroupMismatch(f"rank {group.rank}, call {call}: {name} differs between ranks: {values}")


def _problem(group: Group, signature: Signature, local: int, device: torch.device) -> Problem:
    layout, whole_features = signature.layout, sum(signature.layout.sizes)
    facts = dispatch.FACTS[signature.op]
    columns = whole_features if layout.feature and facts.gathers else signature.columns
    over_ranks = local if facts.dealt else local * group.size
    n, k = (over_ranks, columns) if facts.gathers else (columns, over_ranks)
    return Problem(
        op=signature.op,
        m=layout.total_rows,
        n=n,
        k=k,
        dtype=signature.dtype,
        world_size=group.size,
        device=device.type,
        backend=group.backends.by_device[device.type],
        co_located=group.co_located,
        resources=resources.standings(group, device.type),
        out_dtype=signature.out_dtype,
        activation=signature.activation,
        experts=signature.experts,
        top_k=signature.top_k,
        same_bits=group.same_bits,
    )


def _told(op: str, dtype: torch.dtype, out_dtype: torch.dtype | None, device: torch.device) -> int | None:
    """From how many rows on this rank would multiply in fp32."""
    facts = dispatch.FACTS[op]
    return widened.told(dtype, device.type) if facts.multiplies and not facts.grouped and out_dtype is None else None


def _widens(problem: Problem, records: Sequence[agreement.Record]) -> bool:
    """Whether all ranks multiply in fp32 (:mod:`tpkernels.gemm.widened`), of what each has told."""
    least = widened.agreed_rows([record.facts["widens"] for record in records])
    return least is not None and problem.m >= least and not problem.same_bits  # whose GEMMs are canonical ones


def explain(
    op: str,
    *,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    group: Group | None,
    device: str,
    experts: int = 1,
    top_k: int = 1,
) -> Explanation:
    """See :func:`tpkernels.explain`; a collective call, because "auto" rests on costs that the ranks agree on."""
    problem = Problem(op, m, n, k, dtype, 1, device, "none", out_dtype=out_dtype, experts=experts, top_k=top_k)
    if group is None or group.size == 1:
        return dispatch.select(replace(problem, same_bits=group.same_bits if group else 0), "auto", Costs())[1]
    sizes = f"m={m}, k={k}, n={n}" + (f", experts={experts}, top_k={top_k}" if problem.facts.grouped else "")
    name = f"explain({op}, {sizes}, {dispatch.dtype_text(dtype, out_dtype)}, device={device})"
    _check(group, name, device)
    target = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)

    def work(call: int) -> Costs:
        monitor.ensure_running()
        agreement.meet(group, call, target)
        facts = {
            "resources": [kind.name for kind in resources.kinds()], "widens": _told(op, dtype, out_dtype, target),
        }  # fmt: skip
        records = agreement.exchange_records(group, call, agreement.Record(name, facts))
        resources.check_kinds(group, call, [record.facts["resources"] for record in records])
        resources.ensure(group, call, target)
        widens = _widens(problem, records)
        return agreed_costs(group, call, dtype, target, widens) if config.load().calibrate else Costs(widens=widens)

    costs = _guarded(group, name, work)
    problem = replace(
        problem,
        world_size=group.size,
        backend=group.backends.by_device[device],
        co_located=group.co_located,
        resources=resources.standings(group, device),
        same_bits=group.same_bits,
    )
    return dispatch.select(problem, "auto", costs)[1]


def exchange(group: Group, what: str, facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every rank's ``facts`` (what JSON can say), in rank order; ``what`` names the step that all ranks are in.

    Raises:
        GroupMismatch, PeerLost, CollectiveTimeout: as :func:`run`; the group is poisoned.
    """
    if group.size == 1:
        return [facts]
    device = group.backends.meeting_device()

    def work(call: int) -> list[Mapping[str, Any]]:
        monitor.ensure_running()
        agreement.meet(group, call, device)
        return [record.facts for record in agreement.exchange_records(group, call, agreement.Record(what, facts))]

    return _guarded(group, what, work)
