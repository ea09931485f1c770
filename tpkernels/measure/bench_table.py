"""The table of `tpkernels bench`: one row per way of doing an op, under 100 columns, with a mark where noise hides it.

A ratio is between the medians of one interleaved run.  The ratios of its rounds, which a machine that slows down does
not change, say what may be concluded: where their quartiles lie on both sides of 1, nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tpkernels.measure import figure
from tpkernels.measure.report import BASELINES, NOISE, RIVAL_NAMES, ROOFS, TABLES, CaseResult, Ratio
from tpkernels.packages import needed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "CAPTION",
    "HEADINGS",
    "duration",
    "in_order",
    "print_results",
    "remarks",
    "rows",
    "table",
    "write_table_and_figure",
]

HEADINGS = ("way", "time", "±", "vs torch", "vs unfused", "overlap", "exposed")
CAPTION = (
    "time: median over interleaved rounds of the slowest rank; ±: half the interquartile range.\n"
    "GEMM only: the arithmetic alone. comm only: the payload once over the wire, point to point.\n"
    f"vs: baseline / this way; {NOISE} noise: the quartiles of the rounds' ratios lie on both sides of 1.\n"
    "overlap: (unfused - this) / (unfused - max(GEMM only, comm only)); '-': nothing could be won.\n"
    f"{NOISE} beside overlap: the rounds do not tell one of these two differences from 0.\n"
    "exposed: this - GEMM only; 0 where it was no slower."
)
_WIDTH = 98
_LABELS = {"gemm": "GEMM only", "comm": "comm only"}


def duration(seconds: float) -> str:
    """Three significant digits, in the unit in which they are read."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if abs(value) >= 0.9995 or unit == "us":
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError("unreachable")


def in_order(result: CaseResult) -> list[str]:
    """The ways that were measured: roofs, baselines, ours, auto, others'."""
    ours = [name for name in result.times if name not in (*ROOFS, *BASELINES, *RIVAL_NAMES, "auto")]
    order = [*ROOFS, *BASELINES, *ours, "auto", *RIVAL_NAMES]
    return [name for name in dict.fromkeys(order) if name in result.times]


def rows(result: CaseResult) -> list[tuple[str, ...]]:
    """The cells of one case, a tuple per way, in the order of :data:`HEADINGS`; the roofs show their rate."""
    found: list[tuple[str, ...]] = []
    for name in in_order(result):
        measured, roof = result.times[name], name in ROOFS
        ratios = [None if name == base else Ratio.of(result.times.get(base), measured) for base in BASELINES]
        overlap, exposed = (None, None) if roof else (result.overlap_of(name), result.exposed_of(name))
        found.append(
            (
                _LABELS.get(name, f"auto: {result.chosen}" if name == "auto" else name),
                duration(measured.median),
                duration(measured.interquartile_range / 2),
                "" if roof else _ratio_cell(ratios[0]),
                _rate(result, name) if roof else _ratio_cell(ratios[1]),
                "" if roof else "-" if overlap is None or name in BASELINES else _overlap_cell(result, name, overlap),
                "" if roof else "-" if exposed is None else "0" if exposed <= 0 else duration(exposed),
            )
        )
    return found


def _ratio_cell(ratio: Ratio | None) -> str:
    return "-" if ratio is None else str(ratio)


def _overlap_cell(result: CaseResult, name: str, overlap: float) -> str:
    return f"{overlap:.0%} {NOISE if result.overlap_is_noise(name) else ' '}"


def _rate(result: CaseResult, name: str) -> str:
    seconds = result.times[name].median
    if seconds <= 0:
        return ""
    if name == "gemm":
        flops = result.flops / seconds
        return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.1f} GFLOP/s"
    speed = result.wire_bytes / seconds
    return f"{speed / 1e9:.2f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"


def table(results: Sequence[CaseResult], title: str) -> Table:
    with needed("rich", TABLES):
        from rich.table import Table
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for heading in HEADINGS:
        grid.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
    for result in results:
        grid.add_row()
        grid.add_row(f"[bold]{result.op}[/bold]")
        grid.add_row(f"{result.shape} {result.dtype} TP {result.world_size}")
        for cells in rows(result):
            grid.add_row(f"  {cells[0]}", *cells[1:])
    return grid


def print_results(results: Sequence[CaseResult], title: str, file: TextIO | None = None) -> None:
    """The table, and who was left out, into ``file`` (default: where this process prints)."""
    console = _console(file)
    console.print(table(results, title))
    console.print(CAPTION, markup=False, highlight=False, soft_wrap=True)
    for line in remarks(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _console(file: TextIO | None) -> Console:
    with needed("rich", TABLES):
        from rich.console import Console
    console = Console(file=file)
    return console if console.is_terminal else Console(width=_WIDTH, file=console.file)


def remarks(results: Sequence[CaseResult]) -> list[str]:
    """Wrong results, and who was left out: a line per name and reason, with the problems it concerns."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        label = f"{result.op} {result.shape} TP {result.world_size}"
        for what, of in (("WRONG", result.failures), ("left out", result.notes)):
            for name, why in of.items():
                found.setdefault((name, what, why), []).append(label)
    return [
        f"{name} {what}: {why} ({'everywhere' if len(where) == len(results) else ', '.join(where)})"
        for (name, what, why), where in sorted(found.items(), key=lambda item: item[0][1] != "WRONG")
    ]


def write_table_and_figure(folder: str | Path, results: Sequence[CaseResult], title: str) -> list[str]:
    """bench.txt, and bench.png where matplotlib is installed; returns what to tell the user."""
    text, picture = Path(folder, "bench.txt"), Path(folder, "bench.png")
    with text.open("w", encoding="utf-8") as file:
        print_results(results, title, file)
    refusal = figure.draw(results, title, picture)
    return [f"table: {text}", f"figure: {picture}" if refusal is None else f"no figure: {refusal}"]
