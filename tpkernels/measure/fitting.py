"""What `tpkernels bench` can ask of these ranks: repeats, sizes and a limit, so that it ends within its time.

Owns the choice, and the sentences that tell of it.  It rests on the costs that ranks measure in a moment and agree on
(:func:`tpkernels.explain`), and takes every way of doing an op for as slow as the slowest: a case still watches its own
clock (`tpkernels.measure.timing`).
Repeats come first: sizes are divided only where the fewest repeats take too long, and only those of a suite.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import tpkernels as tpk
from tpkernels.comm.groups import resolve
from tpkernels.measure.cases import Shape
from tpkernels.measure.suites import scaled
from tpkernels.measure.timing import LEAST_REPEATS
from tpkernels.ops.agreed_call import exchange

__all__ = ["USUAL_LIMIT_S", "Fit", "Watch", "fit", "seconds_on"]

USUAL_LIMIT_S = 300.0
_MOST = 32
# The GEMM alone, the transfer alone, "auto" and torch are timed beside the implementations.
_MORE_WAYS = 4
# The call that is verified, and the one whose timeline is recorded.
_MORE_CALLS = 2

Problems = Sequence[tuple[str, Shape]]


@dataclass(frozen=True)
class Fit:
    """What is measured: the problems with their sizes divided by ``divisor``; ``says`` tells what is not as asked."""

    problems: tuple[tuple[str, Shape], ...]
    divisor: int
    repeats: int
    limit_s: float
    says: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, float]:
        """What a result file says of it."""
        divided = {"sizes_divided_by": self.divisor} if self.divisor > 1 else {}
        return {"repeats": self.repeats, "case_timeout_s": self.limit_s, **divided}


def fit(
    problems: Problems,
    seconds_of: Callable[[str, Shape], float | None],
    *,
    repeats: int,
    warmup: int,
    groups: int,
    timeout_s: float,
    limit_s: float | None,
    divides: bool,
) -> Fit:
    """The largest of the problems, and the most of the repeats, that take half of the time at most.

    Args:
        seconds_of: of one call of each way; None where it is not known, and then nothing changes.
        groups: how many measure the same, one after the other.
        limit_s: of one case; None: chosen, USUAL_LIMIT_S or more.
        divides: whether sizes may be divided.
    """
    fewest, beside = min(repeats, LEAST_REPEATS), warmup + _MORE_CALLS
    divisor = 1
    while True:
        sized = tuple(dict.fromkeys((op, scaled(shape, divisor)) for op, shape in problems))
        rounds = [seconds_of(op, shape) for op, shape in sized]
        known = [seconds for seconds in rounds if seconds is not None]
        if len(known) < len(rounds):
            return Fit(tuple(problems), 1, repeats, limit_s or min(timeout_s, USUAL_LIMIT_S))
        total, longest = groups * sum(known), max(known)
        if divisor == 1:
            asked_s = (repeats + beside) * total
        fits = (fewest + beside) * total <= timeout_s / 2
        fits &= (fewest + beside) * longest <= (limit_s or timeout_s) / 2
        if fits or not divides or divisor == _MOST:
            break
        divisor *= 2
    count = max(fewest, min(repeats, int(timeout_s / 2 / total) - beside))
    takes_s = (count + beside) * total
    limit = limit_s or min(timeout_s, max(USUAL_LIMIT_S, 4 * (count + beside) * longest))
    changes = [f"{count} repeats instead of {repeats}"] if count < repeats else []
    changes += [f"sizes of the suite / {divisor}"] if divisor > 1 else []
    says = []
    if changes:
        says.append(
            f"measuring with {' and '.join(changes)}, in about {_rounded(takes_s)}: what was asked for would take "
            f"about {_rounded(asked_s)} here, and half of --timeout {timeout_s:g} is taken at most"
        )
    if takes_s > timeout_s:
        says.append(f"this takes longer than --timeout {timeout_s:g} allows: give smaller shapes, or a longer time")
    if limit_s is None and limit > USUAL_LIMIT_S:
        says.append(f"a case may take {_rounded(limit)} (--case-timeout)")
    return Fit(sized, divisor, count, limit, tuple(says))


def seconds_on(group: dist.ProcessGroup, device: str, dtype: torch.dtype) -> Callable[[str, Shape], float | None]:
    """``seconds_of`` for the ranks of ``group`` (gloo), which call it together; of GPUs nothing is known."""

    def seconds_of(op: str, shape: Shape) -> float | None:
        if device != "cpu":
            return None
        found = tpk.explain(op, m=shape.m, k=shape.k, n=shape.n, dtype=dtype, group=group, device=device)
        estimates = [one.estimate_us for one in found.candidates if one.estimate_us is not None]
        if not found.costs.measured or not estimates:
            return None
        return 1e-6 * max(estimates) * (len(estimates) + _MORE_WAYS)

    return seconds_of


class Watch:
    """The clock of a whole measurement, which leaves out the cases that would not end in time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._start = timeout_s, time.monotonic()
        self._began_s: float | None = None
        self._longest_s = 0.0

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def allows_another(self, control: dist.ProcessGroup, left: int) -> bool:
        """Whether one more case ends in time if it takes as long as the longest; the same on all ranks of ``control``.

        ``left``: how many cases are left out if not, for the sentence.
        """
        now_s = self.elapsed_s()
        if self._began_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._began_s)
        self._began_s = now_s
        mine = now_s + self._longest_s < 0.95 * self._timeout_s
        allowed = bool(exchange(resolve(control), "bench: time", {"allowed": mine})[0]["allowed"])
        if not allowed and control.rank() == 0:
            print(f"{left} cases left out: they would not end within --timeout", file=sys.stderr, flush=True)
        return allowed


def _rounded(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
