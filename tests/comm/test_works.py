"""Operations that do not end on a device: whoever made the call hears why, at its next call, and nothing hangs.

NCCL is not here: the ranks run on a stand-in (:mod:`tests.comm.fake_nccl`).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.comm.fake_nccl import COMM_ERROR, SUCCESS, TIMEOUT, FakeNccl, FakeWork, new_group
from tpkernels.comm import monitor, transport
from tpkernels.comm.groups import resolve
from tpkernels.comm.works import Works
from tpkernels.errors import CollectiveTimeout, CommunicationError, GroupPoisoned, PeerLost
from tpkernels.launching.rank_process import RankDied
from tpkernels.testing.spawn import Pools, WorkerPool

LIMIT_S = 6.0  # of a test that measures how exactly it is kept
SHORT_S = 2.0
LONG_S = 60.0  # a time-out that no test waits for
SOON = 5.0  # measured: below 2
AT_ONCE = 0.5


def call(group: Any, rows: int = 4) -> torch.Tensor:
    """Returns while its operations are under way, so what it returns says nothing here."""
    return tpk.all_reduce(torch.ones(rows, 2), group, implementation="unfused")


def known(group: FakeNccl) -> None:
    """A first call, after which the ranks need nothing but the device for one like it."""
    call(group)
    assert group.synchronize(SOON)
    dist.barrier()


def what_later_calls_say(group: Any) -> list[BaseException | None]:
    said: list[BaseException | None] = []
    for _ in range(2):
        try:
            call(group)
            said.append(None)
        except CommunicationError as error:
            said.append(error)
    return said


# works


@pytest.mark.cpu
def test_the_results_of_works_are_those_of_c10d() -> None:
    names = torch._C._distributed_c10d.WorkResult
    assert [int(one) for one in (names.SUCCESS, names.TIMEOUT, names.COMM_ERROR)] == [SUCCESS, TIMEOUT, COMM_ERROR]


@pytest.mark.cpu
def test_what_has_ended_is_forgotten_with_the_next_operation_and_what_is_stuck_stays() -> None:
    works, made = Works(), [FakeWork() for _ in range(5)]
    for number, work in enumerate(made):
        works.add(number, "op", work)
    assert len(works) == 5
    for work in (made[0], made[1], made[3]):
        work.end()
    works.add(5, "op", FakeWork())
    oldest = works.oldest()
    assert len(works) == 4 and oldest is not None and oldest.work is made[2]
    assert oldest.failure() is None and not oldest.has_timed_out()


@pytest.mark.cpu
@pytest.mark.parametrize(("result", "failed", "timed_out"), [(TIMEOUT, False, True), (COMM_ERROR, True, False)])
def test_what_has_failed_is_not_forgotten(result: int, failed: bool, timed_out: bool) -> None:
    works, work = Works(), FakeWork()
    works.add(1, "op", work)
    work.words = RuntimeError("remote process exited")
    work.end(result)
    oldest = works.oldest()
    assert oldest is not None and oldest.has_timed_out() == timed_out
    assert (oldest.failure() == "the operation failed on the device: remote process exited") == failed


@pytest.mark.cpu
def test_a_torch_that_cannot_say_how_an_operation_failed_is_no_further_failure() -> None:
    works, work = Works(), FakeWork()
    works.add(1, "op", work)
    work.end(COMM_ERROR)
    oldest = works.oldest()
    assert oldest is not None
    with mock.patch.object(FakeWork, "exception", side_effect=TypeError("Unregistered type : exception_ptr")):
        assert "see the log of ProcessGroupNCCL" in str(oldest.failure())


# ranks


def bounded_by_what_is_under_way(calls: int) -> tuple[int, int, int]:
    """Works that are kept while the device is held up, and after it has ended and one more call; those made."""
    with new_group(LONG_S) as group:
        known(group)
        works = resolve(group).works
        assert works is not None
        if dist.get_rank() == 0:
            time.sleep(AT_ONCE)  # the device of the other rank waits for us, and its host runs ahead
        for _ in range(calls):
            call(group)
        ahead = len(works)
        assert group.synchronize(SOON)
        call(group)
        assert group.synchronize(SOON)
        deadline = time.monotonic() + SOON  # the monitor looks every monitor.PERIOD; on a busy machine later
        while (alive := sum(reference() is not None for reference in group.works)) and time.monotonic() < deadline:
            time.sleep(monitor.PERIOD / 4)
        assert resolve(group).verdict is None
        return ahead, alive, len(group.works)


@pytest.mark.gloo
def test_completed_works_are_released(ranks: Pools) -> None:
    calls = 100
    (_, kept, _), (ahead, kept_there, made) = ranks(2).run(bounded_by_what_is_under_way, calls)
    assert kept == kept_there == 0 and made > calls
    assert ahead == calls, "one of the ranks was to run ahead, otherwise this shows nothing"


def does_not_come(absent: int, limit: float, watched: bool) -> tuple[list[BaseException | None], float, float, bool]:
    """Later calls' errors; the seconds that the call took, and its operations; whether the device came free."""
    with new_group(limit) as group:
        known(group)
        if not watched:
            resolve(group).works = None
        said: list[BaseException | None] = []
        start = returned = took = time.monotonic()
        ended = True
        if dist.get_rank() != absent:
            call(group)
            returned = time.monotonic()
            ended = group.synchronize(1.5 * limit)
            took = time.monotonic()
            said = what_later_calls_say(group) if ended else []
        dist.barrier()
        return said, returned - start, took - start, ended


