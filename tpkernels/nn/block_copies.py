"""A replicated parameter once for each block of ``same_bits``, whose gradient is one sum over the blocks of all ranks.

::

    y_b = x                       for each of this rank's blocks b
    dx  = tree over b of dy_b     of all ranks, neighbours first, in fp32 (fp64 for fp64); rounded once

so that a gradient to which every rank adds its share has the same terms in the same order at every number of ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.gemm import canonical, tree_sum
from tpkernels.ops import all_gather

__all__ = ["copies_for_blocks"]


def copies_for_blocks(x: Tensor, mesh: DeviceMesh, blocks: int) -> Tensor:
    """``x``, equal on all ranks, as ``[blocks, ...]``: once for each of this rank's ``blocks``."""
    if not x.requires_grad or not torch.is_grad_enabled():
        return x.expand(blocks, *x.shape)
    return cast(Tensor, _Copies.apply(x, mesh, blocks))  # type: ignore[no-untyped-call]


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, blocks: int) -> Tensor:
        ctx.mesh = mesh
        return x.expand(blocks, *x.shape).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        own = dy.new_empty(1, dy[0].numel(), dtype=tree_sum.wide(dy.dtype))
        tree_sum.of_products([part.reshape(1, -1) for part in dy], own)
        sums = all_gather(own, ctx.mesh)
        dx = dy.new_empty(own.shape)
        canonical.top_of_tree(list(sums.split(1)), dx)
        return dx.view(dy.shape[1:]), None, None
