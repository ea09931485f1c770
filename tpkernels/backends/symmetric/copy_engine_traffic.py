"""How the copy engines move shards and partials through symmetric memory; what both halves of ``symmetric`` share.

:func:`pull` is the traffic of an all-gather: this rank's shard goes into its slot, one signal tells everybody, and the
peers' shards are copied from their slots to their place in the whole, chunk by chunk, each followed by a local flag.
:func:`push` is that of a reduce-scatter: chunks of partial rows go into the owner's slot, each when its local flag says
that it has been computed, and followed by a signal; :func:`reduce` sums what has come.  The copies of a kind of call
are listed once, and enqueued by one call of the C library.

Everything only enqueues.  What must be signalled is enqueued before what waits for it, see ``csrc/cuda/README.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.backends.symmetric.channels import Channel
from tpkernels.backends.symmetric.cuda_group import Call
from tpkernels.backends.symmetric.cuda_native import Chunk, Dtype, Steps
from tpkernels.kernels.config import MIN_CHUNK_BYTES
from tpkernels.ops.contract import Context
from tpkernels.partition import Layout, chunk_ranges, offsets, peers_after

__all__ = [
    "DTYPES",
    "Matrix",
    "aligned",
    "fetch",
    "gather",
    "largest_shard",
    "matrices_of",
    "part_bytes",
    "pull",
    "push",
    "reduce",
    "staged",
]

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


class Matrix(NamedTuple):
    """Rows of some owner: ``rows`` of ``columns`` elements, ``stride`` apart.

    ``address`` is that of the first one, or, where a function says so, how far it is from the beginning of a tensor.
    """

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


def pull(
    channel: Channel, op: str, x: Tensor, layout: Layout, whole: Tensor, num_chunks: int, flags: bool,
    steps: Steps = Steps.BEGIN | Steps.MOVE,
) -> Call:  # fmt: skip
    """Begin a call that fills ``whole`` [total rows, columns] from the shards of all ranks; this one's is contiguous.

    After ``channel.prepare``. With ``flags``, flag ``peer * num_chunks + chunk`` is raised behind each chunk. Returns
    what the rest of the steps are asked of.
    """
    row_bytes, itemsize = whole.shape[1] * whole.element_size(), whole.element_size()
    key = ("pull", op, layout, row_bytes, itemsize, x.numel(), num_chunks, flags, *channel.addresses())
    call: Call = channel.remember(
        key, lambda: _pull(channel, op, layout, row_bytes, itemsize, x.numel() * itemsize, num_chunks, flags),
        on_device=False,
    )  # fmt: skip
    channel.run(call, steps, x.data_ptr(), whole.data_ptr())
    return call


def gather(
    channel: Channel,
    context: Context,
    op: str,
    x: Tensor,
    layout: Layout,
    whole: Tensor,
    num_chunks: int,
    launches: Sequence[Callable[[], None]] = (),
    phase: int = 0,
) -> None:
    """A whole call: gather, with ``launches`` of kernels that wait for its chunks."""
    begins, ends = Steps.BEGIN | Steps.MOVE, Steps.JOIN | Steps.END
    channel.prepare(largest_shard(layout, x), context.fingerprint + phase, context.text)
    try:
        call = pull(channel, op, x, layout, whole, num_chunks, bool(launches), begins if launches else begins | ends)
        for launch in launches:
            channel.device.launch(launch)
        if launches:
            channel.run(call, ends)
    finally:
        channel.settle()


# What is remembered is known by the slots of all ranks: memory that is freed and mapped anew may come back at its old
# address on this rank, and elsewhere on its peers.  Tensors of a call are other ones each time: bases, from 1 on.
_SHARD, _WHOLE = 1, 2


def _pull(
    channel: Channel, op: str, layout: Layout, row_bytes: int, itemsize: int, shard_bytes: int, num_chunks: int,
    flags: bool,
) -> Call:  # fmt: skip
    """This rank's shard into its slot, a signal to all; each peer's from there, chunk by chunk; its own in place."""
    slots, rank = channel.addresses(), channel.rank
    chunks = [
        _chunk(
            0, 0, slots[rank], 0, _Piece(0, 0, 1, shard_bytes, 0, 0), source_base=_SHARD,
            signal_peers=channel.group.others,
        )
    ]  # fmt: skip
    rows = [layout.shard_rows(peer) for peer in range(channel.size)]
    pieces = lambda peer, start, stop: _pieces(layout, peer, start, stop, row_bytes, itemsize)  # noqa: E731
    chunks += _fetched(channel, rows, pieces, layout.max_shard_rows * row_bytes, num_chunks, flags)
    for piece in _pieces(layout, rank, 0, layout.shard_rows(rank), row_bytes, itemsize):
        chunks.append(
            _chunk(
                0, _ON_STREAM, piece.whole, piece.shard, piece, target_base=_WHOLE, source_base=_SHARD,
                source_stride=piece.shard_stride, target_stride=piece.whole_stride,
            )
        )  # fmt: skip
    return channel.planned(op, chunks, channel.size * num_chunks if flags else 0)


def fetch(
    channel: Channel, op: str, rows: Sequence[int], places: Sequence[int], row_bytes: int, num_chunks: int, flags: bool
) -> Call:
    """A call that fetches ``rows[p]`` rows of each peer p, which begin ``places[p]`` bytes into its slot.

    They are there when the peer has signalled chunk 0.  The call's second base is a tensor of the rows of all ranks, in
    which this rank's are left alone.  After ``channel.prepare``, for this call alone: its numbers are a routing's.
    """
    firsts = offsets(rows)

    def pieces(peer: int, start: int, stop: int) -> list[_Piece]:
        num_bytes = (stop - start) * row_bytes
        where = _Piece(places[peer] + start * row_bytes, (firsts[peer] + start) * row_bytes, 1, num_bytes, 0, 0)
        return [where] if num_bytes else []

    chunks = _fetched(channel, rows, pieces, max(rows) * row_bytes, num_chunks, flags)
    return channel.planned(op, chunks, channel.size * num_chunks if flags else 0)


def _fetched(
    channel: Channel, rows: Sequence[int], pieces_of: Callable[[int, int, int], list[_Piece]], largest: int,
    num_chunks: int, flags: bool,
) -> list[Chunk]:  # fmt: skip
    """The peers' rows from their slots, chunk by chunk.  pieces_of: a peer's rows; largest: bytes of all of them."""
    chunks, slots = [], channel.addresses()
    runs = _runs(channel, num_chunks, largest)
    for number in range(num_chunks):
        for turn, peers in enumerate(runs):
            lane = turn % channel.pull_lanes
            pieces = {peer: pieces_of(peer, *chunk_ranges(rows[peer], num_chunks)[number]) for peer in peers}
            last = peers[-1]
            if number == 0 and not pieces[last]:  # an empty shard: its rank is heard of all the same
                pieces[last] = [_Piece(0, 0, 0, 0, 0, 0)]
            # Of all whose data a side stream will carry: it waits once.
            waits = 0
            if number == 0 and turn < channel.pull_lanes:
                waits = _ranks(chain(*runs[turn :: channel.pull_lanes]))
            raised = [peer for peer in peers if pieces[peer]] if flags else []
            for i, (peer, piece) in enumerate(every := [(p, piece) for p in peers for piece in pieces[p]]):
                chunks.append(
                    _chunk(
                        number, lane, piece.whole, slots[peer] + piece.shard, piece, target_base=_WHOLE,
                        source_stride=piece.shard_stride, target_stride=piece.whole_stride,
                        wait_peers=waits if i == 0 else 0, flags=channel.flag(number), flag_stride=num_chunks,
                        raise_ranks=_ranks(raised) if i == len(every) - 1 else 0,
                    )
                )  # fmt: skip
    return chunks


_ON_STREAM = -1  # a lane: the current stream


def _runs(channel: Channel, num_chunks: int, shard_bytes: int) -> list[tuple[int, ...]]:
    """The peers, nearest successor first; those that share a signal or a raising of flags.

    Neighbours share where there are many, and chunks enough to keep the pieces small that the GEMM waits for or sends.
    Of a shard that is one small piece, all share that a side stream carries: a call of the driver for each would take
    as long as its copy does.
    """
    peers = peers_after(channel.rank, channel.size)
    together = 2 if channel.size > 4 and num_chunks > 1 else 1
    if num_chunks == 1 and shard_bytes < MIN_CHUNK_BYTES:
        together = max(1, -(-len(peers) // channel.num_lanes))
    return [peers[start : start + together] for start in range(0, len(peers), together)]


def _ranks(ranks: Iterable[int]) -> int:
    """A bit each."""
    return sum(1 << rank for rank in ranks)


@lru_cache(maxsize=1024)
def matrices_of(layout: Layout, rows: int, columns: int, itemsize: int) -> tuple[Matrix, ...]:
    """Each rank's shard of a contiguous whole [rows, columns], as one matrix relative to its beginning."""
    return tuple(_matrix_of(layout, rank, rows, columns, itemsize) for rank in range(len(layout.sizes)))


