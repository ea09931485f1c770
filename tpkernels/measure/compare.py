"""`tpkernels bench --compare OLD.json`: which ways became faster or slower than in an earlier run, beyond noise.

Times of two runs say as much about the machine's day as about the code.  What is compared is therefore each way's ratio
to ``unfused`` of its own run, whose rounds were interleaved: a change counts where the quartiles of the two runs'
ratios do not meet, and the ratios differ by more than :data:`LEAST`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpkernels.measure.report import BASELINES, ROOFS, CaseResult, Ratio
from tpkernels.measure.timing import Measurement

__all__ = ["LEAST", "Change", "compare", "lines", "read"]

LEAST = 0.05
"""Smaller changes are not reported, however steady."""
Old = Mapping[tuple[str, str, str, int], Mapping[str, Measurement]]


@dataclass(frozen=True)
class Change:
    """One way of one problem in both runs; the ratios are unfused / way."""

    problem: str
    way: str
    old: Ratio
    new: Ratio

    @property
    def verdict(self) -> str:
        """faster, slower, or same: within the noise of the two runs."""
        if abs(self.new.value / self.old.value - 1.0) <= LEAST:
            return "same"
        if self.new.low > self.old.high:
            return "faster"
        return "slower" if self.new.high < self.old.low else "same"

    def __str__(self) -> str:
        change = self.new.value / self.old.value - 1.0
        ratios = f"{self.old.value:.2f}x -> {self.new.value:.2f}x"
        return f"{self.verdict:<7}{change:+6.0%}  {ratios}  {self.way:<14} {self.problem}"


def read(path: str | Path) -> tuple[dict[str, Any], Old]:
    """An earlier result file: what it says of its machine, and every sample.

    Raises:
        ValueError: the file is no result of ``tpkernels bench``.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        rows = {
            (row["op"], row["shape_MxKxN"], row["dtype"], int(row["world_size"])): {
                name: Measurement(name, tuple(float(one) / 1e3 for one in times["samples_ms"]))
                for name, times in row["times"].items()
            }
            for row in content["results"]
        }
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a result file of `tpkernels bench --json`: {error!r}") from error
    return {key: value for key, value in content.items() if key != "results"}, rows


def compare(old: Old, results: Sequence[CaseResult]) -> Iterator[Change]:
    """Every way that both runs measured."""
    for result in results:
        before = old.get((result.op, result.shape, result.dtype, result.world_size), {})
        for name, measured in result.times.items():
            if name in (*ROOFS, *BASELINES):
                continue
            then = Ratio.of(before.get("unfused"), before.get(name))
            now = Ratio.of(result.times.get("unfused"), measured)
            if then is not None and now is not None:
                yield Change(f"{result.op} {result.shape} {result.dtype} TP {result.world_size}", name, then, now)


def lines(path: str | Path, environment: Mapping[str, Any], results: Sequence[CaseResult]) -> list[str]:
    """What to print: the changes beyond noise, how many there were not, and how the machines differ."""
    about, old = read(path)
    changes = list(compare(old, results))
    told = [str(change) for change in changes if change.verdict != "same"]
    head = f"against {path} of {about.get('date', 'an unknown date')}, as unfused / way within each run:"
    same = f"{len(changes) - len(told)} of {len(changes)} within noise or {LEAST:.0%}"
    return [head, *told, same if changes else "no problem was measured in both runs", *_differences(about, environment)]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for part, names in (("hardware", ("cpu", "cores", "gpus")), ("versions", ("torch", "python", "cuda"))):
        then, now = old.get(part) or {}, new.get(part) or {}
        found += [
            f"differs: {name}: {then.get(name)} then, {now.get(name)} now"
            for name in names
            if then.get(name) != now.get(name)
        ]
    return found
