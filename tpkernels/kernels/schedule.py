"""The order in which a kernel visits its tiles, as a table; pure arithmetic on the host.

A kernel's row tiles are listed once per (shard sizes, chunks, tile height, rank): the list says which rows a tile
covers, which chunk it belongs to, and whose it is. Rotation by rank, uneven shards, empty chunks, and tiles that must
not reach over the end of a chunk are nobody's business in device code, where a row tile costs the read of one entry.

Chunks are cut as everywhere (`partition.chunk_ranges`, `chunk_begin` in csrc/common/schedule.h). A chunk without rows
has no tiles: no kernel waits for it or announces it. A shard of a dimension that is not the first (`Layout.outer` above
1) lies in several segments of the whole; a tile ends where its segment does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tpkernels.partition import Layout, chunk_ranges

__all__ = ["FIELDS", "RowTile", "all_gather_order", "as_table", "reduce_scatter_order"]


@dataclass(frozen=True)
class RowTile:
    """`rows` rows from `row` on of the whole [M, K]; they are rows `offset` to `offset + rows` of the shard of `rank`.

    `chunk` counts within that shard, `slot` over all ranks; `chunk_tiles` is the number of row tiles in the chunk.
    """

    row: int
    rows: int
    rank: int
    chunk: int
    slot: int
    offset: int
    chunk_tiles: int


FIELDS = 8  # integers per entry of the table; the last is padding


def all_gather_order(shards: Sequence[int] | Layout, num_chunks: int, tile_rows: int, rank: int) -> tuple[RowTile, ...]:
    """Own shard first, then the peers' as they arrive: chunk c of every peer before chunk c + 1 of any.

    All peers send at once, so their first chunks arrive at about the same time.
    """
    layout = _layout(shards)
    world_size = len(layout.sizes)
    peers = [(rank + step) % world_size for step in range(1, world_size)]
    turns = [(rank, chunk) for chunk in range(num_chunks)]
    turns += [(peer, chunk) for chunk in range(num_chunks) for peer in peers]
    return _tiles(layout, num_chunks, tile_rows, turns)


def reduce_scatter_order(
    shards: Sequence[int] | Layout, num_chunks: int, tile_rows: int, rank: int
) -> tuple[RowTile, ...]:
    """Remote owners' rows first, so that they can leave while the rest is computed; own rows last.

    Chunk c of every peer comes before chunk c + 1 of any, which keeps all links busy from the first chunk on.
    """
    layout = _layout(shards)
    world_size = len(layout.sizes)
    peers = [(rank + step) % world_size for step in range(1, world_size)]
    turns = [(peer, chunk) for chunk in range(num_chunks) for peer in peers]
    turns += [(rank, chunk) for chunk in range(num_chunks)]
    return _tiles(layout, num_chunks, tile_rows, turns)


def as_table(tiles: Sequence[RowTile]) -> list[list[int]]:
    """Rows of the int32 table [len(tiles), FIELDS] that kernels read; M is below 2^31 rows."""
    return [[*astuple(tile), 0] for tile in tiles]


def _layout(shards: Sequence[int] | Layout) -> Layout:
    """That of shards which are so many consecutive rows each, or the one that is given."""
    if not isinstance(shards, Layout):
        return Layout(1, tuple(shards), 1)
    if shards.feature:
        raise ValueError(f"a kernel's shards are rows, these are features: {shards}")
    return shards


def _tiles(layout: Layout, num_chunks: int, tile_rows: int, turns: Sequence[tuple[int, int]]) -> tuple[RowTile, ...]:
    chunks = [chunk_ranges(layout.shard_rows(rank), num_chunks) for rank in range(len(layout.sizes))]
    found = []
    for rank, chunk in turns:
        segments = layout.segments(rank, *chunks[rank][chunk])
        chunk_tiles = sum(-(-(segment.stop - segment.start) // tile_rows) for segment in segments)
        for segment in segments:
            for offset in range(segment.start, segment.stop, tile_rows):
                rows, row = min(tile_rows, segment.stop - offset), segment.dst + offset - segment.start
                found.append(RowTile(row, rows, rank, chunk, rank * num_chunks + chunk, offset, chunk_tiles))
    return tuple(found)
