"""Norms between tensor-parallel layers, with replicated parameters whose gradients are correct in either mode.

Without sequence parallelism every rank normalises the same rows, and every rank's gradient is the full one.  With it,
each rank sees only its part of the sequence, and the gradients of weight and bias are sums over the group, which this
module computes in one all-reduce per norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.parameters import local, mesh_of, replicate_parameter, tp_mesh
from tpkernels.ops import copy_to_group

__all__ = ["LayerNorm", "RMSNorm"]


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` with replicated DTensor parameters; with ``sequence_parallel`` their gradients are summed.

    Examples:
        >>> tpk.nn.LayerNorm(8, mesh["tp"])(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        group: GroupLike,
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.sequence_parallel = sequence_parallel
        _replicate(self, self, tp_mesh(group, self))

    @classmethod
    def from_norm(cls, norm: nn.LayerNorm, group: GroupLike, *, sequence_parallel: bool = False) -> Self:
        """The same norm; copies the parameters, ``norm`` stays as it is."""
        module = cls(
            norm.normalized_shape,
            group,
            eps=norm.eps,
            elementwise_affine=norm.elementwise_affine,
            bias=norm.bias is not None,
            sequence_parallel=sequence_parallel,
            device="meta",
        )
        _replicate(module, norm, tp_mesh(group, norm))
        return module.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _shared([self.weight, self.bias], self.sequence_parallel)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with a replicated DTensor weight; with ``sequence_parallel`` its gradient is summed.

    Examples:
        >>> tpk.nn.RMSNorm(8, mesh["tp"], sequence_parallel=True)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        group: GroupLike,
        *,
        eps: float | None = None,
        elementwise_affine: bool = True,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.sequence_parallel = sequence_parallel
        _replicate(self, self, tp_mesh(group, self))

    @classmethod
    def from_norm(cls, norm: nn.RMSNorm, group: GroupLike, *, sequence_parallel: bool = False) -> Self:
        """The same norm; copies the parameter, ``norm`` stays as it is."""
        module = cls(
            norm.normalized_shape,
            group,
            eps=norm.eps,
            elementwise_affine=norm.elementwise_affine,
            sequence_parallel=sequence_parallel,
            device="meta",
        )
        _replicate(module, norm, tp_mesh(group, norm))
        return module.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        (weight,) = _shared([self.weight], self.sequence_parallel)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sequence_parallel={self.sequence_parallel}"


def _replicate(module: nn.Module, source: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(source.named_parameters(recurse=False)):
        setattr(module, name, replicate_parameter(parameter, mesh, requires_grad=parameter.requires_grad))


def _shared(parameters: Sequence[nn.Parameter | None], sum_gradients: bool) -> list[Tensor | None]:
    """The local tensors of parameters; with ``sum_gradients`` one all-reduce sums all their gradients."""
    tensors = [local(parameter) for parameter in parameters]
    used = [tensor for tensor in tensors if tensor is not None]
    if not sum_gradients or not used or not any(tensor.requires_grad for tensor in used):
        return tensors
    mesh = mesh_of(cast(Tensor, next(p for p in parameters if p is not None)))
    refuse(mesh, "a norm with sequence_parallel", "its gradients are sums over each rank's part of the sequence")
    if mesh.size() == 1:
        return tensors
    packed = copy_to_group(torch.stack(used), mesh)
    views = iter(packed.unbind())
    return [None if tensor is None else next(views) for tensor in tensors]