@pytest.mark.gloo
def test_a_rank_that_does_not_come_is_named_within_the_time_out(ranks: Pools) -> None:
    results = ranks(3).run(does_not_come, 1, LIMIT_S, True)
    for rank in (0, 2):
        (error, again), returned, took, ended = results[rank]
        assert ended and returned < AT_ONCE, "the wait of a call held the host up: this is not NCCL"
        assert type(error) is CollectiveTimeout and error.ranks == (1,), error
        assert f"rank {rank}, call 2 on group" in str(error) and "(all_reduce(" in str(error)
        assert "rank(s) [1] did not come to this call" in str(error)
        assert took < 1.1 * LIMIT_S
        assert type(again) is GroupPoisoned


@pytest.mark.gloo
def test_without_the_watch_the_device_stays_stuck(ranks: Pools) -> None:
    """What the test above would see if nobody looked at the works."""
    errors, _, _, ended = ranks(2).run(does_not_come, 1, SHORT_S, False)[0]
    assert not ended and errors == []


def all_come_and_it_sticks() -> tuple[BaseException | None, float]:
    with new_group(LIMIT_S) as group:
        known(group)
        group.stuck = True
        start = time.monotonic()
        call(group)
        assert group.synchronize(2 * LIMIT_S)
        took = time.monotonic() - start
        return what_later_calls_say(group)[0], took


@pytest.mark.gloo
def test_an_operation_that_never_ends_times_out_on_all_ranks(ranks: Pools) -> None:
    for rank, (error, took) in enumerate(ranks(2).run(all_come_and_it_sticks)):
        assert type(error) is CollectiveTimeout and took < 1.1 * LIMIT_S, (error, took)
        assert "call 2 on group" in str(error) and "all_reduce(" in str(error)
        first = "every rank is alive within" in str(error)
        assert first or f"rank {1 - rank} failed first" in str(error), error


def it_fails(text: str) -> tuple[BaseException | None, float]:
    with new_group(LONG_S) as group:
        known(group)
        group.fails_with = text
        start = time.monotonic()
        call(group)
        while resolve(group).verdict is None and time.monotonic() - start < 2 * SOON:
            time.sleep(0.01)
        took = time.monotonic() - start
        return what_later_calls_say(group)[0], took


