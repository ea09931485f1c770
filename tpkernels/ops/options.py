"""What a call says beside its tensors, for ops of more than one file; other files have a class of their own.

Its fields are arguments of the op in ``torch.ops.tpkernels``, in this order: see :mod:`tpkernels.ops.registration`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GroupedScatter", "Reduce", "Scatter"]


class Reduce(NamedTuple):
    """A sum over the ranks that every rank gets."""

    group_name: str
    implementation: str


class Scatter(NamedTuple):
    """A sum over the ranks that is cut along ``scatter_dim``; without sizes as evenly as possible."""

    group_name: str
    scatter_dim: int
    shard_sizes: list[int] | None
    implementation: str


class GroupedScatter(NamedTuple):
    """A sum over the ranks of a row per token, cut by tokens; without sizes as evenly as possible."""

    group_name: str
    shard_sizes: list[int] | None
    implementation: str
