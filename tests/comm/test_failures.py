"""Ranks that die, stop or raise: the others get an error that names them, soon, and never wait longer than promised."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm import monitor
from tpkernels.comm.transport import Transfer
from tpkernels.errors import CollectiveTimeout, CommunicationError, GroupMismatch, GroupPoisoned, PeerLost
from tpkernels.launching.rank_process import RankDied
from tpkernels.testing.spawn import WorkerPool

pytestmark = pytest.mark.gloo

SOON = 5.0  # seconds; measured: below 1


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_gather": lambda g: tpk.all_gather(ones(4, 8), g, implementation="unfused"),
    "all_gather dim 1": lambda g: tpk.all_gather(ones(4, 8), g, dim=1),
    "reduce_scatter": lambda g: tpk.reduce_scatter(ones(12, 8), g, implementation="unfused"),
    "all_reduce": lambda g: tpk.all_reduce(ones(12, 8), g, implementation="unfused"),
    "all_gather_matmul": lambda g: tpk.all_gather_matmul(ones(4, 8), ones(5, 8), g, implementation="chunked"),
    "unfused": lambda g: tpk.all_gather_matmul(ones(4, 8), ones(5, 8), g, implementation="unfused"),
    "matmul_reduce_scatter": lambda g: tpk.matmul_reduce_scatter(ones(12, 8), ones(5, 8), g, implementation="chunked"),
    "matmul_all_reduce": lambda g: tpk.matmul_all_reduce(ones(12, 8), ones(5, 8), g, implementation="chunked"),
    "large": lambda g: tpk.matmul_all_reduce(ones(1200, 8), ones(512, 8), g, implementation="chunked"),
}


def attempt(group: Any, calls: Sequence[str]) -> tuple[BaseException | None, float]:
    """The first error that these calls raise, and the seconds until then."""
    start = time.monotonic()
    try:
        for name in calls:
            CALLS[name](group)
    except (RuntimeError, ValueError) as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def group_with(timeout: float) -> Any:
    return dist.new_group(timeout=timedelta(seconds=timeout))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_between_calls(victim: int, before: Sequence[str], call: str) -> tuple[BaseException | None, float]:
    group = group_with(20.0)
    for name in before:
        CALLS[name](group)
    dist.barrier()
    if dist.get_rank() == victim:
        die()
    return attempt(group, [call])


def die_inside(victim: int, call: str) -> tuple[BaseException | None, float]:
    """The victim dies when it waits for its first chunk: it has sent everything or nothing, depending on the op."""
    group = group_with(20.0)
    CALLS[call](group)
    dist.barrier()
    if dist.get_rank() == victim:
        Transfer.wait = lambda self: die()  # type: ignore[method-assign]
    return attempt(group, [call] * 3)


def check_lost(results: Sequence[Any], victim: int, seconds: float = SOON) -> None:
    for rank, result in enumerate(results):
        if rank == victim:
            assert isinstance(result, RankDied), result
            continue
        assert not isinstance(result, BaseException), f"rank {rank}: {result!r}"
        error, took = result
        assert type(error) is PeerLost, f"rank {rank}: {error!r}"
        assert error.ranks == (victim,), f"rank {rank} blames {error.ranks}: {error}"
        assert f"rank {rank}" in str(error)
        assert took < seconds, (rank, took)


@pytest.fixture
def workers() -> Any:
    """`workers(n)`: short-lived ranks of this test alone."""
    pools: list[WorkerPool] = []

    def start(nproc: int) -> WorkerPool:
        pools.append(WorkerPool(nproc, group_timeout=20.0, forked=True))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def pool_of() -> Any:
    """Ranks that are started anew only when one of them died."""
    pools: dict[int, WorkerPool] = {}
    yield lambda nproc: pools.setdefault(nproc, WorkerPool(nproc, group_timeout=20.0, forked=True))
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "all_reduce", "all_gather_matmul", "unfused"])
def test_a_peer_that_died_between_known_calls_is_named(pool_of: Any, call: str) -> None:
    check_lost(pool_of(2).run(die_between_calls, 1, [call], call, return_exceptions=True), 1)


@pytest.mark.parametrize(("world", "victim"), [(2, 0), (3, 1), (4, 2)])
def test_a_peer_that_died_before_a_new_signature_is_named(pool_of: Any, world: int, victim: int) -> None:
    results = pool_of(world).run(
        die_between_calls, victim, ["all_reduce"], "matmul_reduce_scatter", return_exceptions=True
    )
    check_lost(results, victim)


@pytest.mark.parametrize(("world", "victim"), [(2, 1), (3, 0)])
def test_a_peer_that_died_before_its_first_call_is_named(pool_of: Any, world: int, victim: int) -> None:
    check_lost(pool_of(world).run(die_between_calls, victim, [], "all_gather_matmul", return_exceptions=True), victim)


@pytest.mark.parametrize(
    ("world", "victim", "call"),
    [
        (2, 1, "all_gather_matmul"),
        (3, 0, "matmul_reduce_scatter"),
        (3, 1, "large"),
        (3, 2, "all_gather"),
        (4, 3, "matmul_all_reduce"),
    ],
)
def test_a_peer_that_dies_inside_a_call_is_named(pool_of: Any, world: int, victim: int, call: str) -> None:
    check_lost(pool_of(world).run(die_inside, victim, call, return_exceptions=True), victim)


def survivors_leave_one_by_one(victim: int) -> tuple[BaseException | None, float] | None:
    """Rank 0 notices the dead victim first and exits with its error, as a job's rank does; rank 1 comes later."""
    group = group_with(20.0)
    CALLS["all_gather_matmul"](group)
    dist.barrier()
    if dist.get_rank() == victim:
        die()
    if dist.get_rank() == 1:
        time.sleep(2.0)
    result = attempt(group, ["all_gather_matmul"])
    if dist.get_rank() == 0:
        os._exit(1)
    return result


