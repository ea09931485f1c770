"""What ranks say where all of a group can find it, whether they have met or not: who has come, and why one has failed.

``tpkernels/meeting/RANK`` in the group's store says who a rank is (:class:`~tpkernels.comm.liveness.Identity`) and, if
so, why it failed; ``tpkernels/meeting/visits/RANK`` counts the groups that a rank has come to with this store, which
tells what it says of this one from what it said of a predecessor.  ``tpkernels/meeting/beat/RANK`` is the heartbeat of
a rank that still waits for others there, for those who have met.  ``tpkernels/meeting/alarm`` exists once a rank has
failed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from tpkernels.comm.bounded_store import BoundedStore, StoreLost
from tpkernels.comm.groups import Group
from tpkernels.comm.liveness import Identity
from tpkernels.errors import CommunicationError

__all__ = [
    "beat", "come", "everybody", "existing", "failures", "present", "say", "stay", "tell", "understood", "waiting",
]  # fmt: skip

_T = TypeVar("_T")

_MEETING = "tpkernels/meeting"
# Exists as soon as a rank of any group with this store has failed.
_ALARM = f"{_MEETING}/alarm"
# Seconds that an error waits for the store to take its note: one on the other side of the earth answers in a third.
_AWAIT_STORE = 0.5
# An exception of this rank's own, as that of Ctrl-C, waits only for so long: all of it is to take 0.2 s at most, and on
# a machine with ten processes a core half of that went here. The note is sent in any case.
_AWAIT_STORE_FOR_OWN = 0.05
# Seconds that an error of the rank which serves the store waits for the others to leave notes of their own.
_AWAIT_READERS = 0.5


def come(group: Group, limit: float = 2.0) -> None:
    """Say who this rank is, once, in the place where all ranks of the group look, met or not; waits for the store."""
    if group.visits:
        return
    visit = 0
    # The store's host may have died or be stopped: the data path, and its time-out, will tell.
    with suppress(StoreLost):
        store = group.control.within(min(limit, max(0.2, 0.15 * group.timeout)))
        visit = store.add(_visits(group.rank), 1)
        say(group, visit, None, store)
    # Until the cards say better: ranks that make their groups together have come as often as this one.
    group.visits = (visit,) * group.size


def say(group: Group, visit: int, failed: Mapping[str, Any] | None, store: BoundedStore) -> None:
    store.set(f"{_MEETING}/{group.rank}", _note(visit, failed))


def _visits(rank: int) -> str:
    return f"{_MEETING}/visits/{rank}"


def _note(visit: int, failed: Mapping[str, Any] | None) -> str:
    return json.dumps({"who": Identity.mine().to_json(), "visit": visit, "failed": failed})


def beat(group: Group, number: int, store: BoundedStore) -> None:
    """Give a sign of life while this rank waits for others."""
    store.set(_beats(group.rank), str(number))


def waiting(ranks: Iterable[int], store: BoundedStore) -> dict[int, str]:
    """The last such sign of each of ``ranks`` that has given one."""
    return existing(store, {rank: _beats(rank) for rank in ranks})


def _beats(rank: int) -> str:
    return f"{_MEETING}/beat/{rank}"


def present(group: Group, store: BoundedStore) -> dict[int, dict[str, Any]]:
    """What the ranks that have come to this group say in the meeting's place, by rank."""
    said = everybody(group, store)
    return {rank: one for rank, one in said.items() if one["visit"] == group.visits[rank]}


def everybody(group: Group, store: BoundedStore) -> dict[int, dict[str, Any]]:
    """What is said there, even by a rank that has said it of a predecessor of this group."""
    keys = {rank: f"{_MEETING}/{rank}" for rank in range(group.size)}
    return understood(store, keys, existing(store, keys), _note_of)


def _note_of(said: Any) -> dict[str, Any]:
    """What a rank says in the meeting's place.

    Raises:
        ValueError: no rank says such things.
    """
    failed = said["failed"]
    if not isinstance(said["visit"], int) or not isinstance(failed, dict | None):
        raise ValueError("no note of a rank")
    if failed is not None:
        ranks = failed["ranks"]
        words = isinstance(failed["kind"], str) and isinstance(failed["message"], str)
        if not words or not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
            raise ValueError("no failure of a rank")
    return {"who": Identity.from_json(said["who"]), "visit": said["visit"], "failed": failed}


def understood(
    store: BoundedStore, keys: Mapping[int, str], texts: Mapping[int, str], read: Callable[[Any], _T]
) -> dict[int, _T]:
    """What ``read`` makes of the JSON that was found under the keys; what is no such record is left out, and reported.

    Where the job has no secret, anybody who reaches the store may have written it.
    """
    found: dict[int, _T] = {}
    for rank, text in texts.items():
        try:
            found[rank] = read(json.loads(text))
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            store.report(keys[rank], f"{type(error).__name__}: {error}")
    return found


def existing(store: BoundedStore, keys: dict[int, str]) -> dict[int, str]:
    """What ranks have left under those keys that exist now; two requests if all do, however many ranks there are."""
    if not store.check(list(keys.values())):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.texts(list(keys.values()))
    return {rank: texts[key] for rank, key in keys.items() if key in texts}


def failures(group: Group, store: BoundedStore | None = None) -> dict[int, dict[str, Any]]:
    """The first failure of every other rank that has failed on this group, whether it or we had met the others.

    One request while nobody has failed with this store, however many ranks there are.
    """
    store = store or group.control
    if not store.check([_ALARM]):
        return {}
    said = present(group, store)
    return {rank: one["failed"] for rank, one in said.items() if rank != group.rank and one["failed"] is not None}


def tell(group: Group, error: CommunicationError, store: BoundedStore) -> None:
    """Leave a note for the peers; ``store``: the client of the thread that calls.

    Waits a moment for the store to take it, so that a peer which sees us gone from here on finds the note.
    """
    come(group, _patience(group, error))
    failed = {"kind": type(error).__name__, "message": str(error), "ranks": list(error.ranks)}
    rank, visit = group.rank, group.visits[group.rank]

    def notes(client: Any) -> dict[str, str]:
        # A store that was silent when this rank came has counted the visit since, and peers read no other note.
        return {f"{_MEETING}/{rank}": _note(visit or client.add(_visits(rank), 0), failed), _ALARM: ""}

    try:
        store.post(notes, wait=_patience(group, error))
    except StoreLost as lost:  # the store's host may be the very rank that died
        error.add_note(f"the store could not be told: {lost}")


def _patience(group: Group, error: CommunicationError) -> float:
    """How long an error waits for the store to take a note."""
    if error.ranks == (group.rank,):
        return _AWAIT_STORE_FOR_OWN
    return min(_AWAIT_STORE, max(0.1, 0.08 * group.timeout))


def stay(group: Group, error: CommunicationError) -> None:
    """Where this process serves the store, give the ranks of other hosts a moment to read why this one has failed.

    Its note goes when the process goes, and they would take this rank for the one that failed first.
    """
    if group.store_host != group.rank or group.co_located or group.rank in error.ranks:
        return
    others = set(range(group.size)) - {group.rank, *error.ranks}
    deadline = time.monotonic() + min(_AWAIT_READERS, 0.1 * group.timeout)
    with suppress(StoreLost):
        while not others <= failures(group).keys() and time.monotonic() < deadline:
            time.sleep(0.01)
