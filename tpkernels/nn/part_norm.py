"""RMS norm over features that are cut over the ranks: a norm of queries or keys over all heads at once (OLMo 2, 3).

::

    s   = sum over ranks of sum(x_r ** 2)          one number per row, [..., 1]: an all-reduce forward and one backward
    y_r = x_r / sqrt(s / features + epsilon) * weight_r

Or, with a gate, of ``x_r * silu(gate_r)`` ("before" the norm, as in Mamba 2), or ``y_r * silu(gate_r)`` ("after" it).

In fp32 (fp64 for fp64), rounded once.  The weight is a DTensor, ``Shard(0)``; its gradient is complete on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.parameters import local, mesh_of, shard_parameter, tp_mesh
from tpkernels.ops import all_reduce, copy_to_group
from tpkernels.partition import chunk_sizes

__all__ = ["GATES", "PartRMSNorm", "rms_norm"]

GATES = ("", "before", "after")


def rms_norm(
    weight: Tensor,
    x: Tensor,
    gate_by: Tensor | None = None,
    *,
    epsilon: float,
    gate: str = "",
    summed: Callable[[Tensor], Tensor] = lambda squares: squares,
    features: int = 0,
) -> Tensor:
    """The equation above in the dtype of what is given; ``summed`` is given each row's sum of squares."""
    if gate == "before":
        assert gate_by is not None
        x = x * F.silu(gate_by)
    squares = summed(x.square().sum(-1, keepdim=True))
    y = x * torch.rsqrt(squares / (features or x.shape[-1]) + epsilon) * weight
    if gate == "after":
        assert gate_by is not None
        y = y * F.silu(gate_by)
    return y


class PartRMSNorm(nn.Module):
    """x, y and the gate, if it takes one, ``[..., features_r]``: this rank's part of the last dimension, cut as
    ``torch.chunk`` cuts.

    Examples:
        >>> norm = tpk.nn.PartRMSNorm.from_norm(nn.RMSNorm(8), mesh["tp"], epsilon=1e-6)
        >>> norm(torch.ones(3, 4)).shape  # half of 8 features
        torch.Size([3, 4])
    """

    weight: nn.Parameter
    features: int
    epsilon: float
    gate: str
    _tpk_sliced = ("weight",)

    def __init__(self) -> None:
        raise TypeError("PartRMSNorm is made by from_norm")

    @classmethod
    def from_norm(cls, norm: nn.Module, group: GroupLike, *, epsilon: float, gate: str = "") -> Self:
        """The norm with the weight of ``norm``; ranks whose weights differ take the first one's, or raise.

        ``gate``: "before" or "after", where the SiLU of a second argument is multiplied; "" without one.

        Raises:
            ValueError: it has other parameters than a vector ``weight``, or fewer features than there are ranks; an
                unknown ``gate``.
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
        if gate not in GATES:
            raise ValueError(f"gate must be one of {GATES}, got {gate!r}")
        module.features, module.epsilon, module.gate = weight.shape[0], epsilon, gate
        module.weight = shard_parameter(weight, mesh, 0, requires_grad=weight.requires_grad)
        numbers = {key: value for key, value in vars(norm).items() if isinstance(value, int | float | str)}
        vars(module).update(numbers | vars(module))  # which code around it may read (variance_epsilon, in Mamba 2)
        return module.train(norm.training)

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the weight lives on."""
        return mesh_of(self.weight)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        mesh, weight = self.mesh, cast(Tensor, local(self.weight))
        if (gate is None) == bool(self.gate) or (gate is not None and gate.shape != x.shape):
            wanted = f"a gate of shape {list(x.shape)}" if self.gate else "no gate"
            raise ValueError(f"PartRMSNorm takes {wanted} here, got {None if gate is None else list(gate.shape)}")
        if x.shape[-1] != weight.shape[0]:
            raise ValueError(f"PartRMSNorm takes {weight.shape[0]} of {self.features} features here, got {x.shape[-1]}")
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        gates = [] if gate is None else [gate.to(dtype)]

        def summed(squares: Tensor) -> Tensor:
            return copy_to_group(all_reduce(squares, mesh), mesh) if mesh.size() > 1 else squares

        y = rms_norm(
            weight.to(dtype), x.to(dtype), *gates, epsilon=self.epsilon, gate=self.gate, summed=summed,
            features=self.features,
        )  # fmt: skip
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"features={self.features}, epsilon={self.epsilon}" + (f", gate={self.gate!r}" if self.gate else "")
