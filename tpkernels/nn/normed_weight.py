"""The weight of a convolution under torch's weight norm, of which each rank computes its channels.

::

    w = g * v / |v|,   |v| for each index of dimension ``dim``
    dim is that of the channels:   w_r = g_r * v_r / |v_r|
    any other:                     w_r = g * v_r / sqrt(s),   s = sum over ranks of |v_r|^2, an all-reduce of [1, 1, K]

v, which torch calls ``original1``, is a DTensor that is cut as the weight would be; so is g, ``original0``, where the
norm is of each channel, and every rank has all of it otherwise.  A weight of several segments has a module with v, and
g where it is cut, for each of them (:mod:`tpkernels.nn.channel_parts`).

It assumes ``torch.nn.utils.parametrizations.weight_norm``, and nothing else that computes the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList

from tpkernels.nn.channel_parts import joined, packed_parameters, take_apart
from tpkernels.nn.parameters import local, mesh_of, replicate_parameter, shard_parameter
from tpkernels.ops import all_reduce, copy_to_group

__all__ = ["cut_norm", "is_cut_norm", "norm_dim", "weight_norm_of"]


def weight_norm_of(module: nn.Module) -> ParametrizationList | None:
    """What computes the weight of ``module``, where that is torch's weight norm over all dimensions but one."""
    computed = module._modules.get("parametrizations")
    if not isinstance(computed, nn.ModuleDict) or list(computed) != ["weight"]:
        return None
    found = computed["weight"]
    if is_cut_norm(found):
        return cast(ParametrizationList, found)
    known = type(found) is ParametrizationList and len(found) == 1 and type(found[0]) is _WeightNorm
    return cast(ParametrizationList, found) if known and norm_dim(found) >= 0 else None


def norm_dim(normed: nn.Module) -> int:
    """The dimension that has a norm for each index; negative for one norm of the whole weight."""
    return int(cast(Any, normed)[0].dim)


def is_cut_norm(module: nn.Module) -> bool:
    return isinstance(module, _CutNorm)


def cut_norm(
    normed: ParametrizationList, mesh: DeviceMesh, dim: int, segments: Sequence[int] = (), copied: int = 0,
    behind: int = 0,
) -> None:  # fmt: skip
    """Cut what computes a weight along dimension ``dim`` of that, in place; a collective call.

    ``segments``, ``copied`` and ``behind``: as for :func:`tpkernels.nn.paired_convolution.pair_channels`.
    """
    own = norm_dim(normed) == dim
    assert own or not copied, "a norm over segments that all ranks have, and others"
    if len(segments) > 1:
        names = ("original0", "original1") if own else ("original1",)
        take_apart(normed, mesh, segments, dict.fromkeys(names, dim), copied, behind)
    for name, parameter in list(normed._parameters.items()):
        assert parameter is not None
        cut, wanted = name == "original1" or own, parameter.requires_grad
        normed._parameters[name] = (
            shard_parameter(parameter, mesh, dim, requires_grad=wanted)
            if cut else replicate_parameter(parameter, mesh, requires_grad=wanted)
        )  # fmt: skip
    normed.__class__ = _CutNormOfParts if len(segments) > 1 else _CutNorm


class _CutNorm(ParametrizationList):
    """Gives this rank's channels of the weight."""

    def forward(self) -> Tensor:
        g, v = (self._parameters[name] for name in ("original0", "original1"))
        assert g is not None and v is not None
        own = g.placements[0].is_shard()  # type: ignore[attr-defined]
        return _weight(mesh_of(v), cast(Tensor, local(g)), cast(Tensor, local(v)), norm_dim(self), own=own)


class _CutNormOfParts(_CutNorm):
    """The same of several segments, one after the other."""

    def packed_parameters(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        return packed_parameters(self)

    def forward(self) -> Tensor:
        g, v = self._parameters.get("original0"), cast(Tensor, joined(self, "original1"))
        norms = joined(self, "original0") if g is None else local(g)
        mesh = mesh_of(next(self.parameters()))
        return _weight(mesh, cast(Tensor, norms), v, norm_dim(self), own=g is None)


def _weight(mesh: DeviceMesh, g: Tensor, v: Tensor, dim: int, *, own: bool) -> Tensor:
    """What a rank's part of v makes; ``own``: whether it has all that each of its norms is of."""
    if mesh.size() == 1 or own:
        return torch._weight_norm(v, g, dim)
    wide = v if v.dtype == torch.float64 else v.float()
    squares = wide.square().sum([other for other in range(v.dim()) if other != dim], keepdim=True)
    size = copy_to_group(all_reduce(squares, mesh), mesh).sqrt()
    return (wide * (copy_to_group(g, mesh) / size)).to(v.dtype)
