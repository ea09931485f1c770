"""The linear layer whose input features are cut over the ranks of a group; it follows a column layer.

::

    w_r = columns of weight,  p_r = x_r @ w_r^T

    sequence_parallel   y_r = (sum over ranks of p_r)[r] + b, a shard of the sequence   op: matmul_reduce_scatter
    scatter_unit        y_r = (sum over ranks of p_r     + b)[r], this rank's features  op: matmul_reduce_scatter
    otherwise           y   =  sum over ranks of p_r     + b, equal on all ranks        op: matmul_all_reduce

The weight is a DTensor, ``Shard(1)``, the bias ``Replicate()`` and added once, after the sum.  Both gradients are
complete as they are: the bias's is the full one on every rank, in any mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.fused_norm import FusedNorm, RowCall, saving_hooks
from tpkernels.nn.parallel_linear import ParallelLinear, features_of
from tpkernels.nn.parameters import check_unit, tp_mesh
from tpkernels.ops.collectives import shard
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter
from tpkernels.ops.shapes import only_row
from tpkernels.partition import chunk_sizes

__all__ = ["RowParallelLinear"]


class RowParallelLinear(ParallelLinear):
    """``y = sum over ranks of x_r @ weight_r^T, plus bias`` with the input features cut over the ranks.

    =====================  ======================================  =================================================
    mode                   x on rank r                             y on rank r
    =====================  ======================================  =================================================
    default                ``[..., in_r]``                         ``[..., out]``, equal on all ranks
    ``sequence_parallel``  ``[..., S, ..., in_r]``                 ``[..., S_r, ..., out]``
    ``scatter_unit``       ``[..., in_r]``                         ``[..., out_r]``
    =====================  ======================================  =================================================

    x is what a column layer of as many features gives without ``gather_output``, or anything elementwise of it.  In the
    default mode the gradient that arrives must be equal on all ranks, as it is when all compute the same loss.

    Arguments are those of :class:`ColumnParallelLinear`; ``unit`` is about the input features: the weight is
    ``[out, units, unit]`` where they have a dimension of their own.  With ``split_input`` x
    is the whole ``[..., in]``, equal on all ranks, and each rank takes its features of it (their gradient is gathered):
    a layer of its own, that needs no column layer before it.  With ``scatter_unit`` ranks share out the features of the
    sum in multiples of so many, as a column layer's: the layer ends one pair and begins another.

    Examples:
        >>> down = tpk.nn.RowParallelLinear(32, 8, mesh["tp"])
        >>> down(torch.ones(4, 16)).shape  # of this rank's 16 features
        torch.Size([4, 8])
    """

    cut_dim = 1
    scatter_unit = 0
    followed_by: FusedNorm | None = None
    """The norm that is computed together with the sum over the ranks (``tpk.parallelize(fused_norm=...)``)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        split_input: bool = False,
        unit: int = 1,
        scatter_unit: int = 0,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.scatter_unit = scatter_unit
        super().__init__(
            in_features,
            out_features,
            group,
            bias=bias,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            unit=unit,
            implementation=implementation,
            device=device,
            dtype=dtype,
        )
        self.split_input = split_input
        if scatter_unit:
            if sequence_parallel or split_input:
                raise ValueError("scatter_unit goes with neither sequence_parallel nor split_input")
            check_unit("out_features", out_features, scatter_unit)
            refuse(self.mesh, "a row layer with scatter_unit", "features of its sum are in no blocks")

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        split_input: bool = False,
        unit: int = 1,
        scatter_unit: int = 0,
        implementation: str = "auto",
    ) -> Self:
        """The same layer, cut: copies this rank's columns with dtype, device and ``requires_grad``; ``linear`` stays.

        ``linear`` as for :class:`ColumnParallelLinear`.  Ranks whose weights differ take the first one's, or raise
        (:func:`init_weights`).
        """
        mesh = tp_mesh(group, linear)
        module = cls(
            *features_of(linear),
            mesh,
            bias=getattr(linear, "bias", None) is not None,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            split_input=split_input,
            unit=unit,
            scatter_unit=scatter_unit,
            implementation=implementation,
            device="meta",
        )
        return module._take(linear, mesh)

    def forward(self, x: Tensor, *, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """``shard_sizes``: every rank's length of the sequence; default ``tpk.array_split``'s (10 over 3: 4, 3, 3)."""
        mesh, weight, bias = self._local_parts()
        if x.dim() == 1 and not self.sequence_parallel:  # the ops take rows
            return only_row(self.forward(x.unsqueeze(0)))
        if self.split_input:
            if x.shape[-1] != self.in_features:
                self._refuse(f"split_input takes all {self.in_features} features, got x of shape {tuple(x.shape)}")
            x = shard(x, mesh, dim=-1, shard_sizes=self.shard_sizes) if mesh.size() > 1 else x
        features = weight.shape[1] if self.blocks is None else self.shard_sizes[mesh.get_local_rank()]
        if shard_sizes is not None or x.shape[-1] != features:
            why = "it must come from a column layer of as many outputs, not gathered"
            self._check_input(x, features, why, shard_sizes)
        if self.blocks is not None:
            x = self.blocks.placed(x, mesh)
        if self.followed_by is not None:
            pending = self._defer(self.followed_by, x, weight, bias, mesh, shard_sizes)
            if pending is not None:
                return pending
        if self.scatter_unit:
            return matmul_reduce_scatter(
                x,
                weight,
                mesh,
                bias=bias,
                scatter_dim=-1,
                shard_sizes=self.scattered_sizes,
                implementation=self.implementation,
            )
        if not self.sequence_parallel:
            return matmul_all_reduce(x, weight, mesh, bias=bias, implementation=self.implementation)
        return matmul_reduce_scatter(
            x,
            weight,
            mesh,
            bias=bias,
            scatter_dim=self.sequence_dim,
            shard_sizes=shard_sizes,
            implementation=self.implementation,
        )

    def _defer(
        self,
        tie: FusedNorm,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: DeviceMesh,
        shard_sizes: Sequence[int] | None,
    ) -> Tensor | None:
        """Leave the product to the addition that follows; None where it must be computed now."""
        if not tie.applies(weight, mesh, x) or (tie.sequence is not None) != self.sequence_parallel:
            return None
        scatter = (self.sequence_dim, shard_sizes) if self.sequence_parallel else None
        call = RowCall(
            x, weight, bias, mesh, self.implementation, scatter, torch.is_grad_enabled(), saving_hooks()
        )  # fmt: skip
        return tie.pending(call)

    @property
    def scattered_sizes(self) -> tuple[int, ...]:
        """Features of the sum that each rank gives; none where it gives all."""
        return chunk_sizes(self.out_features, self.mesh.size(), self.scatter_unit) if self.scatter_unit else ()

    def _options(self) -> str:
        scattered = f", gives={'/'.join(map(str, self.scattered_sizes))}" if self.scatter_unit else ""
        return ", split_input=True" if self.split_input else scattered

    def _op(self) -> str:
        return "matmul_reduce_scatter" if self.sequence_parallel or self.scatter_unit else "matmul_all_reduce"
