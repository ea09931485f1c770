"""Pieces that backends share: row-wise GEMMs into the whole, rows taken from it, the ordered sum.

Rows of a chunk are consecutive in the shard but, for a sharded dimension that is not the first, fall into several
*segments* of the whole; a few segments are computed in place, many small ones through one GEMM and an indexed copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from tpkernels.comm import timeline
from tpkernels.gemm import fp8, widened
from tpkernels.gemm.fp8 import Operand, Scaled
from tpkernels.gemm.widened import MatrixOperand, Widened
from tpkernels.ops.activations import activation_forward, gate_forward
from tpkernels.ops.contract import AllGatherMatmul, MatmulReduceScatter, accumulation_dtype
from tpkernels.partition import Layout

__all__ = [
    "Epilogue",
    "accumulation_dtype",
    "bias_of",
    "earlier_products",
    "gemm",
    "partial_rows",
    "place_rows",
    "product",
    "reduce_rows",
    "take_rows",
    "whole_like",
]

# Above this many segments per chunk, one GEMM plus an indexed copy beats a GEMM per segment.
MAX_SEGMENTS_IN_PLACE = 4
# On the CPU, the sum over ranks runs in blocks that stay in the second-level cache in fp32; a GPU would spend more time
# on launching them.
REDUCE_BLOCK_ELEMENTS = 128 * 1024


def gemm(x: Operand, matrix: MatrixOperand, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ matrix + bias, written in place; ``bias`` is one row or a matrix of the shape of ``out``."""
    if x.shape[0] == 0:
        return
    if isinstance(matrix, Widened):
        assert isinstance(x, Tensor)
        widened.multiply(x, matrix.numbers, out, bias)
    elif isinstance(x, Scaled) or isinstance(matrix, Scaled):
        assert isinstance(x, Scaled) and isinstance(matrix, Scaled)
        fp8.multiply(x, matrix, out, bias)
    elif bias is None:
        torch.mm(x, matrix, out=out)
    else:
        torch.addmm(bias, x, matrix, out=out)


def earlier_products(call: MatmulReduceScatter) -> Tensor | None:
    """The addend of the last product: the call's own, and all products before it, which add up in their dtype."""
    addend = call.addend
    for x, matrix in zip(call.xs[:-1], call.matrices[:-1], strict=True):
        out = call.like.new_empty(x.shape[0], matrix.shape[1])
        gemm(x, matrix, out, addend)
        addend = out
    return None if addend is None else addend.contiguous()


def product(call: MatmulReduceScatter) -> Tensor:
    """This rank's whole partial product."""
    out = call.like.new_empty(call.xs[-1].shape[0], call.columns)
    gemm(call.xs[-1], call.matrices[-1], out, earlier_products(call))
    return out


class Epilogue:
    """The outputs of one all-gather GEMM, filled row range by row range: GEMMs, biases, activation.

    What goes into an activation and is not kept has rows for one ``fill`` only.
    """

    def __init__(self, call: AllGatherMatmul, rows: int | None = None) -> None:
        """``rows``: of the outputs, by default those of the whole."""
        self.call, dtype = call, call.out_dtype or call.x.dtype
        rows = call.layout.total_rows if rows is None else rows
        outs = 1 if call.gated else len(call.matrices)
        self.outs = [call.x.new_empty(rows, matrix.shape[1], dtype=dtype) for matrix in call.matrices[:outs]]
        keep = call.keep_preactivation and call.activation is not None
        columns = [matrix.shape[1] for matrix in call.matrices] if keep else []
        self.preactivations = [call.x.new_empty(rows, count, dtype=dtype) for count in columns]
        self._scratch: Tensor | None = None

    def fill(self, x: Tensor, start: int) -> None:
        """Compute the rows of the whole that begin at ``start`` from their gathered input rows ``x``."""
        self.multiply(self.call.operand(x), start, self.call.matrices, self.call.biases)

    def multiply(
        self, operand: Operand, start: int, matrices: Sequence[MatrixOperand], biases: Sequence[Tensor | None]
    ) -> None:
        """Compute the rows from ``start`` on with these matrices, of the shapes of the call's."""
        stop = start + operand.shape[0]
        befores = self.befores(start, stop)
        for before, matrix, bias in zip(befores, matrices, biases, strict=True):
            gemm(operand, matrix, before, bias)
        self.activate(befores, start, stop)

    def befores(self, start: int, stop: int) -> list[Tensor]:
        """Where the products of these rows go, one tensor per matrix."""
        outs = [self.outs[0 if self.call.gated else i][start:stop] for i in range(len(self.call.matrices))]
        return [self._before(i, out, start) for i, out in enumerate(outs)]

    def activate(self, befores: Sequence[Tensor], start: int, stop: int) -> None:
        """Make these rows of the outputs of their products."""
        call, outs = self.call, [out[start:stop] for out in self.outs]
        if call.activation is None:
            return  # the products are the outputs
        if call.gated:
            gate, up = befores
            gate_forward(call.activation, gate, up, out=outs[0])
            return
        for out, before in zip(outs, befores, strict=True):
            out.copy_(activation_forward(call.activation, before))

    def _before(self, i: int, out: Tensor, start: int) -> Tensor:
        """Where the rows of product i go that make ``out``: where they are kept, or the rows of ``out`` itself."""
        if self.call.activation is None:
            return out
        if self.call.packed:
            return torch.empty_like(out, dtype=torch.float32)  # sums are there in fp32: nothing rounds before
        if self.preactivations:
            return self.preactivations[i][start : start + out.shape[0]]
        if i == 0 or not self.call.gated:
            return out
        if self._scratch is None or self._scratch.shape[0] < out.shape[0]:
            self._scratch = torch.empty_like(out)
        return self._scratch[: out.shape[0]]

    def fill_scattered(self, x: Tensor, index: Tensor) -> None:
        """The same for rows that lie apart: ``index`` names the row of the whole of each row of ``x``."""
        part = Epilogue(self.call, x.shape[0])
        part.fill(x, 0)
        for whole, rows in zip((*self.outs, *self.preactivations), (*part.outs, *part.preactivations), strict=True):
            whole.index_copy_(0, index, rows)


