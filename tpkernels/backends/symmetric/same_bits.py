"""``symmetric`` where a call gives the same bits at every degree: sums over a contraction that is cut into blocks.

The blocks and the tree are those of :mod:`tpkernels.gemm.canonical`, the products those of the Triton kernels.  Two
rules make an element's bits the same at every degree:

- Every launch has the tiles of a rank of the largest degree (:func:`.tuning.tiles_of_blocks`), so K is gone through in
  the same steps.  Where the columns are cut, that is all: one launch has all blocks of this rank.
- Where the contraction is cut, there is a launch for each block of K.  Its sums stay in fp32, and what it stores adds
  those of earlier blocks as a binary counter carries: block 3 adds block 2, then the sum of blocks 0 and 1.  The last
  launch thus has the sum of this rank's subtree, which travels in fp32, and torch adds the top of the tree.

Assumed: an element's sum depends on the tiles and on the operands' numbers, not on where it lies in a tile, on the
number of rows or columns, or on alignment.  Interpreted kernels do that.  On GPUs it is how tensor cores are known to
work, and no GPU has been asked.  The bits are not those of the library's GEMMs, so all degrees must take ``symmetric``;
"auto" does not.

Sums of experts are made in the same way: of each block a launch weights and sums its products over a token's experts in
fp32, and torch adds the blocks.  Experts that are dealt out are whole, and need the same tiles alone.

Products of fp8 numbers are scaled by the launch that makes them, before they are added to those of other blocks, and
those of experts stay in fp32 until they are summed.  A compiler must not make one operation of a scale and an addend
(:func:`tpkernels.kernels.matmul_reduce_scatter.fuses`): a block that is stored by itself would be rounded where one
that is added is not.  Gathered features lie side by side as they would on one rank, so that K is gone through in the
same steps.  A step of fp8 has 128 or 256 numbers of K, and blocks are often shorter or end within one: each begins with
a step of its own, at every degree, and what its last step lacks is zeros.  Tensor cores keep fewer bits than fp32 in a
step; assumed is that they drop the same ones for the same step of the same numbers, whether these were loaded one by
one or in runs.

Memory: fp32 for as many whole results as the rank's tree has levels, and one more.  Only the last block's GEMM hides
transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.copy_engine_traffic import Matrix, matrices_of, part_bytes, push, staged
from tpkernels.backends.symmetric.cuda_native import Steps
from tpkernels.backends.symmetric.grouped_launches import combining_launches
from tpkernels.backends.symmetric.kernel_launches import Launch, own_rows, scatter_launch
from tpkernels.gemm import canonical, fp8
from tpkernels.gemm.fp8 import ExpertMatrices, Operand, Scaled, ScaledExperts
from tpkernels.gemm.widened import Widened
from tpkernels.ops.contract import AllGatherMatmul, Context, GroupedMatmulAllReduce, MatmulReduceScatter
from tpkernels.partition import Layout, chunk_ranges

__all__ = ["MOST_BLOCKS", "features", "sum_of_shard", "sum_of_tokens"]

MOST_BLOCKS = 64
"""As many as there may be ranks, and as divide the small problem of the first call's check."""
_WIDE = torch.float32


def features(call: AllGatherMatmul, whole: Tensor) -> tuple[Operand, Callable[[], None]]:
    """The operand of a gather of features, and what completes it when ``whole`` is there.

    fp8 numbers of several ranks are put side by side, without the scales between them, which the op has compared.
    """
    parts = fp8.split(whole, call.packed) if call.packed else []
    if len(parts) < 2:
        return call.operand(whole), lambda: None
    numbers = torch.empty(len(whole), sum(call.packed), dtype=fp8.DTYPE, device=whole.device)

    def complete() -> None:
        for place, part in zip(numbers.view(torch.uint8).split(call.packed, 1), parts, strict=True):
            place.copy_(part.numbers.view(torch.uint8))

    return Scaled(numbers, parts[0].scale), complete


