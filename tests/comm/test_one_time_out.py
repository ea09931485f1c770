"""A call that the ranks have to agree on has one time-out, where a rank is known not to answer: it had several."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tpkernels.comm import agreement, groups, heartbeats, monitor, records, transport
from tpkernels.comm.groups import Group
from tpkernels.comm.job_identity import JobIdentity
from tpkernels.errors import CollectiveTimeout
from tpkernels.ops import agreed_call
from tpkernels.ops.signatures import Signature
from tpkernels.partition import Layout

pytestmark = pytest.mark.cpu

TIMEOUT_S = 10.0
REMOTE: Any = SimpleNamespace(is_local=False, is_dead=lambda: False, is_stopped=lambda: False)
SIGNATURE = Signature("all_gather", torch.float32, "cpu", Layout(1, (2, 2), 1), 3, "unfused")


def _group(**facts: Any) -> Group:
    backends: Any = SimpleNamespace(waits_in_streams=lambda kind: False)
    group = Group(lambda: None, "tp", 0, 2, backends, TIMEOUT_S, None, JobIdentity("job"))  # type: ignore[arg-type, return-value]
    for name, value in facts.items():
        setattr(group, name, value)
    return group


@pytest.mark.parametrize(
    ("at_once", "expected"), [(True, [0.0, 7.0, None, 0.0, None]), (False, [0.0, None, None, 0.0, None])]
)
def test_a_call_counts_from_before_the_ranks_agree_until_it_has_its_data(
    at_once: bool, expected: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, now, seen = _group(), [1000.0], []

    def note() -> None:
        seen.append(None if group.since is None else now[0] - group.since)

    def agree(group: Group, call: int, signature: Signature, *rest: object) -> Any:
        note()
        now[0] += 7.0
        plan: Any = SimpleNamespace(
            implementation=SimpleNamespace(run=lambda context, call: note), context=lambda *given: None,
            arguments=lambda given: given,
        )  # fmt: skip
        group.remember(signature, plan)
        return plan

    monkeypatch.setattr(agreed_call, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(agreed_call, "_agree", agree)
    monkeypatch.setattr(agreed_call, "_check", lambda *given: None)
    for _ in range(2):  # the second call is known
        agreed_call.start(group, SIGNATURE, 0, None, torch.device("cpu"), at_once=at_once)()
    agreed_call._guarded(group, "save", lambda call: note())
    note()
    assert seen == expected, seen


@pytest.mark.parametrize(
    ("lasted", "unanswering", "ends"), [(11.0, [1], True), (9.0, [1], False), (11.0, [], False), (None, [1], False)]
)
def test_a_call_whose_time_is_up_ends_where_a_rank_does_not_answer(
    lasted: float | None, unanswering: list[int], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks agreed late, one was stopped, and the others waited for its data for another time-out."""
    now, aborted = time.monotonic(), []
    group = _group(since=None if lasted is None else now - lasted, peers=(), key="k")
    group.in_flight = groups.InFlight(3, "all_reduce", now - 4.0)
    watch = monitor._Watch.__new__(monitor._Watch)
    watch.group, watch.next_beat, watch.store = group, now + 60.0, None  # type: ignore[assignment]
    watch._inspect = lambda *given: (None, False)  # type: ignore[method-assign]
    monkeypatch.setattr(monitor.heartbeats, "listen", lambda *given: None)
    monkeypatch.setattr(monitor.agreement, "beats", lambda *given: {})
    monkeypatch.setattr(monitor.agreement, "unanswering", lambda group: unanswering)
    late = CollectiveTimeout("rank(s) [1] are stopped", ranks=(1,))
    monkeypatch.setattr(monitor.agreement, "blame", lambda *given, **options: late)
    monkeypatch.setattr(transport, "abort", aborted.append)
    watch.tick()
    assert (group.verdict is late, aborted == [group]) == (ends, ends)


