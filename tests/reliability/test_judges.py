"""The judges of the trials can say no: tallies, latencies, blame, and wrong numbers in a call of theirs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.reliability import calls, deaths, mismatches, signals
from tests.reliability.crew import Crew, CrewError, Link, Raised, Said
from tests.reliability.outcome import Outcome
from tpkernels.gemm.native import native, why_not

pytestmark = pytest.mark.cpu


def test_a_row_without_trials_has_not_passed() -> None:
    assert Outcome("row").problems() == ["no trial was made"]


def test_one_bad_trial_among_many_fails_the_row_and_is_shown() -> None:
    outcome = Outcome("row")
    outcome.add(None, times=999)
    assert outcome.problems() == []
    outcome.add("a rank hung", "rank 3")
    assert outcome.problems() == ["1 of 1000 trials: a rank hung", "a rank hung: rank 3"]
    assert outcome.to_json()["passed"] is False and outcome.to_json()["count"] == 1000


def test_latencies_are_held_against_their_limits() -> None:
    outcome = Outcome("row", p99_s=0.05, max_s=1.0)
    outcome.add(None, times=200)
    outcome.latencies_s = [0.001] * 195 + [0.06] * 5
    assert outcome.problems() == ["p99 60.0 ms, at most 50 ms"]
    assert outcome.problems(judge_times=False) == []
    outcome.latencies_s[0] = 2.0
    assert "max 2000.0 ms, at most 1000 ms" in outcome.problems(judge_times=False)


def test_a_cost_over_its_gate_fails_the_full_row_and_not_its_slice() -> None:
    outcome = Outcome("row")
    outcome.add(None)
    other = Outcome("row", over_gates=["the header costs 2 us"])
    outcome.merge(other)
    assert outcome.problems() == ["the header costs 2 us"]
    assert outcome.problems(judge_times=False) == []
    assert outcome.to_json()["passed"] is False


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (None, "no error"),
        (Raised("PeerLost", (1,), "rank 0: rank 1 died"), None),
        (Raised("CollectiveTimeout", (1,), "rank 0: rank 1 is late"), "CollectiveTimeout instead of PeerLost"),
        (Raised("PeerLost", (1, 2), "rank 0: ranks 1, 2 died"), "blames others than the victim"),
        (Raised("PeerLost", (), "rank 0: somebody died"), "blames others than the victim"),
        (Raised("PeerLost", (1,), "somebody died"), "the message does not name the rank that raises"),
    ],
)
def test_a_survivor_must_blame_exactly_the_victim(error: Raised | None, problem: str | None) -> None:
    assert deaths._wrong(Said(0, "error", 0.0, error), victim=1) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("all_reduce: rank 1 is late (epoch 7)", None),
        ("all_reduce: rank 1 is late", "the message does not name epoch"),
        ("all_reduce: somebody is late (epoch 7)", "the message does not name rank 1"),
        ("rank 1 is late (epoch 7)", "the message does not name the op"),
    ],
)
def test_a_time_out_must_name_rank_op_and_epoch(text: str, problem: str | None) -> None:
    said = Said(0, "error", 0.0, (Raised("CollectiveTimeout", (1,), text), 1.0, "large_all_reduce"))
    assert signals._not_a_timeout(said, victim=1) == problem


def test_a_mismatch_must_show_both_sides() -> None:
    dispute = next(one for one in mismatches.DISPUTES if one.kind == "rows")
    both = Raised("GroupMismatch", (1,), "row shards=[2, 2] and row shards=[3, 2]")
    assert mismatches._not_both_sides(dispute, both, 2) is None
    one = Raised("GroupMismatch", (1,), "row shards=[2, 2]")
    assert mismatches._not_both_sides(dispute, one, 2) == "rows: the error does not show both sides"
    assert mismatches._not_both_sides(dispute, None, 2) == "rows: a rank got a result"


@pytest.mark.skipif(native() is None, reason=why_not() or "the compiled core is there")
def test_a_segment_that_a_process_has_open_or_mapped_is_left() -> None:
    module: Any = native()
    before = deaths.held_segments()
    descriptor = module.make_data()
    (opened,) = deaths.held_segments() - before
    os.ftruncate(descriptor, 4096)
    mapped = mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ)
    os.close(descriptor)
    assert deaths.held_segments() - before == {opened}
    assert opened in deaths._leftovers()  # which also sees what other processes of this machine leave
    mapped.close()
    assert deaths.held_segments() == before


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of this process alone."""
    was_there = dist.is_initialized()
    yield tpk.init(device="cpu")["tp"].get_group()
    if not was_there:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", list(calls.CALLS))
def test_each_call_notices_one_wrong_element(name: str, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    op = name.removeprefix("large_")
    original = getattr(tpk, op)

    def wrong(*args: object, **options: object) -> torch.Tensor:
        result: torch.Tensor = original(*args, **{**options, "implementation": "auto"})
        result = result.clone()
        result[-1, -1] += 1
        return result

    calls.CALLS[name](alone, 0, 1, 3, "auto")
    monkeypatch.setattr(tpk, op, wrong)
    with pytest.raises(calls.WrongOutput):
        calls.CALLS[name](alone, 0, 1, 3, "auto")


def _leave(link: Link, how: str) -> None:
    if how == "die":
        link.die()
    if how == "raise":
        raise KeyError("trouble")


@pytest.mark.gloo
@pytest.mark.parametrize(("how", "words"), [("die", "left"), ("raise", "trouble"), ("silence", "left")])
def test_a_rank_that_leaves_raises_or_says_nothing_is_not_waited_for(how: str, words: str) -> None:
    with Crew(1, _leave, how) as crew, pytest.raises(CrewError, match=words):
        crew.expect("word", 60.0)
