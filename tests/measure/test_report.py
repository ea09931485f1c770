"""Derived figures, the table and the result file, from made-up times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tpkernels.measure import report
from tpkernels.measure.report import CaseResult
from tpkernels.measure.timing import Measurement


def _result(**milliseconds: float) -> CaseResult:
    times = {name: Measurement(name, (value / 1e3,) * 3) for name, value in milliseconds.items()}
    return CaseResult("all_gather_matmul", "8x8x8", "bf16", 2, times, wire_bytes=64, chosen="chunked", chunks=4)


def test_speedups_name_their_baseline_and_efficiency_is_what_could_be_won() -> None:
    result = _result(gemm=100, comm=60, torch=180, unfused=160, chunked=110, auto=111)
    assert result.fused_name == "chunked"
    assert result.speedup_over("torch") == pytest.approx(180 / 110)
    assert result.speedup_over("unfused") == pytest.approx(160 / 110)
    assert result.roof == pytest.approx(0.100)
    assert result.fused_over_roof == pytest.approx(1.1)
    assert result.overlap_efficiency == pytest.approx((160 - 110) / (160 - 100))
    assert result.exposed_seconds == pytest.approx(0.010)


def test_a_slow_link_is_the_roof_when_it_is_slower_than_the_gemm() -> None:
    result = _result(gemm=100, comm=140, unfused=240, chunked=150)
    assert result.roof == pytest.approx(0.140)
    assert result.overlap_efficiency == pytest.approx(0.9)


def test_the_fastest_fused_implementation_is_the_fused_one_and_auto_is_not_among_them() -> None:
    result = _result(gemm=100, comm=60, unfused=160, chunked=130, shared_memory=105, auto=90)
    assert result.fused_name == "shared_memory"


def test_overlap_stays_between_nothing_and_all() -> None:
    result = _result(gemm=100, comm=60, unfused=160, chunked=200, shared_memory=90)
    assert result.overlap_of("chunked") == 0.0, "slower than unfused hides nothing"
    assert result.overlap_of("shared_memory") == 1.0, "no copy at all may be below the roof"
    assert result.exposed_of("shared_memory") == pytest.approx(-0.010)


def test_overlap_is_noise_where_the_rounds_do_not_say_what_was_won_or_could_be() -> None:
    def overlap_is_noise(unfused: tuple[float, ...], chunked: tuple[float, ...], comm: float) -> bool:
        times = {"gemm": (1.0,) * 3, "comm": (comm,) * 3, "unfused": unfused, "chunked": chunked}
        return replace(
            _result(), times={name: Measurement(name, seconds) for name, seconds in times.items()}
        ).overlap_is_noise("chunked")

    assert not overlap_is_noise((4.0, 4.1, 3.9), (2.0, 2.1, 1.9), 2.0)
    assert overlap_is_noise((4.0, 2.0, 2.0), (2.0, 5.0, 3.0), 1.0), "now faster, now slower than unfused"
    assert overlap_is_noise((3.1, 2.5, 3.7), (2.4, 1.9, 2.9), 3.0), "there may be nothing to win"


def test_no_figure_is_made_up_where_something_was_not_measured() -> None:
    nothing_to_win = _result(gemm=100, comm=1, unfused=101, chunked=101)
    assert nothing_to_win.overlap_efficiency is None
    assert nothing_to_win.speedup_over("torch") is None
    only_unfused = _result(gemm=100, unfused=100)
    assert only_unfused.fused_name is None
    assert only_unfused.exposed_seconds is None
    assert only_unfused.overlap_efficiency is None


def test_a_result_file_holds_hardware_versions_command_date_and_every_sample(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = _result(gemm=100, comm=60, torch=180, unfused=160, chunked=110, auto=111)
    report.write_json(path, report.describe_environment({"nproc": 2}), [result])
    content = json.loads(path.read_text())
    assert content["hardware"]["cpu"] and content["hardware"]["cores"] >= 1
    assert content["versions"]["torch"]
    assert content["command"]
    assert content["date"].startswith("20")
    assert content["setup"] == {"nproc": 2}
    assert content["results"][0]["times"]["chunked"]["samples_ms"] == pytest.approx([110.0] * 3)


def test_the_command_can_be_typed_again() -> None:
    started = ["/usr/lib/python3/tpkernels/__main__.py", "bench", "--out", "a folder"]
    assert report._command(started) == "python -m tpkernels bench --out 'a folder'"
    assert report._command(["/usr/bin/tpkernels", "bench"]) == "tpkernels bench"
