"""One rank's view of a group on three hosts whose store is lost, for tests of whom it blames."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tpkernels.comm.bounded_store import StoreLost
from tpkernels.comm.liveness import Identity

HOST, MINE, OTHER = 0, 1, 2
TIMEOUT_S = 2.0


class LostStore:
    is_silent, is_served_here = False, False
    answered_at = 0.0

    def within(self, limit: float) -> LostStore:
        return self

    def check(self, keys: list[str]) -> bool:
        raise StoreLost("broken pipe")


def group_of_three(*, listened_ago: float, silent_for: float = 0.0) -> Any:
    """Rank 1 of three on three hosts; rank 2 had been silent for so long when the store was last read."""
    now = time.monotonic()
    beats = {rank: ("1 3", now - listened_ago - 0.1) for rank in (HOST, MINE)}
    return SimpleNamespace(
        name="tp", rank=MINE, size=3, timeout=TIMEOUT_S, control=LostStore(), key="k", visits=(1, 1, 1), verdict=None,
        peers=tuple(Identity(f"host {rank}", 7, 7) for rank in range(3)), store_host=HOST, calls=4,
        heard={**beats, OTHER: ("1 2", now - listened_ago - silent_for)}, listened=now - listened_ago,
        missed=(0, ()),
    )  # fmt: skip


class Clock:
    """In the place of a module's clock: it stands still until somebody sleeps, and jumps where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
        self.now, self.slept, self.jump = 1e6, 0, 0.0
        for module in modules:
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now += seconds + (self.jump if self.slept == 3 else 0.0)
