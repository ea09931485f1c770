"""GEMMs of few rows on the CPU: by the compiled kernel where that was measured to be faster than torch's.

A decoding step multiplies one row, or a few, by a weight that no cache holds: it is as long as the reading of the
weight.  torch's GEMM repacks the weight at each call; the compiled kernel (``csrc/cpu/few_rows.h``) reads it once.
Which is faster depends on the machine, the dtype and the sizes, so both are timed: once per process, number of torch's
threads, dtype and power of two of rows, columns and contraction, in some ten milliseconds.  With
``TPKERNELS_CALIBRATE=0`` torch's is taken.

An expert of a mixture may have more rows than the kernel takes at once: they are multiplied in blocks, each of which
goes through the expert's weight again, while that is in a cache.

Both sum in fp32 and round once, in different orders: results differ in the last bits between the two, and are equal for
integers.  Within a process a choice never changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels import config
from tpkernels.gemm.native import native, native_dtype

__all__ = ["Times", "linear", "multiply", "name", "of_experts", "rates", "serves", "wins", "wins_in_blocks"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Below, a GEMM takes no longer than the Python around it.
_LEAST_WEIGHT_BYTES = 64 * 1024
# The weights that a measurement goes through, together: more than a second-level cache holds, as in a model.
_STREAMED_BYTES = 8 * 1024 * 1024
# What the compiled kernel must take at most of torch's time: a choice within the noise would differ from run to run.
_WORTH = 0.9
# Of one weight: a call of more rows is no decoding step, and would be measured for nothing on most machines.
_MOST_ROWS = 32
# Of an expert, above which torch's GEMM is not beaten on any machine that was measured, and measuring takes long.
_MOST_ROWS_IN_BLOCKS = 256
_LEAST_WEIGHTS = 4
_LEAST_CALLS, _MOST_CALLS = 9, 200
_ENOUGH_S = 0.01


class Times(NamedTuple):
    """Microseconds that one GEMM takes."""

    compiled_us: float
    torch_us: float


def serves(rows: int, columns: int, contraction: int, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel can multiply ``[rows, contraction]`` by ``[columns, contraction]``, and may gain.

    The same on all ranks of one host.
    """
    if dtype not in _DTYPES or columns * contraction * dtype.itemsize < _LEAST_WEIGHT_BYTES:
        return False
    return _isa(dtype) is not None and 0 < rows <= _MOST_ROWS


def wins(rows: int, columns: int, contraction: int, dtype: torch.dtype) -> bool:
    """Whether it is the one to take, in this process and with as many threads as torch has now."""
    return serves(rows, columns, contraction, dtype) and _is_faster(rows, columns, contraction, dtype)


def wins_in_blocks(rows: int, columns: int, contraction: int, dtype: torch.dtype) -> bool:
    """The same for as many rows as an expert has, which :func:`multiply` takes in blocks."""
    if rows > _MOST_ROWS_IN_BLOCKS or not serves(1, columns, contraction, dtype):
        return False
    return rows > 0 and _is_faster(rows, columns, contraction, dtype)


def _is_faster(rows: int, columns: int, contraction: int, dtype: torch.dtype) -> bool:
    if not config.load().calibrate:
        return False
    sizes = (_next_power(rows), _nearest_power(columns), _nearest_power(contraction))
    times = measured(*sizes, dtype, torch.get_num_threads())
    return times.compiled_us <= _WORTH * times.torch_us


def rates(dtype: torch.dtype) -> dict[str, float]:
    """What the kernel costs, as :class:`tpkernels.dispatch.Costs` has it; nothing where torch's GEMM is as fast."""
    side = 1024
    found = {}
    for field, rows in (("few_rows_gbytes", 1), ("sixteen_rows_gbytes", 16)):
        if not wins(rows, side, side, dtype):
            return {}
        times = measured(rows, side, side, dtype, torch.get_num_threads())
        found[field] = 1e-3 * side * side * dtype.itemsize / times.compiled_us
    return found


