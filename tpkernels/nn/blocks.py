"""Dimensions that do not divide into the blocks of ``same_bits``: places for whole blocks, of which some stay empty.

Owns where the units of such a dimension (heads, or single features) lie in a parameter, and how a rank's features get
into its places and out of them.  With B blocks and n units, of which n is no multiple of B::

    counts = halves(n, B)               units of each block:  10 heads, B = 8 -> 2,1,1,1,2,1,1,1
    places = ceil(n / B)                of each block, the same:  2

A parameter is ``[B * places, unit, ...]`` at every number of ranks, and a rank has B/W consecutive blocks.  The units
of a block come first in its places; what follows them is zeros, in the weights and in their gradients.  So all blocks
have one size where they are multiplied, added, clipped and updated, and only the layers know of empty places: a
column layer leaves them out of what it gives (:meth:`Blocks.taken`), and a row layer makes zeros for them of what it
takes (:meth:`Blocks.placed`).

A dimension that divides has none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import resolve
from tpkernels.comm.same_bits import anywhere
from tpkernels.partition import halves

__all__ = ["Blocks"]


@dataclass(frozen=True)
class Blocks:
    """How the units of one dimension lie in the blocks of all ranks."""

    counts: tuple[int, ...]
    """Units of each block."""
    unit: int
    """Features of a unit."""

    @classmethod
    def of(cls, total: int, unit: int, mesh: DeviceMesh) -> Self | None:
        """Those of ``total`` features; None where the group has no ``same_bits``, or the units divide."""
        same_bits, units = resolve(mesh).same_bits if anywhere() else 0, total // unit
        return cls(halves(units, same_bits), unit) if same_bits and units % same_bits else None

    @property
    def places(self) -> int:
        """Units that there is room for in a block."""
        return self.counts[0]

    def sizes(self, world_size: int) -> tuple[int, ...]:
        """Features of each rank, without empty places."""
        return tuple(sum(self.widths(rank, world_size)) for rank in range(world_size))

    def widths(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Features of each block of a rank, without empty places."""
        own = len(self.counts) // world_size
        return tuple(self.unit * count for count in self.counts[rank * own : (rank + 1) * own])

    def places_of(self, units: Tensor, mesh: DeviceMesh) -> Tensor:
        """The place of each of these units of this rank; both are counted from the rank's first."""
        own = len(self.counts) // mesh.size()
        counts = torch.tensor(self.counts, device=units.device)[mesh.get_local_rank() * own :][:own]
        ends = counts.cumsum(0)
        block = torch.bucketize(units, ends, right=True).clamp(max=own - 1)
        return block * self.places + units - (ends - counts)[block]

    def with_places(self, full: Tensor, dim: int) -> Tensor:
        """``full``, whose dimension ``dim`` has all units, with zeros in the empty places."""
        shape = list(full.shape)
        shape[dim] = len(self.counts) * self.places
        made = full.new_zeros(shape)
        for block, units in enumerate(full.split(self.counts, dim)):
            made.narrow(dim, block * self.places, units.shape[dim]).copy_(units)
        return made

    def taken(self, y: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's features ``[..., n_r]`` of a product that has all its places."""
        widths = self.widths(mesh.get_local_rank(), mesh.size())
        return cast(Tensor, _Taken.apply(y, widths, self.places * self.unit))  # type: ignore[no-untyped-call]

    def placed(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """This rank's features in their places, for a product; zeros in the empty ones."""
        widths = self.widths(mesh.get_local_rank(), mesh.size())
        return cast(Tensor, _Placed.apply(x, widths, self.places * self.unit))  # type: ignore[no-untyped-call]


def _without(x: Tensor, widths: tuple[int, ...], room: int) -> Tensor:
    return torch.cat([x.narrow(-1, i * room, width) for i, width in enumerate(widths)], -1)


def _within(x: Tensor, widths: tuple[int, ...], room: int) -> Tensor:
    made = x.new_zeros(*x.shape[:-1], room * len(widths))
    for i, part in enumerate(x.split(widths, -1)):
        made.narrow(-1, i * room, part.shape[-1]).copy_(part)
    return made


class _Taken(torch.autograd.Function):
    """By copies in both directions: autograd's sum over narrowed blocks would turn -0 into 0, at some degrees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], room: int) -> Tensor:
        ctx.blocks = widths, room
        return _without(x, widths, room)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _within(dy, *ctx.blocks), None, None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], room: int) -> Tensor:
        ctx.blocks = widths, room
        return _within(x, widths, room)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _without(dy, *ctx.blocks), None, None
