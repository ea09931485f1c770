"""How the ranks of a group agree on a call, and how a failed call finds its culprit.

Everything here goes through the group's store, never through the data path, so it also works for ranks that are stuck.
Under a prefix that rank 0 draws when the ranks first meet (a process group that is made again must not read what its
predecessor wrote), each rank may write:

==================  ===================================================================================================
``call/N/RANK``     its record of call N: the signature and local facts, or the reason for which it refused
``beat/RANK``       its heartbeat, written by the monitor
``order/RANK``      the order of its calls, written by the monitor (:mod:`tpkernels.comm.call_order`)
==================  ===================================================================================================

Who has come, and who has failed, ranks say in another place (:mod:`tpkernels.comm.presence`).

A signature is exchanged when it is new to a rank, and then trusted.  The monitor writes the record of a call that takes
long, and compares: ranks that made two *known* but different calls are found that way, within about a second.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tpkernels.comm import presence, resources, transport
from tpkernels.comm.groups import Group
from tpkernels.comm.liveness import Identity
from tpkernels.errors import CollectiveTimeout, CommunicationError, GroupMismatch, PeerLost

__all__ = [
    "Record",
    "announce",
    "blame",
    "diagnose",
    "exchange_records",
    "meet",
    "mismatch",
    "publish",
    "read",
    "refuse",
]

# A dead process of this host is seen at once; a remote one after this many seconds without a heartbeat.
HEARTBEAT_PATIENCE = 3.0
# Ranks that disagree wait this long for the rest of the group, so that the error blames the right ones.
AWAIT_OTHERS = 1.0
# So often a rank that waits for records looks for reasons to stop.
LOOK_EVERY = 0.02
# A rank that closes its connection and has never come to the meeting is gone; one that has may be about to say why.
AWAIT_EVIDENCE = 0.02
_CARD_BYTES = 4096
_T = TypeVar("_T")
_ERRORS: dict[str, type[CommunicationError]] = {
    cls.__name__: cls for cls in (GroupMismatch, PeerLost, CollectiveTimeout)
}


@dataclass(frozen=True)
class Record:
    """What one rank says of one call."""

    signature: str
    facts: Mapping[str, Any]
    refused: str | None = None

    def to_json(self) -> str:
        return json.dumps({"signature": self.signature, "facts": dict(self.facts), "refused": self.refused})

    @staticmethod
    def from_json(text: str | bytes) -> Record:
        return Record(**json.loads(text))


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
        group.card = _card(group, device)
        sends = [(peer, group.card) for peer in others]
    cards = [group.card if rank == group.rank else torch.empty_like(group.card) for rank in range(group.size)]
    try:
        if group.backends.waits_in_streams(device.type):
            _await_company(group)
        sent, received = transport.exchange(group, tag, 0, sends, [(peer, cards[peer]) for peer in others])
        transport.wait_all(received)
        _await_device(group)
        said = [json.loads(bytes(card.tolist()).rstrip(b"\0")) for card in cards]
        group.peers = tuple(Identity.from_json(one["who"]) for one in said)
        group.visits = tuple(one["visit"] for one in said)
        group.key = f"tpkernels/{said[0]['token']}"
        refused = {rank: Record("", {}, one["refused"]) for rank, one in enumerate(said) if one["refused_call"] == call}
        # Before waiting for our sends: ranks that refused do not receive what was sent to them, yet.
        _raise_if(mismatch(group, call, refused))
        transport.wait_all(sent)
    except transport.TransportFailure as error:
        raise _blame_meeting(group, error, time.monotonic() - start) from error


def _await_company(group: Group) -> None:
    """Return when all ranks have come: NCCL's first operation waits for all without a limit, in the host's thread.

    A rank that left a note at a meeting before this one, and lives, is taken to come here, too.
    """
    start = time.monotonic()
    while True:
        said = _or_empty(lambda: presence.everybody(group, group.store))
        missing = [
            rank for rank in range(group.size) if rank not in said or Identity.from_json(said[rank]["who"]).is_dead()
        ]
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
    said = _or_empty(lambda: presence.present(group))
    return any(
        Identity.from_json(one["who"]).is_dead() or (one["failed"] is not None and rank != group.rank)
        for rank, one in said.items()
    )


def _blame_meeting(group: Group, error: transport.TransportFailure, waited: float) -> CommunicationError:
    """Whom to blame for a meeting that failed; waits a little for evidence, as :func:`blame` does."""
    head = (
        f"rank {group.rank}: the ranks of group {group.name!r} did not meet for their first call "
        f"(timeout {group.timeout:g} s): "
    )
    start = time.monotonic()
    patience = 0.0 if waited > 0.9 * group.timeout else min(HEARTBEAT_PATIENCE, max(0.5, group.timeout / 2))
    while True:
        present = _or_empty(lambda: presence.present(group))
        gone = [rank for rank, one in present.items() if Identity.from_json(one["who"]).is_dead()]
        notes = _or_empty(lambda: presence.failures(group))  # in this order, see blame
        dead = [rank for rank in gone if rank not in notes]
        if dead:
            return PeerLost(f"{head}rank(s) {dead} died. {error}", ranks=dead)
        if notes:
            return _failed_first(head, notes)
        never_came = error.peer is not None and error.peer not in present
        if time.monotonic() - start > (min(patience, AWAIT_EVIDENCE) if never_came else patience):
            ranks = () if error.peer is None else (error.peer,)
            whom = "a rank" if error.peer is None else f"rank {error.peer}"
            return PeerLost(f"{head}no word from {whom}: {error}", ranks=ranks)
        time.sleep(0.005)


def _failed_first(head: str, notes: Mapping[int, Mapping[str, Any]]) -> CommunicationError:
    """The error of a rank whose peers left ``notes`` of their own."""
    rank, note = next(iter(notes.items()))
    cls = _ERRORS.get(note["kind"], PeerLost)
    return cls(f"{head}rank {rank} failed first: {note['message']}", ranks=note["ranks"] or (rank,))


def _card(group: Group, device: torch.device, refused_call: int | None = None, reason: str = "") -> torch.Tensor:
    """What a rank tells every other one when they meet."""
    card = {"token": secrets.token_hex(8), "who": Identity.mine().to_json(), "visit": group.visits[group.rank]}
    text = json.dumps({**card, "refused_call": refused_call, "refused": reason[: _CARD_BYTES // 8]}).encode()
    return torch.frombuffer(bytearray(text.ljust(_CARD_BYTES, b"\0")), dtype=torch.uint8).to(device)


def publish(group: Group, call: int, record: Record, part: str = "call") -> None:
    group.store.set(f"{group.key}/{part}/{call}/{group.rank}", record.to_json())


def announce(group: Group, call: int, signature: str, store: Any) -> None:
    """Say which call this rank is in, unless it has said so: a slow peer may still have to read that record's facts."""
    key = f"{group.key}/call/{call}/{group.rank}"
    if not store.check([key]):
        store.set(key, Record(signature, {}).to_json())


