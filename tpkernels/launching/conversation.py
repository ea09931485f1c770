"""Processes that run one function each, and talk with their parent while they do.

Owns: who has said what, and waiting for words, bounded. The network lab and trials that kill ranks are built on it;
`local_ranks.py` is for functions that only return.

Refuses: to wait for what cannot be said any more. A process that raised, or that ended, is noticed at once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from tpkernels.errors import TpKernelsError
from tpkernels.launching.rank_process import RankFailure, Ranks, RankSetup, StartContext

__all__ = ["Conversation", "NotSaid", "Said"]

TELL_S = 10.0  # a process that reads nothing for so long is noticed by whoever waits for its words


@dataclass(frozen=True)
class Said:
    """What a process told its parent, and when; that it "returned" or "raised" (a `RankFailure`) is said for it."""

    rank: int
    what: str
    at: float
    value: Any


class NotSaid(TpKernelsError):
    """Words that will not come, or did not in time: somebody raised (`failure`) or is `gone`, or all are `missing`."""

    def __init__(self, missing: Sequence[int], gone: Sequence[int] = (), failure: RankFailure | None = None) -> None:
        super().__init__(f"missing: {list(missing)}, gone: {list(gone)}, failure: {failure}")
        self.missing, self.gone, self.failure = tuple(missing), tuple(gone), failure


class Conversation(Ranks):
    """Starts a process per setup, each with its call (see `pack_call`); the functions take a `Link` first."""

    def __init__(self, setups: Sequence[RankSetup], calls: Sequence[bytes], context: StartContext) -> None:
        super().__init__()
        self.heard: list[Said] = []
        self.start(setups, context)
        for rank, call in zip(self.ranks, calls, strict=True):
            rank.call(call, time.monotonic() + TELL_S)

    def tell(self, rank: int, message: object) -> None:
        self.ranks[rank].tell(message, time.monotonic() + TELL_S)

    def expect(
        self, words: Sequence[str], deadline: float, ranks: Iterable[int] | None = None, needed: Iterable[int] = ()
    ) -> list[Said]:
        """Wait until each of `ranks` (default: all) has said one of `words`; the first such word of each, by rank.

        needed: others without whom these cannot go on.

        Raises: NotSaid.
        """
        wanted = list(range(len(self.ranks)) if ranks is None else ranks)
        while True:
            found = {said.rank: said for said in reversed(self.heard) if said.what in words}
            missing = [rank for rank in wanted if rank not in found]
            if not missing:
                return [found[rank] for rank in wanted]
            watched = {*missing, *needed}
            for said in self.heard:
                if said.what == "raised" and said.rank in watched:
                    raise NotSaid(missing, failure=said.value)
            gone = [rank for rank in sorted(watched) if self.ranks[rank].says_no_more()]
            left = deadline - time.monotonic()
            if gone or left <= 0:
                raise NotSaid(missing, gone)
            self.listen(left)

    def listen(self, timeout: float) -> None:
        """Hear what comes until something has, or the time is over."""
        wait([fd for rank in self.ranks for fd in rank.open_ends()], timeout)
        for rank in self.ranks:
            rank.drain()
            while (frame := rank.take_frame()) is not None:
                kind, body = frame
                if kind == "said":
                    self.heard.append(Said(rank.rank, *pickle.loads(body)))
                elif body != b"ready":
                    self.heard.append(Said(rank.rank, kind, time.monotonic(), pickle.loads(body)))
