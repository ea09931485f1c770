"""One local rank: what runs inside its process, and how its parent sees it.

Owns: the rank's environment, its command loop, `Link`, through which a function may talk with the parent while it runs,
and `RankProcess`, the parent's handle (process, command socket, and the pipe through which stacks come). `Ranks` starts
several and ends them; `local_ranks.py` and `conversation.py` say what is done with them in between.

Assumes: Linux. A rank registers SIGUSR1 to show its Python stacks.

Refuses: to block the parent. The parent's ends are non-blocking, and a dead rank is seen through its process handle.
Only an idle rank waits without a limit, for its parent, and the kernel ends it when the parent dies
(PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import struct
import sys
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from tpkernels import config
from tpkernels.errors import TpKernelsError

MASTER_ADDR = "127.0.0.1"
STOP_TIMEOUT_S = 30.0  # destroying groups and leaving the interpreter
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_FRAME = struct.Struct("<Q")


class RankDied(TpKernelsError):
    """A rank's process ended before it answered."""


class RankStuck(TpKernelsError):
    """A rank was still running when its time was over; the message holds its Python stack."""


class RankRaised(TpKernelsError):
    """Stands in for a rank's exception that cannot travel between processes (it does not pickle)."""


@dataclass(frozen=True)
class RankFailure:
    """One rank that did not return: what happened in one line, the exception, and its traceback or stack."""

    rank: int
    summary: str
    exception: BaseException
    details: str
    answered: bool = False  # it raised, so its process is alive and waits for the next call


@dataclass(frozen=True)
class RankSetup:
    """Everything a rank needs before it runs anything."""

    rank: int
    environment: dict[str, str] = field(repr=False)  # it holds the secret of the job
    """All of it: a rank that a fork server starts would have the server's."""
    cores: tuple[int, ...] = ()  # to pin to; empty leaves the affinity alone
    num_threads: int = 1
    exit_on_failure: bool = True
    talks: bool = False
    """What it runs takes a `Link` first."""


