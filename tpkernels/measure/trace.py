"""Timelines: what each rank computed while which bytes moved, as a Chrome/Perfetto file and as one number.

Owns: turning recorded events (`tpkernels.comm.timeline`) and byte counters of the network lab into a trace file, and
the overlap fraction.
Assumes: all times are `time.monotonic_ns()` of one machine.
Refuses: proving overlap from what the program believes. A *send* or *recv* event runs from the moment the transfer was
posted to the moment a wait saw it complete: the data may have arrived long before, and posting early costs nothing, so
such intervals overlap GEMMs whether or not a byte moved. `overlap_fraction` therefore counts bytes: those that the
interface's own counters saw cross the wire while a GEMM was executing, over all that crossed.

Open the file at https://ui.perfetto.dev or chrome://tracing. One process per rank: row "compute" (GEMMs, reductions,
and waits, which are the exposed part), one row per peer and direction, and the link's rate as counter tracks.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpkernels.comm.timeline import Event
from tpkernels.measure.netlab import Sample

_COMPUTE_ROW = 0
_GAP_NS = 20_000_000
_COMPUTE_KINDS = ("gemm", "reduce", "wait")


@dataclass
class RankTrace:
    """One recorded call on one rank. `samples` may cover more time than the call; they are cut to it."""

    rank: int
    label: str
    start_ns: int
    end_ns: int
    events: list[Event]
    samples: list[Sample] = field(default_factory=list)


def gemm_intervals(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Disjoint sorted intervals in which at least one GEMM was executing."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((event.start_ns, event.end_ns) for event in events if event.kind == "gemm"):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap_fraction(events: Iterable[Event], samples: Sequence[Sample]) -> float:
    """Bytes that crossed the wire while a GEMM was executing, over all that crossed between first and last sample.

    Both directions count. Bytes seen between two samples are taken as spread evenly over that interval, so the answer
    is blurred by one sampling interval at each edge of a GEMM. No bytes at all give 0.0: nothing was hidden.

    Raises: ValueError for samples that run backwards in time or count.
    """
    gemms = gemm_intervals(events)
    hidden = total = 0.0
    for before, after in itertools.pairwise(samples):
        moved = after.tx_bytes - before.tx_bytes + after.rx_bytes - before.rx_bytes
        length = after.time_ns - before.time_ns
        if moved < 0 or length <= 0:
            raise ValueError(f"samples must advance in time and never count down, got {before} then {after}")
        covered = sum(
            max(0, min(end, after.time_ns) - max(start, before.time_ns))
            for start, end in gemms
            if start < after.time_ns
        )
        hidden += moved * covered / length
        total += moved
    return hidden / total if total else 0.0


def samples_within(samples: Sequence[Sample], start_ns: int, end_ns: int) -> list[Sample]:
    """The samples of an interval, and one more on each side so that its first and last bytes are counted."""
    times = [sample.time_ns for sample in samples]
    first = max(0, bisect.bisect_left(times, start_ns) - 1)
    last = min(len(samples), bisect.bisect_right(times, end_ns) + 1)
    return list(samples[first:last])


def trace_overlap(trace: RankTrace) -> float:
    """`overlap_fraction` of one recorded call."""
    return overlap_fraction(trace.events, samples_within(trace.samples, trace.start_ns, trace.end_ns))


def chrome_trace(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """The trace-event JSON object (https://chromium.googlesource.com/catapult, "Trace Event Format").

    Calls of the same label are one recording, whose ranks share a clock; recordings are laid one after the other,
    whatever time passed between them.
    """
    if not traces:
        raise ValueError("traces must hold at least one recorded call")
    origins = _origins(traces)
    output: list[dict[str, Any]] = []
    for rank in sorted({trace.rank for trace in traces}):
        mine = [trace for trace in traces if trace.rank == rank]
        output += _row_names(rank, {event.peer for trace in mine for event in trace.events if _is_transfer(event)})
        for trace in mine:
            origin = origins[trace.label]
            output += _compute_row(trace, origin)
            output += _transfer_rows(trace, origin)
            output += _counters(trace, origin)
    return {"traceEvents": output, "displayTimeUnit": "ms"}


def _origins(traces: Sequence[RankTrace]) -> dict[str, int]:
    """By label: the time that the file calls zero, less what the recordings before it take."""
    origins: dict[str, int] = {}
    offset = 0
    for label in dict.fromkeys(trace.label for trace in traces):
        same = [trace for trace in traces if trace.label == label]
        start, end = min(trace.start_ns for trace in same), max(trace.end_ns for trace in same)
        origins[label] = start - offset
        offset += end - start + _GAP_NS
    return origins


def write_chrome_trace(path: str | Path, traces: Sequence[RankTrace]) -> None:
    Path(path).write_text(json.dumps(chrome_trace(traces)) + "\n", encoding="utf-8")


def _is_transfer(event: Event) -> bool:
    return event.kind in ("send", "recv")


def _row(event: Event) -> int:
    return 1 + 2 * event.peer + (event.kind == "send")


def _row_names(rank: int, peers: set[int]) -> list[dict[str, Any]]:
    rows = {_COMPUTE_ROW: "compute"}
    for peer in sorted(peers):
        rows[1 + 2 * peer] = f"from rank {peer}"
        rows[2 + 2 * peer] = f"to rank {peer}"
    names: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    for row, name in rows.items():
        names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
        names.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": row, "args": {"sort_index": row}})
    return names


def _span(rank: int, row: int, name: str, start_ns: int, end_ns: int, origin: int, args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": rank,
        "tid": row,
        "ts": (start_ns - origin) / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": args,
    }


def _title(event: Event) -> str:
    return f"{event.name} chunk {event.chunk}" if event.chunk >= 0 else event.name


def _compute_row(trace: RankTrace, origin: int) -> list[dict[str, Any]]:
    whole = _span(trace.rank, _COMPUTE_ROW, trace.label, trace.start_ns, trace.end_ns, origin, {})
    return [whole] + [
        _span(trace.rank, _COMPUTE_ROW, _title(event), event.start_ns, event.end_ns, origin, {"kind": event.kind})
        for event in trace.events
        if event.kind in _COMPUTE_KINDS
    ]


def _transfer_rows(trace: RankTrace, origin: int) -> list[dict[str, Any]]:
    """One link carries its chunks one after the other, so a row shows each from the end of the one before it.

    Drawn from the moment of posting they would all start together (that moment is in `args`).
    """
    drawn = []
    busy_until: dict[int, int] = {}
    for event in sorted((event for event in trace.events if _is_transfer(event)), key=lambda event: event.end_ns):
        row = _row(event)
        start = min(max(event.start_ns, busy_until.get(row, event.start_ns)), event.end_ns)
        busy_until[row] = event.end_ns
        args = {"posted_us": (event.start_ns - origin) / 1e3, "chunk": event.chunk}
        drawn.append(_span(trace.rank, row, _title(event), start, event.end_ns, origin, args))
    return drawn


def _counters(trace: RankTrace, origin: int) -> list[dict[str, Any]]:
    """The link's rate between samples, as steps; only changes are written."""
    rates: list[dict[str, Any]] = []
    samples = samples_within(trace.samples, trace.start_ns, trace.end_ns)
    for before, after in itertools.pairwise(samples):
        nanoseconds = max(1, after.time_ns - before.time_ns)
        sent, received = after.tx_bytes - before.tx_bytes, after.rx_bytes - before.rx_bytes
        args = {"out": round(sent * 8 / nanoseconds, 4), "in": round(received * 8 / nanoseconds, 4)}
        if not rates or rates[-1]["args"] != args:
            time_us = max(0, before.time_ns - origin) / 1e3
            rates.append({"ph": "C", "name": "link (Gbit/s)", "pid": trace.rank, "ts": time_us, "args": args})
    return rates
