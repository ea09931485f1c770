"""What one trial does: ranks, the work they are at, and faults with their moments. Drawn from a seed, or read as JSON.

Owns: `Schedule` and `draw`. A schedule says everything that is chosen; only the machine's own timing differs between
two runs of it. It also knows, for each rank that looks, which processes the faults make guilty.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BACKENDS", "PLACES", "STORE", "WORKS", "Fault", "Schedule", "draw"]

BACKENDS = ("shared_memory", "chunked", "unfused")
PLACES = ("one host", "hosts")
WORKS = ("set-up", "calls", "saving")
STORE = "store"
"""The process that serves the store, where it is not rank 0's."""

SHORT, LONG = 0.2, 1.7
"""How long a fault lasts that ranks must get over, three in a row included, and one that they cannot, in time-outs."""
# Faults of links, by what the frames of a link suffer; see network.py.
DISTURBANCES: dict[str, dict[str, float]] = {
    "delay": {"delay_s": 0.03, "jitter_s": 0.04},  # frames overtake each other
    "duplicates": {"duplicate": 0.3, "jitter_s": 0.01},
    "loss": {"loss": 0.05},
}


@dataclass(frozen=True)
class Fault:
    """One fault. kind: "kill", "stop", "cut", "one way", "isolate", "clock", "full disk", or one of `DISTURBANCES`.

    target: a rank, or `STORE`; of "cut" and "one way" the link from the first to the second; of "full disk" all ranks,
    which save to one. at_s counts from the moment when the ranks are told to go. lasts_s: None is for good. size:
    seconds that a clock jumps.
    """

    kind: str
    target: tuple[int | str, ...]
    at_s: float
    lasts_s: float | None = None
    size: float = 0.0

    def is_harmless(self, timeout_s: float) -> bool:
        """Whether ranks must get over it: they wait, and it passes."""
        if self.kind in DISTURBANCES or self.kind == "clock":
            return True
        waits = self.kind not in ("kill", "full disk")
        return waits and self.lasts_s is not None and self.lasts_s < timeout_s / 2

    def in_words(self) -> str:
        lasts = "" if self.lasts_s is None else f" for {self.lasts_s:.3f} s"
        size = f" by {self.size:+g} s" if self.size else ""
        return f"{self.kind} {' - '.join(map(str, self.target))}{size} at {self.at_s:.3f} s{lasts}"


@dataclass(frozen=True)
class Schedule:
    """One trial. own_store: a process that is no rank serves the store. lingers: ranks that have raised live on."""

    seed: int
    size: int
    backend: str
    place: str
    work: str
    timeout_s: float
    own_store: bool
    lingers: bool
    faults: tuple[Fault, ...]

    @property
    def store(self) -> int | str:
        """Whose process serves the store."""
        return STORE if self.own_store else 0

    @property
    def duration_s(self) -> float:
        """How long ranks are at their work, if nothing stops them."""
        return max(fault.at_s + (fault.lasts_s or 0.0) for fault in self.faults) + 0.3

    def harmful(self) -> list[Fault]:
        return [fault for fault in self.faults if not fault.is_harmless(self.timeout_s)]

    def disk_fills(self) -> bool:
        return any(fault.kind == "full disk" for fault in self.faults)

    def must_pass(self) -> bool:
        """Whether any error is a false alarm. Several faults, or lost frames, may take longer than they last."""
        return len(self.faults) == 1 and self.faults[0].kind != "loss" and not self.harmful()

    def guilty(self, observer: int) -> set[int | str]:
        """Whom an error of this rank may name: who is at fault, or on the other side of a link that is."""
        found: set[int | str] = set()
        for fault in self.faults:
            if fault.kind not in ("clock", "full disk"):
                found.update(fault.target)
            if fault.kind == "isolate" and observer in fault.target:  # it cannot know on which side the others are
                found.update([*range(self.size), self.store])
        return found

    def in_words(self) -> str:
        who = "a process of its own" if self.own_store else "rank 0"
        after = "live on" if self.lingers else "leave"
        lines = [
            f"seed {self.seed}: {self.size} ranks, {self.place}, {self.backend}, {self.work}, time-out "
            f"{self.timeout_s:g} s, store served by {who}, ranks that raised {after}"
        ]
        return "\n".join([*lines, *(f"  {fault.in_words()}" for fault in self.faults)])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Schedule:
        said: dict[str, Any] = json.loads(text)
        faults = tuple(Fault(**{**one, "target": tuple(one["target"])}) for one in said.pop("faults"))
        return Schedule(**said, faults=faults)


def draw(
    seed: int,
    *,
    backends: Sequence[str] = BACKENDS,
    places: Sequence[str] = PLACES,
    works: Sequence[str] = WORKS,
    timeout_s: float = 2.0,
    full_disks: bool = True,
) -> Schedule:
    """The schedule of a seed, among those that these choices leave."""
    dice = random.Random(seed)
    place = dice.choice(places)
    backend = dice.choice([one for one in backends if place == "one host" or one != "shared_memory"] or ["chunked"])
    size, work = dice.choice((2, 3, 3, 4)), dice.choice(works)
    own_store = dice.random() < 0.5
    spread = {"set-up": 0.15, "calls": 0.6, "saving": 0.6}[work]
    count = dice.choice((1, 1, 1, 2, 3))
    kinds = ["kill", "kill", "stop", "stop", "clock"]
    if place == "hosts":
        kinds += ["cut", "one way", "isolate", *DISTURBANCES]
    if work == "saving" and full_disks:
        kinds += ["full disk", "full disk"]
    faults = tuple(_fault(dice, kinds, size, own_store, dice.uniform(0.0, spread), timeout_s) for _ in range(count))
    return Schedule(seed, size, backend, place, work, timeout_s, own_store, dice.random() < 0.5, faults)


def _fault(
    dice: random.Random, kinds: Sequence[str], size: int, own_store: bool, at_s: float, timeout_s: float
) -> Fault:
    kind = dice.choice(kinds)
    everybody: list[int | str] = [*range(size), *([STORE] if own_store else [])]
    short, long = SHORT * timeout_s, LONG * timeout_s
    if kind == "kill":
        return Fault(kind, (dice.choice(everybody),), at_s)
    if kind == "stop":
        return Fault(kind, (dice.choice(everybody),), at_s, dice.choice((short, long, None)))
    if kind == "clock":
        return Fault(kind, (dice.choice(range(size)),), at_s, size=dice.choice((-86400.0, -3.0, 3.0, 86400.0)))
    if kind == "full disk":
        return Fault(kind, tuple(range(size)), at_s, dice.choice((short, None)))
    if kind == "isolate":
        return Fault(kind, (dice.choice(everybody),), at_s, dice.choice((short, None)))
    if kind in DISTURBANCES:
        return Fault(kind, tuple(everybody), at_s, timeout_s)
    first, second = dice.sample(everybody, 2)
    return Fault(kind, (first, second), at_s, dice.choice((short, None)))
