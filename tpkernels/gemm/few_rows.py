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
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels import config
from tpkernels.gemm.native import native, native_dtype

__all__ = ["Times", "linear", "multiply", "name", "rates", "serves", "wins", "wins_in_blocks"]

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
    _run(x, contraction, weight, bias, y, columns, shape[:-1].numel(), columns, contraction)
    return y


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> bool:
    """``out = x @ weight^T + bias``, of any number of rows; False, and nothing done, for other strides or dtypes."""
    if not (_is_like(x, x, 1) and _is_like(weight, x, 1) and _is_like(out, x, 1)):
        return False
    if bias is not None and not _is_like(bias, x, 0):
        return False
    _run(x, x.stride(0), weight, bias, out, out.stride(0), len(out), out.shape[1], x.shape[1])
    return True


def _is_like(tensor: Tensor, x: Tensor, dim: int) -> bool:
    """Whether it has the dtype of x, on the CPU, and what is along its last dimension lies together."""
    return tensor.dtype is x.dtype and tensor.is_cpu and tensor.stride(dim) == 1


def _run(
    x: Tensor,
    x_step: int,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    out_step: int,
    rows: int,
    columns: int,
    contraction: int,
) -> None:
    module: Any = native()
    dtype, itemsize, most = native_dtype(x.dtype), x.dtype.itemsize, module.MAX_FEW_ROWS
    of_weight = (weight.data_ptr(), weight.stride(0), 0 if bias is None else bias.data_ptr())
    x_at, out_at = x.data_ptr(), out.data_ptr()
    for first in range(0, rows, most):
        module.multiply_few_rows(
            dtype, x_at + first * x_step * itemsize, x_step, *of_weight, out_at + first * out_step * itemsize, out_step,
            min(most, rows - first), columns, contraction,
        )  # fmt: skip


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