def read(group: Group, what: str, store: Any = None) -> dict[int, str]:
    """The notes ``what/RANK`` that exist now, by rank."""
    return presence.existing(store or group.store, {rank: f"{group.key}/{what}/{rank}" for rank in range(group.size)})


def exchange_records(group: Group, call: int, record: Record, part: str = "call") -> list[Record]:
    """Publish our record of ``call`` (or of a later ``part`` of it) and wait for those of all ranks.

    Raises:
        GroupMismatch: a rank made another call or refused its arguments.
        PeerLost, CollectiveTimeout: a rank did not come.
    """
    publish(group, call, record, part=part)
    start = time.monotonic()
    keys = [f"{group.key}/{part}/{call}/{rank}" for rank in range(group.size)]

    def hopeless(waited: float) -> bool:
        """Whether a rank cannot come any more, or those that came disagree and the others had time to join in."""
        if any(peer.is_dead() for peer in group.peers) or presence.failures(group):
            return True
        present = {rank: Record.from_json(text) for rank, text in read(group, f"{part}/{call}").items()}
        return waited > AWAIT_OTHERS and mismatch(group, call, present) is not None

    missing = _poll(group, keys, group.timeout, hopeless)
    if missing:
        waited = time.monotonic() - start
        raise blame(group, call, record.signature, f"no word from rank(s) {missing}", waited)
    records = [Record.from_json(text) for text in group.store.multi_get(keys)]
    _raise_if(mismatch(group, call, dict(enumerate(records))))
    return records


def _raise_if(error: CommunicationError | None) -> None:
    """Raise without leaving the error in a local of a frame of its own traceback: such a cycle would keep the process
    group, its sockets and its threads until the garbage collector comes by."""
    if error is not None:
        try:
            raise error
        finally:
            del error


def mismatch(group: Group, call: int, records: Mapping[int, Record]) -> GroupMismatch | None:
    """The error that the records of one call amount to, or None while they agree."""
    refused = {rank: record.refused for rank, record in records.items() if record.refused is not None}
    if refused:
        rank, reason = next(iter(refused.items()))
        return GroupMismatch(
            f"rank {group.rank}, call {call} on group {group.name!r}: rank {rank} refused its arguments: {reason}",
            ranks=tuple(refused),
        )
    sides: dict[str, list[int]] = {}
    for rank, record in records.items():
        sides.setdefault(record.signature, []).append(rank)
    if len(sides) <= 1:
        return None
    listing = "\n".join(f"  rank(s) {ranks}: {signature}" for signature, ranks in sides.items())
    few = min(sides.values(), key=len)
    return GroupMismatch(
        f"rank {group.rank}, call {call} on group {group.name!r}: the ranks made different calls\n{listing}\n"
        "All ranks must make the same calls in the same order, with the same shapes and dtypes "
        "(uneven shards: pass shard_sizes on every rank)",
        ranks=few,
    )


