"""GEMMs in one form at every tensor-parallel degree: what ``same_bits`` computes with.

Let B be the largest degree whose results are to agree (``same_bits``, a power of two) and W a degree that divides it.
A dimension that tensor parallelism cuts has B blocks of one size, and a rank owns B/W consecutive ones.  Owns the rules
by which every rank of every degree makes the same library calls, and adds their results in the same order::

    columns cut      y[:, b]  = x @ w[b]^T                          a call per block b of N; in a gather per chunk, too
    contraction cut  y        = tree over b of (x[:, b] @ w[:, b]^T)  a call per block b of K, ROWS and COLUMNS
    weight, N cut    dw[b]    = dz[:, b]^T @ x                      a call per block
    weight, K cut    dw[:, b] = dy^T @ x[:, b]                      a call per block
    bias, N cut      db[b]    = sum over rows of dz[:, b]           a call per block

The tree adds neighbours, ((0+1) + (2+3)) + ((4+5) + (6+7)), in fp32 (fp64 for fp64).  A rank's blocks are a subtree of
it, whose sum the rank sends; the top of the tree is over ranks.  The library computes a block's product in the dtype of
the operands, as it does for a rank of B; bf16 products are therefore rounded once before the tree, whatever W is.
fp8 numbers are multiplied in fp32, and the scales are applied to the product of each block, before the tree.  The
kernels of ``symmetric`` do so, too, with products of their own (:mod:`tpkernels.backends.symmetric.same_bits`).

Why calls and not elements.  Measured with torch 2.13.0 (MKL 2024.2, oneDNN 3.12) on an Intel Xeon of the Ice Lake
generation (AVX-512, no bf16 instructions), 2026-11-24, 60 random shapes up to 384 x 1024 x 768 each for x @ w^T, x @ w
and x^T @ w (``benchmarks/same_bits.py shapes --trials 60``); in how many of the 60 the bits of a result changed
with

==============================================  ===========  ===========  ===========
what changed                                    fp32         bf16         fp64
==============================================  ===========  ===========  ===========
number of rows in the call                      21, 4, 5     0, 0, 0      22, 1, 3
half of the columns in the call                 7, 6, 1      0, 0, 0      4, 6, 0
stride of the left operand's rows               0, 0, 2      0, 0, 0      0, 0, 0
stride of the right operand, alignment of both  0, 0, 0      0, 0, 0      0, 0, 0
two threads instead of one                      2, 1, 2      1, 0, 1      3, 4, 3
==============================================  ===========  ===========  ===========

No shape is safe for fp32 but the same shape.  So nothing here rests on a library's habits: a call has the same sizes,
strides, alignment, contents and number of threads at every degree, and the only assumption is that a call with all of
these equal gives equal bits.  Strides and alignment would cost a copy of what has gaps: :mod:`tpkernels.gemm.gaps`
asks the library whether they matter.

Refuses: more than one thread (:func:`check_threads`), blocks of unequal size, devices other than the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tpkernels.errors import UnsupportedProblem
from tpkernels.gemm import fp8, gaps, tree_sum
from tpkernels.gemm.fp8 import Operand, Scaled
from tpkernels.gemm.room import room

__all__ = [
    "COLUMNS",
    "ROWS",
    "Subtree",
    "by_panels",
    "LEAVES",
    "columns_of_product",
    "check_blocks",
    "check_job",
    "check_threads",
    "dense",
    "dense_rows",
    "describe",
    "describe_experts",
    "matrix_block",
    "multiply",
    "panels",
    "part_of",
    "product",
    "row_chunks",
    "sum_of_rows",
    "top_of_tree",
    "weight_gradient",
    "weight_gradient_of_row",
]

ROWS = 512
"""Rows of a call; the last one of a tensor has what is left.  The library packs a block anew in each call: in fp32,
with 2048 rows and blocks of 512 columns, CPU time over that of whole GEMMs (2026-11-25, one core of that Xeon) was
1.11 to 1.29 with 256 rows and 1.04 to 1.16 with 512.  Transfers hide behind calls: more rows hide less of small
problems."""
COLUMNS = 512
"""Columns of a call whose contraction is cut; 1024 were no faster."""
LEAVES = 8
"""Blocks whose products are kept until one pass adds them."""
VECTOR = 64
"""Elements that a loop of torch's takes at once, at most: two vectors of 32 bf16 numbers."""


