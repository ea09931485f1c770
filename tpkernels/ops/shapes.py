"""Shapes between the N-D tensors of users and the 2-D ones of backends, and arguments that op schemas cannot say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from tpkernels.partition import Layout, array_split_sizes

__all__ = [
    "flat",
    "fresh",
    "gather_layout",
    "gathered_shape",
    "has_bias",
    "only_row",
    "pack_biases",
    "rows_layout",
    "scatter_layout",
    "shard_shape",
    "unpack_biases",
]


def pack_biases(biases: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Op schemas have no optional tensors in lists: no bias at all is [], a missing one among others [0, 0]."""
    if all(bias is None for bias in biases):
        return []
    return [like.new_empty(0, 0) if bias is None else bias for bias in biases]


def unpack_biases(biases: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor | None]:
    if not biases:
        return [None] * len(weights)
    return [None if bias.shape == (0, 0) else bias for bias in biases]


def has_bias(biases: Sequence[Tensor]) -> list[bool]:
    """Which of the packed ones are there."""
    return [bias.shape != (0, 0) for bias in biases]


def gather_layout(x: Tensor, dim: int, sizes: Sequence[int] | None, group_size: int) -> Layout:
    """Layout of the whole whose shard is ``x``; without sizes all shards are like ours."""
    return Layout.of(x.shape, dim, sizes if sizes is not None else [x.shape[dim]] * group_size)


def scatter_layout(shape: Sequence[int], dim: int, sizes: Sequence[int] | None, group_size: int) -> Layout:
    """Layout of a whole of ``shape`` that is cut along ``dim``; without sizes as evenly as possible."""
    return Layout.of(shape, dim, sizes if sizes is not None else array_split_sizes(shape[dim], group_size))


@lru_cache(maxsize=256)
def rows_layout(rows: int, group_size: int) -> Layout:
    """Which rows each rank sums when all ranks need the whole."""
    return Layout(1, array_split_sizes(rows, group_size), 1)


def gathered_shape(x: Tensor, dim: int, layout: Layout) -> list[int]:
    """Shape of the whole that ``x`` is a shard of."""
    return [*x.shape[:dim], sum(layout.sizes), *x.shape[dim + 1 :]]


def flat(x: Tensor) -> Tensor:
    """``[..., features]`` as contiguous ``[rows, features]``."""
    if x.dim() == 2 and x.is_contiguous():
        return x
    return x.reshape(-1, x.shape[-1]).contiguous() if x.numel() else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def fresh(y: Tensor, shape: Sequence[int]) -> Tensor:
    """A result ``y`` of a kernel in the shape of the op's output, and no view: torch lets nobody write to a view that
    was made inside a function with a gradient of its own, as in ``x = row(h); x += residual``.

    ``detach`` costs 0.6 us and gives a tensor that autograd takes for no view; the memory is the same.
    """
    if y.shape != torch.Size(shape):
        y = y.view(shape)
    return y.detach() if y._is_view() else y


def only_row(y: Tensor) -> Tensor:
    """``[features]`` of ``[1, features]``, for an x without rows; to autograd no view, as :func:`fresh`."""
    return cast(Tensor, torch.ops.aten._unsafe_view.default(y, y.shape[1:]))


def shard_shape(x: Tensor, dim: int, size: int) -> list[int]:
    """Shape of a shard of ``size`` of the whole ``x``."""
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]
