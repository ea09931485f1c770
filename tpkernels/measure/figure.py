"""The figures of `tpkernels bench`: time over the roof, speed-up by size, roofline, timeline of one call.

A bar of the first is time over the roof, max(GEMM alone, communication alone) of the same run: 1 is communication for
free. Bars of several times the roof are cut and carry their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.measure.report import CaseResult, Ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tpkernels.measure.trace import RankTrace

__all__ = ["draw", "relative_times", "roofline", "speedups", "timeline", "times_over_roof"]

# One colour per way in all figures: baselines grey, ours blue to green, others' warm.
_COLOURS = {
    "torch": "#9a9a9a", "unfused": "#5f5f5f", "chunked": "#7db4e6", "shared_memory": "#2f7ec1", "symmetric": "#12507f",
    "auto": "#1fa187", "torch_symm_mem": "#e8a33d", "transformer_engine": "#76b900",
}  # fmt: skip
_CUT = 3.0  # times the roof
_SPREAD = 0.5  # of the interquartile range


def relative_times(result: CaseResult) -> dict[str, tuple[float, float]]:
    """Per way of doing the op: (median, half the interquartile range) over the roof."""
    roof = result.roof
    if not roof:
        return {}
    ways = [name for name in result.times if name not in ("gemm", "comm")]
    return {
        name: (result.times[name].median / roof, _SPREAD * result.times[name].interquartile_range / roof)
        for name in ways
    }


def draw(results: Sequence[CaseResult], title: str, path: Path) -> str | None:
    """Write :func:`times_over_roof` as PNG; returns why there is none, or None."""
    if not results:
        return "there are no results"
    try:
        times_over_roof(results, title).savefig(path, dpi=130)
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"
    return None


def times_over_roof(results: Sequence[CaseResult], title: str) -> Figure:
    """One panel per op, a group of bars per problem: each way's time over the roof of its run."""
    ops = list(dict.fromkeys(result.op for result in results))
    widest = max(sum(result.op == op for result in results) for op in ops)
    picture = _figure(max(9.0, 1.5 + 1.05 * widest), 3.4 * len(ops))
    picture.suptitle(f"time / max(GEMM alone, communication alone): {title}")
    names = [name for name in _order(results) if any(name in relative_times(result) for result in results)]
    for axes, op in zip(picture.subplots(len(ops), 1, squeeze=False)[:, 0], ops, strict=True):
        _panel(axes, [result for result in results if result.op == op], names)
        axes.set_title(op, loc="left", fontsize=10)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(names) + 1, frameon=False)
    return picture


def speedups(results: Sequence[CaseResult]) -> Figure:
    """Unfused / the fastest fused implementation over M x N, a series per op and group size; bars: the quartiles."""
    picture = _figure(9.0, 4.0)
    axes = picture.subplots()
    series: dict[str, list[tuple[float, Ratio]]] = {}
    for result in results:
        ratio = Ratio.of(result.times.get("unfused"), result.times.get(result.fused_name or ""))
        if ratio is not None:
            m, _, n = result.sizes
            series.setdefault(f"{result.op}, TP {result.world_size}", []).append((m * n, ratio))
    for label, points in series.items():
        points.sort(key=lambda point: point[0])
        values = [ratio.value for _, ratio in points]
        below = [max(0.0, ratio.value - ratio.low) for _, ratio in points]
        above = [max(0.0, ratio.high - ratio.value) for _, ratio in points]
        axes.errorbar(
            [x for x, _ in points], values, yerr=[below, above], marker="o", ms=4, lw=1, capsize=2, label=label
        )
    axes.axhline(1.0, color="#c0392b", linewidth=1.0)
    axes.set_xscale("log")
    axes.set_xlabel("M x N")
    axes.set_ylabel("unfused / fused")
    if series:
        axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