@pytest.mark.gloo
def test_an_operation_that_fails_is_an_error_in_its_words(ranks: Pools) -> None:
    for error, took in ranks(2).run(it_fails, "NCCL error: unhandled system error"):
        assert type(error) is PeerLost and took < SOON, (error, took)
        assert "call 2 on group" in str(error) and "unhandled system error" in str(error)


def fails_and_makes_no_further_call(unlucky: int) -> tuple[BaseException | None, float]:
    """What the other rank says, whose operation waits on the device for one that failed there; and after how long."""
    with new_group(LONG_S) as group:
        known(group)
        error, start = None, time.monotonic()
        if dist.get_rank() == unlucky:
            group.fails_with = "NCCL error: unhandled system error"
            call(group)
        else:
            call(group)
            group.synchronize(2 * SOON)
            error = what_later_calls_say(group)[0]
        took = time.monotonic() - start
        dist.barrier()
        return error, took


@pytest.mark.gloo
def test_a_rank_whose_host_is_elsewhere_tells_its_peers_of_a_failure_on_its_device(ranks: Pools) -> None:
    error, took = ranks(2).run(fails_and_makes_no_further_call, 1)[0]
    assert type(error) is PeerLost and error.ranks == (1,) and took < SOON, (error, took)
    assert "rank 1 failed first" in str(error) and "unhandled system error" in str(error), error


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What the monitor says to a program that makes no further call."""
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(monitor.__name__)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def dies(victim: int) -> tuple[list[BaseException | None], float, int, list[str]]:
    """A survivor's errors, the seconds until its device was free, how often it was aborted, and what was logged."""
    with new_group(LONG_S) as group, heard() as lines:
        known(group)
        if dist.get_rank() == victim:
            die()
        start = time.monotonic()
        call(group)
        assert group.synchronize(2 * SOON), "the device is stuck for good"
        said = what_later_calls_say(group)
        took = time.monotonic() - start
        time.sleep(6 * monitor.PERIOD)
        return said, took, len(group.aborts), lines


@pytest.fixture
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    pools: list[WorkerPool] = []

    def start(nproc: int) -> WorkerPool:
        pools.append(WorkerPool(nproc, group_timeout=20.0, forked=True))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


def check_lost(results: Sequence[Any], victim: int) -> None:
    for rank, result in enumerate(results):
        if rank == victim:
            assert isinstance(result, RankDied), result
            continue
        assert not isinstance(result, BaseException), f"rank {rank}: {result!r}"
        (error, again), took, _, lines = result
        assert len(lines) == 1 and str(error) in lines[0] and "is void" in lines[0], lines
        assert type(error) is PeerLost and error.ranks == (victim,), f"rank {rank}: {error!r}"
        assert f"rank(s) [{victim}] died" in str(error), error
        assert type(again) is GroupPoisoned and took < SOON, (again, took)


@pytest.mark.sample(1)
@pytest.mark.gloo
@pytest.mark.parametrize(("world", "victim"), [(2, 0), (3, 1)])
def test_survivors_of_a_killed_rank_raise_its_name_and_live(workers: Any, world: int, victim: int) -> None:
    results = workers(world).run(dies, victim, return_exceptions=True)
    check_lost(results, victim)
    for result in results[:victim] + results[victim + 1 :]:
        assert result[2] == 1, "the communicator was to be aborted once"
        assert "call 2 on group" in str(result[0][0]) and "all_reduce(" in str(result[0][0])


def dies_before_the_first_call(victim: int) -> tuple[BaseException | None, float, int]:
    """A survivor's error, when it came, and the operations that it had begun on the device by then."""
    with new_group(SHORT_S) as group:
        dist.barrier()
        if dist.get_rank() == victim:
            die()
        start = time.monotonic()
        return what_later_calls_say(group)[0], time.monotonic() - start, len(group.works)


