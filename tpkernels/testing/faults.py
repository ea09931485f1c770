"""Seeded faults: show that a check catches what it is there to catch.

Owns: faults applied to a correct result (`seed_fault`), faults in what a rank receives (`corrupt_receives`), and
uninitialised memory that shows (`poisoned_memory`).

A fault of the first kind takes one correct matmul_reduce_scatter or matmul_all_reduce call in its parts
(`ReducedCall`) and returns the output of an implementation with that bug, and the place where it is wrong:

    missing_partial   one rank's partial is left out of a block of rows (a chunk summed before it arrived)
    stale_chunk       a block of rows is the previous call's output (a signal of the wrong epoch)
    doubled_bias      the bias is added on two ranks
    swapped_row       two neighbouring rows change places (a wrong offset)
    one_nan           one element is NaN

The second kind strikes inside the transport: within `corrupt_receives` every point-to-point chunk that arrives in this
process is handed to a function, which may change it in place, before the op sees it. That is the hook at
`tpkernels.comm.transport.Transfer.wait`; it exists while the context manager is open and costs nothing otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.utils.deterministic
from torch import Tensor

from tpkernels.comm.transport import Transfer

__all__ = ["FAULTS", "Fault", "Place", "ReducedCall", "corrupt_receives", "poisoned_memory", "seed_fault"]


@dataclass(frozen=True)
class Place:
    """Half-open ranges of rows and columns."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    def contains(self, box: Sequence[tuple[int, int]]) -> bool:
        """Whether an index range ((row, stop), (column, stop)) lies inside."""
        (top, bottom), (left, right) = box
        inside = self.rows[0] <= top and bottom <= self.rows[1]
        return inside and self.columns[0] <= left and right <= self.columns[1]


@dataclass(frozen=True)
class ReducedCall:
    """One correct call y = sum_r x_r W_r^T + bias, and the call before it with other payloads.

    x_parts: [M, K_r] per rank; w_parts: [N, K_r]; previous: the earlier call's output [M, N].
    """

    x_parts: tuple[Tensor, ...]
    w_parts: tuple[Tensor, ...]
    bias: Tensor
    previous: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.bias.dtype

    def output(self, *, missing: int | None = None, bias_times: int = 1) -> Tensor:
        """Partials rounded to the dtype, summed in the accumulation dtype, rounded once."""
        accumulate = torch.float64 if self.dtype == torch.float64 else torch.float32
        total = bias_times * self.bias.to(accumulate)
        for rank, (x, w) in enumerate(zip(self.x_parts, self.w_parts, strict=True)):
            if rank != missing:
                total = total + (x @ w.T).to(accumulate)
        return total.to(self.dtype)


Fault = Callable[[ReducedCall, torch.Generator], tuple[Tensor, Place]]


def _missing_partial(call: ReducedCall, generator: torch.Generator) -> tuple[Tensor, Place]:
    y = call.output()
    place = Place(_some_rows(y, generator), (0, y.shape[1]))
    rank = _pick(len(call.x_parts), generator)
    y[slice(*place.rows)] = call.output(missing=rank)[slice(*place.rows)]
    return y, place


def _stale_chunk(call: ReducedCall, generator: torch.Generator) -> tuple[Tensor, Place]:
    y = call.output()
    place = Place(_some_rows(y, generator), (0, y.shape[1]))
    y[slice(*place.rows)] = call.previous[slice(*place.rows)]
    return y, place


def _doubled_bias(call: ReducedCall, generator: torch.Generator) -> tuple[Tensor, Place]:
    y = call.output(bias_times=2)
    return y, Place((0, y.shape[0]), (0, y.shape[1]))


def _swapped_row(call: ReducedCall, generator: torch.Generator) -> tuple[Tensor, Place]:
    y = call.output()
    row = _pick(y.shape[0] - 1, generator)
    y[[row, row + 1]] = y[[row + 1, row]]
    return y, Place((row, row + 2), (0, y.shape[1]))


def _one_nan(call: ReducedCall, generator: torch.Generator) -> tuple[Tensor, Place]:
    y = call.output()
    row, column = _pick(y.shape[0], generator), _pick(y.shape[1], generator)
    y[row, column] = math.nan
    return y, Place((row, row + 1), (column, column + 1))


FAULTS: dict[str, Fault] = {
    "missing_partial": _missing_partial,
    "stale_chunk": _stale_chunk,
    "doubled_bias": _doubled_bias,
    "swapped_row": _swapped_row,
    "one_nan": _one_nan,
}


def seed_fault(name: str, call: ReducedCall, *, seed: int = 0) -> tuple[Tensor, Place]:
    """The output of `call` with the fault, at a place that `seed` chooses, and that place."""
    if name not in FAULTS:
        raise ValueError(f"fault ({name!r}) must be one of {', '.join(map(repr, FAULTS))}")
    return FAULTS[name](call, torch.Generator().manual_seed(seed))


@contextmanager
def corrupt_receives(corrupt: Callable[[Transfer], None]) -> Iterator[None]:
    """Hand every received chunk of this process to `corrupt` once, when it has arrived and before the op reads it.

    `corrupt` sees `transfer.peer`, `transfer.chunk` and `transfer.tensor`, and may change the tensor in place:
    `transfer.tensor.zero_()` is a missing partial, a copy kept from an earlier call a stale chunk. Not thread-safe.
    """
    original = Transfer.wait

    def wait_and_corrupt(self: Transfer) -> None:
        arrived = not self.done
        original(self)
        if arrived and self.kind == "recv":
            corrupt(self)

    Transfer.wait = wait_and_corrupt  # type: ignore[method-assign]
    try:
        yield
    finally:
        Transfer.wait = original  # type: ignore[method-assign]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every tensor that torch allocates without values (`torch.empty` and its kin) with NaN, or the largest int.

    An output element that an op forgets to write is then NaN instead of, by luck, the previous call's right answer.
    This is torch's deterministic mode, so operators that have none warn.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _pick(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


def _some_rows(y: Tensor, generator: torch.Generator) -> tuple[int, int]:
    """A block of an eighth of the rows, at least one."""
    size = max(1, y.shape[0] // 8)
    start = _pick(y.shape[0] - size + 1, generator)
    return start, start + size
