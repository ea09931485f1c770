"""Signs of life of ranks on other hosts, whose processes cannot be looked at.

Every monitor counts in the group's store, and while a call takes long it watches the others count.  So when the time
of the call is up, it is known who has fallen silent, and an error that says so need not wait to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpkernels.comm.groups import Group

__all__ = ["LISTEN_EVERY", "beat", "calls", "every", "listen", "silence", "silent"]

LISTEN_EVERY = 0.25
# Longer between two looks, and nobody can be said to have been silent meanwhile: it was not listened to.
_LONGEST_GAP = 1.0
_MOST_DIGITS = 18
"""Of a call's number. Where the job has no secret anybody may write one, and Python converts no very long ones."""


def every(group: Group) -> float:
    """Seconds between two beats of a rank; several fall into the time-out."""
    return min(1.0, group.timeout / 8)


def beat(group: Group, number: int) -> str:
    """What a rank says: the number of its beat, and the last call that it has made."""
    return f"{number} {group.calls - 1}"


def calls(said: Mapping[int, str]) -> dict[int, int]:
    """The last call of each rank, from its last beat."""
    last = {rank: text.partition(" ")[2][:_MOST_DIGITS] for rank, text in said.items()}
    return {rank: int(number) for rank, number in last.items() if number.isdecimal()}


def silence(group: Group) -> float:
    """Seconds without a beat after which a rank counts as lost: two are missing, and both sides may be late."""
    return 2 * (every(group) + LISTEN_EVERY)


def listen(group: Group, said: Mapping[int, str], now: float) -> None:
    """Note which ranks have counted on since the last look; ``said`` is what the store has of them, by rank."""
    starts = now - group.listened > _LONGEST_GAP
    for rank in range(group.size):
        text, _ = group.heard.get(rank, ("", 0.0))
        if starts or rank not in group.heard or text != said.get(rank, ""):
            group.heard[rank] = said.get(rank, ""), now
    group.listened = now


def silent(group: Group, ranks: Sequence[int], now: float) -> list[int]:
    """Those of ``ranks`` that were listened to for long enough without a beat."""
    limit = silence(group)
    return [rank for rank in ranks if now - group.heard.get(rank, ("", now))[1] > limit]
