"""How much of each architecture is cut: the section of docs/architectures.md, made of the files of plan_shares.py."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["CUT", "PAIRS", "falls_short", "section"]

CUT, PAIRS = 0.95, 0.9
"""Shares of the body's bytes that an architecture shall have cut, and cut in pairs."""
CAUSES = (
    ("convolutions", r"no way to cut a \w*Conv|convolution as torch's are|each channel by itself|channels"),
    ("recurrent layers", r"no way to cut a \w*(LSTM|GRU|RNN)|Rnn|Recurrent"),
    ("parts that the calls tried do not run", r"not called by the example"),
    ("experts of another kind than those that are recognised", r"experts that stay whole|Experts"),
    ("layers whose weight the code reads", r"uses without calling|may use without calling|several parts"),
    ("mixing along the sequence, by scans or convolutions of states (Mamba, RWKV)", r"Mamba|Mixer|RWKV|Rwkv|mamba"),
    ("modules that ask for the values of tensors", r"needs the values of tensors"),
    ("layers without a neighbour to pair with", r"layers give and take the same features"),
    ("layers that could not be proven to belong together", r"not with its neighbours"),
    ("layers without a neighbour to pair with", r"neither expands nor contracts|expands: by|contracts: by"),
    ("parameters of modules that are no layers", r"no way to cut a "),
)


def falls_short(row: dict[str, Any]) -> bool:
    return row["cut"] < CUT or row["pairs"] < PAIRS


def cause(row: dict[str, Any]) -> str:
    """Of the largest part of what is not cut in pairs."""
    if not row.get("traced", True):
        return "the model's data flow could not be traced"
    sizes: Counter[str] = Counter()
    for line in row["rest"]:
        share, _, text = line.partition(" % ")
        sizes[next((name for name, words in CAUSES if re.search(words, text)), "other")] += int(share)
    return sizes.most_common(1)[0][0] if sizes else "other"


def _left_out(content: dict[str, Any]) -> list[str]:
    names = content.get("left out", [])
    return [f"Not planned in the time that the run had: {', '.join(names)}.", ""] if names else []


def section(path: Path, content: dict[str, Any]) -> list[str]:
    rows = [row for row in content["results"] if "cut" in row]
    short = [row for row in rows if falls_short(row)]
    cut, paired = (sum(row[key] >= limit for row in rows) for key, limit in (("cut", CUT), ("pairs", PAIRS)))
    count = len(rows)
    hardware, versions = content["hardware"], content["versions"]
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    dates = sorted(row["date"] for row in rows)
    days = " to ".join(dict.fromkeys((dates[0][:10], dates[-1][:10])))
    lines = [
        "## How much is cut, and how much in pairs",
        "",
        f"**Of {count} architectures, {cut} ({cut / count:.0%}) have at least 95 % of the body's bytes cut over "
        f"2 ranks, {paired} ({paired / count:.0%}) have at least 90 % cut in pairs, where one sum serves a column "
        f"and a row layer.** {len(short)} fall short of one or the other; the table has the reason.",
        "",
        f"`benchmarks/results/{path.name}`: {days}, {hardware['cpu']}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}; commit {commits}; `python benchmarks/plan_shares.py --only all`. Shares are of "
        "the bytes of the default configuration, and the body is everything but tables, output heads and modules that "
        "no code calls. Models are planned without inputs, and with example inputs where those show more.",
        "",
        *_left_out(content),
        "| what is mostly not in pairs | architectures |",
        "|---|---:|",
        *(f"| {name} | {count} |" for name, count in Counter(map(cause, short)).most_common()),
        "",
        "| architecture | cut | in pairs | the largest rests |",
        "|---|---:|---:|---|",
    ]
    for row in sorted(short, key=lambda row: (cause(row), row["name"])):
        rests = "; ".join(row["rest"][:2]) or "; ".join(row["notes"][:1])
        told = re.sub(r"\s+", " ", rests).replace("|", "/").replace("<", "&lt;")[:300]
        lines.append(f"| {row['name']} | {row['cut']:.0%} | {row['pairs']:.0%} | {told} |")
    return [*lines, ""]