def test_a_survivor_that_left_with_its_error_is_not_blamed(workers: Any) -> None:
    results = workers(3).run(survivors_leave_one_by_one, 2, return_exceptions=True, grace=10.0)
    error, took = results[1]
    assert type(error) is PeerLost and error.ranks == (2,), error
    assert took < SOON


# ---------------------------------------------------------------- poison


def poisoned_for_good() -> tuple[list[str], float]:
    """After a failure each later call on the group raises at once, and a new group of the survivors works."""
    group = group_with(20.0)
    CALLS["all_reduce"](group)
    dist.barrier()
    if dist.get_rank() == 2:
        die()
    first, _ = attempt(group, ["all_gather_matmul"])
    start = time.monotonic()
    kinds = [type(attempt(group, [name])[0]).__name__ for name in CALLS]
    seconds = time.monotonic() - start
    # Only this rank and the other survivor: c10d makes groups of a subset through the job's store.
    survivors = dist.new_group([0, 1], timeout=timedelta(seconds=20), use_local_synchronization=True)
    total = tpk.all_reduce(ones(2, 2), survivors)
    assert bool((total == 2).all()) and isinstance(first, PeerLost)
    return kinds, seconds


def test_a_failed_group_stays_poisoned_and_a_new_one_works(workers: Any) -> None:
    results = workers(3).run(poisoned_for_good, return_exceptions=True)
    for kinds, seconds in results[:2]:
        assert kinds == [GroupPoisoned.__name__] * len(CALLS)
        assert seconds < 1.0


# ---------------------------------------------------------------- stopped and late ranks


