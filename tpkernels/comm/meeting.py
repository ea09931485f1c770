"""The first contact of a group's ranks: who everybody is, and under which prefix they talk from then on."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tpkernels.comm import connections, presence, transport, watchdog
from tpkernels.comm.blame import HEARTBEAT_PATIENCE, Looks, failed_first
from tpkernels.comm.bounded_store import StoreLost, StoreSilent
from tpkernels.comm.groups import Group
from tpkernels.comm.job_identity import Foreign
from tpkernels.comm.job_store import has_clashed, host_of
from tpkernels.comm.liveness import Identity
from tpkernels.comm.records import Record, mismatch, raise_if
from tpkernels.errors import CommunicationError, GroupMismatch, PeerLost

__all__ = ["LOOK_EVERY", "TWO_JOBS", "card_of", "meet"]

# So often a rank that waits for others looks for reasons to stop.
LOOK_EVERY = 0.02
# A rank that closes its connection and has never come to the meeting is gone; one that has may be about to say why.
AWAIT_EVIDENCE = 0.02
# Waits end at the time-out. A meeting that has lasted for so many of them is that of a process that was stopped.
_STOOD_STILL = 1.5
_CARD_BYTES = 4096
_CARD_KEYS = ("token", "visit", "serves_store", "refused_call", "refused")
_ADVICE = (
    "Two jobs may have come to one port: export MASTER_PORT=<a free port> for one of them. Ranks of one job need the "
    "same secret, see TPKERNELS_JOB_SECRET_FILE"
)
TWO_JOBS = f"ranks of two jobs have come to the group's store. {_ADVICE}"


class _HadClosed(transport.TransportFailure):
    """The connection to a peer had ended before this rank came to the meeting."""


def meet(group: Group, call: int, device: torch.device) -> None:
    """First contact, on the data path: rank 0's key prefix, who everybody is, and whether one refused this ``call``.

    A peer that died before its first call closes its connections, so its absence is noticed here without the store.
    """
    if group.key is not None:
        return
    start = time.monotonic()
    presence.come(group)
    others = [rank for rank in range(group.size) if rank != group.rank]
    device = group.backends.meeting_device(device)
    tag, sends = transport.call_tag(0), []
    if group.card is None:
        group.card = card_of(group, device)
        sends = [(peer, group.card) for peer in others]
    # Zeros say that a rank's card has not come.
    cards = [group.card if rank == group.rank else torch.zeros_like(group.card) for rank in range(group.size)]
    before = connections.received()
    try:
        if group.backends.waits_in_streams(device.type):
            _await_company(group)
        sent, received = _exchange(group, tag, device, sends, {peer: cards[peer] for peer in others})
        # One after the other, each might take the whole timeout.
        until = None if group.backends.waits_in_streams(device.type) else start + group.timeout
        transport.wait_all(received, until=until)
        _await_device(group)
        said = _read_cards(group, call, cards, start + group.timeout)
        group.peers = tuple(one["who"] for one in said)
        group.visits = tuple(one["visit"] for one in said)
        group.watch = watchdog.guard(group, before, _CARD_BYTES)
        group.key = f"tpkernels/{said[0]['token']}"
        refused = {rank: Record("", {}, one["refused"]) for rank, one in enumerate(said) if one["refused_call"] == call}
        # Before waiting for our sends: ranks that refused do not receive what was sent to them, yet.
        raise_if(mismatch(group, call, refused))
        transport.wait_all(sent, until=until)
    except transport.TransportFailure as error:
        silent = [rank for rank, card in enumerate(cards) if not card.any()]
        raise _blame_meeting(group, error, silent, time.monotonic() - start) from error


def _exchange(
    group: Group,
    tag: int,
    device: torch.device,
    sends: Sequence[tuple[int, torch.Tensor]],
    cards: dict[int, torch.Tensor],
) -> tuple[list[transport.Transfer], list[transport.Transfer]]:
    """Post all cards.  A peer that is gone keeps no other one from getting ours: it would wait for it in vain."""
    if group.backends.waits_in_streams(device.type):  # one operation, which all ranks make alike
        return transport.exchange(group, tag, 0, sends, list(cards.items()))
    sent: list[transport.Transfer] = []
    received: list[transport.Transfer] = []
    failure: transport.TransportFailure | None = None
    given = dict(sends)
    for peer, card in cards.items():
        try:
            out, into = transport.exchange(group, tag, 0, [(peer, given[peer])] if given else [], [(peer, card)])
        except transport.TransportFailure as error:
            failure = failure or error
        else:
            sent, received = [*sent, *out], [*received, *into]
    if failure is not None:
        group.unsent += sent  # gloo forgets a send whose handle is gone
        raise _HadClosed(str(failure), failure.peer) from failure
    return sent, received


def _await_company(group: Group) -> None:
    """Return when all ranks have come: NCCL's first operation waits for all without a limit, in the host's thread.

    A rank that left a note at a meeting before this one, and lives, is taken to come here, too.
    """
    start = time.monotonic()
    while True:
        said = Looks(group)(lambda store: presence.everybody(group, store))
        missing = [rank for rank in range(group.size) if rank not in said or said[rank]["who"].is_dead()]
        if _has_broken_up(group) or (missing and time.monotonic() - start > group.timeout):
            raise transport.TransportFailure(f"rank(s) {missing} did not come", missing[0] if missing else None)
        if not missing:
            return
        time.sleep(LOOK_EVERY)


def _await_device(group: Group) -> None:
    """Return when what was started on the device has ended, before the host reads what it brought.

    To read it at once would be a wait in the driver, which nobody could end: the monitor knows groups that have met.
    """
    start = time.monotonic()
    while group.works is not None and (work := group.works.oldest()) is not None:
        failure = work.failure()
        if failure is not None or work.has_timed_out() or time.monotonic() - start > group.timeout:
            raise transport.TransportFailure(failure or "what they told each other has not arrived")
        if _has_broken_up(group):
            raise transport.TransportFailure("a rank that had come went away")
        time.sleep(LOOK_EVERY)


def _has_broken_up(group: Group) -> bool:
    """Whether a rank that had come to this meeting has died or failed."""
    said = Looks(group)(lambda store: presence.present(group, store))
    return any(one["who"].is_dead() or (one["failed"] is not None and rank != group.rank) for rank, one in said.items())


def _blame_meeting(
    group: Group, error: transport.TransportFailure, silent: Sequence[int], waited: float
) -> CommunicationError:
    """Whom to blame for a meeting that failed; waits a little for evidence, as :func:`blame.blame` does.

    ``silent``: ranks whose cards have not come, who are to blame if nobody tells more.  The connection that failed may
    be that of a rank which gave up a moment before us.
    """
    head = (
        f"rank {group.rank}: the ranks of group {group.name!r} did not meet for their first call "
        f"(timeout {group.timeout:g} s): "
    )
    start, looks = time.monotonic(), Looks(group)
    patience, stood_still = min(HEARTBEAT_PATIENCE, max(0.5, group.timeout / 2)), waited > _STOOD_STILL * group.timeout
    if not stood_still:  # else what the others have said meanwhile may come now
        patience = min(patience, max(0.0, group.timeout - waited))
    while True:
        present = looks(lambda store: presence.present(group, store))
        gone = [rank for rank, one in present.items() if one["who"].is_dead()]
        notes = looks(lambda store: presence.failures(group, store))  # in this order, see blame
        dead = [rank for rank in gone if rank not in notes]
        if dead:
            return PeerLost(f"{head}rank(s) {dead} died. {error}", ranks=dead)
        if notes:
            return failed_first(head, notes)
        never_came = error.peer is not None and error.peer not in present
        at_once = never_came and not isinstance(looks.lost, StoreSilent)  # which may be a busy host's
        if time.monotonic() - start > (min(patience, AWAIT_EVIDENCE) if at_once else patience):
            # A rank that is here was slower than the connection that failed; one that is not may still come in time.
            absent = [rank for rank in silent if rank not in present]
            if error.peer is not None and (never_came or not absent) and waited < 0.9 * group.timeout:
                absent = [error.peer]
            ranks = absent or list(silent) or ([] if error.peer is None else [error.peer])
            if not ranks and isinstance(error, StoreLost) and group.store_host is not None:
                ranks = [group.store_host]
            whom = "a rank" if not ranks else f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
            stopped = [rank for rank, one in present.items() if one["who"].is_stopped()]
            if not stopped and stood_still:
                why = f"this process stood still for some of {waited:.3g} s, and the others gave up"
                return PeerLost(f"{head}{why}: {error}", ranks=[group.rank])
            if looks.lost is not None and isinstance(error, _HadClosed):
                return _came_too_late(group, head, error, looks.lost)
            what = f"rank(s) {stopped} are stopped" if stopped else f"no word from {whom}"
            store = "" if looks.lost is None else f"; {looks.lost}"
            return PeerLost(f"{head}{what}: {error}{store}", ranks=stopped or ranks)
        time.sleep(0.005)


def _came_too_late(
    group: Group, head: str, error: transport.TransportFailure, lost: RuntimeError
) -> CommunicationError:
    """The error of a rank whose peer had closed its connection before: it may have died, or given up on this very rank,
    which was stopped perhaps, and the store does not tell."""
    host = group.store_host if group.store_host is not None else _host_of_jobs_store(group)
    what = f"rank {error.peer} has ended or had given up before this rank came, and the group's store is lost"
    ranks = () if host is None or error.peer is None else tuple(dict.fromkeys((error.peer, host)))
    return PeerLost(f"{head}{what}, which would tell: {error}; {lost}", ranks=ranks)


def _host_of_jobs_store(group: Group) -> int | None:
    """The rank of this group that serves the job's store, as far as is known before the ranks have met."""
    host = host_of(group.store)
    ranks = [] if host is None else dist.get_process_group_ranks(group.pg)
    return ranks.index(host) if host in ranks else None


