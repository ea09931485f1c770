"""One self-contained HTML page of a measurement: tables, figures as inline SVG, hardware, versions, command.

The page loads nothing, so that it can be attached to a report and opened years later.  Figures are matplotlib's; where
it is not installed the page says so in their place.
"""

from __future__ import annotations

import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpkernels.measure import bench_table, figure
from tpkernels.measure.report import CaseResult
from tpkernels.measure.trace import RankTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Section", "bench_sections", "page", "svg", "table", "write"]

Section = tuple[str, str]
"""A heading, and the HTML below it."""

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1d1d1f; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; } h3 { font-size: .95rem; margin-bottom: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid #e3e3e6; }
th:first-child, td:first-child { text-align: left; }
tr.roof td { color: #6e6e73; } tr.best td { font-weight: 600; }
.scroll svg { max-width: 100%; height: auto; }
pre, .note { color: #515154; font-size: .86rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.bad { color: #b00020; font-weight: 600; }
@media (max-width: 40rem) {
  th, td { padding: .15rem .4rem; font-size: .86rem; }
  th:first-child, td:first-child { white-space: normal; min-width: 7rem; }
}
"""


def page(title: str, environment: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """The whole file; ``environment`` is what :func:`tpkernels.measure.report.describe_environment` found."""
    about = {key: value for key, value in environment.items() if key != "results"}
    body = "".join(f"<h2>{html.escape(heading)}</h2>\n{content}\n" for heading, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n"
        f"<pre>{html.escape(str(about.get('command', '')))}</pre>\n{body}"
        f"<h2>Machine, versions, settings</h2>\n<pre>{html.escape(json.dumps(about, indent=1))}</pre>\n</body></html>\n"
    )


def svg(draw: Callable[[], Figure]) -> str:
    """The figure as inline SVG, or a sentence that says why there is none."""
    try:
        picture = draw()
    except ImportError:
        return '<p class="note">no figure: matplotlib is not installed (pip install matplotlib)</p>'
    text = io.StringIO()
    picture.savefig(text, format="svg")
    drawn = text.getvalue()
    return f'<div class="scroll">{drawn[drawn.index("<svg") :]}</div>'


def bench_sections(results: Sequence[CaseResult], title: str, traces: Sequence[RankTrace]) -> list[Section]:
    """What `tpkernels bench` found: the times, and three figures of them; a timeline where calls were recorded."""
    sections = [("Times", "".join(_case(result) for result in results) + _notes(results))]
    if results:
        sections += [
            ("Time over the roof", svg(lambda: figure.times_over_roof(results, title))),
            ("Speed-up over unfused, by M x N", svg(lambda: figure.speedups(results))),
            ("Roofline", svg(lambda: figure.roofline(results))),
        ]
    if traces:
        label = traces[-1].label
        calls = [trace for trace in traces if trace.label == label]
        sections.append((f"Timeline of one call: {label}", svg(lambda: figure.timeline(calls))))
    return sections


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str] = ()) -> str:
    """``kinds``: of each row its class, "roof", "best" or none."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    lines = [
        f'<tr class="{kind}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for kind, cells in zip(kinds or [""] * len(rows), rows, strict=True)
    ]
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>\n'


def _case(result: CaseResult) -> str:
    kinds = [
        "roof" if name in ("gemm", "comm") else "best" if name == result.fused_name else ""
        for name in bench_table.in_order(result)
    ]
    heading = f"{result.op} {result.shape} {result.dtype} TP {result.world_size}"
    return f"<h3>{html.escape(heading)}</h3>{table(bench_table.HEADINGS, bench_table.rows(result), kinds)}"


def _notes(results: Sequence[CaseResult]) -> str:
    lines = [
        f'<div class="{"bad" if " WRONG: " in line else "note"}">{html.escape(line)}</div>'
        for line in bench_table.remarks(results)
    ]
    return f'<p class="note">{html.escape(bench_table.CAPTION)}</p>{"".join(lines)}'


def write(path: Path, title: str, environment: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Write the page; returns what to tell the user."""
    path.write_text(page(title, environment, sections), encoding="utf-8")
    return f"page: {path}"
