"""Candidates take turns, are verified first, and each repeat counts as its slowest rank."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from unittest import mock

import pytest
import torch.distributed as dist

from tpkernels.measure.timing import LEAST_REPEATS, Measurement, measure


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    measure({name: lambda name=name: calls.append(name) for name in "abc"}, repeats=4, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "cba"


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde", "abcdefg"])
def test_no_candidate_has_a_favourite_to_follow(names: str) -> None:
    """What it finds in the caches is what its predecessor left there: each pair about equally often."""
    calls: list[str] = []
    repeats = 6 * len(names)
    measure({name: lambda name=name: calls.append(name) for name in names}, repeats=repeats, warmup=0)
    assert all(set(calls[i : i + len(names)]) == set(names) for i in range(0, len(calls), len(names)))
    pairs = Counter(pairwise(calls))
    follows = [pairs[before, after] for before in names for after in names if before != after]
    assert max(follows) <= 2 * min(follows)


def test_every_candidate_is_verified_before_any_is_timed() -> None:
    seen: list[tuple[str, object]] = []
    calls: list[str] = []

    def verify(name: str, result: object) -> None:
        seen.append((name, result))
        if result == "wrong":
            raise AssertionError(name)

    with pytest.raises(AssertionError, match="bad"):
        measure(
            {"good": lambda: calls.append("good") or "right", "bad": lambda: calls.append("bad") or "wrong"},
            verify=verify,
        )
    assert seen == [("good", "right"), ("bad", "wrong")]
    assert calls == ["good", "bad"]


def test_statistics_are_those_of_the_repeats() -> None:
    measurement = Measurement("x", (0.005, 0.001, 0.002, 0.004, 0.003))
    assert (measurement.median, measurement.best, measurement.worst) == (0.003, 0.001, 0.005)
    assert measurement.interquartile_range == pytest.approx(0.002)
    assert Measurement("x", (1.0,)).interquartile_range == 0.0
    assert str(measurement) == "x: 3.000 ms (1.000..5.000, n=5)"


def test_times_are_those_of_the_callable() -> None:
    measured = measure({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, repeats=3, warmup=0)
    assert 0.019 < measured["slow"].best < 0.2
    assert measured["fast"].median < 0.005


def test_a_sample_of_several_calls_is_their_mean() -> None:
    calls: list[int] = []
    measured = measure({"a": lambda: (calls.append(1), time.sleep(0.005))}, repeats=2, warmup=0, calls_per_sample=4)
    assert len(calls) == 8
    assert 0.0049 < measured["a"].best < 0.02


@pytest.mark.parametrize(("budget_s", "repeats"), [(10.0, 9), (0.05, 5), (1e-6, LEAST_REPEATS)])
def test_repeats_that_would_take_longer_than_they_may_are_left_out(budget_s: float, repeats: int) -> None:
    now = iter(range(1000))
    with mock.patch.object(time, "perf_counter", lambda: next(now) / 200):  # a call takes 5 ms
        times = measure({"a": int, "b": int}, repeats=9, warmup=0, budget_s=budget_s)
    assert [len(one.seconds) for one in times.values()] == [repeats] * 2


def test_nothing_to_time_and_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one callable"):
        measure({})
    with pytest.raises(ValueError, match=r"repeats \(0\)"):
        measure({"a": lambda: None}, repeats=0)


def _time_a_straggler() -> tuple[float, float]:
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    delay = 0.03 if dist.get_rank() == 1 else 0.0
    measured = measure({"uneven": lambda: time.sleep(delay)}, repeats=3, warmup=0)["uneven"]
    dist.destroy_process_group()
    return measured.best, delay


@pytest.mark.usefixtures("forked")
@pytest.mark.gloo
def test_a_repeat_counts_as_its_slowest_rank() -> None:
    from tpkernels.launching.local_ranks import launch

    results = launch(_time_a_straggler, 2, timeout=120)
    assert [delay for _, delay in results] == [0.0, 0.03]
    assert all(best >= 0.029 for best, _ in results)
    assert results[0][0] == results[1][0]