def name(dtype: torch.dtype) -> str:
    """What to call the kernel of a dtype that it serves."""
    return f"compiled kernel for few rows ({_isa(dtype)})"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``F.linear`` of plain tensors that nobody watches and that need no gradient; None where torch is to do it."""
    shape = x.shape
    if not x.is_cpu or not shape or not _linear_wins(shape, weight.shape, x.dtype, torch.get_num_threads()):
        return None
    if not x.is_contiguous() or not _is_like(weight, x, 1):
        return None
    if bias is not None and (bias.shape != weight.shape[:1] or not _is_like(bias, x, 0)):
        return None
    columns, contraction = weight.shape
    y = x.new_empty((*shape[:-1], columns))
    of_weight, rows = _of_weight(weight, bias), shape[:-1].numel()
    _run(x.dtype, x.data_ptr(), contraction, of_weight, y.data_ptr(), columns, rows, columns, contraction)
    return y


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> bool:
    """``out = x @ weight^T + bias``, of any number of rows; False, and nothing done, for other strides or dtypes."""
    if not (_is_like(x, x, 1) and _is_like(weight, x, 1) and _is_like(out, x, 1)):
        return False
    if bias is not None and not _is_like(bias, x, 0):
        return False
    of_weight, (rows, columns) = _of_weight(weight, bias), out.shape
    _run(x.dtype, x.data_ptr(), x.stride(0), of_weight, out.data_ptr(), out.stride(0), rows, columns, x.shape[1])
    return True


def of_experts(weights: Tensor, out: Tensor, biases: Tensor | None) -> Callable[[int, Tensor, int], None] | None:
    """``multiplies(expert, rows, low)``: what :func:`multiply` does with these rows, which lie together, the weight of
    the expert and the rows of ``out`` from ``low`` on.  None for other strides or dtypes.

    ``weights``: ``[E, columns, contraction]``, ``biases``: ``[E, columns]``; the caller keeps all three.  Addresses
    take 29 ms where views of each expert take 36: gate and up of 256 experts of 64 rows, 128 x 896, bf16, one thread of
    an Intel Xeon with AMX, 2026-11-27.
    """
    if not (_is_like(weights, weights, 2) and _is_like(out, weights, 1)):
        return None
    if biases is not None and not _is_like(biases, weights, 1):
        return None
    itemsize, (columns, contraction) = weights.dtype.itemsize, weights.shape[1:]
    weight_at, expert_step, weight_step = weights.data_ptr(), weights.stride(0) * itemsize, weights.stride(1)
    bias_at, bias_step = (0, 0) if biases is None else (biases.data_ptr(), biases.stride(0) * itemsize)
    out_at, out_step, dtype = out.data_ptr(), out.stride(0), weights.dtype

    def multiplies(expert: int, rows: Tensor, low: int) -> None:
        assert rows.dtype is dtype and rows.stride(1) == 1
        of_weight = (weight_at + expert * expert_step, weight_step, bias_at + expert * bias_step)
        _run(
            dtype, rows.data_ptr(), rows.stride(0), of_weight, out_at + low * out_step * itemsize, out_step,
            rows.shape[0], columns, contraction,
        )  # fmt: skip

    return multiplies


def _is_like(tensor: Tensor, x: Tensor, dim: int) -> bool:
    """Whether it has the dtype of x, on the CPU, and what is along its last dimension lies together."""
    return tensor.dtype is x.dtype and tensor.is_cpu and tensor.stride(dim) == 1


def _run(
    of: torch.dtype,
    x_at: int,
    x_step: int,
    of_weight: tuple[int, int, int],
    out_at: int,
    out_step: int,
    rows: int,
    columns: int,
    contraction: int,
) -> None:
    """``of_weight``: the address of the weight, the stride of its rows, and the address of the bias or 0."""
    module: Any = native()
    dtype, itemsize, most = native_dtype(of), of.itemsize, module.MAX_FEW_ROWS
    for first in range(0, rows, most):
        module.multiply_few_rows(
            dtype, x_at + first * x_step * itemsize, x_step, *of_weight, out_at + first * out_step * itemsize, out_step,
            min(most, rows - first), columns, contraction,
        )  # fmt: skip


def _of_weight(weight: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    return weight.data_ptr(), weight.stride(0), 0 if bias is None else bias.data_ptr()


@lru_cache(maxsize=1024)
def _linear_wins(x: torch.Size, weight: torch.Size, dtype: torch.dtype, threads: int) -> bool:
    if len(weight) != 2 or x[-1] != weight[1]:
        return False
    return wins(x[:-1].numel(), *weight, dtype)


@lru_cache(maxsize=256)
def measured(rows: int, columns: int, contraction: int, dtype: torch.dtype, threads: int) -> Times:
    """Medians of both, each call with another weight than the last calls, the two in turn: noise meets both."""
    row_bytes = contraction * dtype.itemsize
    columns = max(1, min(columns, _STREAMED_BYTES // _LEAST_WEIGHTS // row_bytes))
    count = max(_LEAST_WEIGHTS, _STREAMED_BYTES // (columns * row_bytes))
    with torch.no_grad():
        weights = torch.ones(count, columns, contraction, dtype=dtype).unbind()
        x = torch.ones(rows, contraction, dtype=dtype)
        out = torch.empty(rows, columns, dtype=dtype)
        compiled: list[float] = []
        library: list[float] = []
        start = time.perf_counter()
        for number in range(_MOST_CALLS):
            before = time.perf_counter()
            multiply(x, weights[number % count], out)
            between = time.perf_counter()
            F.linear(x, weights[(number + count // 2) % count])
            after = time.perf_counter()
            compiled.append(between - before)
            library.append(after - between)
            if number >= _LEAST_CALLS and after - start > _ENOUGH_S:
                break
    return Times(1e6 * statistics.median(compiled), 1e6 * statistics.median(library))


@lru_cache(maxsize=16)
def _isa(dtype: torch.dtype) -> str | None:
    module: Any = native()
    found: str | None = None if module is None else module.few_rows_isa_of(native_dtype(dtype))
    return found


def _next_power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _nearest_power(size: int) -> int:
    """Of two, by ratio."""
    below = 1 << (size.bit_length() - 1)
    return below if size * size <= 2 * below * below else 2 * below
