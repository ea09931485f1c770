"""Pieces that backends share where a call gives the same bits at every degree (:mod:`tpkernels.gemm.canonical`).

A gather multiplies chunks of the whole's rows, whoever sent them, as soon as all of a chunk's rows are there
(:class:`Arrivals`).  A sum has this rank's subtree, rows of which are computed when they are first asked for
(:func:`subtree`, :func:`partial_of`), and ends with the top of the tree (:func:`combine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from tpkernels.backends.row_gemms import Epilogue, take_rows, whole_like
from tpkernels.comm import timeline
from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import canonical, fp8
from tpkernels.gemm.canonical import Subtree
from tpkernels.gemm.fp8 import Operand
from tpkernels.gemm.room import room
from tpkernels.ops.contract import (
    GATED,
    AllGatherMatmul,
    Context,
    Gathered,
    GroupedMatmulAllReduce,
    MatmulAllReduce,
    MatmulReduceScatter,
    activation_forward,
)
from tpkernels.partition import Layout

__all__ = ["KEEP_BITS", "Arrivals", "Columns", "Tree", "check_sum", "combine", "own_blocks", "partial_of", "subtree"]

KEEP_BITS = (
    *("all_gather", "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"),
    *("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter", "grouped_matmul_all_reduce"),
    *("dispatch_grouped_matmul", "grouped_matmul_combine"),
)
"""Ops that have such a form; a sum of whatever the ranks have is a sum of so many parts as there are ranks."""


class Tree(Protocol):
    """This rank's part of a sum."""

    sums: Tensor

    def complete(self) -> Tensor:
        """All rows."""
        ...

    def rows(self, low: int, high: int) -> Tensor:
        """Rows ``[low, high)``."""
        ...


def own_blocks(context: Context) -> int:
    """How many blocks of what is cut are this rank's."""
    return context.problem.same_bits // context.problem.world_size


class Columns(Epilogue):
    """The outputs of a gather, from one chunk of rows and one block of columns at a time."""

    def __init__(self, call: AllGatherMatmul, blocks: int) -> None:
        super().__init__(call)
        matrices = [cast(Operand, matrix) for matrix in call.matrices]
        self._panels = [canonical.panels(matrix.shape[1], blocks) for matrix in matrices]
        self._blocks = [
            [
                part if isinstance(part, Tensor) else canonical.matrix_block(part)
                for panel in panels
                for part in [canonical.part_of(matrix, slice(None), panel)]
            ]
            for matrix, panels in zip(matrices, self._panels, strict=True)
        ]

    def fill_chunk(self, gathered: Tensor, start: int) -> None:
        """``gathered``: one chunk of :func:`~tpkernels.gemm.canonical.row_chunks`, from row ``start`` on."""
        call, rows = self.call, slice(start, start + gathered.shape[0])
        # Of fp8 features each part has the same scale: the op compares them.
        x: Operand = gathered
        if call.packed:
            x = canonical.dense_rows(fp8.unpack_alike(gathered, call.packed), "rows")
        if call.gated:
            assert call.activation is not None
            for block, panel in enumerate(self._panels[0]):
                gate, up = (self._product(i, block, x, rows, f"product {i}") for i in range(2))
                self.outs[0][rows, panel] = activation_forward(GATED[call.activation], gate) * up
            return
        for i, panels in enumerate(self._panels):
            for block, panel in enumerate(panels):
                out = self.outs[i][rows, panel]
                if call.activation is None and isinstance(x, Tensor):
                    self._multiply(i, block, x, out)
                else:
                    out.copy_(activation_forward(call.activation, self._product(i, block, x, rows)))

    def _product(self, i: int, block: int, x: Operand, rows: slice, place: str = "product") -> Tensor:
        """Until the thread's next one in this place."""
        panel, bias = self._panels[i][block], self.call.biases[i]
        if isinstance(x, Tensor):  # dense: activations are computed in another way where there are gaps
            found = room(place, (x.shape[0], panel.stop - panel.start), x.dtype)
            self._multiply(i, block, x, found)
        else:
            part = None if bias is None else canonical.dense(bias[panel])
            found = canonical.product(x, self._blocks[i][block], part, place)
        if self.preactivations:
            self.preactivations[i][rows, panel] = found
        return found

    def _multiply(self, i: int, block: int, x: Tensor, out: Tensor) -> None:
        bias, matrix = self.call.biases[i], self._blocks[i][block]
        assert isinstance(matrix, Tensor)
        canonical.multiply(x, matrix, out, None if bias is None else bias[self._panels[i][block]])


