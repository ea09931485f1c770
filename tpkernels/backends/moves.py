"""How the copy engines move shards and partials through symmetric memory; what both halves of ``symmetric`` share.

:func:`pull` is the traffic of an all-gather: this rank's shard goes into its slot, one signal tells everybody, and the
peers' shards are copied from their slots to their place in the whole, chunk by chunk, each followed by a local flag.
:func:`push` is that of a reduce-scatter: chunks of partial rows go into the owner's slot, each when its local flag says
that it has been computed, and followed by a signal; :func:`reduce` sums what has come.

Everything only enqueues.  What must be signalled is enqueued before what waits for it, see ``csrc/cuda/README.md``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.comm.cuda_native import Chunk, Dtype
from tpkernels.comm.symmetric_channels import Channel
from tpkernels.partition import Layout, chunk_ranges, offsets, peers_after

__all__ = [
    "DTYPES",
    "Matrix",
    "aligned",
    "copy_own",
    "largest_shard",
    "matrix_of",
    "part_bytes",
    "pull",
    "push",
    "reduce",
]

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


class Matrix(NamedTuple):
    """Rows of some owner: ``rows`` of ``columns`` elements, ``stride`` apart, the first one at ``address``."""

    address: int
    rows: int
    columns: int
    stride: int


class _Piece(NamedTuple):
    """``rows`` runs of ``row_bytes`` bytes: where they are in a shard and in the whole, and how far apart, in bytes."""

    shard: int
    whole: int
    rows: int
    row_bytes: int
    shard_stride: int
    whole_stride: int


def pull(channel: Channel, op: str, x: Tensor, layout: Layout, whole: Tensor, num_chunks: int, flags: bool) -> None:
    """Fill ``whole`` [total rows, columns] from the shards of all ranks; this rank's is ``x``, contiguous.

    Right after ``channel.begin``. With ``flags``, flag ``peer * num_chunks + chunk`` is raised behind each chunk.
    """
    slots, row_bytes = channel.addresses(), whole.shape[1] * whole.element_size()
    stage = _Piece(0, 0, 1, x.numel() * x.element_size(), 0, 0)
    channel.copy(0, op, (Chunk * 1)(_chunk(0, slots[channel.rank], x.data_ptr(), stage)))
    channel.group.signal(chunk=0, peers=channel.group.others, stream=channel.pipeline.stream(0))
    key = ("pull", layout, row_bytes, whole.element_size(), num_chunks, flags, *slots)
    routes = channel.remember(
        key, lambda: _pull_routes(channel, layout, row_bytes, whole.element_size(), num_chunks, flags), on_device=False
    )
    base = whole.data_ptr()
    for lane, (chunks, places) in enumerate(routes):
        for chunk, place in zip(chunks, places, strict=True):
            chunk.target = base + place
        channel.copy(lane, op, chunks)
    copy_own(layout, channel.rank, x, whole)


# A side stream's copies, and where in the tensor of the call each one's moving end is; that differs from call to call.
# They are remembered by the slots of all ranks: memory that is freed and mapped anew may come back at its old address
# on this rank, and elsewhere on its peers.
_Route = tuple[ctypes.Array[Chunk], list[int]]


def _pull_routes(
    channel: Channel, layout: Layout, row_bytes: int, itemsize: int, num_chunks: int, flags: bool
) -> list[_Route]:
    slots = channel.addresses()
    lanes: list[list[tuple[Chunk, int]]] = [[] for _ in range(channel.num_lanes)]
    for number in range(num_chunks):
        for turn, peer in enumerate(peers_after(channel.rank, channel.size)):
            start, stop = chunk_ranges(layout.shard_rows(peer), num_chunks)[number]
            pieces = _pieces(layout, peer, start, stop, row_bytes, itemsize)
            if number == 0 and not pieces:  # an empty shard: its rank is heard of all the same
                pieces = [_Piece(0, 0, 0, 0, 0, 0)]
            for i, piece in enumerate(pieces):
                first, last = number == 0 and i == 0, i == len(pieces) - 1
                chunk = _chunk(
                    number, 0, slots[peer] + piece.shard, piece,
                    source_stride=piece.shard_stride, target_stride=piece.whole_stride,
                    wait_peer=peer if first else -1,
                    raise_flag=channel.flag(peer * num_chunks + number) if flags and last else None,
                )  # fmt: skip
                lanes[turn % channel.num_lanes].append((chunk, piece.whole))
    return [_route(lane) for lane in lanes]


def _route(lane: Sequence[tuple[Chunk, int]]) -> _Route:
    return (Chunk * len(lane))(*(chunk for chunk, _ in lane)), [place for _, place in lane]


def copy_own(layout: Layout, rank: int, x: Tensor, whole: Tensor) -> None:
    """This rank's shard to its place in the whole, on the current stream."""
    start, size = offsets(layout.sizes)[rank], layout.sizes[rank]
    if layout.feature:
        whole[:, start : start + size].copy_(x)
    else:
        by_shard = whole.view(layout.outer, sum(layout.sizes), layout.inner * whole.shape[1])
        by_shard[:, start : start + size].copy_(x.view(layout.outer, size, layout.inner * whole.shape[1]))


