"""Start local ranks, run one function in each, and never wait for a rank that cannot answer.

Owns: a machine's team of ranks (`RankTeam`), the store they meet at, and `launch`, which runs one function in a team.
The parent hosts the TCPStore, as torchrun's agent does, so the death of rank 0 leaves the others a working store.

Assumes: functions and arguments that pickle (a module-level function of an importable module or of the script that
was started, below its `if __name__ == "__main__":`).

Refuses: to hang. A rank that dies is seen through its process handle, not through a timeout; after the first failure
the others have a grace period to fail with errors of their own and are then killed; Ctrl-C and the parent's death
take the ranks along. `timeout=None` puts no limit on how long a healthy job may run.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TypeVar

import torch.distributed as dist

from tpkernels.errors import TpKernelsError
from tpkernels.launching.rank_process import (
    MASTER_ADDR,
    STOP_TIMEOUT_S,
    RankFailure,
    RankProcess,
    Ranks,
    RankSetup,
    StartContext,
    local_environment,
)
from tpkernels.packages import check_platform

T = TypeVar("T")

START_TIMEOUT_S = 300.0  # importing torch in every rank; minutes on a loaded machine with a cold disk
STACK_DUMP_S = 5.0  # a rank shows its stack within milliseconds; a loaded machine takes longer


class LaunchError(TpKernelsError):
    """At least one rank failed. `failures` lists them in the order in which they failed; the first is the cause."""

    def __init__(self, what: str, failures: Sequence[RankFailure]) -> None:
        self.what = what
        self.failures = tuple(failures)
        lines, seen = [f"{what}: " + "; ".join(f.summary for f in self.failures)], set()
        for failure in self.failures:
            stack = failure.details.rstrip().rpartition("\n")[0]  # ranks that fail alike differ in the last line
            if failure.details and stack not in seen:
                lines += [f"--- rank {failure.rank} ---", failure.details.rstrip()]
                seen.add(stack)
        if len(lines) > 1:
            lines.append(f"first failure: {self.failures[0].summary}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[LaunchError], tuple[str, tuple[RankFailure, ...]]]:
        return type(self), (self.what, self.failures)


@dataclass
class Outcome:
    """What a call brought: pickled values by rank, and failures in the order in which they happened."""

    values: dict[int, bytes] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)


class RankTeam(Ranks):
    """`nproc` local ranks that answer calls, and the store that they meet at. A context manager: leaving kills them.

    With `exit_on_failure` a rank that raises exits at once, so that its peers see it (`launch`); without it the rank
    stays for further calls (`tpkernels.testing.WorkerPool`).
    """

    def __init__(
        self,
        nproc: int,
        *,
        pin: bool,
        exit_on_failure: bool,
        num_threads: int | None = None,
        deadline: float = math.inf,
        context: StartContext | None = None,
    ) -> None:
        super().__init__()
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            MASTER_ADDR, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_TIMEOUT_S)
        )
        secret = secrets.token_hex(32)
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // nproc)
        pinned = pin and nproc <= len(cores)
        setups = [
            RankSetup(
                rank,
                local_environment(rank, nproc, self.store.port, secret),
                tuple(cores[rank * share : (rank + 1) * share]) if pinned else (),
                num_threads or share,
                exit_on_failure,
            )
            for rank in range(nproc)
        ]
        try:
            self.start(setups, context or new_interpreters())
            ready = self._collect(min(deadline, time.monotonic() + START_TIMEOUT_S), 0.0, True, "while starting")
        except BaseException:
            self.close()
            raise
        if ready.failures:
            self.close()
            hint = '(a script that starts ranks needs `if __name__ == "__main__":`; a rank\'s own error is above)'
            raise LaunchError(f"starting {nproc} ranks {hint}", ready.failures)

    def call(self, calls: Sequence[bytes], *, deadline: float, grace: float, grace_after_raise: bool) -> Outcome:
        """Run `calls[rank]` (see `pack_call`) on every rank and wait until each has answered, died or run out of time.

        After the first death (with `grace_after_raise`, also after the first exception) the others have `grace`
        seconds left. Ranks reported as `RankStuck` are still running: the caller must close the team.
        """
        for rank, call in zip(self.ranks, calls, strict=True):
            rank.call(call, deadline)
        return self._collect(deadline, grace, grace_after_raise, "before it returned")

    def stop(self) -> list[RankFailure]:
        """Let idle ranks leave in order; those that do not leave cleanly are the result."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for rank in self.ranks:
            rank.send(b"", deadline)
        while time.monotonic() < deadline and (alive := [r for r in self.ranks if not r.has_ended()]):
            wait([r.process.sentinel for r in alive], deadline - time.monotonic())
        late = self._stacks_of([r for r in self.ranks if not r.has_ended()], "returned, but its process did not exit")
        return late + [r.death("after it had returned") for r in self.ranks if r.has_ended() and r.process.exitcode]

    def _collect(self, deadline: float, grace: float, grace_after_raise: bool, when: str) -> Outcome:
        outcome, pending = Outcome(), list(self.ranks)
        limit, why = deadline, f"was still running at the deadline ({when})"
        while pending:
            if (left := limit - time.monotonic()) <= 0:
                outcome.failures += self._stacks_of(pending, why)
                break
            wait([fd for rank in pending for fd in rank.watched()], min(left, 60.0))
            failed_before = len(outcome.failures)
            ended = [rank for rank in pending if rank.has_ended()]  # asked before their last words are read
            for rank in [*pending, *pending]:  # twice: a death is then seen before the peers' errors that it caused
                rank.drain()
            answers = {rank: frame for rank in pending if (frame := rank.take_frame()) is not None}
            dead = [rank for rank in pending if rank not in answers and (rank in ended or rank.has_hung_up())]
            outcome.failures += [rank.death(when) for rank in dead]
            for rank, (kind, body) in answers.items():
                if kind == "returned":
                    outcome.values[rank.rank] = body
                else:
                    outcome.failures.append(pickle.loads(body))
            pending = [rank for rank in pending if rank not in answers and rank not in dead]
            new_failure = len(outcome.failures) > failed_before
            if dead or (new_failure and grace_after_raise):
                if (end := time.monotonic() + grace) < limit:
                    limit, why = end, f"was still running {grace:g} s after the first failure"
        return outcome

    @staticmethod
    def _stacks_of(ranks: Sequence[RankProcess], why: str) -> list[RankFailure]:
        for rank in ranks:
            rank.ask_for_stack()
        deadline, shown = time.monotonic() + STACK_DUMP_S, False
        while (alive := [rank for rank in ranks if not rank.has_ended()]) and not shown:
            if (left := deadline - time.monotonic()) <= 0:
                break
            quiet = not wait([fd for rank in alive for fd in rank.watched()], min(left, 0.2))
            for rank in alive:
                rank.drain()
            shown = quiet and all(rank.has_shown_stack() for rank in alive)
        return [rank.stuck(why) for rank in ranks]