def place_rows(layout: Layout, rank: int, start: int, rows: Tensor, epilogue: Epilogue, whole: Tensor | None) -> None:
    """Feed rows ``start..`` of the shard of ``rank`` to the epilogue, and keep them in ``whole`` if there is one."""
    segments = layout.segments(rank, start, start + rows.shape[0])
    if len(segments) > MAX_SEGMENTS_IN_PLACE:
        index = _whole_index(layout, rank, start, start + rows.shape[0], rows.device)
        epilogue.fill_scattered(rows, index)
        if whole is not None:
            whole.index_copy_(0, index, rows)
        return
    for segment in segments:
        part = rows[segment.start - start : segment.stop - start]
        epilogue.fill(part, segment.dst)
        if whole is not None:
            kept = whole[segment.dst : segment.dst + part.shape[0]]
            if kept.data_ptr() != part.data_ptr():
                kept.copy_(part)


@overload
def take_rows(x: Tensor, layout: Layout, rank: int, start: int, stop: int) -> Tensor: ...


@overload
def take_rows(x: Operand, layout: Layout, rank: int, start: int, stop: int) -> Operand: ...


def take_rows(x: Operand, layout: Layout, rank: int, start: int, stop: int) -> Operand:
    """Rows ``[start, stop)`` of the shard of ``rank``, taken from the whole ``x``; a view where they lie together."""
    segments = layout.segments(rank, start, stop)
    if len(segments) == 1:
        return x[segments[0].dst : segments[0].dst + stop - start]
    if not segments:
        return x[:0]
    return x.index_select(0, _whole_index(layout, rank, start, stop, x.device))


def partial_rows(
    xs: Sequence[Operand],
    matrices: Sequence[MatrixOperand],
    addend: Tensor | None,
    layout: Layout,
    owner: int,
    start: int,
    stop: int,
    out: Tensor,
) -> None:
    """out = rows ``[start, stop)`` of what ``owner`` will sum: sum_i xs[i] @ matrices[i] + addend, restricted to it.

    Several matrices accumulate in the dtype of ``out``, one rounding each, as autograd does for a tensor used twice.
    """
    bias = None
    if layout.feature:
        low, high = layout.columns(owner)
        matrices = [matrix[:, low:high] for matrix in matrices]
        if addend is not None:
            bias = addend[start:stop, low:high]
        parts = [x[start:stop] for x in xs]
    else:
        if addend is not None:
            bias = take_rows(addend, layout, owner, start, stop)
        parts = [take_rows(x, layout, owner, start, stop) for x in xs]
    for part, matrix in zip(parts, matrices, strict=True):
        gemm(part, matrix, out, bias)
        bias = out


def bias_of(bias: Tensor | None, start: int, stop: int) -> Tensor | None:
    """What rows ``[start, stop)`` have added: one row for all of them, or their own."""
    return bias if bias is None or bias.dim() == 1 else bias[start:stop]


def reduce_rows(parts: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> None:
    """out = parts[0] + parts[1] + ... + bias, in this order, in the accumulation dtype, rounded once.

    ``out`` may be one of the parts; ``bias`` is one row, or as many as ``out`` has.
    """
    rows, columns = out.shape
    if out.numel() == 0:
        return
    wide = accumulation_dtype(out.dtype)
    with timeline.span("reduce", "reduce"):
        if len(parts) == 2 and bias is None:
            torch.add(parts[0], parts[1], out=out)  # computes in fp32 and rounds once, for every dtype
            return
        step = rows if out.is_cuda else max(1, REDUCE_BLOCK_ELEMENTS // max(1, columns))
        for start in range(0, rows, step):
            total = parts[0][start : start + step].to(wide, copy=True)
            for part in parts[1:]:
                total += part[start : start + step]
            if bias is not None:
                total += bias if bias.dim() == 1 else bias[start : start + step]
            out[start : start + step].copy_(total)


def whole_like(x: Tensor, layout: Layout) -> Tensor:
    """An uninitialised gathered tensor for shards like ``x``."""
    columns = sum(layout.sizes) if layout.feature else x.shape[1]
    return torch.empty(layout.total_rows, columns, dtype=x.dtype, device=x.device)


def _whole_index(layout: Layout, rank: int, start: int, stop: int, device: torch.device) -> Tensor:
    rows = torch.arange(start, stop, device=device)
    block = layout.sizes[rank] * layout.inner
    shift = sum(layout.sizes[:rank]) * layout.inner
    stride = sum(layout.sizes) * layout.inner
    return rows.div(block, rounding_mode="floor") * stride + shift + rows % block