def _matrix_of(layout: Layout, rank: int, rows: int, columns: int, itemsize: int) -> Matrix:
    start, size, total = offsets(layout.sizes)[rank], layout.sizes[rank], sum(layout.sizes)
    if layout.feature:
        return Matrix(start * itemsize, rows, size, total)
    if layout.outer == 1:
        return Matrix(start * layout.inner * columns * itemsize, size * layout.inner, columns, columns)
    unit = layout.inner * columns
    return Matrix(start * unit * itemsize, layout.outer, size * unit, total * unit)


@lru_cache(maxsize=1024)
def staged(layout: Layout, columns: int, itemsize: int) -> tuple[tuple[Matrix, ...], int]:
    """Where a GEMM puts the rows of each owner, relative to the beginning of a buffer, and the buffer's bytes."""
    parts, place = [], 0
    for owner in range(len(layout.sizes)):
        rows = layout.shard_rows(owner)
        parts.append(Matrix(place, rows, columns, columns))
        place += aligned(rows * columns * itemsize)
    return tuple(parts), max(16, place)


def push(
    channel: Channel, op: str, whole: Tensor, parts: tuple[Matrix, ...], itemsize: int, num_chunks: int, flags: bool,
    steps: Steps, places: Sequence[int] | None = None,
) -> Call:  # fmt: skip
    """Steps of a call that sends each peer its part, chunk by chunk, and signals every chunk, also an empty one.

    Parts are relative to ``whole``. With ``flags``, chunk c of owner o waits for flag ``o * num_chunks + c``, which
    nobody raises for an empty chunk. places: where in the slot of each owner its part goes, in bytes, where the routing
    decides it (and the call is not remembered); by default there is room for as much from every rank.
    """
    if places is not None:
        call = _push(channel, op, parts, itemsize, num_chunks, flags, places)
    else:
        key = ("push", op, parts, itemsize, num_chunks, flags, *channel.addresses())
        of_rank = [channel.rank * part_bytes(part, itemsize) for part in parts]
        make = lambda: _push(channel, op, parts, itemsize, num_chunks, flags, of_rank)  # noqa: E731
        call = channel.remember(key, make, on_device=False)
    channel.run(call, steps, whole.data_ptr())
    return call


