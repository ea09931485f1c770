"""RMS norm over features that are cut over the ranks: a norm of queries or keys over all heads at once (OLMo 2, 3).

::

    s   = sum over ranks of sum(x_r ** 2)          one number per row, [..., 1]: an all-reduce forward and one backward
    y_r = x_r / sqrt(s / features + epsilon) * weight_r

In fp32 (fp64 for fp64), rounded once.  The weight is a DTensor, ``Shard(0)``; its gradient is complete on each rank.
"""

from __future__ import annotations

from typing import Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.parameters import local, mesh_of, shard_parameter, tp_mesh
from tpkernels.ops import all_reduce, copy_to_group
from tpkernels.partition import chunk_sizes

__all__ = ["PartRMSNorm"]


class PartRMSNorm(nn.Module):
    """x and y ``[..., features_r]``: this rank's part of the last dimension, cut as ``torch.chunk`` cuts.

    Examples:
        >>> norm = tpk.nn.PartRMSNorm.from_norm(nn.RMSNorm(8), mesh["tp"], epsilon=1e-6)
        >>> norm(torch.ones(3, 4)).shape  # half of 8 features
        torch.Size([3, 4])
    """

    weight: nn.Parameter
    features: int
    epsilon: float
    _tpk_sliced = ("weight",)

    def __init__(self) -> None:
        raise TypeError("PartRMSNorm is made by from_norm")

    @classmethod
    def from_norm(cls, norm: nn.Module, group: GroupLike, *, epsilon: float) -> Self:
        """The norm with the weight of ``norm``; ranks whose weights differ take the first one's, or raise.

        Raises:
            ValueError: it has other parameters than a vector ``weight``, or fewer features than there are ranks.
        """
        mesh, own = tp_mesh(group, norm), dict(norm.named_parameters())
        if list(own) != ["weight"] or own["weight"].dim() != 1:
            raise ValueError(f"{type(norm).__name__} must have one parameter, a vector named weight, got {list(own)}")
        weight = own["weight"]
        if 0 in chunk_sizes(weight.shape[0], mesh.size()):
            raise ValueError(f"{weight.shape[0]} features leave some of {mesh.size()} ranks without any")
        if not epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {epsilon}")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.features, module.epsilon = weight.shape[0], epsilon
        module.weight = shard_parameter(weight, mesh, 0, requires_grad=weight.requires_grad)
        return module.train(norm.training)

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the weight lives on."""
        return mesh_of(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        mesh, weight = self.mesh, cast(Tensor, local(self.weight))
        if x.shape[-1] != weight.shape[0]:
            raise ValueError(f"PartRMSNorm takes {weight.shape[0]} of {self.features} features here, got {x.shape[-1]}")
        wide = x if x.dtype == torch.float64 else x.float()
        squares = wide.square().sum(-1, keepdim=True)
        if mesh.size() > 1:
            squares = copy_to_group(all_reduce(squares, mesh), mesh)
        y = wide * torch.rsqrt(squares / self.features + self.epsilon) * weight.to(wide.dtype)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}, epsilon={self.epsilon}"
