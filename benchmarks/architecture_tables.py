"""The tables of docs/architectures.md, made of the result files of architectures.py."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import share_tables

__all__ = ["document", "read_files", "summary"]

STATUS = {
    "right": "outputs, evaluation and every gradient as the unsharded model's",
    "fp32": "right in fp64; in fp32 further off than the unsharded model's own rounding explains",
    "wrong": "an output, a gradient, a parameter, or the unsharded model after planning differs",
    "raises": "planning, cutting, forward or backward raised, crashed or hung",
    "nothing to cut": "`make_plan` says that no layer can be cut, and raises",
    "refused": "`make_plan` says in words why it does not do what was asked for, and raises",
    "cannot be built": "no small model that runs unsharded on a CPU here, with the reason",
    "no model": "a part of other architectures without an auto class of its own",
}
RUN = ("right", "fp32", "wrong", "raises", "nothing to cut", "refused")
INTRODUCTION = """# Architectures of transformers

Every `model_type` of the installed transformers, built small from its default configuration with random weights,
planned and parallelized without any option (`parallelize(model, mesh)`), and compared with the unsharded model. This
file is made by `python benchmarks/architectures.py --write` from `benchmarks/results/`.

**right** is: all outputs, every gradient and the outputs in evaluation within 1e-9 of the unsharded model in fp64,
relative to the largest value (1e-6 where the model computes in fp32 inside; for a gradient, a tenth of the model's
largest is added to its own); in fp32 at most 8 times as far from fp64 as the unsharded model, element by element
(`tpkernels/verification/bounds.py`); and the unsharded model still computing what it did before it was planned. fp64
decides: where fp32 is over its bound and fp64 is not, a router or a ReLU may have decided otherwise within rounding.
Then the same unsharded model with weights off by one rounding gives the bound; what is over that one, too, is listed
as **fp32**. A model that amplifies a rounding (batch norms over two values) is judged alike in fp64: what differs there
by less than 1e-6 may differ by 8 times what weights off by one rounding of fp64 change in the unsharded model
("shaken" in the file). Models with experts have torch's grouped product replaced by single ones in fp64, which torch
does not offer. Since 2026-11-28 code that asks for fp32 inside gets fp64 in both models, so that 1e-9 holds there, too:
rows of earlier days that say "fp32 inside" were held to 1e-6. Where fp64 cannot run at all the reference is fp32, and
the limit 1e-4.

*cut*: share of the parameters' bytes that is divided over the ranks. *proven*: layers whose neighbours were proven
from data flow to work on parts, so that one sum serves them all. *untraced*: the model could not be traced without
example inputs, and why; its layers are then taken one by one. *second*: what came of the same with example inputs.

