"""The linear layer whose input features are cut over the ranks of a group; it follows a column layer.

::

    w_r = columns of weight,  p_r = x_r @ w_r^T

    sequence_parallel   y_r = (sum over ranks of p_r)[r] + b, a shard of the sequence   op: matmul_reduce_scatter
    otherwise           y   =  sum over ranks of p_r     + b, equal on all ranks        op: matmul_all_reduce

The weight is a DTensor, ``Shard(1)``, the bias ``Replicate()`` and added once, after the sum.  Both gradients are
complete as they are: the bias's is the full one on every rank, in either mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.parallel_linear import ParallelLinear
from tpkernels.nn.parameters import local, mesh_of, tp_mesh
from tpkernels.ops.matmul_all_reduce import matmul_all_reduce
from tpkernels.ops.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = ["RowParallelLinear"]


class RowParallelLinear(ParallelLinear):
    """``y = sum over ranks of x_r @ weight_r^T, plus bias`` with the input features cut over the ranks.

    =====================  ======================================  =================================================
    mode                   x on rank r                             y on rank r
    =====================  ======================================  =================================================
    default                ``[..., in_r]``                         ``[..., out]``, equal on all ranks
    ``sequence_parallel``  ``[..., S, ..., in_r]``                 ``[..., S_r, ..., out]``
    =====================  ======================================  =================================================

    x is what a column layer of as many features gives without ``gather_output``, or anything elementwise of it.  In the
    default mode the gradient that arrives must be equal on all ranks, as it is when all compute the same loss.

    Arguments are those of :class:`ColumnParallelLinear`; ``unit`` is about the input features.
    """

    cut_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: GroupLike,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        unit: int = 1,
        implementation: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
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

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: GroupLike,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = -2,
        unit: int = 1,
        implementation: str = "auto",
    ) -> Self:
        """The same layer, cut: copies this rank's columns with dtype, device and ``requires_grad``; ``linear`` stays.

        Every rank must hold equal weights; this rank's are taken for everyone's.
        """
        mesh = tp_mesh(group)
        module = cls(
            linear.in_features,
            linear.out_features,
            mesh,
            bias=linear.bias is not None,
            sequence_parallel=sequence_parallel,
            sequence_dim=sequence_dim,
            unit=unit,
            implementation=implementation,
            device="meta",
        )
        return module._take(linear, mesh)

    def forward(self, x: Tensor, *, shard_sizes: Sequence[int] | None = None) -> Tensor:
        """``shard_sizes``: every rank's length of the sequence; default ``tpk.array_split``'s (10 over 3: 4, 3, 3)."""
        parameter = self.weight
        mesh, weight, bias = mesh_of(parameter), local(parameter), local(self.bias)
        assert weight is not None
        why = "it must come from a column layer of as many outputs, not gathered"
        self._check_input(x, weight.shape[1], why, shard_sizes)
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

    def _op(self) -> str:
        return "matmul_reduce_scatter" if self.sequence_parallel else "matmul_all_reduce"