@pytest.mark.parametrize(
    ("lasted", "unanswering", "hopeless"), [(11.0, [1], True), (9.0, [1], False), (11.0, [], False)]
)
def test_an_exchange_of_records_in_such_a_call_ends_as_well(
    lasted: float, unanswering: list[int], hopeless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = _group(since=time.monotonic() - lasted, listened=time.monotonic(), peers=())
    looks: Any = mock.Mock(return_value={}, lost=None)
    monkeypatch.setattr(agreement, "unanswering", lambda group: unanswering)
    assert agreement._look(group, 3, "call", 0.5, looks)[0] == hopeless


def test_a_rank_whose_store_is_far_away_gives_signs_of_life_between_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round of requests took longer than others wait for a beat, who called the rank lost."""
    now, beats = [1000.0], []
    group = _group(since=now[0] - 4.0, peers=(REMOTE,), key="k")
    group.in_flight, group.started = groups.InFlight(3, "all_reduce", now[0] - 4.0), {1: "all_reduce", 2: "all_reduce"}

    def far(*given: Any) -> dict[int, Any]:
        now[0] += 1.0
        return {}

    watch = monitor._Watch.__new__(monitor._Watch)
    watch.group, watch.next_beat, watch.beats = group, now[0], 0
    watch.store = SimpleNamespace(set=lambda *given: beats.append(now[0]))  # type: ignore[assignment]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(monitor, "has_clashed", lambda *given: False)
    monkeypatch.setattr(monitor.presence, "failures", far)
    for name in ("beats", "recorded", "announce"):
        monkeypatch.setattr(monitor.agreement, name, far)
    watch.tick()
    gaps = [later - earlier for earlier, later in pairwise(beats)]
    assert len(beats) >= 4 and max(gaps) <= 2.0, beats


def test_a_rank_whose_store_is_far_away_hears_who_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of requests took longer than may lie between two looks, so that nobody was ever said to be silent."""
    now, (per_request, long) = [1000.0], (0.12, 4.0)
    group = _group(since=now[0], peers=(REMOTE, REMOTE), key="k")
    group.in_flight, group.started = groups.InFlight(3, "all_reduce", now[0]), {}

    def far(*given: Any) -> dict[int, Any]:
        now[0] += per_request
        return {}

    watch = monitor._Watch.__new__(monitor._Watch)
    watch.group, watch.next_beat, watch.beats = group, now[0], 0
    watch.store = SimpleNamespace(set=far)  # type: ignore[assignment]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for name in ("announce", "recorded"):
        monkeypatch.setattr(monitor.agreement, name, lambda *given: (far(), far())[0])
    monkeypatch.setattr(monitor, "has_clashed", far)
    monkeypatch.setattr(monitor.presence, "failures", lambda *given: (far(), far())[0])
    monkeypatch.setattr(monitor.agreement, "beats", lambda *given: far() | {1: "7 3"})
    monkeypatch.setattr(monitor.agreement, "unanswering", lambda group: [])  # the call is to go on
    while now[0] < 1000.0 + long:
        watch.tick()
        now[0] += monitor.PERIOD
    assert heartbeats.silent(group, [1], group.listened) == [1]


def test_a_rank_that_waits_for_others_gives_signs_of_life_that_those_who_have_met_hear() -> None:
    """One was stopped when it had met some; they called those dead that still waited for it."""
    kept: dict[str, str] = {}
    store: Any = SimpleNamespace(
        set=kept.__setitem__, check=lambda keys: kept.keys() >= set(keys),
        texts=lambda keys: {key: kept[key] for key in keys},
    )  # fmt: skip
    heard = []
    watch = monitor._Watch.__new__(monitor._Watch)
    watch.group, watch.next_beat, watch.beats, watch.store = _group(visits=(1, 1)), 0.0, 0, store
    met = _group(peers=(REMOTE, REMOTE), key="k")
    for _ in range(2):
        watch.next_beat = 0.0
        watch.tick()
        heard.append(records.beats(met, store))
    assert [sorted(one) for one in heard] == [[0], [0]] and heard[0] != heard[1]
    assert heartbeats.calls(heard[1]) == {}
    kept["k/beat/0"] = "9 3"
    assert records.beats(met, store) == {0: "9 3"}