class Arrivals:
    """The whole of a gather as its rows arrive, and the products of the chunks that are complete."""

    def __init__(self, context: Context, call: AllGatherMatmul) -> None:
        self.whole = whole_like(call.x, call.layout)
        self._call, self._layout = call, call.layout
        self._columns = Columns(call, own_blocks(context))
        parts = len(call.layout.sizes) if call.layout.feature else 1
        self._missing = {chunk: parts * (chunk[1] - chunk[0]) for chunk in canonical.row_chunks(self.whole.shape[0])}
        if call.layout.feature:
            self._count(0, self.whole.shape[0], call.layout.sizes.count(0))

    def add(self, rank: int, start: int, rows: Tensor) -> None:
        """Rows ``start..`` of the shard of ``rank``."""
        if rows.numel() == 0:
            return
        if self._layout.feature:
            low, high = self._layout.columns(rank)
            self.whole[start : start + rows.shape[0], low:high] = rows
            self._count(start, start + rows.shape[0])
            return
        for segment in self._layout.segments(rank, start, start + rows.shape[0]):
            part = rows[segment.start - start : segment.stop - start]
            kept = self.whole[segment.dst : segment.dst + part.shape[0]]
            if kept.data_ptr() != part.data_ptr():  # else it was received there
                kept.copy_(part)
            self._count(segment.dst, segment.dst + part.shape[0])

    def _count(self, low: int, high: int, times: int = 1) -> None:
        for chunk in [chunk for chunk in self._missing if chunk[0] < high and low < chunk[1]]:
            self._missing[chunk] -= times * (min(high, chunk[1]) - max(low, chunk[0]))
            if self._missing[chunk] == 0:
                del self._missing[chunk]
                with timeline.span("gemm", "gemm"):
                    self._columns.fill_chunk(self.whole[chunk[0] : chunk[1]], chunk[0])

    def gathered(self) -> Gathered:
        """The results, when everything has arrived."""
        assert not self._missing, f"rows that never came: {self._missing}"
        columns = self._columns
        return Gathered(columns.outs, columns.preactivations, self.whole if self._call.keep_whole else None)


def subtree(context: Context, call: MatmulReduceScatter | MatmulAllReduce, sums: Tensor | None = None) -> Subtree:
    """This rank's part of a sum over the contraction; ``sums``: where it goes.  Raises as :func:`check_sum`."""
    check_sum(context, call)
    return Subtree(call.xs, cast(Sequence[Operand], call.matrices), own_blocks(context), sums)


def check_sum(context: Context, call: MatmulReduceScatter | MatmulAllReduce | GroupedMatmulAllReduce) -> None:
    """Refuse what a tree over products has no place for.

    Raises:
        UnsupportedProblem: on all ranks; something else is added to the products, or follows the sum.
    """
    if call.tail is not None or (not isinstance(call, MatmulAllReduce) and call.addend is not None):
        raise UnsupportedProblem(
            f"{context.problem.op} with same_bits={context.problem.same_bits} sums products alone: a residual, a norm "
            "or a gradient of each rank's own would be added in another place of the tree"
        )


def partial_of(tree: Tree, layout: Layout, owner: int, start: int, stop: int) -> Tensor:
    """Rows ``[start, stop)`` of what ``owner`` will sum."""
    with timeline.span("gemm", "gemm", peer=owner):
        if layout.feature:
            low, high = layout.columns(owner)
            return tree.rows(start, stop)[:, low:high]
        for segment in layout.segments(owner, start, stop):
            tree.rows(segment.dst, segment.dst + segment.stop - segment.start)
        return take_rows(tree.sums, layout, owner, start, stop)


def combine(parts: Sequence[Tensor], out: Tensor, bias: Tensor | None) -> None:
    """out = the top of the tree over the ranks' parts, in rank order, + bias; rounded once, also with one rank."""
    with timeline.span("reduce", "reduce"):
        canonical.top_of_tree(parts, out, bias)
