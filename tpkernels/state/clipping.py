"""The norm of all gradients of a model whose parameters are cut, and clipping by it.

::

    norm = (sum over shards |g|^p  +  sum over replicas, once, |g|^p) ^ (1/p)

Each rank takes the norm of what it holds; the norms travel, one number per rank, and are combined in rank order, so
that all ranks get the same bits.

``torch.nn.utils.clip_grad_norm_`` is not used, because it refuses parameters of several meshes and mixes of DTensors
and plain tensors, and because its collectives wait without the group's checks and deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpkernels.comm.groups import group_size
from tpkernels.comm.same_bits import anywhere, same_bits_of
from tpkernels.nn.gathering import gathered_over
from tpkernels.nn.retired import check_current
from tpkernels.ops import all_gather
from tpkernels.partition import chunk_sizes
from tpkernels.state.originals import local_of

__all__ = ["clip_grad_norm_"]

Axes = tuple[object, tuple[int, ...]]
"""A mesh, and the axes of it that cut a gradient; None and none where nothing does."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``; the norm before that, equal on all ranks.

    As ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, but the result is a plain tensor, and norms of bf16
    and fp16 gradients are accumulated and returned in fp32.  Parameters may be on several meshes, or plain: gradients
    of plain ones and of replicas must be equal on all ranks and count once.  All ranks of the model call it.
    ``foreach=False``: one gradient at a time.

    Examples:
        >>> mlp = tpk.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)), mesh["tp"])
        >>> mlp(torch.ones(4, 8)).sum().backward()
        >>> norm = tpk.clip_grad_norm_(mlp.parameters(), 1.0)
        >>> bool(norm > 1) and torch.allclose(tpk.clip_grad_norm_(mlp.parameters(), 2.0), torch.tensor(1.0))
        True

    Raises:
        ValueError: a negative ``max_norm``, a ``norm_type`` that is not positive, gradients that are partial sums,
            parameters that ``tpk.parallelize`` has replaced.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``.
    """
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    check_current(held, "clip_grad_norm_ was given")
    with_grads = [parameter for parameter in held if parameter.grad is not None]
    grads = [cast(Tensor, parameter.grad) for parameter in with_grads]
    p = float(norm_type)
    if not p > 0 or not max_norm >= 0:
        raise ValueError(f"norm_type ({norm_type}) must be positive and max_norm ({max_norm}) at least 0")
    if not grads:
        return torch.tensor(0.0)
    locals_ = [local_of(grad) for grad in grads]
    by_axes: dict[Axes, list[Tensor]] = {}
    in_units: list[tuple[Axes, Tensor, Tensor]] = []
    for parameter, grad, local in zip(with_grads, grads, locals_, strict=True):
        axes, part = _of_one_replica(grad, local, _shard_axes(parameter, grad))
        blocks = _blocks(grad, part, axes)
        if blocks is None:
            in_units.append((axes, grad, part))
        else:
            by_axes.setdefault(axes, []).extend(blocks)
    device = locals_[0].device
    dtype = torch.float64 if any(local.dtype == torch.float64 for local in locals_) else torch.float32
    norms = [_norm_over(axes, mine, p, dtype, device) for axes, mine in by_axes.items()]
    norms += [_norm_of_units(*one, p, dtype, device) for one in in_units]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), p)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {p} of the gradients is {norm.item()}, so they cannot be clipped; "
            "error_if_nonfinite=False scales them by it all the same"
        )
    _scale(locals_, (max_norm / (norm + 1e-6)).clamp(max=1.0), foreach)
    return norm


def _shard_axes(parameter: Tensor, grad: Tensor) -> Axes:
    """The mesh that a gradient lives on, and the axes of it that cut it.

    The mesh is the parameter's: that of a gradient may be an equal one of another group, which torch has cached.
    """
    if not isinstance(grad, DTensor):
        return None, ()
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"a gradient of shape {tuple(grad.shape)} is a partial sum ({grad.placements}): reduce it first"
        )
    axes = tuple(axis for axis, placement in enumerate(grad.placements) if not placement.is_replicate())
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else grad.device_mesh
    return (mesh, axes) if axes else (None, ())


def _of_one_replica(grad: Tensor, local: Tensor, axes: Axes) -> tuple[Axes, Tensor]:
    """Where tensor parallelism gives the same bits, the part that it alone leaves: the replicas that share it would cut
    it in other places at each degree."""
    mesh, dims = axes
    if not dims or not anywhere():
        return axes, local
    of_mesh = cast(DeviceMesh, mesh)
    kept = [axis for axis in range(of_mesh.ndim) if same_bits_of(of_mesh.get_group(axis))]
    others = [axis for axis in dims if axis not in kept]
    if not kept or not others:
        return axes, local
    if len(others) > 1:
        raise ValueError(f"same_bits: a gradient is cut along {len(others)} axes of {mesh} beside tensor parallelism")
    left = tuple(axis for axis in dims if axis in kept)
    return ((mesh, left) if left else (None, ())), gathered_over(cast(DTensor, grad), others[0])


def _blocks(grad: Tensor, local: Tensor, axes: Axes) -> list[Tensor] | None:
    """The gradient in as many parts as the largest degree that is to give the same bits has ranks, or as it is; None:
    it does not divide into so many, and is one of whole experts."""
    found = _cut_for_same_bits(grad, axes)
    if found is None:
        return [local]
    group, placement, same_bits = found
    total, own, size = grad.shape[placement.dim], local.shape[placement.dim], group_size(group)
    if total % same_bits == 0:
        blocks = same_bits // size
        return [part.clone(memory_format=torch.contiguous_format) for part in local.chunk(blocks, placement.dim)]
    if own != chunk_sizes(total, size)[group.rank()]:
        raise ValueError(
            f"same_bits={same_bits}: a gradient of shape {tuple(grad.shape)}, of which this rank has {own} along "
            f"dimension {placement.dim}, is cut neither into blocks of one size nor as torch.chunk cuts"
        )
    return None


def _cut_for_same_bits(grad: Tensor, axes: Axes) -> tuple[dist.ProcessGroup, Shard, int] | None:
    """The group over which ``grad`` is cut, how, and ``same_bits``, if that is asked for."""
    mesh, dims = axes
    if len(dims) != 1:
        return None
    group = cast(DeviceMesh, mesh).get_group(dims[0])
    same_bits = same_bits_of(group)
    return (group, cast(Shard, cast(DTensor, grad).placements[dims[0]]), same_bits) if same_bits else None


def _norm_of_units(
    axes: Axes, grad: Tensor, local: Tensor, p: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Of a gradient of whole experts, from the norm of each: as many numbers at every degree."""
    found = _cut_for_same_bits(grad, axes)
    assert found is not None
    group, placement, _ = found
    own = torch.zeros(local.shape[placement.dim], dtype=dtype, device=device)
    for number, unit in enumerate(local.unbind(placement.dim)):
        whole = unit.clone(memory_format=torch.contiguous_format)
        own[number] = torch.linalg.vector_norm(whole, p, dtype=dtype)
    sizes = chunk_sizes(grad.shape[placement.dim], group_size(group))
    norm: Tensor = torch.linalg.vector_norm(all_gather(own, group, shard_sizes=sizes), p)
    return norm


def _norm_over(axes: Axes, mine: list[Tensor], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    mesh, dims = axes
    parts = [torch.linalg.vector_norm(local, p, dtype=dtype).to(device) for local in mine if local.numel()]
    norm: Tensor = torch.zeros((), dtype=dtype, device=device)
    if parts:
        norm = torch.linalg.vector_norm(torch.stack(parts), p)
    for axis in dims:
        group = cast(DeviceMesh, mesh).get_group(axis)
        if parts and same_bits_of(group):  # by block and gradient, as many numbers at every degree
            blocks = same_bits_of(group) // group_size(group)
            by_block = torch.stack(parts).view(-1, blocks).t().contiguous()
            norm = torch.linalg.vector_norm(all_gather(by_block, group, dim=0), p)
            continue
        norm = torch.linalg.vector_norm(all_gather(norm.reshape(1), group, dim=0), p)
    return norm


def _scale(grads: list[Tensor], factor: Tensor, foreach: bool | None) -> None:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), same in kinds.items():
        by = factor.to(device)
        if foreach is False:
            for grad in same:
                grad.mul_(by)
        else:
            torch._foreach_mul_(same, by)
