"""Ranks that a trial may kill, stop or starve: forked in milliseconds, followed through a pipe, every wait bounded.

Owns: `Crew` (the ranks of one trial and the store that they meet at) and `Link` (a rank's end of its pipe). Ranks are
forked from the tests' fork server, which has imported torch and this package; starting one takes some ten
milliseconds, so that hundreds of trials are affordable. Times are CLOCK_MONOTONIC, one clock for all processes.

Assumes: Linux; bodies are module-level functions `body(link, *args)`, whose default process group is made already.

Refuses: to leave anything behind. Leaving the context kills every rank; ranks also die with the fork server, which dies
with this process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from tpkernels.errors import TpKernelsError
from tpkernels.testing.spawn import fork_server

JOIN_S = 10.0
LINGER_S = 600.0


class CrewError(AssertionError):
    """A rank did what no trial allows: it raised outside the place where errors are expected, left, or was silent."""


@dataclass(frozen=True)
class Said:
    """What a rank told the trial, and when."""

    rank: int
    what: str
    at: float
    value: Any


@dataclass(frozen=True)
class Raised:
    """An exception as the trial judges it."""

    kind: str
    ranks: tuple[int, ...]
    text: str

    @staticmethod
    def of(error: BaseException) -> Raised:
        return Raised(type(error).__name__, tuple(getattr(error, "ranks", ())), str(error))


class Link:
    """A rank's end of the pipe to the trial."""

    def __init__(self, rank: int, size: int, pipe: connection.Connection) -> None:
        self.rank, self.size = rank, size
        self._pipe = pipe

    def say(self, what: str, value: Any = None, at: float | None = None) -> None:
        self._pipe.send((what, time.monotonic() if at is None else at, value))

    def hear(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"rank {self.rank} heard nothing from the trial within {timeout:g} s")
        return self._pipe.recv()

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
        self._heard: list[Said] = []
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        context = fork_server()
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: dict[int, connection.Connection] = {}
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                self._pipes[rank] = ours
                process = context.Process(
                    target=_rank_main,
                    args=(rank, size, self._store.port, timeout, linger, theirs, body, args),
                    daemon=True,
                )
                self.processes.append(process)
                process.start()
                theirs.close()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def tell(self, rank: int, message: object) -> None:
        with suppress(OSError):
            self._pipes[rank].send(message)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal; the time just before it was sent."""
        now = time.monotonic()
        os.kill(self.pids[rank], number)
        return now

    def expect(self, what: str | tuple[str, ...], timeout: float, ranks: Iterable[int] | None = None) -> list[Said]:
        """Wait until each of `ranks` (default: all) has said one of `what`; the first such word of each, by rank."""
        wanted, words = list(range(self.size) if ranks is None else ranks), (what,) if isinstance(what, str) else what
        deadline = time.monotonic() + timeout
        while True:
            found = {said.rank: said for said in reversed(self._heard) if said.what in words}
            missing = [rank for rank in wanted if rank not in found]
            if not missing:
                return [found[rank] for rank in wanted]
            raised = [said for said in self._heard if said.what == "raised" and said.rank in missing]
            if raised and "raised" not in words:
                raise CrewError(f"rank {raised[0].rank} raised:\n{raised[0].value}")
            gone = [rank for rank in missing if rank not in self._pipes]
            left = deadline - time.monotonic()
            if gone or left <= 0:
                why = f"rank(s) {gone} left" if gone else f"rank(s) {missing} said nothing for {timeout:g} s"
                raise CrewError(f"expected {words} of rank(s) {missing}; {why}; heard {self._heard[-8:]}")
            self._listen(left)

    def words(self, what: str) -> list[Said]:
        """Everything of this kind that has been heard so far."""
        self._listen(0.0)
        return [said for said in self._heard if said.what == what]

    def join(self, timeout: float = JOIN_S) -> bool:
        """Whether every process has ended within the time."""
        deadline = time.monotonic() + timeout
        while any(process.exitcode is None for process in self.processes):
            if time.monotonic() > deadline:
                return False
            connection.wait([p.sentinel for p in self.processes if p.exitcode is None], deadline - time.monotonic())
        return True

    def close(self) -> None:
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.join()
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, timeout: float) -> None:
        by_pipe = {pipe: rank for rank, pipe in self._pipes.items()}
        for pipe in connection.wait(list(by_pipe), timeout):
            rank = by_pipe[pipe]  # type: ignore[index]
            try:
                self._heard.append(Said(rank, *self._pipes[rank].recv()))
            except (EOFError, ConnectionResetError):
                self._pipes.pop(rank).close()


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
_PR_SET_PDEATHSIG = 1


def _rank_main(
    rank: int,
    size: int,
    port: int,
    timeout: float,
    linger: bool,
    pipe: connection.Connection,
    body: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.environ.update(_ENVIRONMENT)
    torch.set_num_threads(1)
    link = Link(rank, size, pipe)
    try:
        limit = timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        link.say("returned", body(link, *args))
        if linger:
            with suppress(EOFError, OSError, TimeoutError):
                link.hear(LINGER_S)
    except BaseException:  # noqa: BLE001 - whatever it is, the trial must hear of it
        with suppress(OSError):
            link.say("raised", traceback.format_exc())
    # At once, like a rank of a job that has failed: no farewell to the peers, no finalisers.
    os._exit(0)
