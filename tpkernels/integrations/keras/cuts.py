"""Where each rank's part of a variable lies in the whole one: pure arithmetic on one dimension, and on tensors.

It owns the :class:`Cut`.  Parts are those of ``numpy.array_split`` (10 over 3 ranks: 4, 3 and 3), in units that stay
together (heads), and in each of the runs of which a packed weight consists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tpkernels.partition import array_split_sizes

__all__ = ["Cut", "array_split", "even_cut"]


@dataclass(frozen=True)
class Cut:
    """Dimension ``dim`` of a tensor of ``shape`` is cut; ``ranges`` has the pieces ``(start, stop)`` of each rank."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each rank's part along the dimension."""
        return tuple(sum(stop - start for start, stop in pieces) for pieces in self.ranges)

    def shape_on(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :])

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """What ``rank`` holds; a view where that is one piece."""
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def joined(self, parts: Tensor) -> Tensor:
        """The whole tensor, of the ranks' parts one after another."""
        order = [piece for pieces in self.ranges for piece in pieces]
        if order == sorted(order):
            return parts
        starts = accumulate((stop - start for start, stop in order), initial=0)
        placed = sorted((piece[0], at, piece[1] - piece[0]) for piece, at in zip(order, starts, strict=False))
        return torch.cat([parts.narrow(self.dim, at, size) for _, at, size in placed], self.dim)

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dim": self.dim, "ranges": [[list(p) for p in r] for r in self.ranges]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cut:
        ranges = tuple(tuple((int(start), int(stop)) for start, stop in pieces) for pieces in data["ranges"])
        return cls(tuple(map(int, data["shape"])), int(data["dim"]), ranges)


def even_cut(shape: Sequence[int], dim: int, world_size: int, *, unit: int = 1, runs: Sequence[int] = ()) -> Cut:
    """Cut a dimension in multiples of ``unit``, in each of the ``runs`` of which it consists (default: one)."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    start = 0
    for run in runs or (shape[dim],):
        for rank, count in enumerate(array_split_sizes(run // unit, world_size)):
            if count:
                ranges[rank].append((start, start + count * unit))
            start += count * unit
    return Cut(tuple(shape), dim, tuple(map(tuple, ranges)))


def array_split(x: Any, n: int, axis: int = 0) -> list[Any]:
    """Cut a tensor of whichever backend Keras runs on as ``numpy.array_split`` does: 10 over 3 are 4, 3 and 3.

    Examples:
        >>> [part.shape[0] for part in tpk.keras.array_split(keras.ops.ones((10, 2)), 3)]
        [4, 3, 3]

    Raises:
        ValueError: ``n`` is less than 1, or the tensor has no such axis.
    """
    shape = tuple(x.shape)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis ({axis}) is out of range for a tensor of {len(shape)} dimensions")
    axis %= len(shape)
    ends = [0, *accumulate(array_split_sizes(shape[axis], n))]
    before = (slice(None),) * axis
    return [x[(*before, slice(start, stop))] for start, stop in pairwise(ends)]
