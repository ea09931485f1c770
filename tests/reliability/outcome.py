"""What came of a row of trials: how many, how they ended, how long the errors took, and what is wrong with that."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

OK = "ok"
_KEPT = 5


@dataclass
class Outcome:
    """Tally of one row. `p99_s` and `max_s` are limits that its latencies must keep; `facts` are further figures, and
    `over_gates` says which of them cost more than they may."""

    row: str
    p99_s: float | None = None
    max_s: float | None = None
    counts: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    over_gates: list[str] = field(default_factory=list)

    @property
    def trials(self) -> int:
        return self.counts.total()

    def add(self, problem: str | None, detail: str = "", times: int = 1) -> None:
        """One more trial: None for a good one, else in a few words what went wrong (the key of the tally)."""
        self.counts[OK if problem is None else problem] += times
        if problem is not None and len(self.samples) < _KEPT:
            self.samples.append(f"{problem}: {detail}" if detail else problem)

    def merge(self, other: Outcome) -> None:
        self.counts.update(other.counts)
        self.latencies_s += other.latencies_s
        self.samples = (self.samples + other.samples)[:_KEPT]
        self.facts |= other.facts
        self.over_gates += other.over_gates

    def latencies(self) -> dict[str, float] | None:
        if not self.latencies_s:
            return None
        ordered = sorted(self.latencies_s)
        return {
            "n": len(ordered),
            "median_ms": 1e3 * statistics.median(ordered),
            "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "max_ms": 1e3 * ordered[-1],
        }

    def problems(self, *, judge_times: bool = True) -> list[str]:
        """Why this row has not passed; empty if it has. judge_times: False for a slice, which runs beside other tests
        and has no 99th percentile; the promised limit of an error holds there as well."""
        found = [f"{times} of {self.trials} trials: {what}" for what, times in self.counts.items() if what != OK]
        figures = self.latencies()
        if figures is not None:
            if judge_times and self.p99_s is not None and figures["p99_ms"] > 1e3 * self.p99_s:
                found.append(f"p99 {figures['p99_ms']:.1f} ms, at most {1e3 * self.p99_s:g} ms")
            if self.max_s is not None and figures["max_ms"] > 1e3 * self.max_s:
                found.append(f"max {figures['max_ms']:.1f} ms, at most {1e3 * self.max_s:g} ms")
        if judge_times:
            found += self.over_gates
        if not self.trials:
            found.append("no trial was made")
        return found + (self.samples if found else [])

    def to_json(self) -> dict[str, Any]:
        problems = self.problems()
        return {
            "row": self.row,
            "count": self.trials,
            "passed": not problems,
            "outcomes": dict(self.counts),
            "latency": self.latencies(),
            "limits_ms": {
                name: 1e3 * value for name, value in (("p99", self.p99_s), ("max", self.max_s)) if value is not None
            },
            **({"facts": self.facts} if self.facts else {}),
            **({"problems": problems} if problems else {}),
        }