def local_environment(rank: int, world_size: int, port: int, secret: str) -> dict[str, str]:
    """What torchrun sets for a rank whose peers are all on this machine, where a store listens on `port`.

    `secret` is the job's: whoever else of this machine writes into that store is ignored.
    """
    return {
        **config.inherited(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # env:// then joins that store instead of hosting one in rank 0
        config.JOB_SECRET: secret,
        config.JOB_SECRET_FILE: "",  # of a job that this process may be a rank of
    }


# ---------------------------------------------------------------- in the rank


def write_rank_environment(setup: RankSetup) -> None:
    """Tell torch.distributed (env://) who this process is."""
    os.environ.clear()
    os.environ.update(setup.environment)
    # Where all ranks are on this machine, a host name that resolves to a dead interface must not matter.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _die_with_parent() -> None:
    """A fork server, which is then the parent in the kernel's eyes, ends with the process that started it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died before the request took effect
        os._exit(1)


def _keep_freed_memory() -> None:
    """Have glibc's malloc reuse the memory of large tensors instead of returning it to the kernel.

    Otherwise each output of 16 MB costs 4096 page faults, 10 ms, where its contents take 1-3 ms to compute (AMD EPYC,
    2026-11-20).  Larger than 32 MiB malloc does not go: those tensors are mapped anew each time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have their own ways
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def _rank_main(setup: RankSetup, commands: Connection, stacks: Connection) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank quietly, even inside a blocking C++ wait
    faulthandler.enable(file=stacks.fileno())
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    write_rank_environment(setup)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    torch.set_num_threads(setup.num_threads)
    _keep_freed_memory()
    _serve(commands.fileno(), setup)
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(fd: int, setup: RankSetup) -> None:
    """Answer calls until told to stop (an empty frame)."""
    _write_frame(fd, pickle.dumps(("returned", b"ready")))
    link = (Link(fd),) if setup.talks else ()
    while request := _read_frame(fd):
        try:
            sys_path, call = pickle.loads(request)
            if sys_path is None:
                continue  # told to a function that has returned
            sys.path[:] = sys_path  # the parent may have learnt of new modules since this rank started
            fn, args = pickle.loads(call)
            reply = pickle.dumps(("returned", pickle.dumps(fn(*link, *args))))
        except BaseException as error:  # noqa: BLE001 - whatever a rank raises, SystemExit included, is its answer
            reply = pickle.dumps(("raised", pickle.dumps(_describe_exception(setup.rank, error))))
            _flush()
            _write_frame(fd, reply)
            if setup.exit_on_failure:
                os._exit(1)  # at once: peers that wait for this rank then see closed connections
            continue
        _flush()
        _write_frame(fd, reply)


class Link:
    """A function's connection to the parent while it runs (`RankSetup.talks`)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def say(self, what: str, value: object = None, at: float | None = None) -> None:
        """Tell the parent something, and when it was (`time.monotonic()`, one clock for all processes; None is now)."""
        said = what, time.monotonic() if at is None else at, value
        _write_frame(self.fd, pickle.dumps(("said", pickle.dumps(said))))

    def is_told(self, timeout: float | None = None) -> bool:
        """Whether there is something to hear within the time; None waits for the parent, which is outlived by none."""
        return bool(wait([self.fd], timeout))

    def hear(self, timeout: float | None = None) -> Any:
        """What the parent tells next.

        Raises: TimeoutError; EOFError if the parent is gone or wants this process to end.
        """
        if not self.is_told(timeout):
            raise TimeoutError(f"nothing was heard within {timeout:g} s")
        if not (frame := _read_frame(self.fd)):
            raise EOFError("the parent has nothing more to say")
        return pickle.loads(pickle.loads(frame)[1])


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _describe_exception(rank: int, error: BaseException) -> RankFailure:
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    first_line = message.strip().partition("\n")[0]
    details = "".join(
        traceback.format_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    )
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - any failure to travel means the same: send a stand-in
        error = RankRaised(message)
    return RankFailure(rank, f"rank {rank} raised {textwrap.shorten(first_line, 240)}", error, details, answered=True)


def _read_frame(fd: int) -> bytes:
    """A whole frame; empty when told to stop or when the parent is gone."""
    size = _FRAME.unpack(header)[0] if len(header := _read_exactly(fd, _FRAME.size)) == _FRAME.size else 0
    return _read_exactly(fd, size)


def _read_exactly(fd: int, size: int) -> bytes:
    # Unbounded on purpose: an idle rank waits for its parent, and dies with it.
    received = bytearray()
    while len(received) < size:
        piece = os.read(fd, min(size - len(received), 1 << 20))
        if not piece:
            return b""
        received += piece
    return bytes(received)


def _write_frame(fd: int, body: bytes) -> None:
    view = memoryview(_FRAME.pack(len(body)) + body)
    while view:
        view = view[os.write(fd, view) :]


# ---------------------------------------------------------------- in the parent


StartContext = SpawnContext | ForkServerContext


class RankProcess:
    """One rank as its parent sees it: the process, its command socket, and the pipe its stacks come through."""

    def __init__(self, setup: RankSetup, context: StartContext) -> None:
        self.rank = setup.rank
        self._commands, child_commands = context.Pipe(duplex=True)
        self._stacks, child_stacks = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_rank_main, args=(setup, child_commands, child_stacks), name=f"tpkernels-rank{setup.rank}"
        )
        self.process.start()
        child_commands.close()  # the rank now holds the only other end: its death closes the connection
        child_stacks.close()
        self._inbox = bytearray()
        self._stack_text = bytearray()
        self._open = {self._commands.fileno(): self._inbox, self._stacks.fileno(): self._stack_text}
        for fd in self._open:
            os.set_blocking(fd, False)

    def call(self, call: bytes, deadline: float) -> None:
        """Have it run a pickled (function, arguments)."""
        self.send(pickle.dumps((sys.path, call)), deadline)

    def tell(self, message: object, deadline: float) -> None:
        """For `Link.hear`."""
        self.send(pickle.dumps((None, pickle.dumps(message))), deadline)

    def send(self, body: bytes, deadline: float) -> None:
        """Send a frame; a rank that is dead is noticed by whoever collects its answer."""
        view = memoryview(_FRAME.pack(len(body)) + body)
        poller = select.poll()
        poller.register(self._commands.fileno(), select.POLLOUT)
        while view:
            if not poller.poll(min(max(0.0, deadline - time.monotonic()), 60.0) * 1000):
                return  # it does not read: it will be reported as stuck, with its stack
            try:
                view = view[os.write(self._commands.fileno(), view) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return

    def open_ends(self) -> list[int]:
        """File descriptors that become readable when this rank has sent something or has closed its end."""
        return list(self._open)

    def watched(self) -> list[int]:
        """File descriptors that become readable when something happened to this rank."""
        return [*self.open_ends(), self.process.sentinel]

    def drain(self) -> None:
        for fd, buffer in list(self._open.items()):
            try:
                while piece := os.read(fd, 1 << 20):
                    buffer += piece
                del self._open[fd]
            except BlockingIOError:
                continue
            except ConnectionResetError:
                del self._open[fd]

    def take_frame(self) -> tuple[str, bytes] | None:
        """What it sent next, if that is here as a whole: ("returned" | "raised" | "said", pickled)."""
        if len(self._inbox) < _FRAME.size:
            return None
        end = _FRAME.size + int(_FRAME.unpack_from(self._inbox)[0])
        if len(self._inbox) < end:
            return None
        frame = bytes(memoryview(self._inbox)[_FRAME.size : end])
        del self._inbox[:end]
        kind, body = pickle.loads(frame)
        return kind, body

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def says_no_more(self) -> bool:
        """It has closed its end; whole frames that it had sent can still be taken."""
        return self._commands.fileno() not in self._open

    def has_hung_up(self) -> bool:
        """The process closed its end, which it does by ending; its exit code follows in a moment."""
        if self._commands.fileno() in self._open:
            return False
        self.process.join(1.0)
        return self.has_ended()

    def death(self, when: str) -> RankFailure:
        """Report of a rank whose process has ended."""
        self.drain()
        code = self.process.exitcode
        how = f"exited with code {code}" if code is None or code >= 0 else f"died by {_signal_name(-code)}"
        summary = f"rank {self.rank} {how} {when}"
        return RankFailure(self.rank, summary, RankDied(summary), self._stack_text.decode(errors="replace"))

    def ask_for_stack(self) -> None:
        if not self.has_ended():
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def has_shown_stack(self) -> bool:
        return bool(self._stack_text)

    def stuck(self, why: str) -> RankFailure:
        summary = f"rank {self.rank} {why}"
        details = self._stack_text.decode(errors="replace")
        return RankFailure(self.rank, summary, RankStuck(f"{summary}\n{details}"), details)

    def kill(self) -> None:
        if not self.has_ended():
            self.process.kill()

    def close(self) -> None:
        """Free the process handle; the process has been killed or has ended, so this join is short."""
        self.process.join(STOP_TIMEOUT_S)
        if self.has_ended():
            self.process.close()
        self._commands.close()
        self._stacks.close()


class Ranks:
    """Processes that are started together and end together: leaving the context kills them."""

    def __init__(self) -> None:
        self.ranks: list[RankProcess] = []

    def start(self, setups: Iterable[RankSetup], context: StartContext) -> None:
        try:
            for setup in setups:
                self.ranks.append(RankProcess(setup, context))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.close()
        self.ranks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def children_inherit(variables: dict[str, str]) -> Iterator[None]:
    """Variables that libraries read while they are imported must be there when a new interpreter starts.

    Undone for this process.
    """
    saved = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
