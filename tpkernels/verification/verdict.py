"""What a verification found: numbers, the first place that differs, and how both are printed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

from tpkernels.errors import VerificationError
from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.verification.bounds import FACTOR

__all__ = ["Difference", "Row", "Verification"]

SHOWN = 5
KINDS = ("output", "loss", "gradient", "gradient of input", "buffer")


@dataclass(frozen=True)
class Row:
    """One tensor that was compared: its largest error over all ranks, in units of the unsharded model's own."""

    kind: str
    """One of "output", "loss", "gradient", "gradient of input", "buffer"."""
    name: str
    ratio: float
    problem: str = ""
    """What is wrong besides the values: no gradient, another dtype, ..."""

    @property
    def ok(self) -> bool:
        return self.ratio <= FACTOR


@dataclass(frozen=True)
class Difference:
    """Where the parallel model first computes something else."""

    module: str
    """Its name; "" is the model itself."""
    kind: str
    """Its class in the unsharded model."""
    style: str
    """What the plan says about it."""
    what: str
    """What of it differs."""
    ratio: float
    note: str = ""

    def __str__(self) -> str:
        name = f"{self.module!r}" if self.module else "the model itself"
        text = f"{name} ({self.kind}, {self.style}): {self.what} {_ratio_text(self.ratio)}"
        return f"{text}; {self.note}" if self.note else text


@dataclass(frozen=True)
class Verification:
    """The same on all ranks; ``print`` shows a table, :meth:`check` raises where something differs."""

    ok: bool
    model: str
    world_size: int
    dtype: str
    rows: tuple[Row, ...]
    """The worst first."""
    first_difference: Difference | None = None
    first_parameter: str | None = None
    """Of the gradients that differ, the first one that the backward pass reaches."""
    error: str | None = None
    """What the parallel model raised."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    plan: ShardingPlan | None = None
    """The plan that was made, or given; None of a mapping."""

    @property
    def outputs(self) -> float:
        """The largest error of an output, in units of the unsharded model's; larger than 8 is wrong."""
        return self._worst("output")

    @property
    def loss(self) -> float:
        return self._worst("loss")

    @property
    def gradients(self) -> float:
        """The largest error of the gradients of parameters and inputs, in the same units."""
        return max(self._worst("gradient"), self._worst("gradient of input"))

    @property
    def buffers(self) -> float:
        return self._worst("buffer")

    def _worst(self, kind: str) -> float:
        return max((row.ratio for row in self.rows if row.kind == kind), default=0.0)

    def check(self) -> Verification:
        """This verification, if nothing differs.

        Raises:
            VerificationError: something does; the message is what ``print`` shows.
        """
        if not self.ok:
            raise VerificationError(str(self))
        return self

    def to_json(self) -> str:
        """Everything but the plan, as text; what is infinite is "inf"."""
        return json.dumps(_readable(asdict(replace(self, plan=None))), indent=1)

    def __str__(self) -> str:
        head = f"{self.model} on {self.world_size} ranks, {self.dtype}: "
        if self.error is not None:
            lines = [f"{head}the parallel model raised {self.error}"]
        elif self.ok:
            lines = [f"{head}as exact as the unsharded model"]
        else:
            lines = [f"{head}NOT the unsharded model"]
        if self.first_difference is not None:
            lines.append(f"first difference: {self.first_difference}")
        if self.first_parameter is not None:
            lines.append(f"first gradient that differs, in backward order: {self.first_parameter}")
        lines += self._table()
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        if not self.rows:
            return []
        lines = [f"largest error, in units of the unsharded model's own (at most {FACTOR:g} is right):"]
        for kind in KINDS:
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                wrong = sum(not row.ok for row in rows)
                said = f"{wrong} of {len(rows)} wrong" if wrong else f"{len(rows)} right"
                lines.append(f"  {kind:<18} {_number(rows[0].ratio):>9}  {said:<18} {rows[0].name}")
        others = [row for row in self.rows if not row.ok]
        shown = [f"  {row.kind} of {row.name}: {row.problem or _ratio_text(row.ratio)}" for row in others[:SHOWN]]
        more = len(others) - len(shown)
        return [*lines, *(["wrong:"] if shown else []), *shown, *([f"  and {more} more"] if more else [])]


def _number(ratio: float) -> str:
    return "inf" if math.isinf(ratio) else f"{ratio:.3g}" if ratio < 1e4 else f"{ratio:.1e}"


def _ratio_text(ratio: float) -> str:
    if math.isinf(ratio):
        return "is another one altogether (another shape or dtype, NaN, or none)"
    return f"is off by {_number(ratio)} times the unsharded model's error"


def _readable(value: object) -> object:
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