def sum_of_shard(context: Context, channel: Channel, op: str, call: MatmulReduceScatter, bias: Tensor | None) -> Tensor:
    """A whole call: this rank's shard of the tree over all blocks, plus ``bias``, rounded once."""
    layout, columns, rows = call.layout, call.columns, call.xs[0].shape[0]
    if layout.feature:
        parts, num_bytes = matrices_of(layout, rows, columns, _WIDE.itemsize), rows * columns * _WIDE.itemsize
    else:
        parts, num_bytes = staged(layout, columns, _WIDE.itemsize)
    staging = channel.device.empty((max(16, num_bytes),), torch.uint8)
    if layout.feature:  # columns of a tile would be several owners'
        whole = (Matrix(0, rows, columns, columns),) * channel.size
        launches, num_chunks = _launches(context, channel, call, own_rows(channel, rows), whole, staging)[0], 1
    else:
        launches, num_chunks = _launches(context, channel, call, layout, parts, staging)
    num_bytes = channel.size * max(part_bytes(part, _WIDE.itemsize) for part in parts)
    channel.prepare(num_bytes, context.fingerprint, context.text)
    try:
        if layout.feature:
            for launch in launches:
                launch()
        sent = push(channel, op, staging, parts, _WIDE.itemsize, num_chunks, not layout.feature, Steps.BEGIN)
        if not layout.feature:
            for launch in launches:
                channel.device.launch(launch)
        channel.run(sent, Steps.MOVE, staging.data_ptr())
        call.meanwhile()
        out = _top_of_tree(channel, op, call, parts[channel.rank], staging, bias, num_chunks)
        channel.run(sent, Steps.JOIN | Steps.END)
    finally:
        channel.settle()
    return out