def check_blocks(same_bits: int, world_size: int) -> None:
    """Refuse a number of blocks that no tree over ranks fits."""
    if same_bits < 1 or same_bits & (same_bits - 1):
        raise ValueError(f"same_bits must be a power of two, the largest degree that is to agree, got {same_bits}")
    if same_bits % world_size:
        raise ValueError(f"same_bits ({same_bits}) must be a multiple of the tensor-parallel degree ({world_size})")


def check_job(same_bits: int, dp: int, tp: int, device: str) -> None:
    """Refuse a job that is not proven to give the same bits."""
    check_blocks(same_bits, tp)
    if dp & (dp - 1):
        raise ValueError(f"same_bits ({same_bits}) adds replicas in a tree: dp must be a power of two, got {dp}")
    if device != "cpu":
        raise ValueError(f"same_bits ({same_bits}) is proven on CPUs alone, got device {device!r}")


def check_threads() -> None:
    """A library cuts its sums by the number of threads: with ``same_bits`` it is one, on every rank."""
    count = torch.get_num_threads()
    if count != 1:
        raise UnsupportedProblem(
            f"same_bits computes with one thread per rank, and torch has {count}: the bits of a sum depend on their "
            "number; call torch.set_num_threads(1), as tpkernels.init(same_bits=...) does"
        )


