"""Ranks that a trial may kill, stop or starve: forked in milliseconds, followed through a pipe, every wait bounded.

Owns: `Crew` (a conversation with the ranks of one trial, and the store that they meet at) and `Link` (a rank's end of
it). Ranks are forked from the tests' fork server, which has imported torch and this package; starting one takes some
ten milliseconds, so that hundreds of trials are affordable. Times are CLOCK_MONOTONIC, one clock for all processes.

Assumes: Linux; bodies are module-level functions `body(link, *args)`, whose default process group is made already.

Refuses: to leave anything behind. Leaving the context kills every rank; ranks also die with the fork server, which dies
with this process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from tpkernels import config
from tpkernels.errors import TpKernelsError
from tpkernels.launching import rank_process
from tpkernels.launching.conversation import Conversation, NotSaid, Said
from tpkernels.launching.local_ranks import pack_call
from tpkernels.launching.rank_process import MASTER_ADDR, RankSetup
from tpkernels.testing.spawn import fork_server

JOIN_S = 10.0


class CrewError(AssertionError):
    """A rank did what no trial allows: it raised outside the place where errors are expected, left, or was silent."""


@dataclass(frozen=True)
class Raised:
    """An exception as the trial judges it."""

    kind: str
    ranks: tuple[int, ...]
    text: str

    @staticmethod
    def of(error: BaseException) -> Raised:
        return Raised(type(error).__name__, tuple(getattr(error, "ranks", ())), str(error))


class Link(rank_process.Link):
    """A rank's end of the conversation with its trial."""

    def __init__(self, rank: int, size: int, fd: int) -> None:
        super().__init__(fd)
        self.rank, self.size = rank, size

    def die(self) -> None:
        """SIGKILL from inside, with the time of death told first."""
        self.say("dies")
        os.kill(os.getpid(), signal.SIGKILL)


class Crew:
    """`size` ranks that run `body(link, *args)` once, each in a process of its own.

    timeout: seconds of the default group. linger: ranks that have returned live on until the crew is closed, so that
    their peers can not learn of a failure from an exit; otherwise they leave at once, as those of a failed job do.
    """

    def __init__(
        self, size: int, body: Callable[..., object], *args: object, timeout: float = 20.0, linger: bool = False
    ) -> None:
        self.size = size
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            MASTER_ADDR, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        setups = [RankSetup(rank, config.inherited() | _ENVIRONMENT, talks=True) for rank in range(size)]
        calls = [pack_call(_work, (rank, size, self._store.port, timeout, linger, body, args)) for rank in range(size)]
        self._conversation = Conversation(setups, calls, fork_server())
        self.processes = [rank.process for rank in self._conversation.ranks]
        self.pids = [process.pid or 0 for process in self.processes]

    def tell(self, rank: int, message: object) -> None:
        self._conversation.tell(rank, message)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal; the time just before it was sent."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def expect(self, what: str, timeout: float, ranks: Iterable[int] | None = None) -> list[Said]:
        """Wait until each of `ranks` (default: all) has said this; the first such word of each, by rank."""
        try:
            return self._conversation.expect((what,), time.monotonic() + timeout, ranks)
        except NotSaid as silence:
            if silence.failure is not None:
                raise CrewError(f"rank {silence.failure.rank} raised:\n{silence.failure.details}") from None
            missing, gone = list(silence.missing), list(silence.gone)
            why = f"rank(s) {gone} left" if gone else f"rank(s) {missing} said nothing for {timeout:g} s"
            heard = self._conversation.heard[-8:]
            raise CrewError(f"expected {what!r} of rank(s) {missing}; {why}; heard {heard}") from None

    def join(self, timeout: float = JOIN_S) -> bool:
        """Whether every process has ended within the time."""
        deadline = time.monotonic() + timeout
        while any(process.exitcode is None for process in self.processes):
            if time.monotonic() > deadline:
                return False
            connection.wait([p.sentinel for p in self.processes if p.exitcode is None], deadline - time.monotonic())
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversation.close()


def together(size: int, body: Callable[..., Any], *args: object, within: float, timeout: float = 20.0) -> list[Any]:
    """Run `body(link, *args)` on `size` new ranks and return what it returns, by rank."""
    with Crew(size, body, *args, timeout=timeout, linger=True) as crew:
        return [said.value for said in crew.expect("returned", within)]


def caught(work: Callable[[], object]) -> tuple[Raised | None, float]:
    """What `work` raises of the errors that the library may raise, and when (or when it ended)."""
    try:
        work()
    except (TpKernelsError, ValueError, OSError, RuntimeError, KeyboardInterrupt) as error:
        return Raised.of(error), time.monotonic()
    return None, time.monotonic()


def group_of(ranks: Sequence[int] | None = None, timeout: float = 20.0) -> Any:
    """A new process group; collective over the default group."""
    return dist.new_group(None if ranks is None else list(ranks), timeout=timedelta(seconds=timeout))


# Ranks share cores: one thread each. No calibration unless a trial wants it: it takes a second per group and dtype.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TPKERNELS_CALIBRATE": "0"}


def _work(
    talking: rank_process.Link,
    rank: int,
    size: int,
    port: int,
    timeout: float,
    linger: bool,
    body: Callable[..., object],
    args: tuple[object, ...],
) -> object:
    # Latencies are the library's, not those of the tests beside this one; threads that start from here on inherit it.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(MASTER_ADDR, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    value = body(Link(rank, size, talking.fd), *args)
    if linger:
        return value
    talking.say("returned", value)
    # At once, like a rank of a job that has failed: no farewell to the peers, no finalisers.
    os._exit(0)
