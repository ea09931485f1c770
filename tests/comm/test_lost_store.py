"""A store that does not answer any more, because its host is stopped or cut off without a word: no rank waits long."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability.crew import Crew, Link, Raised, caught, group_of
from tpkernels.comm import agreement, bounded_store, presence
from tpkernels.comm.bounded_store import BoundedStore, StoreLost, StoreSilent
from tpkernels.comm.groups import resolve
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import PeerLost
from tpkernels.measure import links, netlab
from tpkernels.testing.spawn import MASTER_ADDR

SETTLE_S = 40.0
TIMEOUT_S = 2.0
HOST = 0

CALLS: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    # the kinds of calls that were made before, and the one that is made when the store is lost
    "known, over gloo": (("chunked",), lambda g: _matmul(g, "chunked")),
    "known, in shared memory": (("shared_memory",), lambda g: _matmul(g, "shared_memory")),
    "new": (("chunked",), lambda g: tpk.all_reduce(torch.ones(3, 5), g)),
    "first": ((), lambda g: _matmul(g, "chunked")),
}


def _matmul(group: Any, implementation: str) -> torch.Tensor:
    return tpk.all_gather_matmul(torch.ones(4, 8), torch.ones(5, 8), group, implementation=implementation)


def _meet_at_rank_0(link: Link | None, rank: int, size: int, address: str = MASTER_ADDR) -> None:
    """Make the default group anew, with a store that rank 0 serves, as without torchrun's agent."""
    meeting: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    options: dict[str, Any] = {"is_master": rank == HOST, "wait_for_workers": False, "timeout": timedelta(seconds=60)}
    if rank == HOST:
        store = dist.TCPStore(address, 0, **options)  # type: ignore[attr-defined]
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore(address, int(meeting.get("port")), **options)  # type: ignore[attr-defined]
    dist.destroy_process_group()
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _prepared(without: str = "nothing") -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """A group for each kind of call, on which all went well so far."""
    groups = []
    for name, (before, call) in ((name, one) for name, one in CALLS.items() if without not in name):
        group = group_of(timeout=TIMEOUT_S)
        for implementation in before:
            _matmul(group, implementation)
        groups.append((name, group, call))
    return groups


def _lose_the_host(link: Link) -> list[tuple[str, Raised | None, float, int | None]] | None:
    _meet_at_rank_0(link, link.rank, link.size)
    groups = _prepared()
    dist.barrier()
    link.say("ready")
    if link.rank == HOST:
        time.sleep(2 * SETTLE_S)
        return None
    link.hear(SETTLE_S)
    found = []
    for name, group, call in groups:
        start = time.monotonic()
        error, at = caught(lambda call=call, group=group: call(group))
        again, _ = caught(lambda group=group: _matmul(group, "chunked"))
        assert again is not None and again.kind == "GroupPoisoned", again
        found.append((name, error, at - start, resolve(group).store_host))
    return found


def _check(found: list[tuple[str, Raised | None, float, int | None]], rank: int, host: int | None) -> None:
    for name, error, seconds, store_host in found:
        what = f"rank {rank}, {name}: {error} after {seconds:.2f} s"
        assert error is not None and error.kind in ("PeerLost", "CollectiveTimeout"), what
        assert error.ranks == (HOST,), what
        assert f"rank {rank}" in error.text and ("all_" in error.text or "first call" in error.text), what
        limit = 1.25 if name == "first" else 1.1
        assert seconds < limit * TIMEOUT_S + 0.3, what  # the tests beside this one take their time
        assert store_host == (None if name == "first" else host), what


@pytest.mark.full("what it says about time holds alone: a step of its own in .ci/run")
@pytest.mark.gloo
def test_a_stopped_host_of_the_store_is_named_by_every_kind_of_call() -> None:
    with Crew(3, _lose_the_host, timeout=30.0, linger=True) as crew:
        crew.expect("ready", SETTLE_S)
        crew.kill(HOST, signal.SIGSTOP)
        for rank in (1, 2):
            crew.tell(rank, "go on")
        for said in crew.expect("returned", SETTLE_S, [1, 2]):
            _check(said.value, said.rank, HOST)