def refuse(group: Group, signature: str, reason: str) -> None:
    """Tell the peers, if they come to this call, that this rank refused its arguments.  Waits for none of them."""
    with group.lock:
        call = group.calls
        group.calls += 1
        if group.key is not None:
            publish(group, call, Record(signature, {}, refused=reason))
        elif group.card is None and group.backends.serving("cpu") == "gloo":
            # The store has no key for us before the ranks have met; a send that nobody waits for says it as well.
            # (NCCL would block its stream: there the peers learn of it when their time is up.)
            presence.come(group)
            group.card = _card(group, torch.device("cpu"), call, reason)
            peers = [(rank, group.card) for rank in range(group.size) if rank != group.rank]
            group.unsent, _ = transport.exchange(group, transport.call_tag(0), 0, peers, [])


def fail(group: Group, error: CommunicationError) -> CommunicationError:
    """Poison the group for good and leave a note for the peers."""
    if group.poison is None:
        # A copy: the traceback of the one that is raised reaches the process group, which would then never be freed.
        group.poison = error.without_traceback()
        group.verdict = None
        for resource in resources.held(group):
            resource.poison(group.poison)
        presence.come(group)
        presence.tell(group, error, group.store)
    return error


def diagnose(group: Group, call: int, signature: str, error: transport.TransportFailure) -> CommunicationError:
    """Turn a transport error into one that names its culprit; waits at most a few seconds for evidence."""
    if group.verdict is not None:
        return group.verdict
    if error.verdict is not None:
        return error.verdict(f"{_head(group, call, signature)}{error}", ranks=error.ranks)
    waited = time.monotonic() - group.in_flight.since if group.in_flight is not None else 0.0
    return blame(group, call, signature, str(error), waited)


def blame(
    group: Group, call: int, signature: str, symptom: str, waited: float, *, store: Any = None, broken: bool = False
) -> CommunicationError:
    """Find the ranks that are gone, that failed first, or that did not come, in this order.

    A call that has ``waited`` for the whole timeout has left its peers time to leave evidence; one that failed early
    waits for it a little, because connections close before the process is gone.

    Args:
        store: the client of the thread that asks, if it is not the one that makes the group's calls.
        broken: the transport has said that it failed: if no rank is to blame, it was not a matter of time.
    """
    head = _head(group, call, signature)
    remote = [rank for rank, peer in enumerate(group.peers) if not peer.is_local]
    patience = min(HEARTBEAT_PATIENCE, max(0.5, group.timeout / 2))
    if waited > 0.9 * group.timeout:
        patience = max(1.5, min(patience, 0.1 * waited)) if remote else 0.0
    deadline = time.monotonic() + patience
    first_beats = _or_empty(lambda: read(group, "beat", store)) if remote else {}
    while True:
        if group.verdict is not None:
            return group.verdict
        # In this order: a rank that failed because of another leaves its note first and dies later, if at all.
        gone = [rank for rank, peer in enumerate(group.peers) if peer.is_dead()]
        notes = _or_empty(lambda: presence.failures(group, store))
        dead = [rank for rank in gone if rank not in notes]
        if dead:
            return PeerLost(f"{head}rank(s) {dead} died. {symptom}", ranks=dead)
        texts = _or_empty(lambda: read(group, f"call/{call}", store))
        records = {rank: Record.from_json(text) for rank, text in texts.items()}
        # What this rank has said of the call; what it waits for may be a later part, which has a name of its own.
        records.setdefault(group.rank, Record(signature, {}))
        difference = mismatch(group, call, records)
        if difference is not None:
            return difference
        if notes:
            return _failed_first(head, notes)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    beats = _or_empty(lambda: read(group, "beat", store)) if remote else {}
    silent = [rank for rank in remote if rank != group.rank and beats.get(rank) == first_beats.get(rank)]
    if silent:
        return PeerLost(f"{head}no sign of life from rank(s) {silent}. {symptom}", ranks=silent)
    if broken:
        return PeerLost(f"{head}every process is alive, but they cannot reach each other. {symptom}")
    # Ranks whose operations run on a device do not stay in their calls: they say how far they have come.
    reached = {rank: json.loads(text)["call"] for rank, text in _or_empty(lambda: read(group, "order", store)).items()}
    late = [rank for rank in range(group.size) if rank not in records and reached.get(rank, -1) < call]
    return CollectiveTimeout(
        f"{head}every rank is alive"
        + (f", but rank(s) {late} did not come to this call" if late else "")
        + f" within {group.timeout:g} s. {symptom}",
        ranks=late,
    )


def _head(group: Group, call: int, signature: str) -> str:
    return f"rank {group.rank}, call {call} on group {group.name!r} ({signature}): "


def _or_empty(look: Callable[[], dict[int, _T]]) -> dict[int, _T]:
    """What a look into the store finds; a store whose host died knows nothing."""
    try:
        return look()
    except RuntimeError:
        return {}


def _poll(group: Group, keys: list[str], timeout: float, hopeless: Callable[[float], bool]) -> list[int]:
    """Wait until all keys exist; the indices of those that do not when the time is up or waiting is hopeless."""
    start = time.monotonic()
    pause, next_look = 0.0002, start + LOOK_EVERY
    while not group.store.check(keys):
        now = time.monotonic()
        if now - start > timeout:
            break
        if now > next_look:
            next_look = now + LOOK_EVERY
            if hopeless(now - start):
                break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    return [rank for rank, key in enumerate(keys) if not group.store.check([key])]
