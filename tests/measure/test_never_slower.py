"""`benchmarks/never_slower.py`: what its numbers say of results that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpkernels.measure.report import CaseResult
from tpkernels.measure.timing import Measurement

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import never_slower


def result(unfused: list[float], chunked: list[float], auto: list[float], estimate_us: float = 100.0) -> CaseResult:
    seconds = {"unfused": unfused, "chunked": chunked, "auto": auto}
    times = {name: Measurement(name, tuple(1e-6 * us for us in values)) for name, values in seconds.items()}
    estimates = {"unfused": 1000.0, "chunked": estimate_us}
    return CaseResult("all_gather_matmul", "8x8x8", "bf16", 2, times, 0, "chunked", 1, estimates_us=estimates)


STEADY, NOISY = [100.0] * 9, [100.0, 100.0, 60.0, 170.0, 100.0, 180.0, 70.0, 160.0, 60.0]


def test_slower_means_beyond_noise() -> None:
    quicker = never_slower.row("host", result(STEADY, [90.0] * 9, [90.0] * 9))
    noisy = never_slower.row("host", result(STEADY, NOISY, [1.05 * us for us in NOISY]))
    slower = never_slower.row("host", result(STEADY, [110.0] * 9, [110.0] * 9))
    assert (quicker["fastest"], slower["fastest"]) == ("chunked", "unfused")
    found = [never_slower.summary([quicker, other]) for other in (noisy, slower)]
    assert [one["slower_beyond_noise"] for one in found] == [0, 1]
    assert [one["P7_met"] for one in found] == [True, False]
    assert not never_slower.summary([noisy])["P7_met"], "the median is above 1"
    assert found[1]["worst"] == pytest.approx(1.1) and found[1]["auto_is_fastest_or_within_3_percent"] == 1


def test_estimates_are_judged_by_what_auto_chose() -> None:
    rows = [never_slower.row("host", result(STEADY, STEADY, STEADY, estimate)) for estimate in (86.0, 114.0, 80.0)]
    assert [round(row["estimate_over_measured"], 3) for row in rows] == [0.86, 1.14, 0.8]
    assert never_slower.summary(rows)["estimates_within_15_percent"] == pytest.approx(2 / 3)
    assert never_slower.summary(rows[:2])["P9_met"] and not never_slower.summary(rows)["P9_met"]


def test_the_interval_holds_the_median_with_the_probability_that_is_said() -> None:
    assert never_slower.median_interval(range(9)) == (1, 7)  # 1 - 2 (1 + 9) / 2^9 = 0.961
    assert never_slower.median_interval(range(6)) == (0, 5)  # 1 - 2 / 2^6 = 0.969
    assert never_slower.median_interval(range(9), confidence=0.97) == (0, 8)


def test_the_grid_is_as_large_as_is_said() -> None:
    found = never_slower.problems()
    assert len(set(found)) == len(found) == 63
    assert any(shape.m % 4 for _, shape in found)
