"""Parameters of a module that keeps its code, each cut along one dimension: attention sinks, a bias per head.

::

    p_r = this rank's part of p along ``dim``;   dp_r is complete, because only parts on this rank meet it

A packed parameter, of which a rank needs its part of each of several runs (the convolution over queries, keys and
values of Qwen3-Next), stays whole: its code sees these parts, and its gradient is summed over the ranks.  Some runs may
be *copied*: every rank sees all of them, and has a share of their gradient (Mamba 2).  A buffer (the multipliers of
Falcon-H1) is seen in the same way.  A buffer without runs (the means of a batch norm) is cut as a parameter is, and the
module's code may write to this rank's part; so is a batch norm over several segments of channels
(:mod:`tpkernels.nn.packed_norm`).

It assumes that a plan has proven this.  To the module's code ``module.name`` is the local tensor, as with
:func:`tpkernels.nn.replicate_parameters`; the parameter itself is a DTensor of the original shape, ``Shard(dim)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.packed_norm import check_packed_norm, pack_norm
from tpkernels.nn.parameters import mesh_of, replicate_parameter, shard_buffer, shard_parameter, tp_mesh
from tpkernels.nn.replicated import local_property
from tpkernels.ops import copy_to_group
from tpkernels.partition import copied_places

__all__ = ["Cuts", "check_slices", "read_packed", "slice_parameters", "sliced_parameters"]


class Cuts(NamedTuple):
    """What is cut of a module: parameters and dimensions."""

    dims: Mapping[str, int]
    runs: Mapping[str, tuple[int, ...]]
    """The sizes of the runs of packed parameters."""
    copied: int = 0
    behind: int = 0
    """How many of these runs every rank has whole, and how many are behind them."""
    segments: tuple[int, ...] = ()
    """Of a batch norm: the segments of channels of which a rank has its part of each."""

    def parts(self, name: str, rank: int, world_size: int) -> list[tuple[int, int]]:
        """Where a rank's part of each run begins in the run, and its size."""
        sizes = self.runs[name]
        places = copied_places(len(sizes), self.copied, self.behind)
        each = [size // world_size for size in sizes]
        return [
            (0, size) if whole else (rank * part, part) for size, part, whole in zip(sizes, each, places, strict=True)
        ]


def check_slices(module: nn.Module, cuts: Cuts, mesh: DeviceMesh) -> None:
    """Refuse what :func:`slice_parameters` cannot cut."""
    if cuts.segments:
        check_packed_norm(module, cuts.segments, mesh.size())
    dims, runs = cuts.dims, cuts.runs
    for name, dim in dims.items():
        parameter: Tensor | None = module._buffers.get(name, module._parameters.get(name))
        if parameter is None or isinstance(parameter, DTensor) or not 0 <= dim < parameter.dim():
            raise ValueError(f"{type(module).__name__} has no whole parameter {name!r} with a dimension {dim}")
        sizes = runs.get(name, ())
        places = copied_places(len(sizes), cuts.copied, cuts.behind) if sizes else ()
        uneven = any(size % mesh.size() and not whole for size, whole in zip(sizes, places, strict=True))
        if sizes and (sum(sizes) != parameter.shape[dim] or uneven):
            raise ValueError(
                f"runs of {list(sizes)} of {type(module).__name__}.{name} must make up its {parameter.shape[dim]} "
                f"elements, and divide over {mesh.size()} ranks"
            )
    if not runs.keys() <= dims.keys():
        raise ValueError(f"runs are of parameters that have a dimension in {dict(dims)}, got {dict(runs)}")


def slice_parameters(module: nn.Module, cuts: Cuts, group: GroupLike) -> nn.Module:
    """Cut the module's own parameters in place; returns it.

    Raises:
        ValueError: it has no such parameter, or the parameter has no such dimension, or is a DTensor already; runs that
            do not make up the dimension, or do not divide over the ranks.
    """
    mesh = tp_mesh(group, module)
    check_slices(module, cuts, mesh)
    if cuts.segments:
        return pack_norm(module, cuts.segments, mesh)
    for name, dim in cuts.dims.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            buffer = cast(Tensor, module._buffers[name])
            module._buffers[name] = buffer if name in cuts.runs else shard_buffer(buffer, mesh, dim)
            continue
        wanted = parameter.requires_grad
        if name in cuts.runs:
            module._parameters[name] = replicate_parameter(parameter, mesh, requires_grad=wanted)
        else:
            module._parameters[name] = shard_parameter(parameter, mesh, dim, requires_grad=wanted)
    alone = tuple(name for name in cuts.dims if name not in cuts.runs)
    module._tpk_sliced = alone  # type: ignore[assignment]
    if alone:
        of_parts: Any = type(module)
        module.__class__ = _part_view(of_parts, tuple((name, cuts.dims[name]) for name in alone))
    if cuts.runs:
        rank = mesh.get_local_rank()
        packed = tuple(
            (name, cuts.dims[name], tuple(sizes), tuple(cuts.parts(name, rank, mesh.size())), cuts.copied, cuts.behind)
            for name, sizes in cuts.runs.items()
        )
        kind: Any = type(module)
        module.__class__ = _packed_view(kind, packed)
    return module


@lru_cache(maxsize=256)
def _part_view(cls: type[nn.Module], dims: tuple[tuple[str, int], ...]) -> type[nn.Module]:
    """A subclass of ``cls`` whose attributes are this rank's parts, along dimensions, of parameters and buffers."""
    members: dict[str, Any] = {name: _part_property(name, dim) for name, dim in dims}
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members))


