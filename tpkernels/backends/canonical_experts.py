"""Pieces that backends share where a grouped GEMM gives the same bits at every degree.

The rules are those of :mod:`tpkernels.gemm.canonical`.  Features of experts are cut into blocks as those of dense
layers are.  An expert's rows are those of all tokens, whoever brought them, so each block of an expert is multiplied by
library calls of the same sizes at every degree.  A gather therefore multiplies when all tokens are there
(:class:`ExpertArrivals`): each expert has tokens of every rank.  A sum has, for each block of the contraction, the
weighted sum over a token's experts, in their order and in fp32 (fp64 for fp64); the blocks are added in the tree
(:class:`ExpertSubtree`).

Refuses gradients of each rank's own that would be added to a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.backends.canonical_rows import Columns, check_sum, own_blocks, subtree
from tpkernels.backends.row_gemms import whole_like
from tpkernels.comm import timeline
from tpkernels.gemm import canonical, tree_sum
from tpkernels.gemm.canonical import Subtree
from tpkernels.gemm.grouped import TokenRows
from tpkernels.ops.contract import (
    GATED,
    AllGatherGroupedMatmul,
    AllGatherMatmul,
    Context,
    Gathered,
    GroupedMatmulAllReduce,
    GroupedMatmulCombine,
    MatmulAllReduce,
    MatmulReduceScatter,
)
from tpkernels.partition import Layout, offsets

__all__ = ["ExpertArrivals", "ExpertSubtree", "Sum", "fill_slots", "products_of", "shape_of_sums", "tree_of"]

Sum = MatmulReduceScatter | MatmulAllReduce | GroupedMatmulAllReduce


class ExpertArrivals:
    """The tokens of all ranks as they arrive, and then their products."""

    def __init__(self, context: Context, call: AllGatherGroupedMatmul) -> None:
        self.whole = whole_like(call.x, call.layout)
        self._call, self._blocks = call, own_blocks(context)

    def add(self, rank: int, start: int, rows: Tensor) -> None:
        """Tokens ``start..`` of the shard of ``rank``."""
        first = offsets(self._call.layout.sizes)[rank] + start
        kept = self.whole[first : first + rows.shape[0]]
        if kept.data_ptr() != rows.data_ptr():  # else they were received there
            kept.copy_(rows)

    def gathered(self) -> Gathered:
        """The results, when everything has arrived."""
        return products_of(self._call, self._call.rows(), self.whole, self._blocks)


def products_of(call: AllGatherGroupedMatmul, rows: TokenRows, whole: Tensor, blocks: int) -> Gathered:
    """The results of a call whose tokens are all in ``whole``, of which ``rows`` are; columns in ``blocks``."""
    shapes, dtype = [(rows.count, matrix.shape[2]) for matrix in call.matrices], call.out_dtype or call.x.dtype
    of_outs = shapes[:1] if call.activation in GATED else shapes
    outs = [call.x.new_empty(shape, dtype=dtype) for shape in of_outs]
    keeps = call.keep_preactivation and call.activation is not None
    before = [call.x.new_empty(shape) for shape in shapes] if keeps else []
    for expert, low, high in rows.runs():
        picked = whole.index_select(0, rows.tokens[low:high])
        of_expert = AllGatherMatmul(
            picked, Layout(1, (high - low,), 1), [matrix[expert] for matrix in call.matrices],
            [None if bias is None else bias[expert] for bias in call.biases], call.activation,
            keep_preactivation=keeps, out_dtype=call.out_dtype, packed=call.packed,
        )  # fmt: skip
        columns = Columns(of_expert, blocks)
        columns.outs, columns.preactivations = _rows(outs, low, high), _rows(before, low, high)
        with timeline.span("gemm", "gemm"):
            for start, stop in canonical.row_chunks(high - low):
                columns.fill_chunk(picked[start:stop], start)
    return Gathered(outs, before, whole if call.keep_whole else None)


def fill_slots(call: GroupedMatmulCombine, out: Tensor) -> None:
    """``out``: the product of every slot that has one of this rank's experts, in the order in which they came."""
    rows, wide = call.rows, tree_sum.wide(out.dtype)
    assert rows.top_k == 1 and call.weights is None and call.addend is None, "the op sums and weights them"
    with timeline.span("gemm", "gemm"):
        for expert, low, high in rows.runs():
            bias = None if call.expert_biases is None else call.expert_biases[expert]
            terms = [
                canonical.columns_of_product(x[low:high], matrices[expert], bias, 1, out_dtype=call.out_dtype)
                for x, matrices in zip(call.xs, call.matrices, strict=True)
            ]
            total = terms[0] if len(terms) == 1 else sum((one.to(wide) for one in terms[1:]), terms[0].to(wide))
            out[rows.tokens[low:high]] = total.to(out.dtype)


