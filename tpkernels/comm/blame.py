"""How a failed call finds its culprit: by the processes of this host, and by what ranks say in the group's store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tpkernels.comm import heartbeats, presence, transport
from tpkernels.comm.bounded_store import BoundedStore, StoreSilent
from tpkernels.comm.groups import Group
from tpkernels.comm.records import Record, beats, mismatch, recorded, told
from tpkernels.errors import CollectiveTimeout, CommunicationError, GroupMismatch, PeerLost

__all__ = ["HEARTBEAT_PATIENCE", "Looks", "blame", "diagnose", "failed_first", "stood_still", "unanswering"]

# A dead process of this host is seen at once; a remote one after this many seconds without a heartbeat.
HEARTBEAT_PATIENCE = 3.0
# What ends within a part of the time-out, and takes so long and half of it more, was the work of a stopped process.
_SLOW = 1.0
# A look at the store takes up to so long on a busy machine, and a beat is not missing before.
_LATE = 0.1
_T = TypeVar("_T")
_ERRORS: dict[str, type[CommunicationError]] = {
    cls.__name__: cls for cls in (GroupMismatch, PeerLost, CollectiveTimeout)
}


_NO_STORE = "the group's store is lost"


def diagnose(group: Group, call: int, signature: str, error: transport.TransportFailure) -> CommunicationError:
    """Turn a transport error into one that names its culprit; waits at most a few seconds for evidence."""
    if group.verdict is not None:
        return group.verdict
    waited = time.monotonic() - group.in_flight.since if group.in_flight is not None else 0.0
    if stood_still(group, error.lasted - group.timeout):
        waited = 0.0  # it was stopped: what its peers have said meanwhile may come now
    if error.verdict is not None:
        head = _head(group, call, signature)
        cause = _cause(group, head, error, waited) if error.verdict is CollectiveTimeout else None
        return cause or error.verdict(f"{head}{error}", ranks=error.ranks)
    return blame(group, call, signature, str(error), waited, peer=error.peer)


def stood_still(group: Group, seconds: float) -> float:
    """These seconds, if this process must have stood still for most of them, else none.

    It was stopped, or its machine slept; on a busy one, what takes milliseconds has taken some tenths of a second.
    """
    return seconds if seconds > max(_SLOW, group.timeout / 2) else 0.0


def blame(
    group: Group,
    call: int,
    signature: str,
    symptom: str,
    waited: float,
    *,
    store: BoundedStore | None = None,
    broken: bool = False,
    suspects: Sequence[int] = (),
    peer: int | None = None,
) -> CommunicationError:
    """Find the ranks that are gone, that failed first, or that did not come, in this order.

    A call that has ``waited`` for the whole timeout has left its peers time to leave evidence; one that failed early
    waits for it a little, because connections close before the process is gone, but not beyond the timeout.

    Args:
        store: the client of the thread that asks, if it is not the one that makes the group's calls.
        broken: the transport has said that it failed: if no rank is to blame, it was not a matter of time.
        suspects: ranks that were waited for, to name where nothing tells more.
        peer: the rank at the other end of what failed, to name where everybody has come to the call.
    """
    head = _head(group, call, signature)
    remote = [rank for rank, one in enumerate(group.peers) if not one.is_local]
    patience = min(HEARTBEAT_PATIENCE, max(0.5, group.timeout / 2, heartbeats.silence(group) + 0.3 if remote else 0.0))
    start = time.monotonic()
    left = max(0.0, group.timeout - waited)
    deadline = start + min(patience, left)
    looks, next_beats, listens = Looks(group, store), start, False
    while True:
        if group.verdict is not None:
            return group.verdict
        # In this order: a rank that failed because of another leaves its note first and dies later, if at all.
        gone = [rank for rank, peer in enumerate(group.peers) if peer.is_dead()]
        notes = looks(lambda store: presence.failures(group, store))
        dead = [rank for rank in gone if rank not in notes]
        if looks.lost is not None and group.store_host not in dead:
            dead = []  # they may have left because the store is lost, which they could not say
        if dead and looks.lost is not None and not set(missed := _missed(group, call, start, waited)) <= set(dead):
            return _missed_before(group, head, missed, looks.lost, symptom)  # its host left when its time was up
        if dead:
            stopped = _stopped(group)  # because of which they may have failed, and left without a word
            also = f", and rank(s) {stopped} are stopped" if stopped else ""
            return PeerLost(f"{head}rank(s) {dead} died{also}. {symptom}", ranks=[*dead, *stopped])
        records = looks(lambda store: recorded(group, f"call/{call}", store))
        # What this rank has said of the call; what it waits for may be a later part, which has a name of its own.
        records.setdefault(group.rank, Record(signature, {}))
        difference = mismatch(group, call, records)
        if difference is not None:
            return difference
        if notes:
            return failed_first(head, notes)
        now = time.monotonic()
        if remote and now >= next_beats:
            next_beats = now + heartbeats.LISTEN_EVERY
            said = looks(lambda store: beats(group, store))
            if looks.lost is None:  # else they may beat, and nobody hears them
                heartbeats.listen(group, said, now)
                if not listens:  # silence is counted from here, and a busy or distant store was slow so far
                    listens, deadline = True, max(deadline, min(now + heartbeats.silence(group) + _LATE, start + left))
        if now > deadline:
            break
        time.sleep(0.02)
    # Who was silent when the store was last read: whoever serves it may have left because of that rank.
    heard_until = time.monotonic() if looks.lost is None else group.listened
    silent = heartbeats.silent(group, [rank for rank in remote if rank != group.rank], heard_until)
    if looks.lost is not None and not silent:
        missed = _missed(group, call, start, waited) or list(suspects or (() if peer is None else (peer,)))
        if missed and _was_long(group, start, waited):
            return _missed_before(group, head, missed, looks.lost, symptom)
        broke = None if waited > 0.9 * group.timeout or isinstance(looks.lost, StoreSilent) else peer
        return _store_lost(group, head, looks.lost, symptom, suspects, broke)
    if silent:
        return PeerLost(f"{head}no sign of life from rank(s) {silent}. {symptom}", ranks=silent)
    if broken:
        ranks = () if peer is None else (peer,)
        whom = f"rank {peer} cannot be reached" if ranks else "they cannot reach each other"
        return PeerLost(f"{head}every process is alive, but {whom}. {symptom}", ranks=ranks)
    # Ranks whose operations run on a device do not stay in their calls: they say how far they have come.
    reached = looks(lambda store: told(group, "order", lambda note: int(note["call"]), store))
    # Ranks that have what they need of this call go on, and may wait in a later one.
    said = looks(lambda store: beats(group, store))
    came = {rank for rank, at in heartbeats.calls(said).items() if at >= call}
    late = [rank for rank in range(group.size) if rank not in {*records, *came} and reached.get(rank, -1) < call]
    if looks.lost is not None:  # its host has left in this moment
        late = _missed(group, call, start, waited)
    stopped = _stopped(group)
    what = f", but rank(s) {late} did not come to this call" if late else ""
    if stopped:
        what = f", but rank(s) {stopped} are stopped and did not come"
    elif not late and (suspects := suspects or (() if peer is None else (peer,))):
        what = f", but rank(s) {list(suspects)} did not answer"
    return CollectiveTimeout(
        f"{head}every rank is alive{what} within {group.timeout:g} s. {symptom}", ranks=stopped or late or suspects
    )


def _cause(group: Group, head: str, error: transport.TransportFailure, waited: float) -> CommunicationError | None:
    """What a rank may wait for that did not come: one that is stopped, or the store; None if it is late by itself."""
    stopped = _stopped(group)
    if stopped:
        if set(stopped) & set(error.ranks):
            return None
        return CollectiveTimeout(f"{head}rank(s) {stopped} are stopped. {error}", ranks=stopped)
    if time.monotonic() - group.control.answered_at < 0.5 * waited:  # the monitor asks it while calls wait
        return None
    looks = Looks(group)
    looks(lambda store: presence.failures(group, store))
    return None if looks.lost is None else _store_lost(group, head, looks.lost, str(error), (), None)


def unanswering(group: Group) -> list[int]:
    """Ranks that are known not to answer anybody now: stopped, or without a heartbeat when the store was last read."""
    remote = [rank for rank, peer in enumerate(group.peers) if not peer.is_local]
    return _stopped(group) + heartbeats.silent(group, remote, group.listened)


def _stopped(group: Group) -> list[int]:
    return [rank for rank, peer in enumerate(group.peers) if peer.is_stopped()]


def _was_long(group: Group, start: float, waited: float) -> bool:
    """Whether the store, which is lost now, still answered when the call had waited for most of its time."""
    answered_at = max(group.listened, group.control.answered_at)
    return waited > 0.9 * group.timeout and start - answered_at < 0.5 * waited


def _missed(group: Group, call: int, start: float, waited: float) -> list[int]:
    """Ranks that had not come to such a call when the store was last read."""
    at, ranks = group.missed
    return list(ranks) if at == call and _was_long(group, start, waited) else []


def _missed_before(
    group: Group, head: str, ranks: Sequence[int], lost: RuntimeError, symptom: str
) -> CommunicationError:
    """The error of a rank whose store was lost after others had not come: its host may have left like anybody else.

    Where one of this host is stopped, others may have waited for it, too, and left when they gave up.
    """
    stopped = _stopped(group)
    said = f"{stopped} are stopped" if stopped else f"{list(ranks)} did not answer within {group.timeout:g} s"
    return PeerLost(f"{head}rank(s) {said}, and now the store is lost: {lost}. {symptom}", ranks=stopped or ranks)


def _store_lost(
    group: Group, head: str, lost: RuntimeError, symptom: str, suspects: Sequence[int], broke: int | None
) -> CommunicationError:
    """The error of a rank that the store does not answer any more, so that it learns nothing of its peers.

    ``broke``: a peer whose connection was closed as well. Its rank, or the store's host, may have left because of the
    other, and nothing tells which.
    """
    if group.store_host is None:
        return PeerLost(f"{head}{_NO_STORE}: {lost}. {symptom}", ranks=tuple(suspects))
    host = group.store_host
    what = f"the group's store, which rank {host} serves, is lost"
    if broke in (None, host):
        return PeerLost(f"{head}{what}: {lost}. {symptom}", ranks=(host,))
    return PeerLost(f"{head}the connection to rank {broke} broke, and {what}: {lost}. {symptom}", ranks=(broke, host))


def failed_first(head: str, notes: Mapping[int, Mapping[str, Any]]) -> CommunicationError:
    """The error of a rank whose peers left ``notes`` of their own.

    A rank that lost a store which no rank serves names nobody, and is not to blame for that either.
    """
    rank, note = next(iter(notes.items()))
    cls = _ERRORS.get(note["kind"], PeerLost)
    ranks = note["ranks"] or (() if _NO_STORE in note["message"] else (rank,))
    return cls(f"{head}rank {rank} failed first: {note['message']}", ranks=ranks)


def _head(group: Group, call: int, signature: str) -> str:
    return f"rank {group.rank}, call {call} on group {group.name!r} ({signature}): "


class Looks:
    """Looks into the store that end in time, whether it answers or not."""

    def __init__(self, group: Group, store: BoundedStore | None = None) -> None:
        # An error that names ranks has to come within 1.1 timeouts, and the first look that fails ends all others.
        self.store = (store or group.control).within(min(1.0, max(0.1, 0.07 * group.timeout)))
        self.lost: RuntimeError | None = None
        """Why the last one has found nothing."""

    def __call__(self, look: Callable[[BoundedStore], dict[int, _T]]) -> dict[int, _T]:
        try:
            found = look(self.store)
        except RuntimeError as error:
            self.lost = error
            return {}
        self.lost = None
        return found
