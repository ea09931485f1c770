"""The order in which a kernel visits its tiles, as a table; pure arithmetic on the host.

A kernel's row tiles are listed once per (shard sizes, chunks, tile height, rank): the list says which rows a tile
covers, which chunk it belongs to, and whose it is. Rotation by rank, uneven shards, empty chunks, and tiles that must
not reach over the end of a chunk are nobody's business in device code, where a row tile costs the read of one entry.

Chunks are cut as everywhere (`partition.chunk_ranges`, `chunk_begin` in csrc/common/schedule.h). A chunk without rows
has no tiles: no kernel waits for it or announces it. The tiles of a grouped GEMM depend on the routing of each call
(`grouped_table`). A shard of a dimension that is not the first (`Layout.outer` above
1) lies in several segments of the whole; a tile ends where its segment does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from tpkernels.partition import Layout, chunk_ranges, peers_after

__all__ = [
    "FIELDS",
    "RowTile",
    "all_gather_order",
    "arrivals",
    "as_table",
    "departures",
    "grouped_table",
    "reduce_scatter_order",
]


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


FIELDS = 8  # integers per entry of the table; the last is the expert of a grouped GEMM, else nothing


def all_gather_order(shards: Sequence[int] | Layout, num_chunks: int, tile_rows: int, rank: int) -> tuple[RowTile, ...]:
    """Own shard first, then the peers' as they arrive: chunk c of every peer before chunk c + 1 of any.

    All peers send at once, so their first chunks arrive at about the same time.
    """
    layout = _layout(shards)
    return _tiles(layout, num_chunks, tile_rows, arrivals(len(layout.sizes), num_chunks, rank))


def reduce_scatter_order(
    shards: Sequence[int] | Layout, num_chunks: int, tile_rows: int, rank: int
) -> tuple[RowTile, ...]:
    """Remote owners' rows first, so that they can leave while the rest is computed; own rows last.

    Chunk c of every peer comes before chunk c + 1 of any, which keeps all links busy from the first chunk on.
    """
    layout = _layout(shards)
    return _tiles(layout, num_chunks, tile_rows, departures(len(layout.sizes), num_chunks, rank))


def arrivals(world_size: int, num_chunks: int, rank: int) -> list[tuple[int, int]]:
    """(rank, chunk) in the order in which a gather multiplies them."""
    return [(rank, chunk) for chunk in range(num_chunks)] + _of_peers(world_size, num_chunks, rank)


def departures(world_size: int, num_chunks: int, rank: int) -> list[tuple[int, int]]:
    """(owner, chunk) in the order in which a reduce-scatter computes them."""
    return _of_peers(world_size, num_chunks, rank) + [(rank, chunk) for chunk in range(num_chunks)]


def _of_peers(world_size: int, num_chunks: int, rank: int) -> list[tuple[int, int]]:
    return [(peer, chunk) for chunk in range(num_chunks) for peer in peers_after(rank, world_size)]


def as_table(tiles: Sequence[RowTile]) -> list[list[int]]:
    """Rows of the int32 table [len(tiles), FIELDS] that kernels read; M is below 2^31 rows."""
    return [[*astuple(tile), 0] for tile in tiles]


def grouped_table(
    first_rows: Tensor, ranges: Sequence[Sequence[tuple[int, int]]], turns: Sequence[tuple[int, int]], tile_rows: int
) -> Tensor:
    """The int32 table [1 + tiles, FIELDS] of a grouped GEMM: the number of tiles, then tiles with their experts.

    first_rows: of each expert (columns) at each cut, `TokenRows.first_rows`. ranges: of every rank's chunks, the cuts
    where each begins and ends, as rows of `first_rows`. A chunk of tokens is a range of rows per expert; tiles end
    where these do.
    """
    num_experts, num_chunks = first_rows.shape[1], len(ranges[0])
    pairs = torch.tensor([ranges[rank][chunk] for rank, chunk in turns])
    lows, highs = first_rows[pairs[:, 0]], first_rows[pairs[:, 1]]
    counts = (highs - lows + tile_rows - 1) // tile_rows
    runs = torch.repeat_interleave(counts.flatten())
    within = torch.arange(len(runs)) - (counts.flatten().cumsum(0) - counts.flatten())[runs]
    row, turn = lows.flatten()[runs] + within * tile_rows, runs // num_experts
    rows = (highs.flatten()[runs] - row).clamp(max=tile_rows)
    rank, chunk = torch.tensor(turns).unbind(1)
    fields = (row, rows, rank[turn], chunk[turn], rank[turn] * num_chunks + chunk[turn], torch.zeros_like(row),
              counts.sum(1)[turn], runs % num_experts)  # fmt: skip
    table = torch.zeros(1 + len(runs), FIELDS, dtype=torch.int32)
    table[0, 0], table[1:] = len(runs), torch.stack(fields, 1)
    return table


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
