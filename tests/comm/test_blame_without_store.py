"""Whom a rank blames that the store does not answer any more: not its host, if that has only left like others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.three_hosts import HOST, MINE, OTHER, TIMEOUT_S, LostStore, group_of_three
from tpkernels.backends.shared_memory import rendezvous, segments
from tpkernels.comm import meeting, presence
from tpkernels.comm.blame import blame, diagnose
from tpkernels.comm.bounded_store import BoundedStore, StoreLost, StoreSilent
from tpkernels.comm.job_identity import JobIdentity
from tpkernels.comm.liveness import Identity
from tpkernels.comm.records import Record
from tpkernels.comm.transport import TransportFailure
from tpkernels.errors import CollectiveTimeout, PeerLost

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("listened_ago", "silent_for", "peer", "blamed"),
    [
        (0.3, TIMEOUT_S, None, OTHER),  # silent before the host left
        (0.3, 0.1, OTHER, OTHER),  # waited for in vain while the store still answered
        (TIMEOUT_S, 0.1, OTHER, HOST),  # the store has been lost for as long as the call waits
        (0.3, 0.1, None, HOST),
    ],
)
def test_the_host_of_a_lost_store_is_blamed_if_nobody_was_missing_before(
    listened_ago: float, silent_for: float, peer: int | None, blamed: int
) -> None:
    group = group_of_three(listened_ago=listened_ago, silent_for=silent_for)
    error = blame(group, 3, "all_reduce(...)", "recv timed out", TIMEOUT_S, peer=peer)
    assert error.ranks == (blamed,) and str(blamed) in str(error), error


@pytest.mark.parametrize(
    ("missed", "waited", "blamed"),
    [
        ((3, (OTHER,)), TIMEOUT_S, OTHER),  # its time was up a moment before, and it left like anybody else
        ((3, (OTHER,)), 0.5 * TIMEOUT_S, HOST),
        ((3, (HOST, OTHER)), 0.5 * TIMEOUT_S, HOST),
        ((2, (OTHER,)), TIMEOUT_S, HOST),  # of an earlier call
        ((3, ()), TIMEOUT_S, HOST),
    ],
)
def test_a_host_of_the_store_that_is_gone_is_blamed_if_nobody_was_missing_before(
    missed: tuple[int, tuple[int, ...]], waited: float, blamed: int
) -> None:
    """Rank 0 left with its error about rank 2, and took the store with it: ranks said that rank 0 died."""
    group = group_of_three(listened_ago=0.3)
    group.missed = missed
    here = SimpleNamespace(is_local=True, is_dead=lambda: False, is_stopped=lambda: False)
    group.peers = (SimpleNamespace(**{**vars(here), "is_dead": lambda: True}), here, here)
    error = blame(group, 3, "save_pretrained: digests", "broken pipe", waited, suspects=[HOST])
    assert error.ranks == (blamed,) and str(blamed) in str(error), error


def test_a_rank_that_is_stopped_is_named_beside_one_that_has_gone() -> None:
    """Rank 2 was stopped, rank 0 left with its error, and the store with it: rank 1 said that rank 0 died."""
    group = group_of_three(listened_ago=TIMEOUT_S)
    here = {"is_local": True, "is_dead": lambda: False, "is_stopped": lambda: False}
    dead, stopped = here | {"is_dead": lambda: True}, here | {"is_stopped": lambda: True}
    group.peers = tuple(SimpleNamespace(**one) for one in (dead, here, stopped))
    error = blame(group, 3, "all_reduce(...)", "recv timed out", TIMEOUT_S, peer=OTHER)
    assert error.ranks == (HOST, OTHER) and "[0] died, and rank(s) [2] are stopped" in str(error), error


def test_of_those_that_did_not_come_a_stopped_one_is_named_alone() -> None:
    """Rank 3 waited for rank 2, which was stopped, and rank 0 left with the store: rank 1 blamed ranks 2 and 3."""
    group = group_of_three(listened_ago=0.3)
    group.size, group.missed, group.visits = 4, (3, (OTHER, 3)), (1, 1, 1, 1)
    here = {"is_local": True, "is_dead": lambda: False, "is_stopped": lambda: False}
    dead, stopped = here | {"is_dead": lambda: True}, here | {"is_stopped": lambda: True}
    group.peers = tuple(SimpleNamespace(**one) for one in (dead, here, stopped, here))
    error = blame(group, 3, "all_reduce(...)", "reset by peer", TIMEOUT_S, suspects=[HOST])
    assert error.ranks == (OTHER,) and "[2] are stopped" in str(error), error


@pytest.mark.parametrize(("missed", "blamed"), [((), OTHER), ((HOST,), HOST)])
def test_a_host_that_leaves_with_the_store_as_it_is_asked_for_beats_has_not_missed_the_call(
    missed: tuple[int, ...], blamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 1 and 2 were cut off from each other; rank 0 went on, and they said that it did not come to their call."""
    asked: list[Any] = []

    def read(group: Any, store: Any) -> dict[int, str]:
        asked.append(store)
        if len(asked) > 1:
            raise StoreLost("reset")
        return {HOST: "6 4", MINE: "6 3", OTHER: "6 3"}

    signature = "all_reduce(...)"
    monkeypatch.setattr(presence, "failures", lambda *given: {})
    monkeypatch.setattr("tpkernels.comm.blame.recorded", lambda *given: {OTHER: Record(signature, {})})
    monkeypatch.setattr("tpkernels.comm.blame.told", lambda *given: {})
    monkeypatch.setattr("tpkernels.comm.blame.beats", read)
    group = group_of_three(listened_ago=0.1)
    group.missed = (3, missed)
    error = blame(group, 3, signature, "recv timed out", TIMEOUT_S, peer=OTHER)
    assert error.ranks == (blamed,) and len(asked) == 2, error


