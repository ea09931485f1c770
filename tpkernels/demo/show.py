"""How the demo looks: tables, a plot, verdicts.  Takes reports, computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tpkernels.demo.minilm import BOUND_FACTOR, MiniLMReport
from tpkernels.demo.training import TrainingReport
from tpkernels.measure.curves import FACTOR
from tpkernels.measure.report import NOISE, Ratio

__all__ = ["show_minilm", "show_training"]

PLOT_WIDTH, PLOT_HEIGHT = 64, 12
TABLE_ROWS = 10


def show_minilm(console: Console, report: MiniLMReport) -> None:
    """The first part's results."""
    ranks = _ranks(report.world_size)
    console.print(
        f"{report.num_swapped} linears of 6 blocks swapped; {report.num_sentences} sentences, {report.num_tokens} "
        f"tokens, on {ranks}.\n"
    )
    table = _table("", "unsharded", "per rank", "")
    for name, full, parts in (
        ("the blocks' linears", report.full_linear_bytes, report.rank_linear_bytes),
        ("all parameters", report.full_bytes, report.rank_bytes),
    ):
        table.add_row(name, _megabytes(full), _range_of(parts), f"{max(parts) / full:.0%}")
    console.print(Padding(table, (0, 0, 1, 2)))

    table = _table("implementation", "one batch", "speedup")
    for name, time in report.times.items():
        label = f"auto (chose {report.chosen})" if name == "auto" else name
        speedup = "-" if name == "unfused" else str(Ratio.of(report.times["unfused"], time))
        table.add_row(label, f"{time.median * 1e3:.0f} ms", speedup)
    console.print(Padding(table, (0, 0, 0, 2)))
    console.print()
    _indented(
        console,
        f"[dim]Medians, interleaved; {NOISE} is noise. Ranks of one machine have no network to hide behind the GEMM; "
        "`tpkernels bench --netlab 1gbit` gives them one (root).[/dim]\n",
    )
    for question, answer, similarity in report.answers:
        _indented(console, f"{question}  [dim]->[/dim]  {answer}  [dim]{similarity:.2f}[/dim]")
    console.print()
    _verdict(
        console,
        report.holds,
        f"largest difference from the unsharded model {report.difference:.2e}, bound {report.bound:.2e}",
        f"{BOUND_FACTOR:g} x the unsharded model's own rounding error, {report.own_error:.2e}, measured against fp64",
    )


def show_training(console: Console, report: TrainingReport) -> None:
    """The second part's results."""
    sizes, ranks = report.sizes, _ranks(report.world_size)
    console.print(
        f"{sizes.layers} blocks, width {sizes.width}, {sizes.heads} heads, {sizes.d_ff} hidden features, "
        f"{sizes.length} positions, {sizes.vocabulary} tokens; {report.num_parameters:,} parameters, "
        f"{_counts(report.rank_parameters)} per rank; {report.corpus_bytes / 1e6:.1f} MB of text.\n"
    )
    reference, parallel = report.reference.losses, report.parallel.losses
    table = _table("step", "one process", ranks, "difference", "gradient norm", ranks)
    steps = len(reference)
    shown = sorted({round(i * (steps - 1) / (TABLE_ROWS - 1)) for i in range(TABLE_ROWS)})
    for step in shown:
        table.add_row(
            str(step + 1),
            f"{reference[step]:.6f}",
            f"{parallel[step]:.6f}",
            f"{abs(reference[step] - parallel[step]):.1e}",
            f"{report.reference.norms[step]:.4f}",
            f"{report.parallel.norms[step]:.4f}",
        )
    console.print(Padding(table, (0, 0, 1, 2)))
    console.print(Padding(plot(reference, parallel), (0, 0, 0, 2)))
    console.print(f"  [cyan]o[/cyan] one process   [magenta]x[/magenta] {ranks}   [green]@[/green] both\n")
    one, many = report.tokens_per_second(report.reference), report.tokens_per_second(report.parallel)
    console.print(f"  one process {one:,.0f} tokens/s, {ranks} {many:,.0f} tokens/s (median step)\n")
    first, last = parallel[0], parallel[-1]
    _verdict(console, report.has_learnt, f"loss fell from {first:.2f} to {last:.2f} in {steps} steps", "")
    _verdict(
        console,
        report.holds,
        f"largest difference of the two curves {report.difference:.2e}, bound {report.bound:.2e}",
        f"{FACTOR:g} x (what moving each weight by its last bit does to one process, "
        f"{report.sensitivity:.2e}, and the rounding of the loss itself)",
    )


def plot(reference: Sequence[float], parallel: Sequence[float]) -> Text:
    """Two loss curves in characters."""
    low, high = min(*reference, *parallel), max(*reference, *parallel)
    height = (high - low) or 1.0
    width = min(PLOT_WIDTH, max(2, len(reference)))
    marks: dict[tuple[int, int], set[str]] = {}
    for name, losses in (("o", reference), ("x", parallel)):
        for column in range(width):
            step = round(column * (len(losses) - 1) / (width - 1))
            row = round((high - losses[step]) / height * (PLOT_HEIGHT - 1))
            marks.setdefault((row, column), set()).add(name)
    styles = {"o": ("o", "cyan"), "x": ("x", "magenta"), "ox": ("@", "green")}
    text = Text()
    for row in range(PLOT_HEIGHT):
        text.append(f"{high - row * height / (PLOT_HEIGHT - 1):5.2f} |", style="dim")
        for column in range(width):
            found = "".join(sorted(marks.get((row, column), ())))
            text.append(*styles[found]) if found else text.append(" ")
        text.append("\n")
    text.append("      +" + "-" * width + f" step {len(reference)}", style="dim")
    return text


def _indented(console: Console, text: str, columns: int = 2) -> None:
    """Print markup whose further lines, where it does not fit into one, begin below the first."""
    console.print(Padding(Text.from_markup(text), (0, 0, 0, columns), expand=False))


def _verdict(console: Console, holds: bool, what: str, why: str) -> None:
    mark = "[bold green]OK[/bold green]  " if holds else "[bold red]FAILED[/bold red]  "
    console.print(f"{mark}{what}")
    if why:
        _indented(console, f"[dim]{why}[/dim]", 6)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _range_of(sizes: Sequence[int]) -> str:
    low, high = min(sizes), max(sizes)
    return _megabytes(high) if low == high else f"{low / 1e6:.1f} to {_megabytes(high)}"


def _counts(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"
