"""What a step has found, and how it is filed and shown.

Owns the rows of the report, the result file and the table. Every number says what it is (`LABELS`): on one GPU there is
no link between GPUs, so none of them is a speed-up of tensor parallelism. Beside every number stands the one that was
predicted; a step files it before it measures, and a number without one is refused.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpkernels.measure.timing import Measurement

LABELS = {
    "flags preset": "all data and signals are there before the kernel starts",
    "arrival clock": "data is there; a clock raises the signals as a link of the named rate would",
    "PCIe link": "the peers' shards are in pinned memory of the host, and cross PCIe",
    "contention stress": "W processes take turns on the GPU: they slow each other down, alike for all that is compared",
    "device": "one kernel alone",
    "host": "the host's time until it is free again; the device is idle before, and waited for by nobody",
    "count": "trials",
}


@dataclass(frozen=True)
class Prediction:
    """What a model says of a figure that is to be measured; modelled, never measured."""

    target: str
    problem: str
    what: str
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"the prediction of {self.what!r} is {self.value}")


@dataclass(frozen=True)
class Row:
    """One figure: `value` is what `what` says, `bound` is what it should be, e.g. ">= 0.92"; "" if none is promised.

    predicted: set by the recorder, from the prediction of the same target, problem and words.
    """

    target: str
    problem: str
    what: str
    value: float
    label: str
    bound: str = ""
    n: int = 0
    times: dict[str, dict[str, Any]] = field(default_factory=dict)
    predicted: float | None = None

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"label ({self.label!r}) must be one of {', '.join(map(repr, LABELS))}")

    @property
    def met(self) -> bool | None:
        if not self.bound:
            return None
        relation, limit = self.bound.split()
        return self.value >= float(limit) if relation == ">=" else self.value <= float(limit)


@dataclass
class Outcome:
    """Of one step. status: "done", "failed", "out of time", "skipped", "not run"; facts: what else it has seen;
    predictions: of what was not measured (yet)."""

    step: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "rows": [{**asdict(row), "met": row.met} for row in self.rows]}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Outcome:
        rows = [Row(**{name: value for name, value in row.items() if name != "met"}) for row in content["rows"]]
        predictions = [Prediction(**one) for one in content["predictions"]]
        return Outcome(**{**content, "rows": rows, "predictions": predictions})


class Recorder:
    """What a step writes to while it runs: the file is complete after every row, so that a hang loses the rest only."""

    def __init__(self, outcome: Outcome, path: Path | None = None) -> None:
        self.outcome, self._path = outcome, path

    def log(self, name: str) -> Path:
        """A file for what a program of the step prints, beside the results."""
        folder = self._path.parent if self._path is not None else Path(tempfile.mkdtemp())
        return folder / f"{self.outcome.step}-{name}.log"

    def predict(self, target: str, problem: str, what: str, value: float) -> None:
        """File what a model says of a figure, before it is measured."""
        self.outcome.predictions.append(Prediction(target, problem, what, value))
        print(f"{target} {problem}: {what}: {value:.3f} is predicted", flush=True)
        self.save()

    def row(self, row: Row) -> None:
        """File a figure, beside its prediction.

        Raises:
            ValueError: there is none.
        """
        pending = self.outcome.predictions
        same = [one for one in pending if (one.target, one.problem, one.what) == (row.target, row.problem, row.what)]
        if not same:
            raise ValueError(f"{row.target} {row.problem}: {row.what!r} was measured, and nothing was predicted of it")
        pending.remove(same[0])
        self.outcome.rows.append(row := replace(row, predicted=same[0].value))
        verdict = "" if row.met is None else f" ({row.bound}: {'met' if row.met else 'NOT met'})"
        figure = f"{row.value:.3f}, predicted {row.predicted:.3f}{verdict}"
        print(f"{row.target} {row.problem}: {row.what} {figure} [{row.label}, n={row.n}]", flush=True)
        self.save()

    def fact(self, name: str, value: Any) -> None:
        self.outcome.facts[name] = value
        print(f"{name}: {value}", flush=True)
        self.save()

    def save(self) -> None:
        if self._path is not None:
            write_json(self._path, self.outcome.to_json())


def write_json(path: Path, content: Any) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def times_of(measurements: Mapping[str, Measurement]) -> dict[str, dict[str, Any]]:
    """Microseconds."""
    return {
        name: {
            "median_us": 1e6 * one.median,
            "interquartile_range_us": 1e6 * one.interquartile_range,
            "samples_us": [round(1e6 * seconds, 3) for seconds in one.seconds],
        }
        for name, one in measurements.items()
    }


def markdown(environment: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    hardware = environment.get("hardware", {})
    gpus, versions = ", ".join(hardware.get("gpus", ["no GPU"])), environment.get("versions", {})
    lines = ["# One GPU", "", f"{environment.get('date', '')}, {gpus}, torch {versions.get('torch', '?')}"]
    lines += [f"`{environment.get('command', '')}`", ""]
    lines += ["| step | status | s | |", "|---|---|---:|---|"]
    lines += [f"| {o.step} | {o.status} | {o.seconds:.0f} | {_cell(o.reason)} |" for o in outcomes]
    rows = [row for outcome in outcomes for row in outcome.rows]
    if rows:
        lines += ["", "| | problem | what | value | modelled | target | met | kind | n | times, us |"]
        lines += ["|---|---|---|---:|---:|---|---|---|---:|---|"]
        lines += [_table_row(row) for row in rows]
        lines += ["", "*modelled*: predicted before it was measured, by `gpu_steps/roofline.py`."]
        lines += ["", *(f"- *{label}*: {LABELS[label]}" for label in dict.fromkeys(row.label for row in rows))]
    missing = [(outcome.step, one) for outcome in outcomes for one in outcome.predictions]
    if missing:
        lines += ["", "Predicted and not measured:", ""]
        lines += [f"- {step}: {one.target} {one.problem}: {one.what}: {one.value:.3f}" for step, one in missing]
    for outcome in outcomes:
        if outcome.facts:
            lines += ["", f"## {outcome.step}", *(f"- {name}: {_cell(value)}" for name, value in outcome.facts.items())]
    return "\n".join(lines) + "\n"


def _table_row(row: Row) -> str:
    times = "<br>".join(
        f"{name} {one['median_us']:,.1f} ±{one['interquartile_range_us'] / 2:,.1f}" for name, one in row.times.items()
    )
    met = "" if row.met is None else "yes" if row.met else "no"
    modelled = "" if row.predicted is None else f"{row.predicted:.3f}"
    return (
        f"| {row.target} | {row.problem} | {row.what} | {row.value:.3f} | {modelled} | {row.bound} | {met} | "
        f"{row.label} | {row.n} | {times} |"
    )


def _cell(value: Any) -> str:
    return str(value).replace("|", "/").replace("\n", " ")[:400]
