"""GEMMs of bf16 and fp16 on cores without units for them: in fp32, block by block, where that is faster.

oneDNN multiplies bf16 on a core that knows AVX2 alone at a fraction of fp32's rate.  There a GEMM in fp32 of widened
operands is faster, although it converts both of them at each call:

    out = round(float(x) @ float(matrix) + float(bias))

The products of two such numbers are exact in fp32.  They are summed in fp32 by the library's GEMM, whose contraction
is never cut here; the bias is added in fp32; one rounding follows.  So integers come out exactly, and the last bit of
other results may differ from that of the library's own GEMM of bf16.

Owns the GEMM, :class:`Widened`, which stands for a matrix that it is to take, and the measurement of the number of rows
from which it wins: once per process, dtype and number of torch's threads, in some ten milliseconds.  Every rank tells
its number when a call is new, and all take the largest, so that a call runs alike on all ranks
(:func:`tpkernels.ops.agreed_call.run`).  With ``TPKERNELS_CALIBRATE=0`` the library's own GEMM is taken.

Memory: a block of x, one of the matrix and one of the result, 24 MiB together, or one row or column where that is more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels import config
from tpkernels.gemm.fp8 import Operand

__all__ = [
    "DTYPES",
    "MatrixOperand",
    "Widened",
    "agreed_rows",
    "least_rows",
    "linear",
    "matmul",
    "multiply",
    "told",
    "wins",
]

DTYPES = (torch.bfloat16, torch.float16)
# Elements in fp32.  A block of x meets all of the matrix, which is widened again for each; 1024 rows of 4096 hide that.
_BLOCK_OF_X = 4 * 1024 * 1024
_BLOCK_OF_MATRIX = 1024 * 1024
_BLOCK_OF_RESULT = 1024 * 1024
# The sizes that are measured: the weight takes 2 MiB in bf16.
_ROWS = (128, 16, 1)
_FEATURES = 1024
_REPEATS = 3
# What the widened GEMM must take at most of the library's time: a choice within the noise would differ from run to run.
_WORTH = 0.7


class Widened:
    """A matrix ``[contraction, columns]`` of bf16 or fp16 that a backend's GEMM is to multiply in fp32."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def __getitem__(self, index: tuple[slice, slice]) -> Widened:
        """Columns of it."""
        return Widened(self.numbers[index])


MatrixOperand = Operand | Widened


def told(dtype: torch.dtype, device: str) -> int | None:
    """What this rank tells the others: from how many rows on it would widen; None: never."""
    if device != "cpu" or dtype not in DTYPES or not config.load().calibrate:
        return None
    return least_rows(dtype, torch.get_num_threads())


def agreed_rows(told: Sequence[int | None]) -> int | None:
    """From how many rows on all ranks widen, of what each has told; None: never, because one of them never does."""
    found = [least for least in told if least is not None]
    return max(found) if len(found) == len(told) else None


def wins(rows: int, dtype: torch.dtype) -> bool:
    """Whether this process takes the widened GEMM for so many rows where nothing depends on what other ranks take."""
    if dtype not in DTYPES:
        return False
    least = _own_rows(dtype, torch.get_num_threads())
    return least is not None and rows >= least


def matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix`` by whichever GEMM wins in this process."""
    if not x.is_cpu or not wins(min(x.shape), x.dtype):
        return torch.mm(x, matrix)
    out = x.new_empty(x.shape[0], matrix.shape[1])
    multiply(x, matrix, out)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of a matrix x by whichever GEMM wins in this process."""
    if not x.is_cpu or not wins(x.shape[0], x.dtype):
        return F.linear(x, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    multiply(x, weight.t(), out, bias)
    return out


@lru_cache(maxsize=16)
def least_rows(dtype: torch.dtype, threads: int) -> int | None:
    """The least number of rows from which widening wins, of those that are measured; None: it never does."""
    found = None
    with torch.no_grad():
        weight = torch.ones(_FEATURES, _FEATURES, dtype=dtype)
        for rows in _ROWS:
            x, out = torch.ones(rows, _FEATURES, dtype=dtype), torch.empty(rows, _FEATURES, dtype=dtype)
            library_s, widened_s = _least_seconds(_library(x, weight, out), _own(x, weight, out))
            if widened_s > _WORTH * library_s:
                break
            found = rows
    return found


def multiply(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ matrix + bias in fp32, rounded once; ``bias`` is one row or a matrix of the shape of ``out``.

    ``bias`` may be ``out``.
    """
    (rows, contraction), columns = x.shape, matrix.shape[1]
    row_step = min(rows, max(1, _BLOCK_OF_X // max(1, contraction)))
    most_columns = min(_BLOCK_OF_MATRIX // max(1, contraction), _BLOCK_OF_RESULT // max(1, row_step))
    column_step = min(columns, max(1, most_columns))
    if rows == 0 or columns == 0:
        return
    of_x, of_matrix = _Scratch(x, 0, row_step), _Scratch(matrix, 1, column_step)
    total = torch.empty(row_step * column_step, dtype=torch.float32)
    for low in range(0, rows, row_step):
        high = min(rows, low + row_step)
        wide_x = of_x.widen(low, high)
        for left in range(0, columns, column_step):
            right = min(columns, left + column_step)
            part = total[: (high - low) * (right - left)].view(high - low, right - left)
            torch.mm(wide_x, of_matrix.widen(left, right), out=part)
            if bias is not None:
                part += bias[left:right] if bias.dim() == 1 else bias[low:high, left:right]
            out[low:high, left:right].copy_(part)


class _Scratch:
    """Where slices of a matrix are widened, one after the other: with the order of its own strides."""

    def __init__(self, source: Tensor, dim: int, step: int) -> None:
        self._source, self._dim = source, dim
        self._transposed = source.stride(0) < source.stride(1)
        shape = [step if one == dim else size for one, size in enumerate(source.shape)]
        self._buffer = torch.empty(math.prod(shape), dtype=torch.float32)

    def widen(self, low: int, high: int) -> Tensor:
        part = self._source.narrow(self._dim, low, high - low)
        buffer = self._buffer[: part.numel()]
        wide = buffer.view(part.shape[1], part.shape[0]).t() if self._transposed else buffer.view(part.shape)
        return wide.copy_(part)


@lru_cache(maxsize=16)
def _own_rows(dtype: torch.dtype, threads: int) -> int | None:
    """What :func:`told` says; calls in which nothing is sent do not read the settings again."""
    return told(dtype, "cpu")


def _library(x: Tensor, weight: Tensor, out: Tensor) -> Callable[[], Any]:
    return lambda: torch.mm(x, weight.t(), out=out)


def _own(x: Tensor, weight: Tensor, out: Tensor) -> Callable[[], Any]:
    return lambda: multiply(x, weight.t(), out)


def _least_seconds(*works: Callable[[], Any]) -> list[float]:
    """Of each, the least of a few turns after one that is not counted: other processes only ever add time."""
    best = [math.inf] * len(works)
    for turn in range(1 + _REPEATS):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            if turn > 0:
                best[i] = min(best[i], time.perf_counter() - start)
    return best
