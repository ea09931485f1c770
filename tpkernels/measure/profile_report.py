"""What `tpkernels profile` found: the verdict, the figures that follow from samples, the table, the JSON, the figure.

Refuses: a number without its samples, and times where the curves differ.  Ratios are between medians of one run.
"""

from __future__ import annotations

import html
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tpkernels.measure import figure, html_report
from tpkernels.measure.curves import Curve, bound
from tpkernels.measure.report import TABLES, measurement_to_json
from tpkernels.measure.timing import Measurement
from tpkernels.measure.trace import trace_overlap
from tpkernels.measure.training import METHODS, NO_TP, OVERLAP, TP, RankResult, Training
from tpkernels.packages import needed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = ["Profile", "print_profile", "write"]

_COLOURS = {NO_TP: "#9a9a9a", TP: "#e8a33d", OVERLAP: "#1fa187"}
_WIDTH = 130


@dataclass
class Profile:
    """Results of all ranks, by rank; `link` says what joined them."""

    training: Training
    results: Sequence[RankResult]
    link: str = "one host"

    @property
    def description(self) -> str:
        sizes, dtype = self.training.sizes, str(self.training.dtype).removeprefix("torch.")
        return (
            f"{self.training.device}, {dtype}, {sizes.layers} layer(s), width {sizes.width}, d_ff {sizes.d_ff}, "
            f"{sizes.heads} heads, {sizes.tokens} tokens a step"
        )

    def curve(self, name: str) -> Curve:
        return self.results[0].curves[name]

    def bound(self, what: str) -> float:
        return bound(self.curve(NO_TP), self.results[0].curves["shifted"], what)

    def difference(self, name: str, what: str) -> float:
        """The largest difference of any rank's curve from that of the one process."""
        return max(result.curves[name].difference(self.curve(NO_TP), what) for result in self.results)

    @property
    def failures(self) -> list[str]:
        return [
            f"{name}: {what} differ from those of one process by {found:.3g}, at most {limit:.3g} expected"
            for name, what in itertools.product((TP, OVERLAP), ("losses", "norms"))
            if not (found := self.difference(name, what)) <= (limit := self.bound(what))
        ]

    @property
    def same(self) -> bool:
        return not self.failures

    def step(self, name: str) -> Measurement:
        """Seconds of the timed steps, each that of its slowest rank."""
        curves = [result.curves[name] for result in self.results if result.curves[name].seconds]
        slowest = [max(seconds) for seconds in zip(*(curve.seconds for curve in curves), strict=True)]
        return Measurement(name, tuple(slowest[self.training.warmup :]))

    def peak_bytes(self, name: str) -> list[int]:
        return [result.curves[name].peak_bytes for result in self.results if result.curves[name].seconds]

    def overlaps(self, name: str) -> list[float]:
        """Of every recorded step and rank the part of the bytes that crossed while a GEMM was executing."""
        traces = [trace for result in self.results for trace in result.traces if trace.label.startswith(f"{name}, ")]
        return [trace_overlap(trace) for trace in traces if trace.samples and name != NO_TP]

    def waiting(self, name: str) -> float:
        """Of the recorded steps, the part in which a rank stood still for a message (the median)."""
        traces = [trace for result in self.results for trace in result.traces if trace.label.startswith(f"{name}, ")]
        parts = [
            sum(event.end_ns - event.start_ns for event in trace.events if event.kind == "wait")
            / (trace.end_ns - trace.start_ns)
            for trace in traces
        ]
        return statistics.median(parts)

    def to_json(self) -> dict[str, Any]:
        times = self.same
        return {
            "same_training": self.same,
            "failures": self.failures,
            "bounds": {what: self.bound(what) for what in ("losses", "norms")},
            "training": {**asdict(self.training), "dtype": str(self.training.dtype)},
            "methods": {
                name: {
                    "losses": self.curve(name).losses,
                    "norms": self.curve(name).norms,
                    **({"step": measurement_to_json(self.step(name))} if times else {}),
                    "peak_bytes_per_rank": self.peak_bytes(name),
                    "overlap_fractions": self.overlaps(name),
                    "waiting": self.waiting(name),
                }
                for name in METHODS
            },
        }


