"""The weight of a convolution under torch's weight norm, of which each rank computes its channels.

::

    w = g * v / |v|,   |v| for each index of dimension ``dim``
    dim is that of the channels:   w_r = g_r * v_r / |v_r|
    any other:                     w_r = g * v_r / sqrt(s),   s = sum over ranks of |v_r|^2, an all-reduce of [1, 1, K]

v, which torch calls ``original1``, is a DTensor that is cut as the weight would be; so is g, ``original0``, where the
norm is of each channel, and every rank has all of it otherwise.

It assumes ``torch.nn.utils.parametrizations.weight_norm``, and nothing else that computes the weight.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from tpkernels.nn.parameters import local, mesh_of, replicate_parameter, shard_parameter
from tpkernels.ops import all_reduce, copy_to_group

__all__ = ["cut_norm", "is_cut_norm", "norm_dim", "weight_norm_of"]


def weight_norm_of(module: nn.Module) -> ParametrizationList | None:
    """What computes the weight of ``module``, where that is torch's weight norm over all dimensions but one."""
    computed = module._modules.get("parametrizations")
    if not isinstance(computed, nn.ModuleDict) or list(computed) != ["weight"]:
        return None
    found = computed["weight"]
    if type(found) is not ParametrizationList and not is_cut_norm(found):
        return None
    known = isinstance(found, ParametrizationList) and len(found) == 1 and type(found[0]) is _WeightNorm
    return cast(ParametrizationList, found) if known and norm_dim(found) >= 0 else None


def norm_dim(normed: nn.Module) -> int:
    """The dimension that has a norm for each index; negative for one norm of the whole weight."""
    return int(cast(Any, normed)[0].dim)


def is_cut_norm(module: nn.Module) -> bool:
    return isinstance(module, _CutNorm)


def cut_norm(normed: ParametrizationList, mesh: DeviceMesh, dim: int) -> None:
    """Cut what computes a weight along dimension ``dim`` of that, in place; a collective call."""
    for name, parameter in list(normed._parameters.items()):
        assert parameter is not None
        cut = name == "original1" or norm_dim(normed) == dim
        wanted = parameter.requires_grad
        normed._parameters[name] = (
            shard_parameter(parameter, mesh, dim, requires_grad=wanted)
            if cut else replicate_parameter(parameter, mesh, requires_grad=wanted)
        )  # fmt: skip
    normed.__class__ = _CutNorm


class _CutNorm(ParametrizationList):
    """Gives this rank's channels of the weight."""

    def forward(self) -> Tensor:
        g, v = (self._parameters[name] for name in ("original0", "original1"))
        assert g is not None and v is not None
        mesh, dim = mesh_of(v), norm_dim(self)
        g_r, v_r = cast(Tensor, local(g)), cast(Tensor, local(v))
        if mesh.size() == 1 or g.placements[0].is_shard():  # type: ignore[attr-defined]
            return torch._weight_norm(v_r, g_r, dim)
        wide = v_r if v_r.dtype == torch.float64 else v_r.float()
        squares = wide.square().sum([other for other in range(v_r.dim()) if other != dim], keepdim=True)
        size = copy_to_group(all_reduce(squares, mesh), mesh).sqrt()
        return (wide * (copy_to_group(g_r, mesh) / size)).to(v_r.dtype)