def roofline(results: Sequence[CaseResult]) -> Figure:
    """Floating-point operations per second of a rank over those per byte on its wire, below the measured roofs."""
    picture = _figure(9.0, 4.4)
    axes = picture.subplots()
    compute = max((result.flops / time for result in results if (time := result.median("gemm"))), default=0.0)
    wire = max((result.wire_bytes / time for result in results if (time := result.median("comm"))), default=0.0)
    per_byte = [result.flops / result.wire_bytes for result in results if result.wire_bytes]
    if compute and wire and per_byte:
        low, high = min(*per_byte, compute / wire) / 2, max(*per_byte, compute / wire) * 2
        corners = [low, compute / wire, high]
        axes.plot(corners, [min(compute, wire * x) / 1e9 for x in corners], color="#c0392b", lw=1.2, label="roofs")
    for name in ("unfused", "chunked", "shared_memory", "symmetric"):
        points = [(result.flops / result.wire_bytes, result.flops / time / 1e9)
                  for result in results if result.wire_bytes and (time := result.median(name))]  # fmt: skip
        if points:
            axes.plot(*zip(*points, strict=True), "o", ms=5, color=_COLOURS[name], label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte that a rank sends")
    axes.set_ylabel("GFLOP/s of a rank")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


_KINDS = {"gemm": "#2f7ec1", "reduce": "#1fa187", "wait": "#d9534f", "send": "#c9c9c9", "recv": "#9a9a9a"}


def timeline(calls: Sequence[RankTrace]) -> Figure:
    """What each rank did in one call: arithmetic and waits above, transfers (posted to seen complete) below."""
    rows = [(trace, transfers) for trace in calls for transfers in (False, True)]
    picture = _figure(9.0, 0.8 + 0.45 * len(rows))
    axes = picture.subplots()
    start = min(trace.start_ns for trace in calls)
    for place, (trace, transfers) in enumerate(rows):
        for event in trace.events:
            if (event.kind in ("send", "recv")) == transfers:
                left, length = (event.start_ns - start) / 1e6, (event.end_ns - event.start_ns) / 1e6
                axes.barh(
                    place, length, left=left, height=0.7, color=_KINDS[event.kind], alpha=0.6 if transfers else 1.0
                )
    for kind, colour in _KINDS.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.set_yticks(range(len(rows)), [f"rank {t.rank}{' wire' if wire else ''}" for t, wire in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    picture.legend(loc="outside upper right", ncols=len(_KINDS), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return picture


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # no pyplot: no window system, no state

    return Figure(figsize=(width, height), layout="constrained")


def _order(results: Sequence[CaseResult]) -> list[str]:
    known = list(_COLOURS)
    return [*known, *{name: None for result in results for name in result.times if name not in known}]


def _panel(axes: Any, results: Sequence[CaseResult], names: Sequence[str]) -> None:
    width = 0.86 / len(names)
    for place, name in enumerate(names):
        at, heights, spreads = [], [], []
        for group, result in enumerate(results):
            time, spread = relative_times(result).get(name, (0.0, 0.0))
            position = group + (place - (len(names) - 1) / 2) * width
            at.append(position)
            heights.append(min(time, _CUT))
            spreads.append(0.0 if time > _CUT else spread)
            if time > _CUT:
                axes.text(position, 1.01 * _CUT, f"{time:.1f}", ha="center", va="bottom", fontsize=6, rotation=90)
        axes.bar(at, heights, width, yerr=spreads, label=name, color=_COLOURS.get(name), error_kw={"lw": 0.7})
    axes.axhline(1.0, color="#c0392b", linewidth=1.0, label="roof")
    axes.set_xticks(range(len(results)), [f"{result.shape}\nTP {result.world_size}" for result in results], fontsize=7)
    axes.set_xlim(-0.6, len(results) - 0.4)
    axes.set_ylim(0, _CUT * 1.12 if any(t > _CUT for r in results for t, _ in relative_times(r).values()) else None)
    axes.set_ylabel("x roof")
    axes.spines[["top", "right"]].set_visible(False)