def stop_between_calls(victim: int, timeout: float, known: bool) -> tuple[BaseException | None, float]:
    """The victim is stopped, not dead; a survivor wakes it when its own error has come."""
    rank, pids = dist.get_rank(), [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    group = group_with(timeout)
    CALLS["all_gather_matmul" if known else "all_reduce"](group)
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    result = attempt(group, ["all_gather_matmul"])
    if rank == (victim + 1) % len(pids):
        os.kill(pids[victim], signal.SIGCONT)
    dist.barrier()
    return result


@pytest.mark.sample(3)
@pytest.mark.parametrize(("world", "victim"), [(2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_a_stopped_peer_is_named_when_the_time_is_up(pool_of: Any, world: int, victim: int, known: bool) -> None:
    timeout = 2.5
    results = pool_of(world).run(stop_between_calls, victim, timeout, known, timeout=40.0)
    for rank, (error, took) in enumerate(results):
        if rank == victim:
            assert isinstance(error, CommunicationError), f"the woken rank got {error!r}"
            continue
        assert type(error) in (CollectiveTimeout, PeerLost), f"rank {rank}: {error!r}"
        assert error.ranks == (victim,), f"rank {rank} blames {error.ranks}: {error}"
        assert f"[{victim}]" in str(error)
        assert timeout - 0.5 < took < timeout + SOON, (rank, took)


def come_too_late(victim: int) -> tuple[BaseException | None, float]:
    group = group_with(2.0)
    CALLS["all_gather_matmul"](group)
    dist.barrier()
    if dist.get_rank() == victim:
        time.sleep(6.0)
    return attempt(group, ["all_gather_matmul"])


def test_a_rank_that_comes_after_the_timeout_is_named_and_gets_an_error_itself(pool_of: Any) -> None:
    results = pool_of(3).run(come_too_late, 1)
    for rank in (0, 2):
        error, took = results[rank]
        assert type(error) is CollectiveTimeout, error
        assert error.ranks == (1,) and "did not come to this call within 2 s" in str(error), error
        assert took < 2.0 + SOON
    error, took = results[1]
    assert isinstance(error, CommunicationError) and took < SOON, (error, took)


def work_longer_than_the_monitor_is_patient() -> None:
    """A rank whose GEMM takes seconds is late, not lost."""
    group = group_with(20.0)
    for call in ("all_gather_matmul", "all_reduce", "matmul_reduce_scatter"):
        CALLS[call](group)
        for late in range(dist.get_world_size()):
            if dist.get_rank() == late:
                time.sleep(1.3)
            CALLS[call](group)


def test_being_late_within_the_timeout_is_not_an_error(pool_of: Any) -> None:
    pool_of(2).run(work_longer_than_the_monitor_is_patient)


# ---------------------------------------------------------------- ranks that raise


class Trouble(torch.autograd.Function):
    """Raises in the backward pass of one rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if dist.get_rank() == ctx.rank:
            raise KeyError("trouble in a hook")
        return grads[0], None


def raise_in_backward(victim: int) -> tuple[BaseException | None, float, BaseException | None]:
    """One rank's backward pass stops between two of ours; it goes on to another call, as a training loop might."""
    group = group_with(20.0)
    up, down = ones(8, 8).requires_grad_(), ones(8, 8).requires_grad_()
    error: BaseException | None = None
    start = time.monotonic()
    try:
        for _ in range(2):
            hidden = tpk.all_gather_matmul(ones(4, 8).requires_grad_(), up, group)
            Trouble.apply(tpk.matmul_reduce_scatter(hidden, down, group), -1).sum().backward()
        hidden = tpk.all_gather_matmul(ones(4, 8).requires_grad_(), up, group)
        tpk.matmul_reduce_scatter(Trouble.apply(hidden, victim), down, group).sum().backward()
    except (RuntimeError, KeyError) as caught:
        error = caught
    if dist.get_rank() == victim:
        late, _ = attempt(group, ["all_reduce"])
        return error, time.monotonic() - start, late
    return error, time.monotonic() - start, None


def test_a_rank_that_raises_in_backward_and_goes_on_is_found(pool_of: Any) -> None:
    results = pool_of(2).run(raise_in_backward, 1)
    error, _, late = results[1]
    assert isinstance(error, KeyError)
    assert isinstance(late, CommunicationError), late
    error, took, _ = results[0]
    assert type(error) is GroupMismatch and took < SOON, (error, took)
    assert "all_reduce(" in str(error) and "all_gather(" in str(error)


def raise_inside(victim: int) -> tuple[BaseException | None, float]:
    """One rank fails inside a backend, as it does when memory runs out."""
    group = group_with(20.0)
    CALLS["matmul_reduce_scatter"](group)
    dist.barrier()
    if dist.get_rank() == victim:
        from tpkernels.backends.point_to_point import chunked

        def fail(*_: Any) -> None:
            raise MemoryError("out of memory")

        chunked.partial_rows = fail
    start = time.monotonic()
    try:
        CALLS["matmul_reduce_scatter"](group)
    except (RuntimeError, MemoryError) as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def test_a_rank_that_fails_inside_a_call_tells_the_others(workers: Any) -> None:
    results = workers(3).run(raise_inside, 1)
    assert isinstance(results[1][0], MemoryError)
    for rank in (0, 2):
        error, took = results[rank]
        assert type(error) is PeerLost and error.ranks == (1,) and "MemoryError" in str(error), error
        assert took < SOON


# ---------------------------------------------------------------- the end of a job


def leave_while_the_peer_computes(seconds: float) -> str:
    """Rank 1 has done its part and exits; rank 0 is still computing in the same call, on chunks that have arrived."""
    group = group_with(20.0)
    CALLS["all_gather_matmul"](group)
    dist.barrier()
    if dist.get_rank() == 0:
        from tpkernels.backends.point_to_point import chunked

        original = chunked.place_rows

        def slow(*args: Any) -> None:
            time.sleep(seconds)
            original(*args)

        chunked.place_rows = slow
    y = CALLS["all_gather_matmul"](group)
    if dist.get_rank() == 1:
        os._exit(0)
    assert bool((y == 8).all())
    return "done"


def test_a_peer_that_leaves_after_its_last_call_is_not_lost(workers: Any) -> None:
    seconds = 2 * monitor.SUSPICIOUS_AFTER + 1.0
    results = workers(2).run(leave_while_the_peer_computes, seconds, return_exceptions=True, grace=15.0)
    assert results[0] == "done"
    assert isinstance(results[1], RankDied)