def print_profile(profile: Profile, title: str, file: TextIO | None = None) -> None:
    """The table and the verdict, into ``file`` (default: where this process prints)."""
    with needed("rich", TABLES):
        from rich.console import Console
    console = Console(file=file)
    if not console.is_terminal:
        console = Console(width=_WIDTH, file=console.file)  # a log or a file: wrapping would cut the columns
    console.print(_table(profile, title))
    for line in profile.failures:
        console.print(f"NOT THE SAME TRAINING  {line}", style="bold red", markup=False, soft_wrap=True)
    if profile.same:
        alone, unfused, fused = (profile.step(name).median for name in (NO_TP, TP, OVERLAP))
        console.print(f"overlap: {unfused / fused:.2f}x over TP without it, {alone / fused:.2f}x over one process")


def _table(profile: Profile, title: str) -> Table:
    with needed("rich", TABLES):
        from rich.table import Table
    grid = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    grid.add_column("")
    for name in METHODS:
        grid.add_column(name, justify="right")
    for row in _rows(profile):
        grid.add_row(*row)
    return grid


def _rows(profile: Profile) -> list[list[str]]:
    """What is told, and of each method its cell."""

    def off(name: str, what: str) -> str:
        return "reference" if name == NO_TP else f"{profile.difference(name, what):.2g} of {profile.bound(what):.2g}"

    curves = [profile.curve(name) for name in METHODS]
    rows = [
        ["loss, first to last step", *[f"{c.losses[0]:.4f} to {c.losses[-1]:.4f}" for c in curves]],
        ["  largest difference, of its bound", *[off(name, "losses") for name in METHODS]],
        ["gradient norm, last step", *[f"{c.norms[-1]:.5f}" for c in curves]],
        ["  largest difference, of its bound", *[off(name, "norms") for name in METHODS]],
    ]
    if profile.same:
        rows.append(["step, ms", *[_milliseconds(profile.step(name)) for name in METHODS]])
    return [
        *rows,
        ["peak memory of a rank, MiB", *[f"{max(profile.peak_bytes(name)) / 2**20:.1f}" for name in METHODS]],
        ["bytes that crossed under a GEMM", *[_percent(profile.overlaps(name), name) for name in METHODS]],
        ["waiting for messages", *["-" if name == NO_TP else f"{profile.waiting(name):.0%}" for name in METHODS]],
    ]


def sections(profile: Profile, title: str) -> list[html_report.Section]:
    """Of the page: the verdict and the table, the panels, and one step of training with overlap."""
    verdict = [f'<p class="bad">NOT THE SAME TRAINING {html.escape(line)}</p>' for line in profile.failures]
    table = html_report.table(["", *METHODS], _rows(profile))
    found = [("What was found", f'{"".join(verdict)}{table}<p class="note">{html.escape(_CAPTION)}</p>')]
    found.append(("Curves, steps, memory", html_report.svg(lambda: panels(profile, title))))
    step = f"{OVERLAP}, step 0"
    traces = [trace for result in profile.results for trace in result.traces if trace.label == step]
    if profile.same and traces:
        found.append((f"Timeline of one step: {OVERLAP}", html_report.svg(lambda: figure.timeline(traces))))
    return found


def _milliseconds(times: Measurement) -> str:
    return f"{times.median * 1e3:.1f} ±{times.interquartile_range / 2 * 1e3:.1f} (n {len(times.seconds)})"


def _percent(parts: Sequence[float], name: str) -> str:
    if name == NO_TP:
        return "-"
    return f"{statistics.median(parts):.0%}" if parts else "counted with --netlab only"


_CAPTION = (
    "no TP: one process on one core (one GPU), while the others are idle; the others: one core (GPU) a rank.\n"
    "step: forward, backward, global gradient norm, optimizer; median of interleaved steps, slowest rank, "
    "± half the interquartile range.\n"
    "peak memory: tensors of the fullest rank (weights, optimizer state, one step), without what ranks share.\n"
    "Differences are held against one process whose weights were moved by one unit in the last place."
)


