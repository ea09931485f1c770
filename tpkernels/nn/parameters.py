"""Parameters as DTensors, and the mesh that they live on.

It owns how a full tensor becomes this rank's part, and how ``forward`` gets a local tensor again.

Sharded sizes follow ``torch.chunk`` (10 over 4 ranks: 3, 3, 3, 1; 3 over 4: 1, 1, 1, 0), because that is what
``DTensor``'s ``Shard`` means: ``full_tensor()``, distributed checkpoints, optimizers and ``clip_grad_norm_`` are then
exact for every size.  Where a cut in larger units differs from that, for example 10 heads of 64 features over 3 ranks
by whole heads, the parameter has a dimension for the units, ``[10, 64, ...]``, and ``Shard`` cuts that one.  Where that
would leave a rank without any (10 over 8), every rank has as many places, ``[16, 64, ...]``, and the last of some are
zeros that nobody reads.  With ``same_bits`` so has every block (:mod:`tpkernels.nn.blocks`).

Modules keep no mesh of their own: they ask their weight, so that ``copy.deepcopy``, ``.to()`` and FSDP2's replacement
of parameters need no help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.nn.blocks import Blocks
from tpkernels.nn.same_weights import equal_on_ranks
from tpkernels.ops.main_grad import with_sink
from tpkernels.partition import as_shard, chunk_sizes, offsets, unit_sizes

__all__ = [
    "TP_AXES",
    "as_parameter",
    "check_unit",
    "cut_parameter",
    "has_units",
    "local",
    "local_parts",
    "mesh_of",
    "replicate_parameter",
    "shard_buffer",
    "shard_parameter",
    "shard_places",
    "shard_units",
    "tp_axis",
    "tp_mesh",
]

TP_AXES = ("tp", "tensor_parallel")
"""Names of a mesh's axis for tensor parallelism: ours, which others share, and Lightning's."""


def tp_axis(mesh: DeviceMesh) -> str | None:
    """The name of the axis for tensor parallelism, or None."""
    names = mesh.mesh_dim_names or ()
    return next((name for name in TP_AXES if name in names), None)


def tp_mesh(group: GroupLike, of: nn.Module | torch.device | str | None = None) -> DeviceMesh:
    """The one-dimensional mesh that parameters live on: the mesh given, the "tp" axis of a larger one (in Lightning
    "tensor_parallel"), or a group's.

    A group may serve several devices, and DTensor moves weights to the one of the mesh.  So a group's mesh is for the
    device that the weights are on, those ``of`` a module or on a device (default: where torch makes tensors).  Weights
    on one that the group does not serve, "meta" for example, go to the group's own.

    Raises:
        ValueError: no group, or a mesh of several axes none of which is "tp", or this rank is not in it.
    """
    if isinstance(group, dist.ProcessGroup):
        backends, device = resolve(group).backends, _device(of)
        return DeviceMesh.from_group(group, device if backends.serving(device) else backends.own_device)
    if not isinstance(group, DeviceMesh):
        raise ValueError(f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    if group.ndim > 1:
        axis = tp_axis(group)
        if axis is None:
            axes = group.mesh_dim_names or group.ndim
            raise ValueError(f'group is a mesh with axes {axes}; pass one axis, or name one "tp"')
        group = group[axis]
    if group.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {group}")
    return group


def _device(of: nn.Module | torch.device | str | None) -> str:
    if isinstance(of, nn.Module):
        parameter = next(of.parameters(), None)
        of = None if parameter is None else parameter.device
    return torch.device(torch.get_default_device() if of is None else of).type


def check_unit(what: str, total: int, unit: int) -> None:
    """Refuse a cut in multiples of ``unit`` (a head's features) where the size is no multiple of it."""
    if unit < 1 or total % unit:
        raise ValueError(f"{what} ({total}) must be a multiple of unit ({unit})")


def has_units(total: int, unit: int, world_size: int) -> bool:
    """Whether a cut in multiples of ``unit`` is another one than ``Shard``'s, and needs a dimension for the units."""
    return chunk_sizes(total, world_size, unit) != chunk_sizes(total, world_size)


def shard_parameter(full: Tensor, mesh: DeviceMesh, dim: int, *, requires_grad: bool = True) -> nn.Parameter:
    """This rank's part of ``full`` as a parameter; only that part is copied.

    A collective call: ranks whose ``full`` differs take the first rank's, or raise (:func:`init_weights`).
    """
    full = equal_on_ranks(full, mesh)
    sizes = chunk_sizes(full.shape[dim], mesh.size())
    rank = mesh.get_local_rank()
    part = full.detach().narrow(dim, offsets(sizes)[rank], sizes[rank])
    return _parameter(_copy(part), mesh, [Shard(dim)], full.shape, requires_grad)


def shard_buffer(full: Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """This rank's part of ``full`` as a buffer; a collective call, as :func:`shard_parameter`."""
    part = shard_parameter(full, mesh, dim, requires_grad=False)
    return _whole(cast(DTensor, part)._local_tensor, mesh, [Shard(dim)], full.shape)


def shard_units(full: Tensor, mesh: DeviceMesh, dim: int, *, requires_grad: bool = True) -> nn.Parameter:
    """The same for a dimension of units, dealt out by :func:`unit_sizes`; what a rank has no unit for is zeros."""
    sizes = unit_sizes(full.shape[dim], mesh.size())
    if as_shard(full.shape[dim], mesh.size()):
        return shard_parameter(full, mesh, dim, requires_grad=requires_grad)
    full = equal_on_ranks(full, mesh).detach()
    rank, places = mesh.get_local_rank(), list(full.shape)
    places[dim] = sizes[0]
    part = full.new_zeros(places)
    part.narrow(dim, 0, sizes[rank]).copy_(full.narrow(dim, offsets(sizes)[rank], sizes[rank]))
    places[dim] *= mesh.size()
    return _parameter(part, mesh, [Shard(dim)], torch.Size(places), requires_grad)


def shard_places(
    full: Tensor, mesh: DeviceMesh, dim: int, blocks: Blocks, *, requires_grad: bool = True
) -> nn.Parameter:
    """The same for a dimension of units that lie in ``blocks``: this rank's blocks."""
    full = equal_on_ranks(full, mesh).detach()
    rank, own = mesh.get_local_rank(), len(blocks.counts) // mesh.size()
    places = blocks.with_places(full, dim)
    part = places.narrow(dim, rank * own * blocks.places, own * blocks.places)
    return _parameter(_copy(part), mesh, [Shard(dim)], places.shape, requires_grad)


def replicate_parameter(full: Tensor, mesh: DeviceMesh, *, requires_grad: bool = True) -> nn.Parameter:
    """A copy of ``full`` as a replicated parameter; a collective call, as :func:`shard_parameter`."""
    full = equal_on_ranks(full, mesh)
    return _parameter(_copy(full.detach()), mesh, [Replicate()], full.shape, requires_grad)


def cut_parameter(
    full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, requires_grad: bool = True, tp_axis: int = 0
) -> nn.Parameter:
    """This rank's part of ``full`` on a mesh of any number of axes, one placement for each; only that part is copied.

    A collective call, as :func:`shard_parameter`; ``tp_axis``: whose ranks must draw the same random numbers.
    """
    part = equal_on_ranks(full, mesh, tp_axis=tp_axis).detach()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            sizes = chunk_sizes(full.shape[placement.dim], mesh.size(axis))
            part = part.narrow(placement.dim, offsets(sizes)[coordinate[axis]], sizes[coordinate[axis]])
    return _parameter(_copy(part), mesh, placements, full.shape, requires_grad)


def local_parts(weight: Tensor, bias: Tensor | None) -> tuple[DeviceMesh, Tensor, Tensor | None]:
    """The mesh of ``weight``, and :func:`local` of both, in fewer steps where no gradient is recorded."""
    if type(weight) is DTensor and (bias is None or type(bias) is DTensor) and not torch.is_grad_enabled():
        return weight._spec.mesh, weight._local_tensor, None if bias is None else bias._local_tensor
    return mesh_of(weight), cast(Tensor, local(weight)), local(bias)


def local(parameter: Tensor | None) -> Tensor | None:
    """The tensor that this rank computes with; its gradient becomes the parameter's, with its placement."""
    if not isinstance(parameter, DTensor):
        return parameter
    if not torch.is_grad_enabled():
        return parameter._local_tensor  # what to_local() makes a view of; in small calls each microsecond shows
    if torch.compiler.is_compiling():
        return with_sink(parameter.to_local(), parameter)
    part: Tensor = _Local.apply(parameter)  # type: ignore[no-untyped-call]
    return with_sink(part, parameter)


class _Local(torch.autograd.Function):
    """``parameter.to_local()``, whose gradient has the strides of the parameter, whole and here.

    That of ``to_local()`` has other ones where parts are uneven: those of parts that are all as large as this rank's.
    Autograd makes a gradient of other strides anew, and torch before 2.13 gathers uneven parts for it, unasked.  That
    copy is made here, where the part lies in memory otherwise than the parameter's: fused optimizers look at neither.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.set_materialize_grads(False)  # who adds to main_grad gives none
        part = parameter._local_tensor
        ctx.spec, ctx.strides = parameter._spec, part.stride()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> DTensor | None:
        if gradient is None:
            return None
        if gradient.stride() != ctx.strides:
            gradient = gradient.new_empty_strided(gradient.shape, ctx.strides).copy_(gradient)
        mesh, placements = ctx.spec.mesh, ctx.spec.placements
        return DTensor.from_local(
            gradient, mesh, placements, run_check=False, shape=ctx.spec.shape, stride=ctx.spec.stride
        )


def mesh_of(parameter: Tensor) -> DeviceMesh:
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"a parameter of a tensor-parallel module must be a DTensor, got {type(parameter).__name__}: load state "
            "with load_state_dict and convert with .to(), which keep it one"
        )
    return parameter.device_mesh


def _copy(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device=part.device).copy_(part)


def _parameter(
    part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, requires_grad: bool
) -> nn.Parameter:
    return as_parameter(_whole(part, mesh, placements, shape), requires_grad)


def _whole(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def as_parameter(whole: DTensor, requires_grad: bool) -> nn.Parameter:
    """``nn.Parameter(whole)``, a leaf, on its very mesh.

    That constructor detaches, and DTensor takes the mesh of the result from a cache of earlier calls: an equal one, but
    its process groups may be gone.
    """
    whole.requires_grad_(requires_grad)
    whole._is_param = True
    return cast(nn.Parameter, whole)
