"""How the ranks of a group agree on a call.

Everything here goes through the group's store, never through the data path, so it also works for ranks that are stuck.
Under a prefix that rank 0 draws when the ranks first meet (a process group that is made again must not read what its
predecessor wrote), each rank may write:

==================  ===================================================================================================
``call/N/RANK``     its record of call N: the signature and local facts, or the reason for which it refused
``call/N/count``    how many ranks exchange records of that call; the last one writes ``call/N/all``
``beat/RANK``       its heartbeat, written by the monitor
``order/RANK``      the order of its calls, written by the monitor (:mod:`tpkernels.comm.call_order`)
==================  ===================================================================================================

Who has come, and who has failed, ranks say in another place (:mod:`tpkernels.comm.presence`).  No request waits for the
store without a limit (:mod:`tpkernels.comm.bounded_store`).

A signature is exchanged when it is new to a rank, and then trusted.  The monitor writes the record of a call that takes
long, and compares: ranks that made two *known* but different calls are found that way, within about a second.
"""

from __future__ import annotations

import logging
import time

import torch

from tpkernels.comm import heartbeats, presence, resources, transport
from tpkernels.comm.blame import Looks, blame, diagnose, stood_still, unanswering
from tpkernels.comm.bounded_store import StoreLost, StoreSilent
from tpkernels.comm.groups import Group
from tpkernels.comm.meeting import LOOK_EVERY, card_of, meet
from tpkernels.comm.records import Record, announce, beats, mismatch, publish, raise_if, recorded, told
from tpkernels.errors import CommunicationError

__all__ = [
    "Looks",
    "Record",
    "announce",
    "beats",
    "blame",
    "diagnose",
    "exchange_records",
    "fail",
    "meet",
    "mismatch",
    "publish",
    "recorded",
    "refuse",
    "told",
    "unanswering",
]

# Ranks that disagree wait this long for the rest of the group, so that the error blames the right ones.
AWAIT_OTHERS = 1.0
_log = logging.getLogger(__name__)


def exchange_records(group: Group, call: int, record: Record, part: str = "call") -> list[Record]:
    """Publish our record of ``call`` (or of a later ``part`` of it) and wait for those of all ranks.

    The last rank to publish says that all have: to wait for that is to ask for one key, however many ranks there are.

    Raises:
        GroupMismatch: a rank made another call or refused its arguments.
        PeerLost, CollectiveTimeout: a rank did not come.
    """
    start = time.monotonic()
    place, store = f"{group.key}/{part}/{call}", group.control
    group.missed = call, ()
    try:
        publish(group, call, record, part=part)
        found = None
        if store.add(f"{place}/count", 1) == group.size:
            store.set(f"{place}/all", "")
            found = recorded(group, f"{part}/{call}", store)
        if found is None or len(found) < group.size:
            found = _poll(group, call, part, start)
    except StoreLost as error:
        waited = time.monotonic() - start
        host = () if group.store_host is None else (group.store_host,)
        raise blame(group, call, record.signature, str(error), waited, suspects=host) from error
    missing = [rank for rank in range(group.size) if rank not in found]
    if missing:
        waited = group.timeout if group.is_overdue() else time.monotonic() - start
        raise blame(group, call, record.signature, f"no word from rank(s) {missing}", waited, suspects=missing)
    raise_if(mismatch(group, call, found))
    return [found[rank] for rank in range(group.size)]


