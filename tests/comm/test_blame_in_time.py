"""How a rank that waits for records, for evidence and for signs of life counts its time, and what it hears last."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.comm.three_hosts import HOST, MINE, OTHER, TIMEOUT_S, Clock, group_of_three
from tpkernels.comm import agreement, presence, transport
from tpkernels.comm.blame import blame, diagnose, failed_first
from tpkernels.comm.records import Record
from tpkernels.comm.transport import Patience, Transfer, TransportFailure, wait_all

pytestmark = pytest.mark.cpu


def test_silence_is_listened_for_from_the_first_answer_of_a_slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first answers took some tenths of a second, and a rank that was dead was called one that came late."""
    now = [time.monotonic()]

    def failures(*given: Any) -> dict[int, Any]:
        now[0] += 0.0 if now[0] > start + 0.3 else 0.4
        return {}

    def sleep(seconds: float) -> None:
        now[0] += seconds

    start, beats = now[0], {HOST: 6, MINE: 6, OTHER: 6}

    def read(*given: Any) -> dict[int, str]:
        for rank in (HOST, MINE):
            beats[rank] += 1
        return {rank: f"{number} 3" for rank, number in beats.items()}

    monkeypatch.setattr("tpkernels.comm.blame.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(presence, "failures", failures)
    monkeypatch.setattr("tpkernels.comm.blame.recorded", lambda *given: {})
    monkeypatch.setattr("tpkernels.comm.blame.beats", read)
    group = group_of_three(listened_ago=2 * TIMEOUT_S)
    error = blame(group, 3, "all_reduce(...)", "closed by peer", 0.1, peer=OTHER)
    assert error.ranks == (OTHER,) and "no sign of life" in str(error), error
    assert now[0] - start < TIMEOUT_S


@pytest.mark.parametrize(
    ("why", "ranks", "blamed"),
    [("the group's store is lost", [], ()), ("the group's store is lost", [2], (2,)), ("no memory", [], (HOST,))],
)
def test_a_rank_that_lost_the_store_and_named_nobody_is_not_named_by_its_peers(
    why: str, ranks: list[int], blamed: tuple[int, ...]
) -> None:
    error = failed_first("", {HOST: {"kind": "PeerLost", "message": f"rank 0: {why}: ...", "ranks": ranks}})
    assert error.ranks == blamed and "rank 0 failed first" in str(error)


@pytest.mark.parametrize(("stood_still", "lasted"), [(0.0, TIMEOUT_S), (1.7 * TIMEOUT_S, 2.7 * TIMEOUT_S)])
def test_the_time_in_which_a_rank_stood_still_is_not_one_of_waiting_for_records(
    stood_still: float, lasted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was stopped, the others gave up, and it blamed them before their notes had come."""
    clock = Clock(monkeypatch, agreement)
    clock.jump = stood_still
    monkeypatch.setattr(agreement, "_is_there", lambda group, key: False)
    monkeypatch.setattr(agreement, "_look", lambda *given: (False, {}))
    monkeypatch.setattr(agreement, "recorded", lambda *given: {})
    group = group_of_three(listened_ago=0.1)
    group.control = SimpleNamespace(answered_at=0.0, within=lambda limit: None)
    start = clock.now
    assert agreement._poll(group, 3, "call", start) == {}
    assert lasted <= clock.now - start < lasted + 0.1


def test_records_that_are_all_there_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that had been stopped saw them, and blamed the store that took half a second for the same once more."""
    group = group_of_three(listened_ago=0.1)
    group.peers, group.is_overdue = (SimpleNamespace(is_dead=lambda: False),) * 3, lambda: False
    group.co_located = True
    everybody = {rank: Record("save_pretrained", {}) for rank in range(3)}
    answers = iter([everybody])
    monkeypatch.setattr(agreement, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(agreement, "_is_there", lambda group, key: False)
    monkeypatch.setattr(presence, "failures", lambda *given: {})
    monkeypatch.setattr(agreement, "beats", lambda *given: {})
    monkeypatch.setattr(agreement, "recorded", lambda *given: next(answers))
    assert agreement._poll(group, 3, "call", time.monotonic()) == everybody


def test_that_all_have_come_is_heard_before_a_far_store_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer took a tenth of a second, and three requests went before the one that said so: a second per call."""
    clock = Clock(monkeypatch, agreement)
    start, everybody = clock.now, {rank: Record("all_gather", {}) for rank in range(3)}

    def look(*given: Any) -> Any:
        clock.now += 0.3
        return False, {}

    def is_there(group: Any, key: str) -> bool | None:
        clock.now += agreement.LOOK_EVERY
        return True if clock.now > start + 0.1 else None

    monkeypatch.setattr(agreement, "_look", look)
    monkeypatch.setattr(agreement, "_is_there", is_there)
    monkeypatch.setattr(agreement, "recorded", lambda *given: everybody)
    group = group_of_three(listened_ago=0.1)
    group.peers = (SimpleNamespace(is_dead=lambda: False),) * 3
    group.control = SimpleNamespace(answered_at=0.0, within=lambda limit: None)
    assert agreement._poll(group, 3, "call", start) == everybody
    assert clock.now - start < 0.2


@pytest.mark.parametrize(("first", "second"), [(0.7, 0.3), (0.95, 0.1), (0.01, None), (2.5, None)])
def test_two_waits_in_a_row_do_not_add_up_to_two_timeouts(
    first: float, second: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer is silent while another one is waited for; but nobody is while this process stands still."""
    clock, limits = Clock(monkeypatch, transport), list[float | None]()

    def wait(seconds: float) -> Any:
        def until(limit: Any = None) -> None:
            limits.append(None if limit is None else limit.total_seconds() / TIMEOUT_S)
            clock.now += seconds * TIMEOUT_S

        return SimpleNamespace(wait=until)

    patience = Patience(TIMEOUT_S)
    waits = [wait(first), wait(0.05), wait(0.0), wait(0.0)]
    order = zip((HOST, OTHER, HOST, OTHER), waits, strict=True)
    wait_all([Transfer("recv", peer, 0, Any, work, 0, patience=patience) for peer, work in order])
    assert limits[0] is None and limits[1] == (second if second is None else pytest.approx(second))
    assert limits[2] == pytest.approx(0.95) and limits[3] is None, "whoever was heard of has the whole timeout again"


@pytest.mark.parametrize(("lasted", "looks"), [(1.0, 1), (1.7, 2)])
def test_a_rank_whose_wait_ended_late_hears_what_the_others_have_said(
    lasted: float, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped in a transfer, and blamed its peer before that one's note had come."""
    notes = [{}, {OTHER: {"kind": "CollectiveTimeout", "message": "rank 1 did not come", "ranks": [MINE]}}]
    looked: list[int] = []

    def failures(group: Any, store: Any) -> Any:
        looked.append(1)
        return notes[min(len(looked), 2) - 1]

    monkeypatch.setattr(presence, "failures", failures)
    for name in ("recorded", "told", "beats"):
        monkeypatch.setattr(f"tpkernels.comm.blame.{name}", lambda *given, **options: {})
    group = group_of_three(listened_ago=0.1)
    here = SimpleNamespace(is_local=True, is_dead=lambda: False, is_stopped=lambda: False)
    group.peers, group.in_flight = (here,) * 3, SimpleNamespace(since=time.monotonic() - lasted * TIMEOUT_S)
    failure = TransportFailure("recv timed out", OTHER, lasted=lasted * TIMEOUT_S)
    error = diagnose(group, 3, "all_gather(...)", failure)
    assert len(looked) == looks and (error.ranks == (MINE,)) == (looks == 2), (looked, error)