def _wait_for_interrupt(link: Link) -> tuple[Raised | None, float] | None:
    _meet_at_rank_0(link, link.rank, link.size)
    group = group_of(timeout=60.0)
    _matmul(group, "chunked")
    dist.barrier()
    link.say("ready")
    if link.rank == HOST:
        time.sleep(2 * SETTLE_S)
        return None
    link.hear(SETTLE_S)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of launch() die of it
    link.say("waits")
    return caught(lambda: tpk.all_reduce(torch.ones(3, 5), group))


@pytest.mark.gloo
def test_an_interrupt_ends_a_wait_for_a_store_that_is_stopped() -> None:
    with Crew(2, _wait_for_interrupt, timeout=30.0, linger=True) as crew:
        crew.expect("ready", SETTLE_S)
        crew.kill(HOST, signal.SIGSTOP)
        crew.tell(1, "go on")
        crew.expect("waits", SETTLE_S, [1])
        time.sleep(0.5)
        sent = crew.kill(1, signal.SIGINT)
        (said,) = crew.expect("returned", SETTLE_S, [1])
    error, at = said.value
    assert error is not None and error.kind == "KeyboardInterrupt", error
    assert at - sent < 0.7, at - sent  # 0.05 s of it: the peers could not be told


@pytest.mark.cpu
def test_an_error_of_its_own_waits_less_for_the_store_than_one_that_blames_others() -> None:
    waits: list[float] = []
    store: Any = SimpleNamespace(post=lambda notes, wait: waits.append(wait))
    group: Any = SimpleNamespace(rank=1, timeout=60.0, visits=(1, 1))
    for blamed in (1, 0):
        presence.tell(group, PeerLost("KeyboardInterrupt()", ranks=(blamed,)), store)
    assert waits == [0.05, 0.5]


def _cut_off() -> list[tuple[str, Raised | None, float, int | None]] | None:
    """Rank 0 serves the store and its link goes down without a word."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    _meet_at_rank_0(None, rank, size, links.host_address(HOST))
    groups = _prepared(without="shared memory")
    dist.barrier()
    if rank == HOST:
        time.sleep(0.2)
        subprocess.run(["ip", "link", "set", links.HOST_INTERFACE, "down"], check=True)
        time.sleep(5 * TIMEOUT_S)
        return None
    time.sleep(0.5)
    found = []
    for name, group, call in groups:
        start = time.monotonic()
        error, at = caught(lambda call=call, group=group: call(group))
        found.append((name, error, at - start, resolve(group).store_host))
    return found


class _Slow:
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        self.open, self.may_connect = True, False
        self.sets: list[str] = []

    def check(self, keys: list[str]) -> bool:
        while not self.open:
            time.sleep(0.005)
        return True

    def set(self, key: str, value: str) -> None:
        self.check([key])
        self.sets.append(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        raise RuntimeError("connection reset by peer")

    def clone(self) -> _Slow:
        while not self.may_connect:
            time.sleep(0.005)
        return _Slow()


@pytest.mark.cpu
def test_requests_end_and_are_not_repeated_while_one_is_unanswered() -> None:
    slow = _Slow()
    store = BoundedStore(slow, 5.0)
    assert store.check(["a"]) and not store.is_silent
    slow.open = False
    start = time.monotonic()
    with pytest.raises(StoreLost, match=r"did not answer within 0\.05 s"):
        store.within(0.05).check(["a"])
    assert time.monotonic() - start < 0.5 and store.is_silent
    start, threads = time.monotonic(), len(bounded_store._idle)
    for _ in range(20):
        with pytest.raises(StoreLost, match="owes an earlier answer"):
            store.within(0.05).check(["b"])
    with pytest.raises(StoreLost):
        store.post(lambda client: {"note": "", "alarm": ""}, wait=5.0)
    assert time.monotonic() - start < 0.5 and threads - len(bounded_store._idle) <= 1
    with pytest.raises(StoreLost, match="did not answer"):
        store.within(0.05).check(["a"])  # the same question waits for the same answer
    slow.open = True
    deadline = time.monotonic() + 5.0
    while (store.is_silent or slow.sets != ["note", "alarm"]) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert slow.sets == ["note", "alarm"], "what was posted to a silent store arrives when it answers again"
    assert store.check(["a"])
    with pytest.raises(StoreLost, match="connection reset by peer") as caught_:
        store.texts(["a"])
    assert isinstance(caught_.value, TransportFailure)


@pytest.mark.cpu
def test_a_request_waits_for_the_answer_to_an_earlier_one_as_long_as_it_has_time() -> None:
    """It failed at once, and a store that had stopped for a moment was called lost."""
    slow = _Slow()
    slow.open = False
    store = BoundedStore(slow, 5.0)
    with pytest.raises(StoreLost, match="did not answer"):
        store.within(0.02).check(["a"])
    timer = threading.Timer(0.2, setattr, (slow, "open", True))
    timer.start()
    assert store.check(["b"])
    timer.join()
    slow.open = False
    with pytest.raises(StoreLost, match="did not answer"):
        store.within(0.02).check(["a"])
    start = time.monotonic()
    for _ in range(5):
        with pytest.raises(StoreLost, match="owes an earlier answer"):
            store.within(0.3).check(["b"])
    assert time.monotonic() - start < 1.0, "of many requests to a lost store only the first one waits"
    slow.open = True


class _Broken:
    """c10d's client when the connection has ended: the first request says so, the next one may last for seconds."""

    asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        if self.asked > 1:
            time.sleep(0.5)
        raise dist.DistNetworkError("broken pipe")


