"""The figure of `tpkernels bench`: how far each way of doing an op is from its roof.

One panel per op, one group of bars per shape and group size. A bar is time over the roof, max(GEMM alone, communication
alone) of the same run: 1 is communication for free. Bars of several times the roof are cut and carry their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpkernels.measure.report import CaseResult

__all__ = ["draw", "relative_times"]

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
    """Write the figure as PNG; returns why there is none, or None."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no window system, no state
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"
    ops = list(dict.fromkeys(result.op for result in results))
    if not ops:
        return "there are no results"
    widest = max(sum(result.op == op for result in results) for op in ops)
    picture = Figure(figsize=(max(9.0, 1.5 + 1.05 * widest), 3.4 * len(ops)), layout="constrained")
    picture.suptitle(f"time / max(GEMM alone, communication alone): {title}")
    names = [name for name in _order(results) if any(name in relative_times(result) for result in results)]
    for axes, op in zip(picture.subplots(len(ops), 1, squeeze=False)[:, 0], ops, strict=True):
        _panel(axes, [result for result in results if result.op == op], names)
        axes.set_title(op, loc="left", fontsize=10)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(names) + 1, frameon=False)
    picture.savefig(path, dpi=130)
    return None


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