def _part_property(name: str, dim: int) -> property:
    of_parameter = local_property(name, sum_gradients=False).fget
    assert of_parameter is not None

    def read(self: nn.Module) -> Tensor | None:
        part: Tensor | None = _part_of_buffer(self._buffers[name]) if name in self._buffers else of_parameter(self)
        if part is None or isinstance(part, DTensor) or torch.compiler.is_compiling():
            return part
        if (told := read_packed.get()) is not None:
            told(part, dim, (part.shape[dim],), 0, 0)
        return part

    return property(read)


def _part_of_buffer(buffer: Tensor | None) -> Tensor | None:
    if not isinstance(buffer, DTensor):
        return buffer
    return buffer.to_local() if torch.compiler.is_compiling() else buffer._local_tensor


_Packed = tuple[str, int, tuple[int, ...], tuple[tuple[int, int], ...], int, int]
"""A packed parameter: its name, its dimension, the sizes of its runs, a rank's part of each, and how many are copied
and behind these."""
read_packed: ContextVar[Callable[[Tensor, int, tuple[int, ...], int, int], None] | None] = ContextVar(
    "read_packed", default=None
)
"""Who is told of each part of a parameter or buffer that code reads, and how it is cut."""


@lru_cache(maxsize=256)
def _packed_view(cls: type[nn.Module], packed: tuple[_Packed, ...]) -> type[nn.Module]:
    """A subclass of ``cls`` whose attributes are this rank's parts of the runs of ``packed`` parameters."""
    members: dict[str, Any] = {one[0]: _packed_property(*one) for one in packed}
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members))


def _packed_property(
    name: str, dim: int, sizes: tuple[int, ...], parts: tuple[tuple[int, int], ...], copied: int, behind: int
) -> property:
    def read(self: nn.Module) -> Tensor | None:
        if name in self._buffers:
            whole = cast(Tensor, self._buffers[name])
        else:
            parameter: Tensor | None = self._parameters[name]
            if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:  # as of replicated parameters
                return parameter
            mesh, whole = mesh_of(parameter), parameter.to_local()
            if whole.requires_grad and mesh.size() > 1:
                refuse(mesh, "a packed parameter", "its gradients are sums over each rank's part")
                whole = copy_to_group(whole, mesh)
        runs = whole.split(list(sizes), dim)
        part = torch.cat([run.narrow(dim, *part) for run, part in zip(runs, parts, strict=True)], dim)
        if (told := read_packed.get()) is not None:
            told(part, dim, tuple(size for _, size in parts), copied, behind)
        return part

    return property(read)


def sliced_parameters(module: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The local tensors of what was cut in ``module``, and the dimension; not those that tell when they are read."""
    for name in getattr(type(module), "_tpk_sliced", ()):
        parameter: Any = module._parameters.get(name)
        if isinstance(parameter, DTensor):
            placement = parameter.placements[-1]
            assert isinstance(placement, Shard)
            yield parameter._local_tensor, placement.dim