def card_of(group: Group, device: torch.device, refused_call: int | None = None, reason: str = "") -> torch.Tensor:
    """What a rank tells every other one when they meet."""
    card: dict[str, Any] = {
        "token": secrets.token_hex(8),
        "who": Identity.mine().to_json(),
        "visit": group.visits[group.rank],
        "job": group.job.name,
    }
    card["serves_store"] = group.control.is_served_here
    text = json.dumps({**card, "refused_call": refused_call, "refused": reason[: _CARD_BYTES // 8]})
    sealed = group.job.seal(group.name).close(f"card/{group.rank}", text).encode()
    return torch.frombuffer(bytearray(sealed.ljust(_CARD_BYTES, b"\0")), dtype=torch.uint8).to(device)


def _read_cards(group: Group, call: int, cards: Sequence[torch.Tensor], until: float) -> list[dict[str, Any]]:
    """What the ranks' cards say; asks the store until then.

    Raises:
        GroupMismatch: some are those of another job, as ranks of two jobs that came to one port.
    """
    said: list[dict[str, Any]] = []
    jobs: dict[str, list[int]] = {}
    strangers: dict[int, str] = {}
    seal = group.job.seal(group.name)
    for rank, card in enumerate(cards):
        raw = card.cpu().numpy().tobytes().rstrip(b"\0")
        try:
            text = seal.open(f"card/{rank}", raw)
            one = json.loads(text)
            said.append({key: one[key] for key in _CARD_KEYS} | {"who": Identity.from_json(one["who"])})
            jobs.setdefault(str(one["job"]), []).append(rank)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            strangers[rank] = str(error) if isinstance(error, Foreign) else f"its card cannot be read: {error!r}"
    head = f"rank {group.rank}, call {call} on group {group.name!r}: "
    if strangers:
        raise GroupMismatch(
            f"{head}rank(s) {list(strangers)} do not belong to this job ({group.job}): "
            f"{next(iter(strangers.values()))}. {_ADVICE}",
            ranks=tuple(strangers),
        )
    group.store_host = next((rank for rank, one in enumerate(said) if one["serves_store"]), None)
    if has_clashed(group.control.within(max(0.2, until - time.monotonic())), group.job):
        raise GroupMismatch(f"{head}{TWO_JOBS}")
    if len(jobs) > 1:
        listing = "; ".join(f"rank(s) {ranks} of {name or 'a job without a name'}" for name, ranks in jobs.items())
        others = [rank for name, ranks in jobs.items() if name != group.job.name for rank in ranks]
        raise GroupMismatch(f"{head}ranks of different jobs have met: {listing}. {_ADVICE}", ranks=others)
    return said
