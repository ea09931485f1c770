"""The overlap fraction counts bytes on the wire, and the trace file shows rows that a viewer can draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpkernels.comm.timeline import Event
from tpkernels.measure.netlab import Sample
from tpkernels.measure.trace import (
    RankTrace,
    chrome_trace,
    gemm_intervals,
    overlap_fraction,
    samples_within,
    write_chrome_trace,
)


def _gemm(start: int, end: int) -> Event:
    return Event("gemm", "gemm", start, end)


def _steady(start: int, end: int, step: int, per_step: int) -> list[Sample]:
    return [Sample(time, index * per_step, 0) for index, time in enumerate(range(start, end + 1, step))]


def test_bytes_that_move_only_under_a_gemm_are_all_hidden() -> None:
    assert overlap_fraction([_gemm(0, 1000)], _steady(0, 1000, 100, 50)) == pytest.approx(1.0)


def test_a_transfer_that_ends_before_the_gemm_starts_hides_nothing() -> None:
    samples = [*_steady(0, 1000, 100, 50), Sample(2000, 500, 0)]
    assert overlap_fraction([_gemm(1000, 2000)], samples) == 0.0


def test_a_transfer_posted_early_does_not_count_as_overlap_by_itself() -> None:
    events = [_gemm(0, 1000), Event("recv", "recv", 0, 2000, chunk=0, peer=1)]
    samples = [Sample(0, 0, 0), Sample(1000, 0, 0), Sample(2000, 0, 800)]  # every byte came after the GEMM
    assert overlap_fraction(events, samples) == 0.0


def test_overlapping_gemms_count_a_byte_once() -> None:
    events = [_gemm(0, 600), _gemm(400, 500), _gemm(100, 800)]
    assert gemm_intervals(events) == [(0, 800)]
    assert overlap_fraction(events, _steady(0, 1000, 100, 10)) == pytest.approx(0.8)


def test_both_directions_count_and_a_sample_interval_is_split_at_the_edge_of_a_gemm() -> None:
    samples = [Sample(0, 0, 0), Sample(1000, 300, 100)]
    assert overlap_fraction([_gemm(250, 500)], samples) == pytest.approx(0.25)
    samples.append(Sample(2000, 300, 500))
    assert overlap_fraction([_gemm(250, 500), _gemm(1500, 3000)], samples) == pytest.approx((100 + 200) / 800)


def test_no_bytes_and_no_samples_are_no_overlap() -> None:
    assert overlap_fraction([_gemm(0, 10)], []) == 0.0
    assert overlap_fraction([_gemm(0, 10)], [Sample(0, 5, 5), Sample(10, 5, 5)]) == 0.0
    assert overlap_fraction([], [Sample(0, 0, 5), Sample(10, 0, 9)]) == 0.0


@pytest.mark.parametrize("second", [Sample(10, 4, 0), Sample(5, 9, 0)])
def test_samples_that_run_backwards_are_refused(second: Sample) -> None:
    with pytest.raises(ValueError, match="never count down"):
        overlap_fraction([_gemm(0, 10)], [Sample(5, 5, 0), second])


def test_samples_are_cut_to_the_call_with_one_more_on_each_side() -> None:
    samples = _steady(0, 100, 10, 1)
    assert [sample.time_ns for sample in samples_within(samples, 25, 55)] == [20, 30, 40, 50, 60]
    assert samples_within(samples, 0, 1000) == samples


def _two_ranks() -> list[RankTrace]:
    events = [
        _gemm(1_000, 5_000),
        Event("recv", "recv", 1_000, 4_000, chunk=0, peer=1),
        Event("recv", "recv", 1_000, 6_000, chunk=1, peer=1),
        Event("send", "send", 1_000, 7_000, chunk=0, peer=1),
        Event("wait recv", "wait", 5_000, 6_000, chunk=1, peer=1),
    ]
    return [
        RankTrace(0, "chunked", 0, 8_000, events, [Sample(0, 0, 0), Sample(8_000, 8_000, 4_000)]),
        RankTrace(1, "chunked", 500, 8_000, [_gemm(2_000, 3_000)]),
    ]


def test_the_trace_has_a_compute_row_per_rank_and_rows_per_peer_whose_chunks_do_not_overlap(tmp_path: Path) -> None:
    write_chrome_trace(tmp_path / "trace.json", _two_ranks())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (0, 0): "compute",
        (0, 3): "from rank 1",
        (0, 4): "to rank 1",
        (1, 0): "compute",
    }
    received = [e for e in events if e["ph"] == "X" and e["tid"] == 3]
    assert [(e["ts"], e["dur"]) for e in received] == [(1.0, 3.0), (4.0, 2.0)]
    assert [e["args"]["posted_us"] for e in received] == [1.0, 1.0]
    counters = [e["args"] for e in events if e["ph"] == "C"]
    assert counters == [{"out": 8.0, "in": 4.0}]
    assert all(e["ts"] >= 0 for e in events if "ts" in e)


def test_recordings_are_laid_one_after_the_other_and_ranks_of_one_share_its_clock() -> None:
    hour = 3_600_000_000_000
    traces = [
        RankTrace(0, "first", 1_000, 3_000, [_gemm(1_000, 2_000)]),
        RankTrace(0, "second", hour, hour + 1_000, [_gemm(hour, hour + 500)]),
        RankTrace(1, "first", 2_000, 4_000, [_gemm(2_000, 3_000)]),
        RankTrace(1, "second", hour + 250, hour + 900, [_gemm(hour + 250, hour + 600)]),
    ]
    spans = [e for e in chrome_trace(traces)["traceEvents"] if e["ph"] == "X" and e["name"] == "gemm"]
    starts = {(e["pid"], index): e["ts"] for index, e in enumerate(spans)}
    first, second = starts[0, 0], starts[0, 1]
    assert (first, starts[1, 2]) == (0.0, 1.0)
    assert 3.0 < second < 1e6, "the hour in between is not drawn"
    assert starts[1, 3] - second == pytest.approx(0.25)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one recorded call"):
        chrome_trace([])
