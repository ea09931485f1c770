"""The arithmetic that all ranks must agree on without talking: every part covered once, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tpkernels as tpk
from tpkernels.partition import (
    MAX_CHUNKS,
    Layout,
    array_split_sizes,
    chunk_ranges,
    chunk_sizes,
    halves,
    num_chunks,
    offsets,
    peers_after,
)

pytestmark = pytest.mark.cpu

totals = st.integers(0, 300)
parts = st.integers(1, 12)
shard_lists = st.lists(st.integers(0, 5), min_size=1, max_size=5)
shapes = st.lists(st.integers(0, 4), min_size=2, max_size=4)


@given(totals, parts)
def test_array_split_sizes_are_numpys(total: int, n: int) -> None:
    assert array_split_sizes(total, n) == tuple(len(part) for part in np.array_split(np.arange(total), n))


@given(totals, parts, st.integers(1, 4))
def test_chunk_sizes_are_torch_chunks_in_units_padded_with_zeros(units: int, n: int, unit: int) -> None:
    expected = [len(part) * unit for part in torch.arange(units).chunk(n)] if units else []
    sizes, expected = chunk_sizes(units * unit, n, unit), expected + [0] * (n - len(expected))
    if unit > 1 and 0 in expected and units >= n:  # each part gets one at least
        expected = [len(part) * unit for part in torch.arange(units).tensor_split(n)]
    assert sizes == tuple(expected)
    assert sum(sizes) == units * unit


@given(shard_lists)
def test_offsets_are_where_the_parts_start(sizes: list[int]) -> None:
    assert offsets(sizes) == tuple(sum(sizes[:i]) for i in range(len(sizes)))


@given(totals, parts)
def test_chunk_ranges_cover_the_rows_once_and_in_order(rows: int, count: int) -> None:
    ranges = chunk_ranges(rows, count)
    assert len(ranges) == count
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))


@given(st.integers(0, 10**7), st.integers(0, 10**6))
def test_the_chunk_count_is_bounded_and_grows_with_the_shard(rows: int, row_bytes: int) -> None:
    count = num_chunks(rows, row_bytes)
    assert 1 <= count <= MAX_CHUNKS
    assert num_chunks(2 * rows, row_bytes) >= count
    if count > 1:
        assert rows // count >= 256 and rows * row_bytes // count >= 256 * 1024


@given(parts)
def test_no_two_ranks_start_with_the_same_peer(world_size: int) -> None:
    orders = [peers_after(rank, world_size) for rank in range(world_size)]
    for rank, order in enumerate(orders):
        assert sorted((*order, rank)) == list(range(world_size))
    for step in range(world_size - 1):
        assert len({order[step] for order in orders}) == world_size


@given(shapes, st.integers(-4, 3), shard_lists, st.data())
def test_segments_put_every_row_of_a_shard_where_concatenation_puts_it(
    shape: list[int], dim: int, sizes: list[int], data: st.DataObject
) -> None:
    dim %= len(shape)
    if dim == len(shape) - 1:
        dim = 0
    shards = []
    for rank, size in enumerate(sizes):
        extent = [*shape[:dim], size, *shape[dim + 1 :]]
        shards.append(1000 * rank + torch.arange(int(np.prod(extent))).view(extent))
    whole = torch.cat(shards, dim)
    layout = Layout.of(whole.shape, dim, sizes)
    features = shape[-1]
    assert layout.total_rows == int(np.prod(whole.shape[:-1]))
    laid = torch.full((layout.total_rows, features), -1)
    count = data.draw(st.integers(1, 5))
    for rank, shard in enumerate(shards):
        rows = shard.reshape(layout.shard_rows(rank), features)
        assert layout.shard_rows(rank) <= layout.max_shard_rows
        for start, stop in chunk_ranges(layout.shard_rows(rank), count):
            covered = start
            for segment in layout.segments(rank, start, stop):
                assert segment.start == covered < segment.stop <= stop
                covered = segment.stop
                target = laid[segment.dst : segment.dst + segment.stop - segment.start]
                assert bool((target == -1).all()), "a row of the whole was written twice"
                target.copy_(rows[segment.start : segment.stop])
            assert covered == max(start, stop)
    assert torch.equal(laid, whole.reshape(layout.total_rows, features))


@given(shapes, shard_lists)
def test_a_feature_layout_keeps_all_rows_and_cuts_columns(shape: list[int], sizes: list[int]) -> None:
    layout = Layout.of([*shape[:-1], sum(sizes)], -1, sizes)
    assert layout.feature
    rows = int(np.prod(shape[:-1]))
    assert layout.total_rows == layout.max_shard_rows == rows
    columns = [column for rank in range(len(sizes)) for column in range(*layout.columns(rank))]
    assert columns == list(range(sum(sizes)))
    assert all(layout.shard_rows(rank) == rows for rank in range(len(sizes)))


@given(totals, parts, st.integers(-2, 1))
def test_array_split_returns_views_cut_as_numpy_cuts(total: int, n: int, dim: int) -> None:
    x = torch.arange(total * 2).view(total, 2) if dim % 2 == 0 else torch.arange(total * 2).view(2, total)
    pieces = tpk.array_split(x, n, dim)
    expected = np.array_split(x.numpy(), n, dim)
    assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in expected]
    assert all(piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in pieces)


@given(totals, st.integers(0, 5))
def test_halves_are_even_and_cut_where_half_as_many_parts_do(total: int, power: int) -> None:
    sizes = halves(total, 2**power)
    assert sum(sizes) == total and len(sizes) == 2**power and max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes)
    assert not power or tuple(map(sum, zip(sizes[::2], sizes[1::2], strict=True))) == halves(total, 2 ** (power - 1))


def test_ten_rows_over_three_ranks() -> None:
    assert array_split_sizes(10, 3) == (4, 3, 3)
    assert chunk_sizes(10, 3) == (4, 4, 2)
    assert array_split_sizes(2, 4) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: array_split_sizes(4, 0), r"cannot split into 0 parts: n must be at least 1"),
        (lambda: array_split_sizes(-1, 2), r"cannot split a size of -1"),
        (lambda: halves(10, 6), r"cannot halve into 6 parts: n must be a power of two"),
        (lambda: chunk_sizes(10, 2, 4), r"total \(10\) must be a multiple of unit \(4\)"),
        (lambda: tpk.array_split(torch.zeros(3, 3), 2, 2), r"dim \(2\) is out of range for a tensor of 2 dimensions"),
        (lambda: tpk.array_split(torch.zeros(3, 3), 0), r"cannot split into 0 parts"),
    ],
)
def test_what_cannot_be_split_is_refused_with_its_numbers(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