def new_interpreters() -> StartContext:
    return multiprocessing.get_context("spawn")


def pack_call(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    """Pickle a call by value (tensors are copied), with an error that says what a rank can be sent.

    A function of a notebook or an interactive session is sent as it stands, by cloudpickle, if that is installed.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    dumps: Callable[[object], bytes] = pickle.dumps
    if getattr(fn, "__module__", None) == "__main__" and not _ranks_can_import_main(name):
        try:
            from cloudpickle import dumps as by_value

            dumps = by_value
        except ModuleNotFoundError:
            raise ValueError(
                f"fn ({name}) is defined in a notebook or an interactive session, and ranks are separate processes "
                "that cannot import it from there: put it into a file and import that (in a notebook: "
                "%%writefile ranks.py), or pip install cloudpickle, which sends the function itself"
            ) from None
    try:
        return dumps((fn, tuple(args)))
    except Exception as error:
        raise ValueError(
            f"fn ({name}) and its arguments must pickle, because ranks are separate processes: "
            f"use a module-level function, and rebuild what cannot be copied inside it ({error})"
        ) from error


def _ranks_can_import_main(name: str) -> bool:
    """Whether the main module is a file or was started by its name; a notebook, a REPL and ``python -c`` are not."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is not None and getattr(main, "__spec__", None) is None and not os.path.exists(file):
        raise ValueError(f"fn ({name}) was read from {file}, which ranks cannot import: save it as a .py file")
    return file is not None


def check_nproc(nproc: object) -> None:
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise ValueError(f"nproc ({nproc!r}) must be an int of at least 1")


def launch(
    fn: Callable[..., T], nproc: int, *args: object, timeout: float | None = None, pin: bool = True, grace: float = 10.0
) -> list[T]:
    """Run `fn(*args)` in `nproc` new local processes, the ranks of one job, and return their results by rank.

    In each rank RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as under
    torchrun, so `tpk.init()` (or `init_process_group()`) finds its peers; rank r has `cores // nproc` threads (at
    least 1) and, with `pin` and enough cores, cores of its own. What ranks print goes to this process's output.

    timeout: seconds for the whole job, start included; None lets a healthy job run as long as it likes.
    grace: seconds that the other ranks have, after the first failure, to fail on their own before they are killed.

    Examples:
        >>> tpk.launch(max, 2, 3, 4)
        [4, 4]

    Raises: ValueError for arguments that cannot be sent to a rank; LaunchError naming every rank that raised, died
    (with the signal) or had to be killed, with tracebacks, caused by the first failing rank's own exception.

    Ranks leave together: none exits before all have returned. Call it from a thread that outlives the job, since the
    kernel ends the ranks when the thread that started them ends.
    """
    check_platform()
    check_nproc(nproc)
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout ({timeout}) must be positive, or None for no limit")
    call = pack_call(fn, args)
    what = f"launch({getattr(fn, '__qualname__', fn)!s}, nproc={nproc})"
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with RankTeam(nproc, pin=pin, exit_on_failure=True, deadline=deadline) as team:
        outcome = team.call([call] * nproc, deadline=deadline, grace=grace, grace_after_raise=True)
        if failures := outcome.failures or team.stop():
            raise LaunchError(what, failures) from failures[0].exception
    return [pickle.loads(outcome.values[rank]) for rank in range(nproc)]
