"""Parameters of a module that keeps its code, each cut along one dimension: attention sinks, a bias per head.

::

    p_r = this rank's part of p along ``dim``;   dp_r is complete, because only parts on this rank meet it

A packed parameter, of which a rank needs its part of each of several runs (the convolution over queries, keys and
values of Qwen3-Next), stays whole: its code sees these parts, and its gradient is summed over the ranks.

It assumes that a plan has proven this.  To the module's code ``module.name`` is the local tensor, as with
:func:`tpkernels.nn.replicate_parameters`; the parameter itself is a DTensor of the original shape, ``Shard(dim)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tpkernels.comm.groups import GroupLike
from tpkernels.comm.same_bits import refuse
from tpkernels.nn.parameters import mesh_of, replicate_parameter, shard_parameter, tp_mesh
from tpkernels.nn.replicated import show_local
from tpkernels.ops import copy_to_group

__all__ = ["check_slices", "slice_parameters", "sliced_parameters"]


Runs = Mapping[str, tuple[int, ...]]
"""The sizes of the runs of packed parameters."""
_NONE: Runs = MappingProxyType({})


def check_slices(module: nn.Module, dims: Mapping[str, int], runs: Runs, mesh: DeviceMesh) -> None:
    """Refuse what :func:`slice_parameters` cannot cut."""
    for name, dim in dims.items():
        parameter = module._parameters.get(name)
        if parameter is None or isinstance(parameter, DTensor) or not 0 <= dim < parameter.dim():
            raise ValueError(f"{type(module).__name__} has no whole parameter {name!r} with a dimension {dim}")
        sizes = runs.get(name, ())
        if sizes and (sum(sizes) != parameter.shape[dim] or any(size % mesh.size() for size in sizes)):
            raise ValueError(
                f"runs of {list(sizes)} of {type(module).__name__}.{name} must make up its {parameter.shape[dim]} "
                f"elements, and divide over {mesh.size()} ranks"
            )
    if not runs.keys() <= dims.keys():
        raise ValueError(f"runs are of parameters that have a dimension in {dict(dims)}, got {dict(runs)}")


def slice_parameters(module: nn.Module, dims: Mapping[str, int], group: GroupLike, *, runs: Runs = _NONE) -> nn.Module:
    """Cut the module's own parameters ``dims`` in place, packed ones by ``runs``; returns it.

    Raises:
        ValueError: it has no such parameter, or the parameter has no such dimension, or is a DTensor already; runs that
            do not make up the dimension, or do not divide over the ranks.
    """
    mesh = tp_mesh(group, module)
    check_slices(module, dims, runs, mesh)
    for name, dim in dims.items():
        parameter = module._parameters[name]
        assert parameter is not None
        wanted = parameter.requires_grad
        if name in runs:
            module._parameters[name] = replicate_parameter(parameter, mesh, requires_grad=wanted)
        else:
            module._parameters[name] = shard_parameter(parameter, mesh, dim, requires_grad=wanted)
    alone = tuple(name for name in dims if name not in runs)
    module._tpk_sliced = alone  # type: ignore[assignment]
    show_local(module, alone)
    if runs:
        packed = tuple((name, dims[name], tuple(sizes)) for name, sizes in runs.items())
        kind: Any = type(module)
        module.__class__ = _packed_view(kind, packed)
    return module


@lru_cache(maxsize=256)
def _packed_view(cls: type[nn.Module], packed: tuple[tuple[str, int, tuple[int, ...]], ...]) -> type[nn.Module]:
    """A subclass of ``cls`` whose attributes are this rank's parts of the runs of ``packed`` parameters."""
    members: dict[str, Any] = {name: _packed_property(name, dim, sizes) for name, dim, sizes in packed}
    members |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "__qualname__": cls.__qualname__}
    return cast("type[nn.Module]", type(cls.__name__, (cls,), members))


def _packed_property(name: str, dim: int, sizes: tuple[int, ...]) -> property:
    def read(self: nn.Module) -> Tensor | None:
        parameter: Tensor | None = self._parameters[name]
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:  # as of replicated parameters
            return parameter
        mesh, whole = mesh_of(parameter), parameter.to_local()
        if whole.requires_grad and mesh.size() > 1:
            refuse(mesh, "a packed parameter", "its gradients are sums over each rank's part")
            whole = copy_to_group(whole, mesh)
        rank = mesh.get_local_rank()
        each = [size // mesh.size() for size in sizes]
        runs = whole.split(list(sizes), dim)
        return torch.cat([run.narrow(dim, rank * size, size) for run, size in zip(runs, each, strict=True)], dim)

    return property(read)


def sliced_parameters(module: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The local tensors of what was cut in ``module``, and the dimension."""
    for name in getattr(module, "_tpk_sliced", ()):
        parameter: Any = module._parameters.get(name)
        if isinstance(parameter, DTensor):
            placement = parameter.placements[-1]
            assert isinstance(placement, Shard)
            yield parameter._local_tensor, placement.dim
