"""Persistent ranks: what they return, and that no failure of theirs costs more than its own call."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.launching.rank_process import RankDied, RankStuck
from tpkernels.testing.spawn import MOST_THREADS, Pools, RanksFailed, WorkerPool

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(3, forked=True) as workers:
        yield workers


def reduce_sum(x: float) -> float:
    total = torch.tensor([x + dist.get_rank()])
    dist.all_reduce(total)
    return total.item()


def rank_and_pid() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def random_numbers() -> tuple[float, float]:
    return random.random(), torch.rand(1).item()


def raise_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise KeyError(f"from rank {rank}")
    return dist.get_rank()


def die_on(rank: int, sleep: float) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(sleep)
    return "survived"


def send_and_fail(value: float) -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.tensor([value]), 1, tag=7)
        time.sleep(0.2)
    raise ValueError("after the message was sent")


def send_and_receive(value: float) -> float:
    message = torch.tensor([value])
    if dist.get_rank() == 0:
        dist.send(message, 1, tag=7)
    elif dist.get_rank() == 1:
        message.zero_()
        dist.recv(message, 0, tag=7)
    return message.item()


def return_a_lambda() -> object:
    return lambda: None


def test_calls_run_on_every_rank_of_the_same_processes(pool: WorkerPool) -> None:
    assert pool.run(reduce_sum, 1.0) == [6.0, 6.0, 6.0]
    first = pool.run(rank_and_pid)
    assert [rank for rank, _ in first] == [0, 1, 2]
    assert [pid for _, pid in first] == pool.pids
    assert pool.run(rank_and_pid) == first


def test_each_rank_can_have_arguments_of_its_own(pool: WorkerPool) -> None:
    assert pool.run_each(reduce_sum, [(1.0,), (10.0,), (100.0,)]) == [114.0] * 3
    with pytest.raises(ValueError, match=r"args_by_rank has 2 entries; expected one per rank \(3\)"):
        pool.run_each(reduce_sum, [(1.0,), (2.0,)])


def test_random_numbers_do_not_depend_on_earlier_calls(pool: WorkerPool) -> None:
    assert len({*pool.run(random_numbers), *pool.run(random_numbers)}) == 1


def test_an_exception_keeps_its_type_and_the_pool_its_workers(pool: WorkerPool) -> None:
    pids = [pid for _, pid in pool.run(rank_and_pid)]
    with pytest.raises(RanksFailed, match="raise_on on 3 ranks: rank 1 raised KeyError: 'from rank 1'") as caught:
        pool.run(raise_on, 1)
    assert [type(error) for error in caught.value.exceptions.values()] == [KeyError]
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in raise_on" in str(caught.value)
    assert pool.run(reduce_sum, 1.0) == [6.0, 6.0, 6.0]
    assert pool.pids == pids


def test_exceptions_can_be_returned_in_their_ranks_places(pool: WorkerPool) -> None:
    first, second, third = pool.run(raise_on, 2, return_exceptions=True)
    assert (first, second) == (0, 1)
    assert isinstance(third, KeyError)
    assert any("in raise_on" in note for note in third.__notes__)


def test_a_result_that_does_not_pickle_is_that_ranks_failure(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 raised .*lambda"):
        pool.run(return_a_lambda)


def test_a_message_of_a_failed_call_is_not_received_by_the_next(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed):
        pool.run(send_and_fail, 1.0)
    assert pool.run(send_and_receive, 2.0)[1] == 2.0


def test_a_dead_worker_is_reported_while_the_others_are_busy(pool: WorkerPool) -> None:
    pool.run(rank_and_pid)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pool.run(die_on, 1, 50.0, grace=0.2)
    assert time.monotonic() - start < 20
    assert "rank 1 died by SIGKILL (signal 9) before it returned; rank 0 was still running" in str(caught.value)
    assert not pool.running
    assert pool.run(reduce_sum, 1.0) == [6.0, 6.0, 6.0]


def test_survivors_of_a_dead_worker_can_still_answer(pool: WorkerPool) -> None:
    results = pool.run(die_on, 0, 0.2, return_exceptions=True)
    assert isinstance(results[0], RankDied)
    assert results[1:] == ["survived", "survived"]


def test_a_worker_that_died_between_calls_is_replaced(pool: WorkerPool) -> None:
    pool.run(rank_and_pid)
    os.kill(pool.pids[2], signal.SIGKILL)
    time.sleep(0.5)
    assert pool.run(reduce_sum, 1.0) == [6.0, 6.0, 6.0]


def test_past_the_deadline_every_workers_stack_is_shown_and_the_pool_starts_again(pool: WorkerPool) -> None:
    pool.run(rank_and_pid)
    with pytest.raises(RanksFailed, match="rank 2 was still running at the deadline") as caught:
        pool.run(die_on, 99, 500.0, timeout=3.0, return_exceptions=True)
    assert [type(error) for error in caught.value.exceptions.values()] == [RankStuck] * 3
    assert all("in die_on" in failure.details for failure in caught.value.failures)
    assert pool.run(reduce_sum, 1.0) == [6.0, 6.0, 6.0]


def test_pools_are_kept_by_world_size_and_the_oldest_makes_room() -> None:
    pools = Pools(limit=2, forked=True)
    try:
        two, three = pools(2), pools(3)
        assert pools(2) is two
        assert two.run(rank_and_pid)[1][0] == 1
        pools(4)  # now the oldest is 3, then 2
        assert two.running and pools(2) is two
        assert pools(3) is not three
    finally:
        pools.close()
    assert not two.running


def test_shared_ranks_come_from_a_fixture(ranks: Pools) -> None:
    assert ranks(2).run(reduce_sum, 1.0) == [3.0, 3.0]
    assert ranks(2) is ranks(2)


def leave_groups(count: int) -> int:
    """How many groups there are after making so many more."""
    for _ in range(count):
        dist.new_group([0, 1])
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.gloo
def test_groups_that_calls_leave_behind_are_cleared_away_when_they_are_many() -> None:
    many = MOST_THREADS // 3  # each has three
    with WorkerPool(2, forked=True) as pool:
        assert pool.run(leave_groups, many) == [many + 1] * 2
        assert pool.run(leave_groups, 1) == [many + 2] * 2, "so many may stay"
        assert pool.run(leave_groups, 1) == [2, 2]


_held: list[DeviceMesh] = []


def hold_meshes(count: int) -> int:
    """How many threads there are after holding so many more meshes, as caches of torch's do."""
    for _ in range(count):
        _held.append(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"))
    return len(os.listdir("/proc/self/task"))


@pytest.mark.gloo
def test_groups_of_meshes_that_are_held_have_no_threads_after_a_renewal() -> None:
    with WorkerPool(2, forked=True) as pool:
        before = max(pool.run(hold_meshes, 1))
        assert min(pool.run(hold_meshes, 4)) >= before + 12
        assert max(pool.run(hold_meshes, 0)) <= before
