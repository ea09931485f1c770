"""Whether the ranks of a group make the same calls in the same order, where messages do not say which call they are of.

gloo matches messages by tags, and shared and symmetric memory compare fingerprints: there no call reads the data of
another one.  NCCL matches messages by their order alone.  Two calls that all ranks know, of equal bytes, in another
order on one rank, then compute with each other's data, and two of unequal bytes wait for ever.

So the monitor of every rank publishes its :class:`~tpkernels.comm.trail.Trail` and compares the peers'.  A difference
is found after the fact, within about two seconds; the next call then raises :class:`GroupMismatch` with the first calls
that differ, and what was computed from these on is void.

Does not see: replays of captured graphs, which make no call, and the order of calls of different groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tpkernels.comm import agreement
from tpkernels.comm.groups import Group
from tpkernels.comm.trail import KEPT, Step, Trail
from tpkernels.errors import GroupMismatch

__all__ = ["Comparison"]

_VOID = "NCCL does not tell calls apart: what was computed from there on may be made of another call's data"


class Comparison:
    """One rank's view of all trails of a group; :meth:`look` from time to time.

    A rank that sees a difference, or that another one has seen one, tells its calls in words; who has those of all
    ranks finds the first that differs.
    """

    def __init__(self) -> None:
        self._alarmed: float | None = None
        """Since when."""
        self._published: int | None = None

    def look(self, group: Group, trail: Trail, store: Any) -> GroupMismatch | None:
        """The error that the trails amount to; None while they agree, or while ranks still have to tell theirs."""
        self._publish(group, trail, store)
        notes = agreement.told(group, "order", _note_of, store)
        if self._alarmed is None:
            if not any(note["steps"] or _differs(trail, note) for note in notes.values()):
                return None
            self._alarmed, self._published = time.monotonic(), None
            self._publish(group, trail, store)
        told = {rank: _steps(note) for rank, note in notes.items() if note["steps"]}
        told[group.rank] = trail.steps()
        if len(told) < group.size and time.monotonic() - self._alarmed < agreement.AWAIT_OTHERS:
            return None
        return _first_difference(group, told)

    def _publish(self, group: Group, trail: Trail, store: Any) -> None:
        last = trail.last
        if last.place == self._published:
            return
        self._published = last.place
        note: dict[str, Any] = {
            "place": last.place, "call": last.call, "digest": last.digest, "steps": [], "words": [],
        }  # fmt: skip
        if self._alarmed is not None:
            steps = trail.steps()
            words = {step.signature: str(step.signature) for step in steps}
            index = {signature: i for i, signature in enumerate(words)}
            note["steps"] = [(*step[:3], index[step.signature]) for step in steps]
            note["words"] = list(words.values())
        store.set(f"{group.key}/order/{group.rank}", json.dumps(note))


def _note_of(said: Any) -> dict[str, Any]:
    """What a rank has published.

    Raises:
        ValueError, TypeError, KeyError, IndexError: no rank publishes that.
    """
    note = {"place": int(said["place"]), "digest": int(said["digest"]), "steps": said["steps"], "words": said["words"]}
    _steps(note)
    return note


def _steps(note: Mapping[str, Any]) -> list[Step]:
    words = [str(word) for word in note["words"]]
    return [Step(int(place), int(digest), int(call), words[i]) for place, digest, call, i in note["steps"]]


def _differs(trail: Trail, note: Mapping[str, Any]) -> bool:
    """Whether a rank's trail is not the beginning of ours; one that is ahead of us finds that out itself."""
    step = trail.at(note["place"])
    return step is not None and step.digest != note["digest"]


def _first_difference(group: Group, told: Mapping[int, Sequence[Step]]) -> GroupMismatch:
    by_place: dict[int, dict[int, Step]] = {}
    for rank in sorted(told):
        for step in told[rank]:
            by_place.setdefault(step.place, {})[rank] = step
    for place in sorted(by_place):
        here, before = by_place[place], by_place.get(place - 1, {})
        if len({step.digest for step in here.values()}) > 1:
            if place > 1 and not here.keys() <= before.keys():
                break  # they differed before
            records = {rank: agreement.Record(str(step.signature), {}) for rank, step in here.items()}
            found = agreement.mismatch(group, here[min(here)].call, records)
            assert found is not None
            return GroupMismatch(f"{found}. {_VOID}", ranks=found.ranks)
    silent = [rank for rank in range(group.size) if rank not in told]
    why = f"rank(s) {silent} do not say which" if silent else f"more than {KEPT} calls ago"
    return GroupMismatch(
        f"rank {group.rank}, group {group.name!r}: the ranks made different calls, {why}. {_VOID}", ranks=silent
    )