def matrix_of(layout: Layout, rank: int, whole: Tensor) -> Matrix:
    """The shard of ``rank`` in a contiguous ``whole``, as one matrix."""
    start, size, total = offsets(layout.sizes)[rank], layout.sizes[rank], sum(layout.sizes)
    columns, itemsize = whole.shape[1], whole.element_size()
    if layout.feature:
        return Matrix(whole.data_ptr() + start * itemsize, whole.shape[0], size, total)
    if layout.outer == 1:
        return Matrix(
            whole.data_ptr() + start * layout.inner * columns * itemsize, size * layout.inner, columns, columns
        )
    unit = layout.inner * columns
    return Matrix(whole.data_ptr() + start * unit * itemsize, layout.outer, size * unit, total * unit)


def push(channel: Channel, op: str, parts: Sequence[Matrix], itemsize: int, num_chunks: int, flags: bool) -> None:
    """Send each peer its part, chunk by chunk, and signal every chunk, also one without elements.

    All parts lie in one tensor. With ``flags``, chunk c of owner o waits for flag ``o * num_chunks + c``, which nobody
    raises for an empty chunk.
    """
    base = parts[0].address
    relative = tuple(part._replace(address=part.address - base) for part in parts)
    key = ("push", relative, itemsize, num_chunks, flags, *channel.addresses())
    routes = channel.remember(
        key, lambda: _push_routes(channel, relative, itemsize, num_chunks, flags), on_device=False
    )
    for lane, (chunks, places) in enumerate(routes):
        for chunk, place in zip(chunks, places, strict=True):
            chunk.source = base + place
        channel.copy(lane, op, chunks)


def _push_routes(
    channel: Channel, parts: Sequence[Matrix], itemsize: int, num_chunks: int, flags: bool
) -> list[_Route]:
    rank = channel.rank
    lanes: list[list[tuple[Chunk, int]]] = [[] for _ in range(channel.num_lanes)]
    for number in range(num_chunks):
        for turn, owner in enumerate(peers_after(rank, channel.size)):
            part = parts[owner]
            start, stop = chunk_ranges(part.rows, num_chunks)[number]
            row_bytes, stride = part.columns * itemsize, part.stride * itemsize
            target = channel.addresses(rank * part_bytes(part, itemsize))[owner] + start * row_bytes
            empty = (stop - start) * row_bytes == 0
            chunk = _chunk(
                number, target, 0, _Piece(0, 0, stop - start, row_bytes, 0, 0),
                source_stride=stride, target_stride=row_bytes, signal_peer=owner,
                wait_flag=channel.flag(owner * num_chunks + number) if flags and not empty else None,
            )  # fmt: skip
            lanes[turn % channel.num_lanes].append((chunk, part.address + start * stride))
    return [_route(lane) for lane in lanes]