@pytest.mark.cpu
def test_a_connection_that_has_failed_is_not_asked_again() -> None:
    """A rank of a lost store raised after 1.5 time-outs."""
    broken = _Broken()
    store = BoundedStore(broken, 5.0)
    for _ in range(3):
        with pytest.raises(StoreLost, match="broken pipe") as raised:
            store.within(0.2).check(["a"])
        assert not isinstance(raised.value, StoreSilent)
    assert broken.asked == 1 and not store.is_silent


class _FarAway:
    """A store that takes a while for each answer."""

    def check(self, keys: list[str]) -> bool:
        time.sleep(0.1)
        return True


@pytest.mark.cpu
def test_short_looks_see_what_a_store_that_is_far_away_answers() -> None:
    """Each look dropped the answer to the last one: ranks waited for the whole time-out, and called the store lost."""
    store, answers = BoundedStore(_FarAway(), 5.0).within(0.02), []
    start = time.monotonic()
    while not answers and time.monotonic() < start + 5.0:
        with suppress(StoreLost):
            answers.append(store.check(["all"]))
    assert answers == [True] and time.monotonic() - start < 2.0


class _JustLate:
    """A client whose answer comes between the end of its time and the next question: it is not silent any more."""

    is_silent = False

    def within(self, limit: float) -> _JustLate:
        return self

    def check(self, keys: list[str]) -> bool:
        raise StoreSilent("the group's store did not answer within 0.02 s")


@pytest.mark.cpu
def test_a_look_that_is_answered_just_too_late_fails_no_call() -> None:
    """Ranks of a busy machine said that every rank was alive, and that the store did not answer within 0.02 s."""
    group: Any = SimpleNamespace(control=_JustLate())
    assert not agreement._is_there(group, "all")


@pytest.mark.cpu
def test_another_thread_gets_its_own_connection_when_the_first_is_taken_and_not_before() -> None:
    """To connect may take seconds, and c10d may wait on the first connection for minutes."""
    slow = _Slow()
    second = BoundedStore(slow, 5.0).second(limit=0.05)
    assert second.check(["a"]) and second._client.store is slow
    slow.open = False
    for _ in range(2):
        with pytest.raises(StoreLost):
            second.check(["a"])
    assert second._client.store is slow, "that connection is not there yet"
    slow.may_connect = True
    deadline = time.monotonic() + 5.0
    while second.is_silent and time.monotonic() < deadline:
        time.sleep(0.005)
        with suppress(StoreLost):
            assert second.check(["a"])
    assert second._client.store is not slow
    slow.open = True


@pytest.mark.full("what it says about time holds alone: a step of its own in .ci/run")
@pytest.mark.usefixtures("forked")
@pytest.mark.netns
def test_a_host_of_the_store_that_is_cut_off_is_named() -> None:
    results = netlab.run_in_netlab(_cut_off, 3, timeout=60)
    for rank in (1, 2):
        _check(results[rank], rank, HOST)
