"""What each rank says of a call, in the group's store, and what a difference between the ranks amounts to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tpkernels.comm import presence
from tpkernels.comm.bounded_store import BoundedStore
from tpkernels.comm.groups import Group
from tpkernels.errors import CommunicationError, GroupMismatch

__all__ = ["Record", "announce", "beats", "mismatch", "publish", "raise_if", "read", "recorded", "told"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Record:
    """What one rank says of one call."""

    signature: str
    facts: Mapping[str, Any]
    refused: str | None = None

    def to_json(self) -> str:
        return json.dumps({"signature": self.signature, "facts": dict(self.facts), "refused": self.refused})

    @staticmethod
    def from_json(text: str) -> Record:
        return Record.of(json.loads(text))

    @staticmethod
    def of(said: Any) -> Record:
        """The record that was read from JSON.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        record = Record(said["signature"], said["facts"], said["refused"])
        if (type(record.signature), type(record.facts)) != (str, dict) or not isinstance(record.refused, str | None):
            raise ValueError("no record of a call")
        return record


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


def raise_if(error: CommunicationError | None) -> None:
    """Raise without leaving the error in a local of a frame of its own traceback: such a cycle would keep the process
    group, its sockets and its threads until the garbage collector comes by."""
    if error is not None:
        try:
            raise error
        finally:
            del error


def publish(group: Group, call: int, record: Record, part: str = "call") -> None:
    group.control.set(f"{group.key}/{part}/{call}/{group.rank}", record.to_json())


def announce(group: Group, call: int, signature: str, store: BoundedStore) -> None:
    """Say which call this rank is in, unless it has said so: a slow peer may still have to read that record's facts."""
    key = f"{group.key}/call/{call}/{group.rank}"
    if not store.check([key]):
        store.set(key, Record(signature, {}).to_json())


def recorded(group: Group, part: str, store: BoundedStore | None = None) -> dict[int, Record]:
    """The records ``part/RANK`` that exist now, by rank."""
    return told(group, part, Record.of, store)


def told(group: Group, what: str, read: Callable[[Any], _T], store: BoundedStore | None = None) -> dict[int, _T]:
    """What ``read`` makes of the JSON in the notes ``what/RANK`` that exist now, by rank."""
    store = store or group.control
    keys = _keys(group, what)
    return presence.understood(store, keys, presence.existing(store, keys), read)


def _keys(group: Group, what: str) -> dict[int, str]:
    return {rank: f"{group.key}/{what}/{rank}" for rank in range(group.size)}


def read(group: Group, what: str, store: BoundedStore | None = None) -> dict[int, str]:
    """The notes ``what/RANK`` that exist now, by rank."""
    return presence.existing(store or group.control, _keys(group, what))


def beats(group: Group, store: BoundedStore | None = None) -> dict[int, str]:
    """The last sign of life of each rank; of one that still waits to meet another one, that which it gives there."""
    said = read(group, "beat", store)
    absent = [rank for rank in range(group.size) if rank not in said]
    return said | presence.waiting(absent, store or group.control) if absent else said