Each section names the commits of its rows, which were run on several days (`--only`); the result file has that of each
row.
"""


def document(files: Mapping[Path, dict[str, Any]], shares: Mapping[Path, dict[str, Any]]) -> str:
    lines = [line for path, content in shares.items() for line in share_tables.section(path, content)]
    whole_first = sorted(files.items(), key=lambda item: -len(item[1]["results"]))
    return (
        "\n".join([INTRODUCTION, *lines, *(line for path, content in whole_first for line in _section(path, content))])
        + "\n"
    )


def _section(path: Path, content: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    groups = sorted({(row["world"], row["sequence_parallel"]) for row in content["results"]})
    for world, sequence in groups:
        rows = [row for row in content["results"] if (row["world"], row["sequence_parallel"]) == (world, sequence)]
        day = max(row["date"] for row in rows)[:10]
        lines += [f"## {world} ranks, {'residual cut along the sequence' if sequence else 'residual whole'}, {day}", ""]
        lines += [*_summary(path, content, rows), *_table(rows), *_unbuilt(rows)]
    return lines


def summary(rows: list[dict[str, Any]]) -> str:
    """One line: how many of which status."""
    count = Counter(row["status"] for row in rows)
    run = sum(count[status] for status in RUN)
    listed = ", ".join(f"{count[status]} {status}" for status in RUN)
    untraced = sum(row.get("traced") is False for row in rows)
    return (
        f"**{len(rows)} architectures, {run} run: {listed}.** {untraced} could not be traced without example inputs. "
        f"{count['cannot be built']} cannot be built or run unsharded here, {count['no model']} are parts of others."
    )


def _summary(path: Path, content: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    hardware, versions = content["hardware"], content["versions"]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    dates = sorted(row["date"] for row in rows)
    days = " to ".join(dict.fromkeys((dates[0][:10], dates[-1][:10])))
    return [
        summary(rows),
        "",
        f"`benchmarks/results/{path.name}`: {days}, {hardware['cpu']}, {hardware['cores']} cores, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, Python "
        f"{versions['python']}; commit {commits}; `python benchmarks/{_shortened(content['command'])}`",
        "",
        *(f"- {status}: {meaning}" for status, meaning in STATUS.items()),
        "",
    ]


def _shortened(command: str) -> str:
    """A list of names as their number: they are in the table."""
    words = shlex.split(command)
    if "--only" in words:
        place = words.index("--only") + 1
        words[place] = f"<{words[place].count(',') + 1} names>"
    return " ".join(words)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """What ran; what is not right comes first."""
    lines = [
        "| architecture | class | inputs | mode | verdict | cut | proven | fp32 worst | s | |",
        "|---|---|---|---|---|---:|---:|---:|---:|---|",
    ]
    order = ("wrong", "raises", "fp32", "right", "nothing to cut", "refused")
    for row in sorted((row for row in rows if row["status"] in order), key=lambda row: order.index(row["status"])):
        worst = row.get("worst")
        lines.append(
            f"| {row['name']} | {row['kind']} | {row['inputs']} | {row['mode']}{_reference(row)} | {row['status']} | "
            f"{_percent(row.get('cut'))} | {row.get('proven', '')} | {'' if worst is None else f'{worst:.3g}'} | "
            f"{row['seconds']:.0f} | {_remark(row)} |"
        )
    return [*lines, ""]


def _reference(row: dict[str, Any]) -> str:
    if row["reference"] != "fp64":
        return ", fp32 alone"
    return ", fp32 inside" if row["single"] else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _remark(row: dict[str, Any]) -> str:
    parts = [_problem(row)]
    if row.get("traced") is False:
        parts.append(f"untraced: {row['why']}")
    if "with inputs" in row:
        again = row["with inputs"]
        parts.append(f"second: {again['status']} {_problem(again)}".strip())
    return _plain("; ".join(part for part in parts if part))


def _problem(row: dict[str, Any]) -> str:
    if row["status"] in ("raises", "refused"):
        return f"{row['stage']}: {row['reason']}" if row.get("stage") else ""
    found = row.get("wrong") or row.get("fp32") or {}
    shown = [f"{name} {size:.1e}" if size < 1e9 else name for name, size in list(found.items())[:2]]
    more = max(row.get("wrong_count", 0), row.get("fp32_count", 0)) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if found and more > 0 else "")


def _unbuilt(rows: list[dict[str, Any]]) -> list[str]:
    missing = [row for row in rows if row["status"] == "cannot be built"]
    parts = sorted(row["name"] for row in rows if row["status"] == "no model")
    lines = ["### Not run", "", "| architecture | class | where | reason |", "|---|---|---|---|"] if missing else []
    for row in missing:
        lines.append(f"| {row['name']} | {row['kind']} | {row['stage']} | {_plain(row['reason'])} |")
    if parts:
        lines += ["", f"Parts of other architectures, without an auto class: {', '.join(parts)}."]
    return [*lines, ""]


def _plain(text: str) -> str:
    """In a cell of a table."""
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")[:240]


def read_files(folder: Path, kind: str) -> dict[Path, dict[str, Any]]:
    return {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{kind}-*.json"))}