def _push(
    channel: Channel, op: str, parts: Sequence[Matrix], itemsize: int, num_chunks: int, flags: bool,
    places: Sequence[int],
) -> Call:  # fmt: skip
    chunks, slots = [], channel.addresses()
    runs = _runs(channel, num_chunks, max(part_bytes(part, itemsize) for part in parts))
    for number in range(num_chunks):
        for turn, owners in enumerate(runs):
            ranges = {owner: chunk_ranges(parts[owner].rows, num_chunks)[number] for owner in owners}
            filled = [o for o in owners if (ranges[o][1] - ranges[o][0]) * parts[o].columns]
            for owner in owners:
                part, (start, stop) = parts[owner], ranges[owner]
                row_bytes, stride = part.columns * itemsize, part.stride * itemsize
                target = slots[owner] + places[owner] + start * row_bytes
                chunks.append(
                    _chunk(
                        number, turn % channel.num_lanes, target, part.address + start * stride,
                        _Piece(0, 0, stop - start, row_bytes, 0, 0), source_base=_SHARD, source_stride=stride,
                        target_stride=row_bytes, flags=channel.flag(number), flag_stride=num_chunks,
                        wait_ranks=_ranks(filled) if flags and owner == owners[0] else 0,
                        signal_peers=_ranks(owners) if owner == owners[-1] else 0,
                    )
                )  # fmt: skip
    return channel.planned(op, chunks, channel.size * num_chunks if flags else 0)


def reduce(
    channel: Channel, op: str, own: Matrix, dtype: torch.dtype, bias: Tensor | None, out: Tensor, num_chunks: int
) -> None:
    """out = sum over ranks of the parts that :func:`push` has sent here, and ``own``, + bias; on the current stream.

    ``own`` lies at its address; ``out`` has as many elements, contiguous, of the dtype of the parts or, if these have
    fewer bits, in fp32; the bias has that of ``out``.
    """
    here = channel.addresses()[channel.rank]
    size = part_bytes(own, dtype.itemsize)
    parts = [own.address if r == channel.rank else here + r * size for r in range(channel.size)]
    strides = [own.stride if r == channel.rank else own.columns for r in range(channel.size)]
    channel.group.reduce(
        op=channel.op(op), part_dtype=DTYPES[dtype], out_dtype=DTYPES[out.dtype], parts=parts, strides=strides,
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
    lane: int,
    target: int,
    source: int,
    piece: _Piece,
    *,
    target_base: int = 0,
    source_base: int = 0,
    source_stride: int = 0,
    target_stride: int = 0,
    flags: int = 0,
    flag_stride: int = 0,
    wait_peers: int = 0,
    wait_ranks: int = 0,
    raise_ranks: int = 0,
    signal_peers: int = 0,
) -> Chunk:
    return Chunk(
        target=target, source=source, target_base=target_base, source_base=source_base, rows=piece.rows,
        row_bytes=piece.row_bytes, target_stride_bytes=target_stride or piece.row_bytes,
        source_stride_bytes=source_stride or piece.row_bytes, wait_peers=wait_peers, wait_ranks=wait_ranks,
        raise_ranks=raise_ranks, signal_peers=signal_peers, flags=flags, flag_stride=flag_stride, chunk=number,
        lane=lane,
    )  # fmt: skip