def write(folder: Path, profile: Profile, title: str, environment: Mapping[str, Any]) -> list[str]:
    """profile.json, profile.txt, profile.html, and profile.png where matplotlib is installed; returns what to say."""
    samples, text, picture = folder / "profile.json", folder / "profile.txt", folder / "profile.png"
    samples.write_text(json.dumps({**environment, **profile.to_json()}, indent=1) + "\n", encoding="utf-8")
    with text.open("w", encoding="utf-8") as file:
        print_profile(profile, title, file)
    refusal = draw(profile, title, picture)
    drawn = f"figure: {picture}" if refusal is None else f"no figure: {refusal}"
    page = html_report.write(folder / "profile.html", title, environment, sections(profile, title))
    return [f"samples: {samples}", f"table: {text}", drawn, page]


def draw(profile: Profile, title: str, path: Path) -> str | None:
    """Write the four panels as PNG; returns why there are none, or None."""
    try:
        panels(profile, title).savefig(path, dpi=130)
    except ImportError:
        return "matplotlib is not installed (pip install matplotlib)"
    return None


def panels(profile: Profile, title: str) -> Figure:
    """Losses, gradient norms, times of steps, and memory."""
    from matplotlib.figure import Figure  # no pyplot: no window system, no state

    picture = Figure(figsize=(11, 7.5), layout="constrained")
    picture.suptitle(title, fontsize=10)
    loss, norm, step, memory = picture.subplots(2, 2).flat
    for axes, what, name in ((loss, "losses", "loss"), (norm, "norms", "global gradient norm")):
        for number, method in enumerate(METHODS):
            style = {"lw": 5.5 - 2 * number, "alpha": 0.8, "color": _COLOURS[method], "label": method}
            values = getattr(profile.curve(method), what)
            axes.plot(range(1, len(values) + 1), values, **style)
        axes.set_title(f"{name}: at most {_worst(profile, what)} of its bound apart", loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=8)
    if profile.same:
        _step_panel(step, profile)
    else:
        step.text(0.5, 0.5, "not the same training:\nno times", ha="center", va="center", transform=step.transAxes)
    peaks = [max(profile.peak_bytes(name)) / 2**20 for name in METHODS]
    bars = memory.bar(METHODS, peaks, color=[_COLOURS[name] for name in METHODS])
    memory.bar_label(bars, fmt="%.1f", fontsize=9)
    memory.set_title("peak memory of the fullest rank, MiB of tensors", loc="left", fontsize=10)
    for axes in (loss, norm, step, memory):
        axes.spines[["top", "right"]].set_visible(False)
    return picture


def _worst(profile: Profile, what: str) -> str:
    limit = profile.bound(what)
    return f"{max(profile.difference(name, what) for name in (TP, OVERLAP)) / limit:.1%}" if limit else "0%"


def _step_panel(axes: Any, profile: Profile) -> None:
    """Bars are medians, points the steps."""
    times = [profile.step(name) for name in METHODS]
    axes.bar(METHODS, [one.median * 1e3 for one in times], color=[_COLOURS[name] for name in METHODS])
    top = max(one.worst for one in times) * 1e3
    for place, one in enumerate(times):
        count = len(one.seconds)
        spread = [place - 0.2 + 0.4 * number / max(1, count - 1) for number in range(count)]
        axes.plot(spread, [seconds * 1e3 for seconds in one.seconds], ".", color="black", ms=4)
        label, hidden = f"{one.median * 1e3:.1f} ms", profile.overlaps(one.name)
        if hidden:
            label += f"\n{statistics.median(hidden):.0%} of bytes\nunder a GEMM"
        axes.text(place, top * 1.04, label, ha="center", va="bottom", fontsize=9)
    axes.set_ylim(0, top * 1.35)
    axes.set_ylabel("ms")
    axes.set_title("step: median and every step, slowest rank", loc="left", fontsize=10)