def sum_of_tokens(
    context: Context, channel: Channel, op: str, call: GroupedMatmulAllReduce, layout: Layout, bias: Tensor | None
) -> Tensor:
    """The same of experts: this rank's tokens in ``layout``; ``bias``: fp32, a row for each of these.

    A block is what its products are, weighted and summed over a token's experts in fp32.  Nothing of it travels before
    all of it is there.
    """
    rows, columns = call.rows.num_tokens, call.columns
    parts = matrices_of(layout, rows, columns, _WIDE.itemsize)
    channel.prepare(
        channel.size * max(part_bytes(part, _WIDE.itemsize) for part in parts), context.fingerprint, context.text
    )
    try:
        sums = _sums_of_blocks(context, channel, call, range(context.problem.same_bits // channel.size))
        staging = sums.view(-1).view(torch.uint8)
        sent = push(channel, op, staging, parts, _WIDE.itemsize, 1, False, Steps.BEGIN)
        channel.run(sent, Steps.MOVE, staging.data_ptr())
        call.meanwhile()
        out = _top_of_tree(channel, op, call, parts[channel.rank], staging, bias, 1)
        channel.run(sent, Steps.JOIN | Steps.END)
    finally:
        channel.settle()
    return out


def _sums_of_blocks(context: Context, channel: Channel, call: GroupedMatmulAllReduce, blocks: range) -> Tensor:
    """``[tokens, columns]``: the subtree over some of this rank's blocks."""
    own, rows, columns = context.problem.same_bits // channel.size, call.rows.num_tokens, call.columns
    if len(blocks) > 1:
        middle = len(blocks) // 2
        left = _sums_of_blocks(context, channel, call, blocks[:middle])
        return left.add_(_sums_of_blocks(context, channel, call, blocks[middle:]))
    xs: list[Operand] = []
    of_experts: list[ExpertMatrices] = []
    for x, matrices in zip(call.xs, call.matrices, strict=True):
        panel = canonical.panels(x.shape[1], own)[blocks[0]]
        xs.append(canonical.part_of(x, slice(None), panel))
        of_experts.append(matrices.block(panel) if isinstance(matrices, ScaledExperts) else matrices[:, panel])
    part = replace(call, xs=xs, matrices=of_experts, bias=None)
    sums = call.like.new_empty(rows, columns, dtype=_WIDE)
    place = (Matrix(0, rows, columns, columns),)
    for launch in combining_launches(context, channel, part, None, place, sums, _WIDE)[0]:
        launch()
    return sums


def _launches(
    context: Context, channel: Channel, call: MatmulReduceScatter, layout: Layout, parts: Sequence[Matrix],
    staging: Tensor,
) -> tuple[list[Launch], int]:  # fmt: skip
    """The GEMMs of this rank's blocks, the last of which puts their sum into ``parts``; chunks of every shard."""
    blocks, terms = context.problem.same_bits // channel.size, len(call.xs)
    rows, columns = call.xs[0].shape[0], call.columns
    # Planes begin at multiples of 16 bytes.  The first one has the terms of a block before the last, the others the
    # levels of the tree.
    kept = call.like.new_empty(blocks.bit_length(), -(-rows // 4) * 4, columns, dtype=_WIDE)
    plane_bytes = kept.shape[1] * columns * _WIDE.itemsize
    launches: list[Launch] = []
    num_chunks = 1
    for block in range(blocks):
        carried = _trailing_ones(block)
        for term, (x, matrix) in enumerate(zip(call.xs, call.matrices, strict=True)):
            assert not isinstance(matrix, Widened), "a GPU multiplies bf16 itself"
            panel, every = canonical.panels(x.shape[1], blocks)[block], slice(None)
            completes = term == terms - 1
            addends = kept[0 if term else 1 : 1 + carried if completes else 1]
            rows_of_x, columns_of_matrix = canonical.part_of(x, every, panel), canonical.part_of(matrix, panel, every)
            part = replace(call, xs=[rows_of_x], matrices=[columns_of_matrix])
            if completes and block == blocks - 1:
                part, target, memory = replace(part, layout=layout), parts, staging
            else:
                plane = Matrix((1 + carried if completes else 0) * plane_bytes, rows, columns, columns)
                part = replace(part, layout=own_rows(channel, rows))
                target, memory = (plane,) * channel.size, kept
            launch, num_chunks = scatter_launch(
                context, channel, part, addends if len(addends) else None, target, memory, _WIDE
            )
            launches.append(launch)
    return launches, num_chunks


def _trailing_ones(number: int) -> int:
    """Of its binary digits: so many subtrees end with this block."""
    return (~number & (number + 1)).bit_length() - 1


def _top_of_tree(
    channel: Channel, op: str, call: MatmulReduceScatter | GroupedMatmulAllReduce, own: Matrix, staging: Tensor,
    bias: Tensor | None, num_chunks: int,
) -> Tensor:  # fmt: skip
    """What the ranks have sent and this rank's ``own`` part, added as they come."""
    size, slot, stream = part_bytes(own, _WIDE.itemsize), channel.own_slot(), channel.device.stream()
    parts = [
        _matrix(staging, own)
        if rank == channel.rank
        else _matrix(slot, own._replace(address=rank * size, stride=own.columns))
        for rank in range(channel.size)
    ]
    out = call.like.new_empty(own.rows, own.columns)
    for chunk, (start, stop) in enumerate(chunk_ranges(own.rows, num_chunks)):
        channel.group.wait(op=channel.op(op), chunk=chunk, peers=channel.group.others, stream=stream)
        if start < stop:
            canonical.top_of_tree([part[start:stop] for part in parts], out[start:stop], bias)
    return out


def _matrix(memory: Tensor, place: Matrix) -> Tensor:
    """``place`` is relative to these bytes."""
    numbers = memory.view(_WIDE)
    start = numbers.storage_offset() + place.address // _WIDE.itemsize
    return numbers.as_strided((place.rows, place.columns), (place.stride, 1), start)
