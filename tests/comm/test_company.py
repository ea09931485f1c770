"""Steps of c10d in which ranks wait for each other, and one is stopped: they end in time, and with Ctrl-C, by name."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tpkernels.comm import bounded_store, company
from tpkernels.comm.bounded_store import interruptible
from tpkernels.comm.liveness import Identity
from tpkernels.errors import PeerLost

pytestmark = pytest.mark.cpu

LIMIT_S = 0.5
SOON_S = 10.0  # on a busy machine; c10d would wait for minutes


@pytest.fixture
def store() -> Iterator[Any]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]


@pytest.fixture
def stuck() -> Iterator[Callable[[], None]]:
    """A step that waits in compiled code until the test is over, and takes no signal."""
    over = threading.Event()

    def wait() -> None:
        over.wait(60.0)

    yield wait
    over.set()


def _together(work: Callable[[], object], store: Any, rank: int = 0) -> object:
    return company.together(work, "group", store, rank, 2, timedelta(seconds=LIMIT_S))


@pytest.mark.parametrize(
    ("came", "stopped", "blamed", "words"),
    [
        (True, True, (1,), r"rank\(s\) \[1\] are stopped"),
        (True, False, (), "every rank came, and none is known"),
        (False, False, (1,), r"rank\(s\) \[1\] did not come"),
    ],
)
def test_a_rank_that_is_stopped_as_the_ranks_connect_is_named_in_time(
    came: bool, stopped: bool, blamed: tuple[int, ...], words: str, store: Any, stuck: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """gloo tried five times as long as it was told to, and then the host of the store was blamed."""
    if came:
        _together(lambda: None, store, rank=1)  # and has left the step
    monkeypatch.setattr(Identity, "is_stopped", lambda who: stopped)
    start = time.monotonic()
    with pytest.raises(PeerLost, match=words) as raised:
        _together(stuck, store)
    assert raised.value.ranks == blamed and time.monotonic() - start < SOON_S


@pytest.mark.parametrize("beats", [False, True])
def test_a_rank_of_another_host_that_came_and_gives_no_sign_of_life_is_named(
    beats: bool, store: Any, stuck: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was, for /proc tells nothing of it."""
    other = company._Company(store, "group", 1, 2, LIMIT_S)
    if beats:
        threading.Thread(target=other._beat, daemon=True).start()
    monkeypatch.setattr(Identity, "is_stopped", lambda who: False)
    try:
        with pytest.raises(
            PeerLost, match="none is known" if beats else r"no sign of life from rank\(s\) \[1\]"
        ) as raised:
            _together(stuck, store)
        assert raised.value.ranks == (() if beats else (1,))
    finally:
        other._over.set()


def test_a_step_that_is_taken_again_does_not_count_who_came_before(store: Any, stuck: Callable[[], None]) -> None:
    """Rank 1 had come to the mesh of a first ``tpk.init()``, and not to that of the second."""
    for rank in (0, 1):
        _together(lambda: None, store, rank)
    with pytest.raises(PeerLost, match=r"rank\(s\) \[1\] did not come") as raised:
        _together(stuck, store)
    assert raised.value.ranks == (1,)


def test_a_rank_that_leaves_no_word_in_the_store_is_named(store: Any) -> None:
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(PeerLost, match="did not come") as raised:
        _together(lambda: store.get("address of rank 1"), store)
    assert raised.value.ranks == (1,)


def test_a_store_that_does_not_answer_either_is_named(store: Any, stuck: Callable[[], None]) -> None:
    silent = SimpleNamespace(port=store.port, set=lambda *given: None, add=lambda *given: 1, clone=stuck)
    with pytest.raises(PeerLost, match="the job's store at port"):
        _together(stuck, silent)


def test_ctrl_c_ends_the_wait_and_what_comes_of_it_later_is_undone() -> None:
    free, undone = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            interruptible(lambda: free.wait(60.0), 60.0, undone.set)
        assert not undone.is_set()
        free.set()
        assert undone.wait(SOON_S)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ends_with", [Empty, KeyboardInterrupt])
def test_what_ends_in_the_moment_in_which_it_is_given_up_is_taken_or_undone(
    ends_with: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process group stayed after ``tpk.init()`` had raised."""
    ended, undone = threading.Event(), []

    class Answer(SimpleQueue[Any]):
        def put(self, item: Any) -> None:
            super().put(item)
            if isinstance(item, tuple):  # an answer, and no request
                ended.set()

        def get(self, timeout: float | None = None) -> Any:
            if timeout is not None and ended.wait(60.0):
                raise ends_with
            return super().get()

    monkeypatch.setattr(bounded_store, "SimpleQueue", Answer)
    monkeypatch.setattr(bounded_store, "_idle", [])  # workers of other tests have queues of their own
    if ends_with is Empty:
        assert interruptible(lambda: "made", 60.0, lambda: undone.append(True)) == "made" and undone == []
    else:
        with pytest.raises(ends_with):
            interruptible(lambda: "made", 60.0, lambda: undone.append(True))
        assert undone == [True]
