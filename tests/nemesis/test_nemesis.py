"""A few schedules of `python -m tests.nemesis`, tests of the judge, and faults of the product that it must notice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tpkernels as tpk
from tests.nemesis import disk, network
from tests.nemesis.judge import problems
from tests.nemesis.network import CUT, Network, Weather
from tests.nemesis.play import End, Story, play
from tests.nemesis.schedules import BACKENDS, PLACES, STORE, Fault, Schedule, draw
from tests.nemesis.work import Failed
from tests.reliability.crew import Raised
from tpkernels.comm import agreement
from tpkernels.comm.transport import Transfer
from tpkernels.errors import PeerLost
from tpkernels.state import snapshots

SEED = 20261124
FEW = (1, 8, 9, 13)
"""Of each kind of work one, with and without hosts; in 8 peers of an isolated rank blamed the host of the store."""
SLACK_S = 1.0  # tests run beside this one
CALLS = Schedule(
    seed=0, size=3, backend="chunked", place="one host", work="calls", timeout_s=2.0, own_store=True, lingers=True,
    faults=(Fault("kill", (1,), 0.2),),
)  # fmt: skip


# ---------------------------------------------------------------- schedules


@pytest.mark.gloo
@pytest.mark.slow("8 s: four schedules, beside CI's sixteen")
def test_ranks_have_the_right_bits_or_an_error_that_names_a_faulty_rank_in_time(full: bool) -> None:
    places = [place for place in PLACES if place == "one host" or network.unavailable() is None]
    full_disks = disk.unavailable() is None
    schedules = [
        draw(SEED + number, places=places, timeout_s=3.0, full_disks=full_disks)
        for number in (range(500) if full else FEW)
    ]
    with ThreadPoolExecutor(2 if full else 4) as pool:
        stories = list(pool.map(play, schedules))
    broken = {
        f"{schedule.in_words()}\n--schedule '{schedule.to_json()}'": found
        for schedule, story in zip(schedules, stories, strict=True)
        if (found := problems(schedule, story, SLACK_S))
    }
    assert not broken, "\n".join(f"{what}\n{found}" for what, found in broken.items())


@pytest.mark.cpu
def test_a_fault_that_ends_leaves_those_that_last(tmp_path: Path) -> None:
    switch = Network(tmp_path, seed=0)  # does not run
    late, jumpy = Weather(delay_s=0.2, duplicate=0.5), Weather(loss=0.5, delay_s=0.1, jitter_s=0.1)
    for weather in (CUT, CUT, late, jumpy):
        switch.begin(0, 1, weather)
    switch.end(0, 1, CUT)
    assert switch.weather(0, 1).loss == 1.0
    switch.end(0, 1, CUT)
    assert switch.weather(0, 1) == Weather(loss=0.5, delay_s=0.2 + 0.1, jitter_s=0.1, duplicate=0.5)
    switch.end(0, 1, jumpy)
    switch.end(0, 1, late)
    assert switch.weather(0, 1) == switch.weather(1, 0) == Weather()


@pytest.mark.cpu
def test_stops_that_overlap_count_once() -> None:
    stop = Fault("stop", (1,), 0.0)
    spans = [(1.0, 3.0), (2.0, 4.0), (6.0, None), (7.0, 8.0)]
    story = Story(go_at=0.0, struck=[(stop, *span) for span in spans])
    assert story.stopped_for(1, 0.5, 9.0) == 3.0 + 3.0
    assert story.stopped_for(1, 2.5, 6.5) == 1.5 + 0.5
    assert story.stopped_for(0, 0.5, 9.0) == 0.0


@pytest.mark.cpu
def test_a_seed_draws_one_schedule_and_json_repeats_it() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert drawn == [draw(seed) for seed in range(300)] == [Schedule.from_json(one.to_json()) for one in drawn]
    assert {(one.place, one.backend) for one in drawn} >= {("hosts", "chunked"), *(("one host", b) for b in BACKENDS)}
    kinds = {fault.kind for one in drawn for fault in one.faults}
    assert kinds == {"kill", "stop", "clock", "cut", "one way", "isolate", "delay", "duplicates", "loss", "full disk"}
    assert any(fault.target == (STORE,) for one in drawn for fault in one.faults)


# ---------------------------------------------------------------- faults of the product


def _wait_for_ever() -> None:
    Transfer.wait = lambda self: time.sleep(1e6)  # type: ignore[method-assign]


def _blame_the_next() -> None:
    original = agreement.fail

    def fail(group: Any, error: Any) -> Any:
        wrong = tuple((rank + 1) % group.size for rank in error.ranks)
        return original(group, PeerLost(f"{error} (says rank {wrong})", ranks=wrong))

    agreement.fail = fail


def _die() -> None:
    agreement.fail = lambda group, error: os._exit(3)


def _compute_garbage() -> None:
    original = Transfer.wait

    def wait(self: Transfer) -> None:
        original(self)
        if self.kind == "recv" and self.tensor.is_floating_point():
            self.tensor.add_(1)

    Transfer.wait = wait  # type: ignore[method-assign]


def _take_a_full_disk_for_written() -> None:
    def careless(write: Callable[..., None]) -> Callable[..., None]:
        def swallow(*given: Any) -> None:
            with suppress(Exception):
                write(*given)

        return swallow

    snapshots.write_tensors = careless(snapshots.write_tensors)  # type: ignore[attr-defined]
    snapshots.write_manifest = careless(snapshots.write_manifest)  # type: ignore[attr-defined]
    tpk.save_pretrained = lambda *given, **options: None


@pytest.mark.gloo
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sabotage", "found"),
    [
        (_wait_for_ever, "hangs"),
        (_blame_the_next, "blames the innocent"),
        (_die, "died by itself"),
        (_compute_garbage, "got wrong bits"),
    ],
)
@pytest.mark.slow("5 s")
def test_a_fault_in_the_product_is_noticed(sabotage: Any, found: str) -> None:
    story = play(CALLS, sabotage=sabotage, patience_s=1.0)
    assert any(found in one for one in problems(CALLS, story, SLACK_S)), problems(CALLS, story, SLACK_S)


@pytest.mark.gloo
@pytest.mark.slow("2 s")
@pytest.mark.parametrize("sabotage", [None, _take_a_full_disk_for_written])
def test_a_save_that_a_full_disk_did_not_take_is_noticed(sabotage: Any) -> None:
    if (missing := disk.unavailable()) is not None:
        pytest.skip(missing)
    schedule = replace(CALLS, work="saving", faults=(Fault("full disk", (0, 1, 2), 0.2, 0.4),))
    story = play(schedule, sabotage=sabotage, patience_s=1.0)
    found = problems(schedule, story, SLACK_S)
    if sabotage is None:
        assert found == []
        assert {end.failed.raised.kind for end in story.ends.values() if end.failed} == {"ValueError"}
    else:
        assert found  # the rank that looks at what the others wrote, or the files themselves, tell


# ---------------------------------------------------------------- the judge


def _judged(schedule: Schedule, ends: dict[int, End], struck: list[tuple[Fault, float, float | None]]) -> list[str]:
    return problems(schedule, Story(100.0, struck=struck, ends=ends))


def _error(kind: str = "PeerLost", ranks: tuple[int, ...] = (1,), at: float = 101.0, text: str = "") -> End:
    text = text or f"rank(s) {list(ranks)} died"
    return End("error", at, Failed(Raised(kind, ranks, text), "all_reduce", 100.1))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("end", "found"),
    [
        (End("done"), None),
        (_error(), None),
        (_error("CollectiveTimeout"), None),
        (_error(ranks=(2,)), "blames the innocent"),
        (_error(ranks=(1, 2)), "blames the innocent"),
        (_error(ranks=()), "names nobody"),
        (_error(ranks=(), text="the group's store is lost"), "names nobody"),
        (_error(text="somebody died"), "does not name in words"),
        (_error("GroupMismatch"), "raised GroupMismatch"),
        (_error(at=102.8), "took 2.70 s"),
        (End("hangs", text="stack"), "hangs"),
        (End("died", text="exit code -11"), "died by itself"),
        (End("wrong", text="3 instead of 4"), "wrong bits"),
        (End("raised", text="KeyError"), "raised what it may not"),
    ],
)
def test_the_judge_accepts_what_is_promised_and_nothing_else(end: End, found: str | None) -> None:
    told = _judged(CALLS, {0: end, 1: End("struck"), 2: End("done")}, [(CALLS.faults[0], 100.2, None)])
    assert told == [] if found is None else len(told) == 1 and found in told[0], told


@pytest.mark.cpu
def test_the_judge_knows_what_each_fault_makes_of_each_rank() -> None:
    def schedule(*faults: Fault, **changes: Any) -> Schedule:
        return replace(CALLS, faults=faults, **changes)

    stop = Fault("stop", (1,), 0.2, 0.4)
    assert "false alarm" in _judged(schedule(stop), {0: _error()}, [(stop, 100.2, 100.6)])[0]
    lost = _error(ranks=(), text="the group's store is lost")
    kill = Fault("kill", (STORE,), 0.2)
    assert _judged(schedule(kill), {0: lost}, [(kill, 100.2, None)]) == []
    assert "innocent" in _judged(schedule(kill), {0: _error()}, [(kill, 100.2, None)])[0]
    # On one side of a cut everybody is lost; the others know who.
    alone = schedule(Fault("isolate", (0,), 0.2), place="hosts")
    assert _judged(alone, {0: _error(ranks=(1, 2)), 1: _error(ranks=(0,))}, []) == []
    assert "innocent" in _judged(alone, {1: _error(ranks=(2,))}, [])[0]
    # Whoever raised and left may be named beside the culprit, and not in its place.
    leaves = schedule(Fault("kill", (1,), 0.2), lingers=False)
    assert _judged(leaves, {0: _error(), 2: _error(ranks=(0, 1), at=101.5)}, []) == []
    assert "innocent" in _judged(leaves, {0: _error(), 2: _error(ranks=(0,), at=101.5)}, [])[0]
    # Of a full disk every rank says so; one that did not hear of it may miss who has left because of it.
    full = schedule(Fault("full disk", (0, 1, 2), 0.2), work="saving", lingers=False)
    no_room = _error("ValueError", (), text="save_snapshot: rank 2: OSError: [Errno 28] No space left on device: 'x'")
    assert _judged(full, {0: no_room, 1: _error(ranks=(0,), at=101.5)}, []) == []
    assert "innocent" in _judged(full, {0: no_room, 1: _error(ranks=(2,), at=101.5)}, [])[0]
    assert "raised ValueError" in _judged(full, {0: _error("ValueError", (), text="a name is missing")}, [])[0]
    assert "raised ValueError" in _judged(leaves, {0: no_room}, [])[0]
    # The time in which a rank was stopped is not the library's.
    long = Fault("stop", (0,), 0.2, 4.0)
    assert _judged(schedule(long), {0: _error(ranks=(0,), at=104.5)}, [(long, 100.2, 104.2)]) == []
