"""Pieces that backends share for grouped GEMMs: the rows of a chunk of tokens, expert by expert, on one rank.

Each expert's rows take one GEMM of the library.  torch's own ``F.grouped_mm`` runs the same GEMMs on a CPU, with the
same bits, and takes about as long (torch 2.13, one core, bf16: 0.88 ms against 0.92 for 8 experts of 128 rows, K 512
and N 512; 2.15 ms against 2.35 for 64 experts of 16 rows, N 256; 2026-11-23, on a busy machine).  But it writes to a
new tensor, from which rows of a chunk would have to be copied to their place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.backends.row_gemms import Epilogue, accumulation_dtype, gemm
from tpkernels.gemm.grouped import TokenRows, are_few, multiply
from tpkernels.ops.contract import AllGatherGroupedMatmul, AllGatherMatmul, GroupedMatmulAllReduce

__all__ = ["GroupedEpilogue", "partial_tokens", "takes_few_rows"]


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

    def fill_tokens(self, x: Tensor, start: int) -> None:
        """Compute the rows of the tokens that begin at ``start`` from their gathered inputs ``x``."""
        for expert, low, high in self._rows.runs(start, start + x.shape[0]):
            picked = x.index_select(0, self._rows.tokens[low:high] - start)
            matrices = [matrix[expert] for matrix in self._matrices]
            biases = [None if bias is None else bias[expert] for bias in self._expert_biases]
            self.multiply(self.call.operand(picked), low, matrices, biases)


def takes_few_rows(call: GroupedMatmulAllReduce) -> bool:
    """Whether the compiled kernel makes the products; each rank decides for its own ones."""
    return len(call.xs) == 1 and are_few(call.xs[0], call.matrices[0], call.rows)


def partial_tokens(call: GroupedMatmulAllReduce, start: int, stop: int, out: Tensor, *, few: bool = False) -> None:
    """out = this rank's partial sums of tokens ``[start, stop)``: see :class:`GroupedMatmulAllReduce`.

    ``few``: what :func:`takes_few_rows` says of the whole call.
    """
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
