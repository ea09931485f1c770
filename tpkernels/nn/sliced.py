"""Parameters of a module that keeps its code, each cut along one dimension: attention sinks, a bias per head.

::

    p_r = this rank's part of p along ``dim``;   dp_r is complete, because only parts on this rank meet it

It assumes that a plan has proven this.  To the module's code ``module.name`` is the local tensor, as with
:func:`tpkernels.nn.replicate_parameters`; the parameter itself is a DTensor of the original shape, ``Shard(dim)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.parameters import shard_parameter, tp_mesh
from tpkernels.nn.replicated import show_local

__all__ = ["check_slices", "slice_parameters", "sliced_parameters"]


def check_slices(module: nn.Module, dims: Mapping[str, int]) -> None:
    """Refuse what :func:`slice_parameters` cannot cut."""
    for name, dim in dims.items():
        parameter = module._parameters.get(name)
        if parameter is None or isinstance(parameter, DTensor) or not 0 <= dim < parameter.dim():
            raise ValueError(f"{type(module).__name__} has no whole parameter {name!r} with a dimension {dim}")


def slice_parameters(module: nn.Module, dims: Mapping[str, int], group: GroupLike) -> nn.Module:
    """Cut the module's own parameters ``dims`` in place; returns it.

    Raises:
        ValueError: it has no such parameter, or the parameter has no such dimension, or is a DTensor already.
    """
    mesh = tp_mesh(group, module)
    check_slices(module, dims)
    for name, dim in dims.items():
        parameter = module._parameters[name]
        assert parameter is not None
        module._parameters[name] = shard_parameter(parameter, mesh, dim, requires_grad=parameter.requires_grad)
    module._tpk_sliced = tuple(dims)  # type: ignore[assignment]
    show_local(module, tuple(dims))
    return module


def sliced_parameters(module: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """The local tensors of what was cut in ``module``, and the dimension."""
    for name in getattr(module, "_tpk_sliced", ()):
        parameter: Any = module._parameters.get(name)
        if isinstance(parameter, DTensor):
            placement = parameter.placements[-1]
            assert isinstance(placement, Shard)
            yield parameter._local_tensor, placement.dim