@pytest.mark.parametrize(
    ("peer", "waited", "lost", "blamed"),
    [
        (OTHER, 0.9, StoreLost("reset"), (OTHER, HOST)),
        (HOST, 0.9, StoreLost("reset"), (HOST,)),
        (OTHER, 0.9, StoreSilent("no answer"), (HOST,)),
        (OTHER, 1.0, StoreLost("reset"), (HOST,)),  # of a time-out nobody is told apart by whose connection ended it
    ],
)
def test_a_peer_is_named_whose_connection_broke_like_that_to_the_store(
    peer: int, waited: float, lost: StoreLost, blamed: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 died, rank 0 left with its error, and rank 1 said that rank 0 was lost."""

    def check(store: LostStore, keys: list[str]) -> bool:
        raise lost

    monkeypatch.setattr(LostStore, "check", check)
    group = group_of_three(listened_ago=TIMEOUT_S)
    error = blame(group, 3, "all_gather(...)", "connection reset by peer", waited * TIMEOUT_S, peer=peer)
    assert error.ranks == blamed and all(str(one) in str(error) for one in blamed), error


@pytest.mark.parametrize(
    ("host", "blamed", "looks"), [(MINE, HOST, 3), (HOST, OTHER, 0), (MINE, MINE, 0)], ids=["serves", "other", "own"]
)
def test_the_host_of_the_store_stays_until_others_have_failed_too(
    host: int, blamed: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notes go with it; nobody waits for a rank that is blamed, nor for others to hear of an error of its own."""
    said = [{}, {}, {OTHER: {}}]
    looked: list[Any] = []

    def failures(group: Any) -> Any:
        looked.append(group)
        return said[len(looked) - 1]

    monkeypatch.setattr(presence, "failures", failures)
    monkeypatch.setattr(presence, "_AWAIT_READERS", 60.0)
    group = group_of_three(listened_ago=0.1)
    group.store_host, group.co_located, group.timeout = host, False, 1e4
    presence.stay(group, PeerLost("died", ranks=(blamed,)))
    assert len(looked) == looks


@pytest.mark.parametrize(
    ("late", "stopped", "answered_ago", "blamed"),
    [
        (OTHER, HOST, 0.1, HOST),
        (HOST, HOST, TIMEOUT_S, HOST),
        (OTHER, None, TIMEOUT_S, None),  # the store has been silent for as long as the call waits
        (OTHER, None, 0.1, OTHER),
    ],
)
def test_a_rank_that_waits_for_a_stopped_one_or_for_the_store_is_not_blamed(
    late: int, stopped: int | None, answered_ago: float, blamed: int | None
) -> None:
    """Rank 0, or the store, was stopped, and rank 1 blamed rank 2, for which it waited in memory."""
    group = group_of_three(listened_ago=0.1)
    group.store_host, group.in_flight = None, SimpleNamespace(since=time.monotonic() - TIMEOUT_S)
    group.control.answered_at = time.monotonic() - answered_ago
    group.peers = tuple(SimpleNamespace(is_stopped=lambda rank=rank: rank == stopped) for rank in range(3))
    failure = TransportFailure(f"rank {late} did not reach signal 1", verdict=CollectiveTimeout, ranks=(late,))
    error = diagnose(group, 3, "all_gather(...)", failure)
    assert f"rank {late} did not" in str(error), error
    assert error.ranks == (() if blamed is None else (blamed,)) and ("store" in str(error)) == (blamed is None), error


def test_a_meeting_for_which_the_store_is_lost_names_its_host() -> None:
    error = meeting._blame_meeting(group_of_three(listened_ago=9.0), StoreLost("no answer"), [], TIMEOUT_S)
    assert error.ranks == (HOST,) and f"rank {HOST}" in str(error), error


@pytest.mark.parametrize("served_by", [None, HOST])
def test_rank_0_that_leaves_the_set_up_of_shared_memory_for_want_of_the_store_is_not_blamed(
    served_by: int | None,
) -> None:
    group = group_of_three(listened_ago=9.0)
    group.store_host = served_by
    error = segments._culprit(group, 3, rendezvous.Lost("rank 0 went away", (HOST,)), 0.5 * TIMEOUT_S)
    assert error.ranks == (() if served_by is None else (HOST,)) and "store" in str(error), error


def _see(monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    """These ranks have come to the meeting, live, and have said no more."""

    class Looks:
        lost = None

        def __init__(self, group: Any) -> None: ...

        def __call__(self, look: Callable[[Any], Any]) -> Any:
            return look(None)

    monkeypatch.setattr(meeting, "Looks", Looks)
    there = {rank: {"who": Identity.mine(), "failed": None} for rank in ranks}
    monkeypatch.setattr(meeting.presence, "present", lambda group, store: there)
    monkeypatch.setattr(meeting.presence, "failures", lambda group, store: {})


@pytest.mark.parametrize(
    ("waited", "came", "blamed"),
    [
        (0.1, [MINE], [HOST]),
        (0.1, [HOST, MINE, OTHER], [HOST]),
        (0.95 * TIMEOUT_S, [MINE], [HOST, OTHER]),
        (0.95 * TIMEOUT_S, [HOST, MINE, OTHER], [HOST, OTHER]),
        (1.7 * TIMEOUT_S, [MINE], [MINE]),  # stopped itself: the others' time was up before its own
    ],
)
def test_whose_connection_broke_is_blamed_alone_while_others_may_still_come(
    waited: float, came: list[int], blamed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 died before it left a note, or before its card came, and rank 2 is slow."""
    _see(monkeypatch, *came)
    monkeypatch.setattr(meeting, "HEARTBEAT_PATIENCE", 0.0)
    error = TransportFailure("connection reset by peer", HOST)
    found = meeting._blame_meeting(group_of_three(listened_ago=0.0), error, [HOST, OTHER], waited)
    assert list(found.ranks) == blamed, found


def _meet(monkeypatch: pytest.MonkeyPatch, exchange: Callable[..., Any]) -> PeerLost:
    """What a first meeting raises whose transfers are these."""
    monkeypatch.setattr(meeting.transport, "exchange", exchange)
    monkeypatch.setattr(meeting.presence, "come", lambda group: None)
    group = group_of_three(listened_ago=9.0)
    group.backends = SimpleNamespace(meeting_device=lambda device: device, waits_in_streams=lambda kind: False)
    group.key, group.unsent, group.card = None, [], None
    group.job = JobIdentity("job")
    with pytest.raises(PeerLost) as raised:
        meeting.meet(group, 1, torch.device("cpu"))
    return raised.value


def test_a_peer_that_is_gone_keeps_no_other_one_from_getting_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 had died, and rank 2 waited for this one's card, with no store to learn from, and blamed it."""
    sent: list[int] = []

    def exchange(group: Any, tag: int, chunk: int, sends: Any, recvs: Any) -> Any:
        peers = [peer for peer, _ in (*recvs, *sends)]  # in this order, see transport
        if HOST in peers:
            raise TransportFailure("connection closed", HOST)
        sent.extend(peer for peer, _ in sends)
        return [], []

    error = _meet(monkeypatch, exchange)
    assert sent == [OTHER] and error.ranks == (HOST,), (sent, error)


def test_what_memory_held_is_no_card_of_a_rank_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 had not come, and rank 0, whose connection failed, was blamed: rank 2's card seemed to be there."""

    def wait() -> None:
        raise TransportFailure("timed out", HOST)

    def exchange(group: Any, tag: int, chunk: int, sends: Any, recvs: Any) -> Any:
        ((peer, card),) = recvs
        if peer == HOST:
            card.fill_(1)  # it came
        return [], [SimpleNamespace(wait=wait)]

    _see(monkeypatch, HOST, MINE)
    monkeypatch.setattr(meeting, "HEARTBEAT_PATIENCE", 0.0)
    monkeypatch.setattr(torch, "empty", torch.ones)
    monkeypatch.setattr(torch, "empty_like", torch.ones_like)
    error = _meet(monkeypatch, exchange)
    assert error.ranks == (OTHER,), error


# ---------------------------------------------------------------- a rank that was stopped itself


@pytest.mark.parametrize(
    ("lost", "host", "waited", "blamed"),
    [
        (None, None, 0.0, (OTHER,)),  # the store says nothing of it, so it never came
        (StoreLost("reset"), None, 0.0, ()),
        (StoreSilent("no answer"), None, 0.0, ()),
        (StoreSilent("no answer"), None, 1.7, (MINE,)),  # stopped as it came, and so it says
        (StoreLost("reset"), HOST, 0.0, (OTHER, HOST)),
        (StoreLost("reset"), OTHER, 0.0, (OTHER,)),
    ],
)
def test_a_rank_that_comes_too_late_to_a_lost_store_does_not_say_who_is_to_blame(
    lost: StoreLost | None,
    host: int | None,
    waited: float,
    blamed: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was stopped before the meeting, the others gave up, the store was killed, and it named one of the others."""
    if lost is None:
        _see(monkeypatch, MINE)
    else:

        def check(store: LostStore, keys: list[str]) -> bool:
            raise lost

        monkeypatch.setattr(LostStore, "check", check)
    monkeypatch.setattr(meeting, "HEARTBEAT_PATIENCE", 0.0)
    group = group_of_three(listened_ago=9.0)
    group.store_host, group.store = host, None
    error = meeting._blame_meeting(group, meeting._HadClosed("closed by rank 2", OTHER), [], waited * TIMEOUT_S)
    assert error.ranks == blamed and f"rank {OTHER}" in str(error), error
    assert ("store is lost" in str(error)) == (lost is not None and waited == 0.0), error


class _Served:
    """A store that answers when it is told to, one request after the other, as c10d's client does."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self.answers, self.asks = threading.Event(), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def ask(*given: Any) -> Any:
            with self.asks:
                self.answers.wait(60.0)
                return getattr(self.store, name)(*given)

        return ask


def test_what_a_rank_says_to_a_store_that_was_silent_since_it_came_is_read_by_its_peers() -> None:
    """The host of the store was stopped; woken, it did not know the others' notes for those of this group."""
    served = _Served()
    served.answers.set()
    mine, host = group_of_three(listened_ago=9.0), group_of_three(listened_ago=9.0)
    for group, rank in ((mine, MINE), (host, HOST)):
        group.rank, group.visits, group.control = rank, (), BoundedStore(served, TIMEOUT_S)
    presence.come(host)
    served.answers.clear()
    presence.come(mine, limit=0.01)
    deadline = time.monotonic() + 10.0
    while not served.asks.locked() and time.monotonic() < deadline:
        time.sleep(0.005)
    presence.tell(mine, PeerLost("no word from rank 0", ranks=(HOST,)), mine.control)
    served.answers.set()
    while not (said := presence.failures(host)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert said[MINE]["ranks"] == [HOST], said