def _rows(whole: Sequence[Tensor], low: int, high: int) -> list[Tensor]:
    return [one[low:high] for one in whole]


class ExpertSubtree:
    """This rank's part of a sum over a contraction that is cut; what :class:`~tpkernels.gemm.canonical.Subtree` is to
    dense sums.  All of it is computed when the first rows are asked for."""

    def __init__(self, context: Context, call: GroupedMatmulAllReduce, sums: Tensor | None = None) -> None:
        """``sums``: where the result goes; by default it is made."""
        check_sum(context, call)
        assert call.expert_biases is None, "biases of experts whose features are cut are added behind the sum"
        wide = tree_sum.wide(call.like.dtype)
        self.sums = call.like.new_empty(shape_of_sums(call), dtype=wide) if sums is None else sums
        self._call, self._blocks, self._is_complete = call, own_blocks(context), False

    def complete(self) -> Tensor:
        """All rows."""
        if not self._is_complete:
            self._tree(range(self._blocks), self.sums)
            self._is_complete = True
        return self.sums

    def rows(self, low: int, high: int) -> Tensor:
        """Rows ``[low, high)``."""
        return self.complete()[low:high]

    def _tree(self, blocks: range, sums: Tensor) -> None:
        if len(blocks) == 1:
            self._block(blocks[0], sums)
            return
        middle, right = len(blocks) // 2, torch.empty_like(sums)
        self._tree(blocks[:middle], sums)
        self._tree(blocks[middle:], right)
        sums.add_(right)

    def _block(self, block: int, sums: Tensor) -> None:
        """``sums``: of each token, the products of its experts in this block of the contraction."""
        call = self._call
        sums.zero_()
        for expert, low, high in call.rows.runs():
            total: Tensor | None = None
            for i, (x, matrices) in enumerate(zip(call.xs, call.matrices, strict=True)):
                panel = canonical.panels(x.shape[1], self._blocks)[block]
                matrix = canonical.matrix_block(canonical.part_of(matrices[expert], panel, slice(None)), "panel")
                rows = canonical.dense_rows(canonical.part_of(x, slice(low, high), panel), "rows")
                term = canonical.product(rows, matrix, place=f"term {i}")
                total = term.to(sums.dtype) if total is None else total + term
            assert total is not None
            weighted = total if call.weights is None else total * call.weights[low:high, None]
            sums.index_add_(0, call.rows.tokens[low:high], weighted)


def shape_of_sums(call: Sum) -> tuple[int, int]:
    """Rows and columns of what all ranks' partial sums have."""
    rows = call.rows.num_tokens if isinstance(call, GroupedMatmulAllReduce) else call.xs[0].shape[0]
    return rows, call.matrices[0].shape[-1]


def tree_of(context: Context, call: Sum, sums: Tensor | None = None) -> Subtree | ExpertSubtree:
    """This rank's part of a sum over the contraction; ``sums``: where it goes.

    Raises:
        UnsupportedProblem: on all ranks, see :func:`~tpkernels.backends.canonical_rows.check_sum`.
    """
    if isinstance(call, GroupedMatmulAllReduce):
        return ExpertSubtree(context, call, sums)
    return subtree(context, call, sums)
