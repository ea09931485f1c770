"""What a call says beside its tensors, for ops of more than one file; other files have a class of their own.

Its fields are arguments of the op in ``torch.ops.tpkernels``, in this order: see :mod:`tpkernels.ops.registration`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

__all__ = [
    "CopyKeywords",
    "DispatchKeywords",
    "GatedName",
    "GatherKeywords",
    "Gathered",
    "GroupedCopyKeywords",
    "GroupedGatherKeywords",
    "GroupedScatter",
    "Products",
    "Reduce",
    "Scatter",
]

GatedName = Literal["swiglu", "geglu", "clamped_swiglu"]
"""Activations of two products, which make one output."""


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


class CopyKeywords(TypedDict, total=False):
    """For type checkers: keywords of an op that do not decide what it returns."""

    bias: Tensor | Sequence[Tensor | None] | None
    implementation: str


class GatherKeywords(CopyKeywords, total=False):
    """The same of a gather."""

    scale_weight: Tensor | Sequence[Tensor] | None
    out_dtype: torch.dtype | None
    gather_dim: int
    shard_sizes: Sequence[int] | None
    save_gathered: bool


class GroupedCopyKeywords(CopyKeywords, total=False):
    """The same of an op with experts."""

    scale_weight: Tensor | Sequence[Tensor] | None
    out_dtype: torch.dtype | None


class GroupedGatherKeywords(GroupedCopyKeywords, total=False):
    """The same of a gather of tokens."""

    shard_sizes: Sequence[int] | None
    save_gathered: bool


class DispatchKeywords(GroupedCopyKeywords, total=False):
    """The same of an op that sends tokens to the experts of other ranks."""

    scale_x: Tensor | None
    expert_sizes: Sequence[int] | None
    shard_sizes: Sequence[int] | None


Products = Tensor | list[Tensor]
"""One for one weight or a gated pair, else a list."""
Gathered = Products | tuple[Products, Tensor] | tuple[Products, Tensor, Tensor]
"""What a gather returns where a type checker cannot tell: with ``return_gathered`` also x, and of fp8 its scales."""