def reduce(
    channel: Channel, op: str, own: Matrix, dtype: torch.dtype, bias: Tensor | None, out: Tensor, num_chunks: int
) -> None:
    """out = sum over ranks of the parts that :func:`push` has sent here, and ``own``, + bias; on the current stream.

    ``out`` has as many elements as ``own``, contiguous.
    """
    here = channel.addresses()[channel.rank]
    size = part_bytes(own, dtype.itemsize)
    parts = [own.address if r == channel.rank else here + r * size for r in range(channel.size)]
    strides = [own.stride if r == channel.rank else own.columns for r in range(channel.size)]
    channel.group.reduce(
        op=channel.op(op), part_dtype=DTYPES[dtype], out_dtype=DTYPES[dtype], parts=parts, strides=strides,
        bias=0 if bias is None else bias.data_ptr(), out=out.data_ptr(), out_stride=own.columns, rows=own.rows,
        columns=own.columns, num_chunks=num_chunks, stream=channel.device.stream(),
    )  # fmt: skip


def aligned(num_bytes: int) -> int:
    """The next multiple of 16."""
    return -(-num_bytes // 16) * 16


def part_bytes(part: Matrix, itemsize: int) -> int:
    """Of one rank's partial in the slot of its owner."""
    return aligned(part.rows * part.columns * itemsize)


def largest_shard(layout: Layout, x: Tensor) -> int:
    """Bytes; the same on every rank."""
    columns = max(layout.sizes) if layout.feature else x.shape[1]
    return layout.max_shard_rows * columns * x.element_size()


def _pieces(layout: Layout, rank: int, start: int, stop: int, row_bytes: int, itemsize: int) -> list[_Piece]:
    """Where rows ``[start, stop)`` of a shard lie: at most three pieces, however many segments they are."""
    if layout.feature:
        low, high = layout.columns(rank)
        width = (high - low) * itemsize
        piece = _Piece(start * width, start * row_bytes + low * itemsize, stop - start, width, width, row_bytes)
        return [piece] if piece.rows * piece.row_bytes else []
    block = layout.sizes[rank] * layout.inner
    if start >= stop or row_bytes == 0:
        return []
    if layout.outer == 1:
        return [_run(layout, rank, start, stop, row_bytes)]
    first_whole, last_whole = -(-start // block), stop // block
    if first_whole >= last_whole:  # no whole block: within one, or across the end of one
        border = min(stop, first_whole * block)
        runs = [(start, border), (border, stop)]
        return [_run(layout, rank, low, high, row_bytes) for low, high in runs if low < high]
    (head,) = layout.segments(rank, first_whole * block, first_whole * block + 1)
    step = sum(layout.sizes) * layout.inner * row_bytes
    middle = _Piece(
        first_whole * block * row_bytes, head.dst * row_bytes, last_whole - first_whole, block * row_bytes,
        block * row_bytes, step,
    )  # fmt: skip
    ends = [(start, first_whole * block), (last_whole * block, stop)]
    around = [_run(layout, rank, low, high, row_bytes) for low, high in ends if low < high]
    return [*around, middle]


def _run(layout: Layout, rank: int, start: int, stop: int, row_bytes: int) -> _Piece:
    """Rows that lie together in the whole as well."""
    (segment,) = layout.segments(rank, start, stop)
    num_bytes = (stop - start) * row_bytes
    return _Piece(start * row_bytes, segment.dst * row_bytes, 1, num_bytes, num_bytes, num_bytes)


def _chunk(
    number: int,
    target: int,
    source: int,
    piece: _Piece,
    *,
    source_stride: int = 0,
    target_stride: int = 0,
    wait_flag: int | None = None,
    wait_peer: int = -1,
    raise_flag: int | None = None,
    signal_peer: int = -1,
) -> Chunk:
    return Chunk(
        target=target, source=source, rows=piece.rows, row_bytes=piece.row_bytes,
        target_stride_bytes=target_stride or piece.row_bytes, source_stride_bytes=source_stride or piece.row_bytes,
        wait_flag=wait_flag, wait_peer=wait_peer, raise_flag=raise_flag, signal_peer=signal_peer, chunk=number,
    )  # fmt: skip
