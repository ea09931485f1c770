"""Comparisons, one row each: a subject in one implementation, over all its trials, on all ranks.

Owns: running a trial in every implementation, the verdict, and what a row says.  A trial's results are judged against a
fp64 reference element by element (`tpkernels.testing.numeric`); with integer-valued data they must also equal those of
`unfused` bit for bit, because every order of summation then gives the same number.
Assumes: every rank runs the same trials in the same order.
Refuses: to stop at the first wrong number.  Whatever is wrong is written down, and the ranks go on together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tpkernels import dispatch
from tpkernels.comm.groups import resolve
from tpkernels.errors import TpKernelsError, UnsupportedProblem
from tpkernels.testing.numeric import Bounded, assert_bitwise_equal

__all__ = ["Row", "Subject", "Trial", "compare", "merge"]

Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """One computation of a subject: `run(implementation)` gives this rank's results by name, forward and backward.

    expected: what they must be.  integers: the data is, so all implementations agree in every bit.
    """

    where: str
    run: Callable[[str], Results]
    expected: Mapping[str, Bounded]
    integers: bool = False


@dataclass(frozen=True)
class Subject:
    """What is compared, under the name of its rows.  `implementations`: names that can be forced, beside "auto"."""

    what: str
    implementations: Sequence[str]
    trials: Callable[[], Iterator[Trial]]


@dataclass
class Row:
    """What was found of a subject in one implementation, on one rank or, merged, on all."""

    what: str
    implementation: str
    ran: list[str] = field(default_factory=list)
    """The implementations that did the work; for "auto" its choices."""
    compared: int = 0
    """Tensors held against their fp64 reference."""
    bitwise: int = 0
    """Tensors held against those of `unfused`, bit for bit."""
    worst: float = 0.0
    """The largest error in units of its bound."""
    where: str = ""
    refused: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failures:
            return "FAILED"
        return "ok" if self.compared else "refused"

    def to_json(self) -> dict[str, Any]:
        worst = self.worst if math.isfinite(self.worst) else None  # JSON knows no infinity
        return {**asdict(self), "worst": worst, "verdict": self.verdict}

    def judge(self, where: str, results: Results, expected: Mapping[str, Bounded]) -> bool:
        failed = len(self.failures)
        for name, bounded in expected.items():
            place = f"{where}, {name}"
            self.compared += 1
            if name not in results:
                self.failures.append(f"{place}: there is none")
                continue
            ratio = bounded.worst_ratio(results[name])
            if ratio >= self.worst:
                self.worst, self.where = ratio, place
            try:
                bounded.check(results[name], place)
            except AssertionError as error:
                self.failures.append(str(error))
        return len(self.failures) == failed

    def judge_bits(self, where: str, results: Results, unfused: Results) -> None:
        for name in results.keys() & unfused.keys():
            self.bitwise += 1
            try:
                assert_bitwise_equal(results[name], unfused[name], f"{where}, {name} against unfused", either_zero=True)
            except AssertionError as error:
                self.failures.append(str(error))


def compare(subject: Subject, group: dist.ProcessGroup) -> list[Row]:
    """Run all trials of a subject; a collective call.  The rows of this rank: auto, then every implementation."""
    rows = {name: Row(subject.what, name) for name in ("auto", *subject.implementations)}
    state = resolve(group)
    state.agreed.clear()  # calls of an earlier subject are agreed on anew, so that their implementation is seen
    state.checked.clear()
    for trial in subject.trials():
        unfused: Results | None = None
        for name in sorted(rows, key=lambda name: name != "unfused"):
            row = rows[name]
            try:
                with _recorded(row, group):
                    results = trial.run(name)
            except UnsupportedProblem as error:
                row.refused = list(dict.fromkeys([*row.refused, _reason(error, name)]))
                continue
            except TpKernelsError as error:  # the group is lost, but the table shall say with what
                row.failures.append(f"{trial.where}: {type(error).__name__}: {error}")
                continue
            right = row.judge(trial.where, results, trial.expected)
            if name == "unfused" and right:  # a wrong one is no reference
                unfused = results
            if trial.integers and name != "unfused" and unfused is not None:
                row.judge_bits(trial.where, results, unfused)
    return list(rows.values())


@contextmanager
def _recorded(row: Row, group: dist.ProcessGroup) -> Iterator[None]:
    """Adds the implementations of the calls that the ranks agreed on in the meantime."""
    agreed = resolve(group).agreed
    before = set(agreed)
    yield
    found = {plan.explanation.chosen for signature, plan in agreed.items() if signature not in before}
    row.ran = sorted({*row.ran, *found})


def _reason(error: UnsupportedProblem, name: str) -> str:
    """What one implementation said; the error lists them all."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")), str(error))


def merge(by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of all ranks in one: the worst number of any, and every failure with its rank."""
    merged = []
    for rows in zip(*by_rank, strict=True):
        worst = max(rows, key=lambda row: row.worst)
        merged.append(
            Row(
                rows[0].what,
                rows[0].implementation,
                ran=sorted({name for row in rows for name in row.ran}),
                compared=sum(row.compared for row in rows),
                bitwise=sum(row.bitwise for row in rows),
                worst=worst.worst,
                where=worst.where,
                refused=list(dict.fromkeys(reason for row in rows for reason in row.refused)),
                failures=[f"rank {rank}: {one}" for rank, row in enumerate(rows) for one in row.failures],
            )
        )
    return merged


def implementations_of(op: str) -> list[str]:
    return [implementation.name for implementation in dispatch.implementations(op)]
