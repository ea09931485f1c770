"""Persistent ranks for tests: start the processes once, then run many functions on them.

Owns: `WorkerPool` (rank processes with a gloo default group) and `Pools` (at most one pool per world size).

Assumes: module-level functions and arguments that pickle; each call is collective, every rank runs it. Before each
call the ranks seed Python's and torch's generators with the same constant, so no result depends on test order.

Refuses: to wait for what cannot come. A worker that dies is reported at once, with its signal; a call that passes its
deadline is answered with every worker's Python stack, and the pool is torn down. A pool that was torn down starts
again on its next use. After a call in which a rank raised, the default group is made anew, because messages
of the failed call may still be under way in the old one; and so it is after calls that have left groups with threads.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import pickle
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.launching.local_ranks import LaunchError, Outcome, RankTeam, check_nproc, pack_call
from tpkernels.launching.rank_process import MASTER_ADDR, RankStuck, children_inherit

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
GROUP_TIMEOUT_S = 30.0
MOST_THREADS = 12
"""Threads that calls may leave behind in a rank: a group has three, one of which wakes 100 times a second."""
SEED = 20240229


class RanksFailed(LaunchError):
    """At least one rank of a `WorkerPool` call failed; `exceptions` holds what each of them raised."""

    @property
    def exceptions(self) -> dict[int, BaseException]:
        return {failure.rank: failure.exception for failure in self.failures}


def fork_server() -> ForkServerContext:
    """What starts processes by forking one that has imported torch and this package, and has done nothing else.

    There is one per process that asks. It starts with the first process, and ends with the one that asked.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tpkernels", "tpkernels.sharding", __name__])
    return context