def _poll(group: Group, call: int, part: str, start: float) -> dict[int, Record]:
    """Wait until all ranks have left their records; those that are there when the time is up or waiting is hopeless.

    A time in which this process stood still is not one of waiting: what the others said meanwhile comes after it.
    """
    seen = time.monotonic()
    if seen - start > group.timeout:
        start = seen  # it was stopped as it left its own record: no request to the store takes so long
    pause, next_look, looks = 0.0002, start + LOOK_EVERY, Looks(group)
    last_one_tells, until = True, start + group.timeout
    owed_since: float | None = None
    while True:
        now = time.monotonic()
        until, seen = until + stood_still(group, now - seen), now
        there = last_one_tells and _is_there(group, f"{group.key}/{part}/{call}/all")
        if there:
            found = recorded(group, f"{part}/{call}", group.control.within(max(LOOK_EVERY, until - now)))
            if len(found) == group.size:
                return found
            last_one_tells = False  # that was nobody of ours: look for the records themselves
            seen = time.monotonic()
        if now > until:
            break
        owed_since = (owed_since or now) if there is None else None
        if now > next_look and (owed_since is None or now - owed_since > _owes(group) or _has_lost_one(group)):
            hopeless, found = _look(group, call, part, now - start, looks)
            # Every rank looks at all others: where they are many, each looks less often. So it does where the store is
            # far: a look is up to three requests, before which nobody hears that all have come.
            took = time.monotonic() - now
            next_look = now + max(LOOK_EVERY * max(1.0, group.size / 8), 3 * took)
            if len(found) == group.size:
                return found  # to ask once more, for less than the time that is left, may fail
            if hopeless:
                break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    # A store that is far away still answers; to wait for a silent one would only make the error late.
    is_far = time.monotonic() - group.control.answered_at < 0.5 * group.timeout
    last = group.control.within(min(1.0, 0.15 * group.timeout)) if is_far else looks.store
    return recorded(group, f"{part}/{call}", last)


def _is_there(group: Group, key: str) -> bool | None:
    """None while the store owes the answer, for which whoever asks again goes on waiting."""
    try:
        return group.control.within(LOOK_EVERY).check([key])
    except StoreSilent:
        return None


def _owes(group: Group) -> float:
    """Seconds for which an answer of the store may be under way before a peer's death is looked for beside it."""
    return min(0.5, 0.1 * group.timeout)


def _has_lost_one(group: Group) -> bool:
    return any(peer.is_dead() for peer in group.peers)


def _look(group: Group, call: int, part: str, waited: float, looks: Looks) -> tuple[bool, dict[int, Record]]:
    """Whether to wait longer is hopeless, and what the ranks that came have said.

    It is where a rank cannot come any more, or those that came disagree and the others had time to join in.

    A rank that refused its arguments, and one that knows the call and waits in it, leave records without counting them.
    """
    if _has_lost_one(group) or looks(lambda store: presence.failures(group, store)):
        return True, {}
    present = looks(lambda store: recorded(group, f"{part}/{call}", store))
    if looks.lost is None:
        group.missed = call, tuple(rank for rank in range(group.size) if rank not in present)
    now = time.monotonic()
    if group.is_overdue() and unanswering(group):
        return True, present
    if not group.co_located and now - group.listened > heartbeats.LISTEN_EVERY:  # the monitor listens later, in calls
        said = looks(lambda store: beats(group, store))
        if looks.lost is None:
            heartbeats.listen(group, said, now)
    return waited > AWAIT_OTHERS and mismatch(group, call, present) is not None, present


def refuse(group: Group, signature: str, reason: str) -> None:
    """Tell the peers, if they come to this call, that this rank refused its arguments.  Waits for none of them."""
    with group.lock:
        call = group.calls
        group.calls += 1
        if group.key is not None:
            try:
                publish(group, call, Record(signature, {}, refused=reason))
            except StoreLost as error:  # the caller's error must come first; the next call finds who is gone
                _log.warning("tpkernels: rank %d could not tell that it refused call %d: %s", group.rank, call, error)
        elif group.card is None and group.backends.serving("cpu") == "gloo":
            # The store has no key for us before the ranks have met; a send that nobody waits for says it as well.
            # (NCCL would block its stream: there the peers learn of it when their time is up.)
            presence.come(group)
            group.card = card_of(group, torch.device("cpu"), call, reason)
            peers = [(rank, group.card) for rank in range(group.size) if rank != group.rank]
            group.unsent, _ = transport.exchange(group, transport.call_tag(0), 0, peers, [])


def fail(group: Group, error: CommunicationError) -> CommunicationError:
    """Poison the group for good and leave a note for the peers, without waiting for a store that is lost."""
    if group.poison is None:
        # A copy: the traceback of the one that is raised reaches the process group, which would then never be freed.
        group.poison = error.without_traceback()
        group.verdict = None
        for resource in resources.held(group):
            resource.poison(group.poison)
        presence.tell(group, error, group.control)
        presence.stay(group, error)
    return error