def describe(m: int, n: int, k: int, itemsize: int, world_size: int, same_bits: int, *, gathers: bool) -> str:
    """What a call of m x k x n over the whole group is made of, and what that costs, in words.

    ``gathers``: N is cut over the ranks, not K.
    """
    blocks, chunks = same_bits // world_size, -(-m // ROWS)
    if gathers:
        count, shape = blocks * chunks, (min(m, ROWS), k, n // same_bits)
        then = "parts with gaps are copied where the library needs it"
    else:
        count, shape = blocks * chunks * -(-n // COLUMNS), (min(m, ROWS), k // same_bits, min(n, COLUMNS))
        then = _of_sums(itemsize, blocks)
    return (
        f"{_of_blocks(same_bits, blocks, gathers)}, {count} library calls of at most {'x'.join(map(str, shape))}\n"
        f"   instead of one; one thread; {then}"
    )


def describe_experts(
    m: int, n: int, k: int, itemsize: int, world_size: int, same_bits: int, *, gathers: bool, experts: int, top_k: int
) -> str:
    """:func:`describe` of a grouped GEMM: an expert's rows are as many as the routing says."""
    blocks, rows, used = same_bits // world_size, -(-m * top_k // experts), min(experts, m * top_k)
    if gathers:
        count, shape = blocks * used * -(-rows // ROWS), (min(rows, ROWS), k, n // same_bits)
        then = "tokens are multiplied when all have come"
    else:
        count, shape = blocks * used, (rows, k // same_bits, n)
        then = _of_sums(itemsize, blocks)
    return (
        f"{_of_blocks(same_bits, blocks, gathers)}, {count} library calls of at most {'x'.join(map(str, shape))}\n"
        f"   instead of {used} if all experts have as many rows; one thread; {then}"
    )


def _of_blocks(same_bits: int, blocks: int, gathers: bool) -> str:
    return f"same_bits={same_bits}: {blocks} of {same_bits} blocks of {'N' if gathers else 'K'} per rank"


def _of_sums(itemsize: int, blocks: int) -> str:
    wide = max(itemsize, torch.float32.itemsize)
    more = f", {wide // itemsize} times the bytes" if wide > itemsize else ""
    return f"a pass over the products of {blocks} blocks; partial sums travel in {8 * wide} bits{more}"


def panels(size: int, blocks: int) -> list[slice]:
    """This rank's blocks of a dimension of which it has ``size``.

    Raises:
        ValueError: they are not of one size.
    """
    if size % blocks:
        raise ValueError(
            f"same_bits cuts the features of a rank into {blocks} blocks of one size, and this one has {size} features"
        )
    width = size // blocks
    return [slice(block * width, (block + 1) * width) for block in range(blocks)]


def row_chunks(rows: int) -> Iterator[tuple[int, int]]:
    """The rows of each call."""
    for low in range(0, rows, ROWS):
        yield low, min(rows, low + ROWS)


def dense(x: Tensor, place: str = "") -> Tensor:
    """A matrix or vector as the library sees it at every degree: without gaps, aligned to a cache line.

    ``place``: in the thread's room (:func:`tpkernels.gemm.room.room`), of a copy that nobody keeps.
    """
    strides = (x.shape[1], 1) if x.dim() == 2 else (1,)
    if x.stride() == strides and x.data_ptr() % gaps.ALIGNMENT == 0:
        return x
    if place:
        return room(place, x.shape, x.dtype).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


def part_of(matrix: Operand, rows: slice, columns: slice) -> Operand:
    """A part of either factor of a product, with its scales if it is fp8."""
    return matrix.block(rows, columns) if isinstance(matrix, Scaled) else matrix[rows, columns]


def dense_rows(x: Operand, place: str = "") -> Operand:
    """:func:`dense` rows of x, widened if they are fp8."""
    return Scaled(dense(x.wide(), place), x.scale) if isinstance(x, Scaled) else dense(x, place)


def matrix_block(matrix: Operand, place: str = "") -> Operand:
    """A ``[contraction, columns]`` block of a weight or of its transpose, dense in the one or in the other form.

    Which one follows from the block's sizes and strides, so that the same block is given in the same form everywhere.
    fp8 is widened.  ``place`` as for :func:`dense`.
    """
    if isinstance(matrix, Scaled):
        return Scaled(_in_one_form(matrix.wide(), place), matrix.scale)
    return _in_one_form(matrix, place)


def _in_one_form(matrix: Tensor, place: str) -> Tensor:
    is_weight = 1 in matrix.shape or matrix.stride(0) == 1
    return dense(matrix.t(), place).t() if is_weight else dense(matrix, place)


def product(x: Operand, block: Operand, bias: Tensor | None = None, place: str = "product") -> Tensor:
    """``x @ block + bias`` in one call, until the thread's next one; in fp32 if they are fp8.

    ``x`` are the :func:`dense_rows` of one chunk, ``block`` is a :func:`matrix_block`; ``place``: in the thread's room,
    where the result is.
    """
    if isinstance(x, Scaled):
        assert isinstance(block, Scaled)
        scaled = room(place, (x.shape[0], block.shape[1]), torch.float32)
        fp8.multiply(x, block, scaled, bias)
        return scaled
    assert isinstance(block, Tensor)
    out = room(place, (x.shape[0], block.shape[1]), x.dtype)
    return torch.mm(x, block, out=out) if bias is None else torch.addmm(bias, x, block, out=out)


def multiply(x: Tensor, matrix: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """``out = x @ matrix + bias`` with the bits of a call with dense operands and a dense result.

    Any of the three may be a part of something; each is dense in one of its dimensions.
    """
    part = None if bias is None else dense(bias)
    if gaps.keeps_bits(x, matrix, out, part):
        gaps.call(x, matrix, out, part)
    else:
        out.copy_(product(_in_one_form(x, "rows"), _in_one_form(matrix, "panel"), part, "dense product"))


def columns_of_product(
    x: Operand, matrix: Operand, bias: Tensor | None, blocks: int, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ matrix + bias``, a call for each of the ``blocks`` blocks of columns; of fp8 also for each chunk of rows.

    ``out_dtype``: of the result, if x is fp8.
    """
    like, every = x.like(out_dtype) if isinstance(x, Scaled) else x, slice(None)
    out = like.new_empty(x.shape[0], matrix.shape[1])
    for panel in panels(matrix.shape[1], blocks):
        columns, part = part_of(matrix, every, panel), None if bias is None else bias[panel]
        if isinstance(x, Tensor) and isinstance(columns, Tensor):
            multiply(x, columns, out[:, panel], part)
            continue
        block = matrix_block(columns, "panel")
        for low, high in row_chunks(x.shape[0]):
            rows = dense_rows(part_of(x, slice(low, high), every), "rows")
            out[low:high, panel] = product(rows, block, None if part is None else dense(part))
    return out


def weight_gradient(dz: Tensor, x: Tensor, blocks: int) -> Tensor:
    """dz^T x, a call for each of the ``blocks`` blocks of dz's columns."""
    out = x.new_empty(dz.shape[1], x.shape[1])
    for panel in panels(dz.shape[1], blocks):
        multiply(dz[:, panel].t(), x, out[panel])
    return out


def weight_gradient_of_row(dy: Tensor, x: Tensor, blocks: int) -> Tensor:
    """dy^T x, a call for each of the ``blocks`` blocks of x's columns."""
    out = x.new_empty(dy.shape[1], x.shape[1])
    for panel in panels(x.shape[1], blocks):
        multiply(dy.t(), x[:, panel], out[:, panel])
    return out


def sum_of_rows(dz: Tensor, blocks: int) -> Tensor:
    """The sum over rows, a call for each of the ``blocks`` blocks of columns."""
    return torch.cat([dense(dz[:, panel], "panel").sum(0) for panel in panels(dz.shape[1], blocks)])


def by_panels(function: Callable[..., Sequence[Tensor]], blocks: int, *operands: Tensor) -> list[Tensor]:
    """The results of an elementwise ``function`` of matrices, block by block of their columns.

    A vectorised loop computes the last few elements of a tensor in another way than the rest: each element has the same
    place in its block at every degree.
    """
    parts = [
        function(*[operand[:, panel].contiguous() for operand in operands])
        for panel in panels(operands[0].shape[1], blocks)
    ]
    return [torch.cat(of_one, 1) for of_one in zip(*parts, strict=True)]


def top_of_tree(parts: Sequence[Tensor], out: Tensor, bias: Tensor | None = None) -> None:
    """``out`` = the sum of the ranks' subtrees, neighbours first, plus ``bias``; rounded once."""
    tree_sum.of_sums(parts, out, bias)


class Subtree:
    """This rank's part of the sum over a contraction that is cut: the subtree over its own blocks, in fp32 or fp64.

    ``sums`` is ``sum_i xs[i] @ matrices[i]``; its rows are computed when they are first asked for, in whole chunks.
    """

    def __init__(
        self, xs: Sequence[Operand], matrices: Sequence[Operand], blocks: int, sums: Tensor | None = None
    ) -> None:
        """``sums``: where the result goes; by default it is made."""
        shape = xs[0].shape[0], matrices[0].shape[1]
        like = xs[0].like(torch.float32) if isinstance(xs[0], Scaled) else xs[0]
        self.sums = like.new_empty(shape, dtype=tree_sum.wide(like.dtype)) if sums is None else sums
        self._xs = xs
        self._columns = [panels(x.shape[1], blocks) for x in xs]
        self._blocks = [
            [
                part if isinstance(part, Tensor) else matrix_block(part, f"matrix {i} {block}")
                for block, panel in enumerate(panels(matrix.shape[0], blocks))
                for part in [part_of(matrix, panel, slice(None))]
            ]
            for i, matrix in enumerate(matrices)
        ]
        self._missing = dict.fromkeys(row_chunks(shape[0]))

    def complete(self) -> Tensor:
        """All rows."""
        return self.rows(0, self.sums.shape[0])

    def rows(self, low: int, high: int) -> Tensor:
        """Rows ``[low, high)``."""
        for chunk in list(self._missing):
            if chunk[0] < high and low < chunk[1]:
                del self._missing[chunk]
                self._compute(*chunk)
        return self.sums[low:high]

    def _compute(self, low: int, high: int) -> None:
        operands = [
            [
                part if isinstance(part, Tensor) else dense_rows(part, f"rows {i} {b}")
                for b, panel in enumerate(columns)
                for part in [part_of(x, slice(low, high), panel)]
            ]
            for i, (x, columns) in enumerate(zip(self._xs, self._columns, strict=True))
        ]
        for left in range(0, self.sums.shape[1], COLUMNS):
            place = slice(left, min(self.sums.shape[1], left + COLUMNS))
            self._tree(operands, place, range(len(operands[0])), self.sums[low:high, place])

    def _tree(self, operands: Sequence[Sequence[Operand]], place: slice, blocks: range, sums: Tensor) -> None:
        if len(blocks) > LEAVES:
            middle = len(blocks) // 2
            halves = [room(f"half {side} of {len(blocks)}", sums.shape, sums.dtype) for side in range(2)]
            for half, of in zip(halves, (blocks[:middle], blocks[middle:]), strict=True):
                self._tree(operands, place, of, half)
            tree_sum.of_sums(halves, sums)
            return
        parts: list[Tensor] = []
        for block in blocks:
            for x, matrices in zip(operands, self._blocks, strict=True):
                rows, columns, leaf = x[block], part_of(matrices[block], slice(None), place), f"leaf {len(parts)}"
                if isinstance(rows, Tensor) and isinstance(columns, Tensor):
                    parts.append(room(leaf, (rows.shape[0], columns.shape[1]), rows.dtype))
                    multiply(rows, columns, parts[-1])
                else:
                    parts.append(product(rows, columns, place=leaf))
        tree_sum.of_products(parts, sums, len(operands))