class WorkerPool:
    """`nproc` rank processes with a gloo default group, one thread each, kept between calls.

    pin: give each rank a core of its own (for timings; needs `nproc` cores).
    group_timeout: seconds of the default group's collectives.
    forked: start ranks in milliseconds (:func:`fork_server`) instead of new interpreters in seconds. What modules read
    from the environment while they are imported, as Triton does, is then what it was when the first such pool started.
    environment: variables that the ranks have besides those of this process.

    Not thread-safe. Use it as a context manager or call `close`; workers also die with this process.
    """

    def __init__(
        self,
        nproc: int,
        *,
        group_timeout: float = GROUP_TIMEOUT_S,
        pin: bool = False,
        forked: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        check_nproc(nproc)
        self.nproc = nproc
        self._group_timeout = group_timeout
        self._pin = pin
        self._context = fork_server() if forked else None
        self._environment = dict(environment or {})
        self._team: RankTeam | None = None
        self._generation = 0
        self._threads = 0

    @property
    def running(self) -> bool:
        return self._team is not None

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while the pool is down."""
        return [rank.process.pid or 0 for rank in self._team.ranks] if self._team else []

    @overload
    def run(self, fn: Callable[..., T], *args: object, timeout: float = ..., grace: float = ...) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: object,
        timeout: float = ...,
        grace: float = ...,
        return_exceptions: Literal[True],
    ) -> list[T | BaseException]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *args: object,
        timeout: float = CALL_TIMEOUT_S,
        grace: float = 5.0,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Run `fn(*args)` on every rank and return the results by rank.

        timeout: seconds for the call. grace: seconds that the survivors have left once a worker has died.
        return_exceptions: put a rank's exception (`RankDied` for a dead worker) in its place in the list.

        Raises `RanksFailed`, caused by the first failing rank's exception; past the deadline in either mode.
        """
        call = pack_call(fn, args)
        return self._run(fn, [call] * self.nproc, timeout, grace, return_exceptions)

    def run_each(
        self,
        fn: Callable[..., Any],
        args_by_rank: Sequence[Sequence[object]],
        *,
        timeout: float = CALL_TIMEOUT_S,
        grace: float = 5.0,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Like `run`, with arguments of its own for each rank: rank r runs `fn(*args_by_rank[r])`."""
        if len(args_by_rank) != self.nproc:
            raise ValueError(f"args_by_rank has {len(args_by_rank)} entries; expected one per rank ({self.nproc})")
        calls = [pack_call(fn, args) for args in args_by_rank]
        return self._run(fn, calls, timeout, grace, return_exceptions)

    def renew(self) -> None:
        """Make the default group anew on every rank (done by itself after a call in which a rank raised)."""
        team = self._started()
        self._generation += 1
        shared = (self.nproc, team.store.port, self._generation, self._group_timeout)
        calls = [pack_call(_make_default_group, (rank, *shared)) for rank in range(self.nproc)]
        deadline = time.monotonic() + 2 * self._group_timeout
        outcome = team.call(calls, deadline=deadline, grace=1.0, grace_after_raise=True)
        if outcome.failures:
            self.close()
            raise RanksFailed(f"making the default group of {self.nproc} ranks", outcome.failures)
        self._threads = max(pickle.loads(value) for value in outcome.values.values())

    def close(self) -> None:
        """Kill the workers. The next call starts new ones."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> RankTeam:
        if self._team is not None and any(rank.has_ended() for rank in self._team.ranks):
            self.close()  # a worker died between calls
        if self._team is None:
            with children_inherit(self._environment):
                self._team = RankTeam(
                    self.nproc, pin=self._pin, exit_on_failure=False, num_threads=1, context=self._context
                )
            self._generation = 0
            self.renew()
        return self._team

    def _run(
        self, fn: Callable[..., Any], calls: list[bytes], timeout: float, grace: float, return_exceptions: bool
    ) -> list[Any]:
        team = self._started()
        packed = [pack_call(_run_seeded, (call,)) for call in calls]
        try:
            outcome = team.call(packed, deadline=time.monotonic() + timeout, grace=grace, grace_after_raise=False)
        except BaseException:
            self.close()  # answers of this call would otherwise be taken for those of the next
            raise
        self._repair(team, outcome)
        stuck = any(isinstance(failure.exception, RankStuck) for failure in outcome.failures)
        if outcome.failures and (stuck or not return_exceptions):
            what = f"{getattr(fn, '__qualname__', fn)!s} on {self.nproc} ranks"
            raise RanksFailed(what, outcome.failures) from outcome.failures[0].exception
        answers: dict[int, Any] = {rank: pickle.loads(value) for rank, value in outcome.values.items()}
        results = {rank: value for rank, (value, _) in answers.items()}
        if not outcome.failures and max(threads for _, threads in answers.values()) > self._threads + MOST_THREADS:
            self.renew()
        for failure in outcome.failures:
            failure.exception.add_note(failure.details)
            results[failure.rank] = failure.exception
        return [results[rank] for rank in range(self.nproc)]

    def _repair(self, team: RankTeam, outcome: Outcome) -> None:
        if any(not failure.answered for failure in outcome.failures):
            self.close()
        elif outcome.failures:
            try:
                self.renew()
            except LaunchError:
                self.close()  # the next call starts new workers; the failure of this call is what the caller needs


def _make_default_group(rank: int, world_size: int, port: int, generation: int, timeout_s: float) -> int:
    """How many threads there are then."""
    if dist.is_initialized():
        dist.destroy_process_group()
        if _count_threads() > MOST_THREADS:
            _let_go_of_groups()
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(MASTER_ADDR, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo",
        # Keys of an earlier generation hold addresses of connections that are gone.
        store=dist.PrefixStore(f"generation{generation}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return _count_threads()


def _let_go_of_groups() -> None:
    """End the threads of groups, all of which were destroyed: meshes hold them, and caches of torch's the meshes."""
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    for item in gc.get_referrers(DeviceMesh):
        if type(item) is DeviceMesh:  # some caches have no other end
            item._pg_registry.clear()
    for generation in (1, 2):  # cycles hold others, most often new ones; to look at all takes a third of a second
        if _count_threads() > MOST_THREADS:
            gc.collect(generation)


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _run_seeded(call: bytes) -> tuple[object, int]:
    """What the function returns, and how many threads there are now."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    fn, args = pickle.loads(call)
    value = fn(*args)
    return value, _count_threads()


class Pools:
    """Pools by world size, started when first asked for. At most `limit` are alive: the oldest used makes room."""

    def __init__(self, *, limit: int = 3, forked: bool = False, environment: Mapping[str, str] | None = None) -> None:
        self._limit, self._forked, self._environment = limit, forked, environment
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, nproc: int) -> WorkerPool:
        pool = self._pools.pop(nproc, None) or WorkerPool(nproc, forked=self._forked, environment=self._environment)
        self._pools[nproc] = pool  # now the most recently used
        for oldest in list(self._pools)[: -self._limit]:
            self._pools.pop(oldest).close()
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
