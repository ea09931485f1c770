"""Pure arithmetic of shards, chunks and their order; no communication and no state.

Vocabulary: a *shard* is a rank's permanent part of a dimension, a *chunk* is the unit of transport, a *segment* is a
run of consecutive rows that stay consecutive when a chunk is laid into the gathered tensor.

Two ways to cut ``total`` into ``n`` parts are in use, and they differ when ``n`` does not divide ``total``:

* :func:`array_split_sizes` (``numpy.array_split``, 10/3 -> 4,3,3) for activations: the most even cut;
* :func:`chunk_sizes` (``torch.chunk``, 10/3 -> 4,4,2) for parameters: the cut that ``DTensor``'s ``Shard`` means.

Where all numbers of ranks are to cut at the same places, :func:`halves` says where (``same_bits``).

What is not cut itself, such as a head, is dealt out by :func:`unit_sizes`: as ``torch.chunk`` does where that gives
every part some, else as ``numpy.array_split`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "Layout",
    "Segment",
    "array_split",
    "array_split_sizes",
    "as_shard",
    "chunk_ranges",
    "chunk_sizes",
    "copied_places",
    "halves",
    "held_sizes",
    "num_chunks",
    "offsets",
    "peers_after",
    "unit_sizes",
]

# Bounds of the chunk count.  A GEMM of 256 rows still runs within 2 % of the full rate on the CPUs we measured (1 core,
# bf16, K 2048, N 4096: 77.4 us/row at 256 rows against 76.3 at 4096; 80.9 at 128), and a transfer below 256 KiB is
# dominated by its fixed cost.  More than 8 chunks hide no more: the exposed part is one chunk.
MIN_CHUNK_ROWS = 256
MIN_CHUNK_BYTES = 256 * 1024
MAX_CHUNKS = 8


def array_split_sizes(total: int, n: int) -> tuple[int, ...]:
    """Sizes of ``numpy.array_split(range(total), n)``: the first ``total % n`` parts get one more."""
    _check_split(total, n)
    base, rest = total // n, total % n  # total may be a compiler's symbol, which divmod refuses
    return tuple(base + 1 if i < rest else base for i in range(n))


def chunk_sizes(total: int, n: int, unit: int = 1) -> tuple[int, ...]:
    """Sizes of ``torch.chunk``, zeros where nothing is left: 10/4 -> 3,3,3,1; or those of :func:`unit_sizes`.

    Raises:
        ValueError: ``unit`` does not divide ``total``.
    """
    _check_split(total, n)
    if unit < 1 or total % unit:
        raise ValueError(f"total ({total}) must be a multiple of unit ({unit})")
    if unit > 1:
        return tuple(unit * count for count in unit_sizes(total // unit, n))
    size = -(-total // n)
    return tuple(max(0, min(size, total - i * size)) for i in range(n))


def unit_sizes(units: int, n: int) -> tuple[int, ...]:
    """How many of ``units`` that stay whole each part gets: 10/4 -> 3,3,3,1, and 10/8 -> 2,2,1,1,1,1,1,1.

    ``torch.chunk`` gives 2,2,2,2,2,0,0,0 there; models rely on a head at least.
    """
    sizes = chunk_sizes(units, n)
    return array_split_sizes(units, n) if 0 in sizes and units >= n else sizes


def halves(total: int, n: int) -> tuple[int, ...]:
    """Sizes of a cut in two, again and again, whose first half is the larger one: 10/4 -> 3,2,3,2.

    A part of n is two neighbours of 2n, so that all degrees cut at the same places.  ``n`` is a power of two.
    """
    _check_split(total, n)
    if n & (n - 1):
        raise ValueError(f"cannot halve into {n} parts: n must be a power of two")
    sizes = [total]
    while len(sizes) < n:
        sizes = [half for size in sizes for half in (size - size // 2, size // 2)]
    return tuple(sizes)


def held_sizes(total: int, n: int, unit: int = 1) -> tuple[int, ...]:
    """What each part has memory for: :func:`chunk_sizes`, or the largest of them where ``Shard`` cannot say these."""
    sizes = chunk_sizes(total, n, unit)
    return sizes if unit == 1 or as_shard(total // unit, n) else (sizes[0],) * n


def as_shard(units: int, n: int) -> bool:
    """Whether :func:`unit_sizes` deals them out as ``DTensor``'s ``Shard`` would."""
    return unit_sizes(units, n) == chunk_sizes(units, n)


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Start of each part: (4, 3, 3) -> (0, 4, 7)."""
    return tuple(accumulate(sizes, initial=0))[:-1]


def copied_places(count: int, copied: int, behind: int = 0, *, of: str = "") -> tuple[bool, ...]:
    """For each of ``count`` segments: whether it is one of the ``copied`` ones, which ``behind`` others follow.

    ``of`` begins the message.

    Raises:
        ValueError: there are not so many, or none is left that is cut.
    """
    first = count - behind - copied
    if copied < 0 or behind < 0 or first < 0 or copied >= max(1, count):
        raise ValueError(f"{of}copied ({copied}, with {behind} behind them) must be fewer than the segments ({count})")
    return tuple(first <= place < first + copied for place in range(count))


def array_split(x: torch.Tensor, n: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Views of ``x`` cut along ``dim`` as ``numpy.array_split`` cuts: 10 rows over 3 parts are 4, 3 and 3.

    Examples:
        >>> [part.tolist() for part in tpk.array_split(torch.arange(10), 3)]
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]

    Raises:
        ValueError: ``x`` has no dimension ``dim``, or ``n`` is less than 1.
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim ({dim}) is out of range for a tensor of {x.dim()} dimensions")
    return tuple(x.split(list(array_split_sizes(x.shape[dim], n)), dim))


def peers_after(rank: int, world_size: int) -> tuple[int, ...]:
    """The other ranks, nearest successor first, so that no two ranks start with the same peer."""
    return tuple((rank + step) % world_size for step in range(1, world_size))


def num_chunks(rows: int, row_bytes: int) -> int:
    """Chunks into which a shard of ``rows`` rows of ``row_bytes`` bytes is cut; a pure function, equal on all ranks.

    The caller passes the *largest* shard of the group, which every rank knows.
    """
    by_rows = rows // MIN_CHUNK_ROWS
    by_bytes = rows * row_bytes // MIN_CHUNK_BYTES
    return max(1, min(MAX_CHUNKS, by_rows, by_bytes))


def chunk_ranges(rows: int, count: int) -> tuple[tuple[int, int], ...]:
    """``count`` half-open row ranges that cover ``rows``; some are empty where ``rows < count``."""
    sizes = array_split_sizes(rows, count)
    return tuple((start, start + size) for start, size in zip(offsets(sizes), sizes, strict=True))


@dataclass(frozen=True)
class Segment:
    """Rows ``[start, stop)`` of a flattened shard are rows ``[dst, dst + stop - start)`` of the flattened whole."""

    start: int
    stop: int
    dst: int


@dataclass(frozen=True)
class Layout:
    """How the shards of one dimension of an N-D tensor lie in the whole, both seen as 2-D ``[rows, features]``.

    A tensor ``[*outer, sizes[r], *inner, features]`` flattens to ``outer * sizes[r] * inner`` rows.  With one outer
    index (dim 0, or leading dimensions of size 1) each shard is one segment of the whole; otherwise it is ``outer`` of
    them.  ``feature`` marks the last dimension itself as the sharded one: then ``sizes`` counts features, and every
    rank holds all ``outer * inner`` rows.
    """

    outer: int
    sizes: tuple[int, ...]
    inner: int
    feature: bool = False

    @staticmethod
    def of(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> Layout:
        """Layout of a tensor of ``shape`` (whole or shard: ``shape[dim]`` is not read) that is cut along ``dim``."""
        dim %= len(shape)
        if dim == len(shape) - 1:
            return Layout(prod(shape[:-1]), tuple(sizes), 1, feature=True)
        return Layout(prod(shape[:dim]), tuple(sizes), prod(shape[dim + 1 : -1]))

    @property
    def total_rows(self) -> int:
        return self.outer * self.inner * (1 if self.feature else sum(self.sizes))

    @property
    def max_shard_rows(self) -> int:
        return self.outer * self.inner * (1 if self.feature else max(self.sizes))

    def shard_rows(self, rank: int) -> int:
        return self.outer * self.inner * (1 if self.feature else self.sizes[rank])

    def columns(self, rank: int) -> tuple[int, int]:
        """Feature range of ``rank`` (feature layouts only)."""
        start = offsets(self.sizes)[rank]
        return start, start + self.sizes[rank]

    def segments(self, rank: int, start: int, stop: int) -> list[Segment]:
        """Where rows ``[start, stop)`` of the flattened shard of ``rank`` lie in the flattened whole."""
        if start >= stop:
            return []
        block = self.sizes[rank] * self.inner
        shift = offsets(self.sizes)[rank] * self.inner
        stride = sum(self.sizes) * self.inner
        result = []
        for outer in range(start // block, (stop - 1) // block + 1):
            low, high = max(start, outer * block), min(stop, (outer + 1) * block)
            result.append(Segment(low, high, outer * stride + shift + low - outer * block))
        return result


def _check_split(total: int, n: int) -> None:
    if n < 1:
        raise ValueError(f"cannot split into {n} parts: n must be at least 1")
    if total < 0:
        raise ValueError(f"cannot split a size of {total}")