@pytest.mark.gloo
def test_a_rank_that_never_came_is_not_waited_for_on_the_device(workers: Any) -> None:
    """NCCL's first operation would wait for it for ever; that it is dead nobody can see, it has not said who it is."""
    for error, took, begun in workers(3).run(dies_before_the_first_call, 2, return_exceptions=True)[:2]:
        assert type(error) is PeerLost and error.ranks == (2,) and "no word from rank 2" in str(error), error
        assert took < SHORT_S + SOON and begun == 0


def cannot_be_aborted() -> tuple[BaseException | None, list[str]]:
    with new_group(1.0) as group, heard() as lines:
        known(group)
        group.stuck = True
        with mock.patch.object(FakeNccl, "abort", side_effect=RuntimeError("abort did not finish")):
            call(group)
            assert not group.synchronize(2.0)
        return what_later_calls_say(group)[0], lines


@pytest.mark.gloo
def test_an_abort_that_fails_is_said_and_the_next_call_raises_all_the_same(ranks: Pools) -> None:
    for error, lines in ranks(2).run(cannot_be_aborted):
        assert type(error) is CollectiveTimeout
        assert any("could not be aborted" in line and "abort did not finish" in line for line in lines), lines


def waits_for_the_device_inside_a_call(victim: int) -> tuple[BaseException | None, float]:
    """As a call does that reads what it received; the abort wakes it, and what it finds then is void."""
    with new_group(LONG_S) as group:
        known(group)
        dist.barrier()
        if dist.get_rank() == victim:
            die()
        original = transport.wait_all

        def and_read(transfers: Any) -> None:
            original(transfers)
            group.synchronize(2 * SOON)

        start = time.monotonic()
        with mock.patch("tpkernels.backends.point_to_point.exchange.wait_all", and_read):
            try:
                call(group)
            except CommunicationError as error:
                return error, time.monotonic() - start
        return None, time.monotonic() - start


@pytest.mark.gloo
def test_a_call_that_the_abort_wakes_does_not_return(workers: Any) -> None:
    error, took = workers(2).run(waits_for_the_device_inside_a_call, 1, return_exceptions=True)[0]
    assert type(error) is PeerLost and error.ranks == (1,) and took < SOON, (error, took)


def fails_on_the_host(victim: int, looks: bool) -> tuple[BaseException | None, bool]:
    """One rank has begun a call on the device and fails in the next; the other one comes to neither."""
    with new_group(LONG_S) as group:
        known(group)
        error, free = None, True
        if dist.get_rank() == victim:
            if not looks:
                resolve(group).works = None
            call(group)
            posting = "tpkernels.backends.point_to_point.exchange.exchange"
            out_of_memory = mock.patch(posting, side_effect=MemoryError("out of memory"))
            with out_of_memory, pytest.raises(MemoryError):
                call(group)
            error, free = what_later_calls_say(group)[0], group.synchronize(3.0)
        dist.barrier()
        return error, free


@pytest.mark.gloo
@pytest.mark.parametrize("looks", [True, False])
def test_what_a_failed_rank_has_begun_does_not_keep_its_device(ranks: Pools, looks: bool) -> None:
    error, free = ranks(2).run(fails_on_the_host, 1, looks)[1]
    assert type(error) is GroupPoisoned and free == looks, "without a look at the works, it would stay"


def captured(capturing: bool) -> tuple[bool, bool, BaseException | None]:
    """Whether a call that never ends is looked after; whether it was ended for being late; what a later call says."""
    with new_group(1.0) as group:
        known(group)
        group.stuck = True
        graph = mock.patch.object(transport, "_capturing", lambda device: capturing)
        with graph:
            call(group)
        works = resolve(group).works
        assert works is not None
        watched = works.oldest() is not None
        ended = group.synchronize(2.0)
        with graph:
            return watched, ended, what_later_calls_say(group)[0]


@pytest.mark.gloo
def test_what_is_captured_in_a_graph_is_not_watched(ranks: Pools) -> None:
    for watched, ended, error in ranks(2).run(captured, True):
        assert not watched and not ended and error is None
    for watched, ended, error in ranks(2).run(captured, False):
        assert watched and ended and type(error) is CollectiveTimeout
