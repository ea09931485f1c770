"""The whole of a DTensor, gathered by this library's own op, so that every wait is bounded and names who is missing.

``DTensor.full_tensor()`` uses c10d's functional collectives: a rank that calls it alone hangs, or is aborted by gloo.
This module owns the order in which the axes of a mesh have cut a tensor, including FSDP2's cut of a tensor that tensor
parallelism has cut.  Any dtype can be gathered, because bits are copied.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tpkernels.ops import all_gather, all_reduce
from tpkernels.ops.checks import DTYPES
from tpkernels.partition import chunk_sizes

__all__ = ["gathered", "gathered_over", "pieces_of", "true_everywhere"]

_BITS = {2: torch.float16, 4: torch.float32, 8: torch.float64}


def gathered(tensor: Tensor) -> Tensor:
    """What ``tensor.full_tensor()`` gives, without a place in a graph; a plain tensor is returned as it is.

    All ranks of the mesh call it.  Where nothing is cut the result is this rank's own tensor, not a copy.

    Raises:
        ValueError: a placement that is neither replicated nor cut as ``torch.chunk`` cuts it, or each piece of it.
        GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: see :mod:`tpkernels.errors`.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if tensor.is_meta:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    mesh = tensor.device_mesh
    local = cast(DTensor, tensor.detach()).to_local()
    pieces = pieces_of(tensor)
    if pieces is not None and mesh.ndim == 1:
        dim, count = pieces
        sizes = list(chunk_sizes(tensor.shape[dim] // count, mesh.size()))
        return torch.cat([_gather(one, mesh.get_group(), dim, sizes) for one in local.chunk(count, dim)], dim)
    for axis, dim, sizes in reversed(_cuts(tensor)):
        local = _gather(local, mesh.get_group(axis), dim, sizes)
    return local


def gathered_over(tensor: DTensor, axis: int) -> Tensor:
    """This rank's part of a DTensor that an axis of its mesh, which has cut it last, had not cut.

    FSDP2 is such an axis: it cuts what tensor parallelism has cut.  All ranks of the axis call it.

    Raises:
        ValueError: another axis has cut the same dimension later.
        GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: see :mod:`tpkernels.errors`.
    """
    local, cuts = cast(DTensor, tensor.detach()).to_local(), _cuts(tensor)
    own = [(number, dim, sizes) for number, (cut, dim, sizes) in enumerate(cuts) if cut == axis]
    for number, dim, sizes in own:
        if any(later == dim and len(parts) > 1 for _, later, parts in cuts[number + 1 :]):
            raise ValueError(f"axis {axis} of {tensor.device_mesh} is not the last that cut dimension {dim}")
        local = _gather(local, tensor.device_mesh.get_group(axis), dim, sizes)
    return local


def true_everywhere(tensor: Tensor) -> bool:
    """Whether all elements are true, on all ranks of the mesh; ``bool(tensor.all())`` tells of this rank's part alone.

    All ranks of the mesh call it, and get the same answer.

    Raises:
        GroupMismatch, PeerLost, CollectiveTimeout, GroupPoisoned: see :mod:`tpkernels.errors`.
    """
    if not isinstance(tensor, DTensor):
        return bool(tensor.all())
    mesh = tensor.device_mesh
    wrong = tensor.to_local().logical_not().any().to(torch.float32).reshape(1)
    for axis in range(mesh.ndim):
        wrong = all_reduce(wrong, mesh.get_group(axis))
    return not bool(wrong)


def pieces_of(tensor: Tensor) -> tuple[int, int] | None:
    """A dimension of which each rank holds several pieces, and how many; None where every part is one box.

    transformers cuts a weight in this way that has gate and up in it (``packed_colwise``): a rank has rows of both.
    """
    for axis, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        factor, dim = getattr(placement, "split_factor", 1), getattr(placement, "dim", 0) % max(tensor.dim(), 1)
        later = cast(DTensor, tensor).placements[axis + 1 :]
        sizes = cast(DTensor, tensor).device_mesh.shape[axis + 1 :]
        cut_before = math.prod(size for size, one in zip(sizes, later, strict=True) if getattr(one, "dim", None) == dim)
        if factor not in (1, cut_before):  # FSDP2's factor is the number of parts that the other axes have made
            return dim, factor
    return None


def _cuts(tensor: DTensor) -> list[tuple[int, int, list[int]]]:
    """Axis, dimension and every rank's size of each cut, outermost first."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not part of the mesh {mesh}")
    if pieces_of(tensor) is not None:
        raise ValueError(f"a tensor of several pieces on each rank ({tensor.placements}) is gathered on one axis alone")
    placed = list(enumerate(tensor.placements))
    # An axis with a split factor has cut what the axes after it had cut before (FSDP2's way).
    order = [one for one in placed if not hasattr(one[1], "split_factor")]
    order += [one for one in placed if hasattr(one[1], "split_factor")]
    shape, cuts = list(tensor.shape), []
    for axis, placement in order:
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial():
            raise ValueError(f"a tensor with placements {tensor.placements} cannot be gathered")
        sizes = list(chunk_sizes(shape[dim], mesh.size(axis)))
        cuts.append((axis, dim, sizes))
        shape[dim] = sizes[coordinate[axis]]
    held = tuple(tensor._local_tensor.shape)
    if held != tuple(shape):
        raise ValueError(f"this rank holds {held} of a tensor {tuple(tensor.shape)} cut by {tensor.placements}")
    return cuts


def _gather(part: Tensor, group: torch.distributed.ProcessGroup, dim: int, sizes: list[int]) -> Tensor:
    dtype, part = part.dtype, part.contiguous()
    if dtype in DTYPES:
        return all_gather(part, group, dim=dim, shard_sizes=sizes)
    if part.is_complex():
        return torch.view_as_complex(_gather(torch.view_as_real(part), group, dim, sizes))
    if part.element_size() == 1:  # every byte is a number that fp16 has
        numbers = all_gather(part.view(torch.uint8).to(torch.float16), group, dim=dim, shard_sizes=sizes)
        return numbers.to(torch.uint8).view(dtype)
    return all_gather(part.view(_BITS[part.element_size()]), group, dim=dim, shard_sizes=sizes).view(dtype)
