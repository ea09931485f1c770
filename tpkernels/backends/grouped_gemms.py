"""Pieces that backends share for grouped GEMMs: the rows of a chunk of tokens, expert by expert, on one rank.

Each expert's rows take one GEMM: the library's, or the compiled kernel's where :func:`~tpkernels.gemm.grouped.are_few`
says so.  torch's own ``F.grouped_mm`` calls the same GEMMs on a CPU, with the same bits, and takes as long: 21.0 ms
against 21.7 for 8 experts of 512 rows (gate of Mixtral-8x7B / 4, 1792 x 1024), 22.3 against 25.5 for 256 of 64 rows
(DeepSeek-V3 / 8, 128 x 896), where the compiled kernel takes 18.4; in the backward pass 42 against 45, and for the
weights 58 against 40 (torch 2.13, one core of an Intel Xeon with AMX, bf16, 2026-11-27).  And it writes to a new
tensor, from which rows of a chunk would have to be copied to their place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.backends.row_gemms import Epilogue, accumulation_dtype, gemm
from tpkernels.gemm.fp8 import Operand
from tpkernels.gemm.grouped import TokenRows, are_few, multiply
from tpkernels.gemm.widened import MatrixOperand, Widened
from tpkernels.ops.contract import AllGatherGroupedMatmul, AllGatherMatmul, GroupedMatmulAllReduce

__all__ = ["GroupedEpilogue", "partial_tokens"]


class GroupedEpilogue(Epilogue):
    """The outputs of one grouped all-gather GEMM, filled chunk of tokens by chunk of tokens."""

    def __init__(self, call: AllGatherGroupedMatmul, rows: TokenRows) -> None:
        first = AllGatherMatmul(
            call.x, call.layout, [torch.empty(matrix.shape[1:], device="meta") for matrix in call.matrices],
            [None] * len(call.matrices), call.activation, keep_preactivation=call.keep_preactivation,
            out_dtype=call.out_dtype, packed=call.packed,
        )  # fmt: skip
        super().__init__(first, rows.count)
        self._rows, self._matrices, self._expert_biases = rows, call.matrices, call.biases
        self._few = not call.packed and are_few(call.x, call.matrices[0], rows)

    def gemm(self, x: Operand, matrix: MatrixOperand, out: Tensor, bias: Tensor | None) -> None:
        assert not isinstance(matrix, Widened)
        multiply(x, matrix, out, bias, self._few)

    def fill_tokens(self, x: Tensor, start: int) -> None:
        """Compute the rows of the tokens that begin at ``start`` from their gathered inputs ``x``."""
        for expert, low, high in self._rows.runs(start, start + x.shape[0]):
            picked = x.index_select(0, self._rows.tokens[low:high] - start)
            matrices = [matrix[expert] for matrix in self._matrices]
            biases = [None if bias is None else bias[expert] for bias in self._expert_biases]
            self.multiply(self.call.operand(picked), low, matrices, biases)


def partial_tokens(call: GroupedMatmulAllReduce, start: int, stop: int, out: Tensor) -> None:
    """out = this rank's partial sums of tokens ``[start, stop)``: see :class:`GroupedMatmulAllReduce`."""
    few = len(call.xs) == 1 and are_few(call.xs[0], call.matrices[0], call.rows)
    wide = accumulation_dtype(out.dtype)
    total = out if out.dtype == wide else torch.empty(out.shape, dtype=wide, device=out.device)
    if call.addend is None:
        total.zero_()
    else:
        total.copy_(call.addend[start:stop])
    for expert, low, high in call.rows.runs(start, stop):
        product, addend = out.new_empty(high - low, out.shape[1]), None
        for x, matrices in zip(call.xs, call.matrices, strict=True):
            if addend is None:
                bias = None if call.expert_biases is None else call.expert_biases[expert]
                multiply(x[low:high], matrices[expert], product, bias, few)
            else:
                gemm(x[low:high], matrices[expert], product, addend)
            addend = product
        weighted = product.to(wide) if call.weights is None else product * call.weights[low:high, None]
        total.index_add_(0, call.rows.tokens[low:high] - start, weighted)
    if total is not out:
        out.copy_(total)
