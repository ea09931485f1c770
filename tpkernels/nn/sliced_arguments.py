"""Arguments of a module of which a rank takes its heads' part: alibi, or another constant that is made for all heads.

::

    module(..., name=a)   runs as   module(..., name=[this rank's heads of run 0 of a | of run 1 | ...])

The dimension consists of runs of ``heads`` elements (``[batch * heads, 1, length]``), or of one run.  What stands in a
tuple or list has a name as well: ``turns[0]``.  It assumes that a plan has proven that the module needs no more.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.ops import shard
from tpkernels.partition import unit_sizes

__all__ = ["named_arguments", "slice_arguments", "with_arguments"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _names(module: nn.Module) -> list[str]:
    forward = getattr(type(module), "forward", None)
    if forward is None:  # a layer of Keras
        return []
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, and what stands in tuples and lists among them; further positional ones have
    no names, nor have those of a module without ``forward``."""
    named = dict(zip(_names(module), args, strict=False)) | dict(kwargs)
    return named | {f"{name}[{place}]": item for name, one in named.items() for place, item in enumerate(_items(one))}


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if type(value) in (tuple, list) else ()


def with_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with other values for some of its arguments."""

    def changed(name: str, value: Any) -> Any:
        if items := _items(value):
            value = type(value)(values.get(f"{name}[{place}]", item) for place, item in enumerate(items))
        return values.get(name, value)

    names = _names(module)[: len(args)]
    first = [changed(name, value) for name, value in zip(names, args, strict=False)]
    return (*first, *args[len(names) :]), {name: changed(name, value) for name, value in kwargs.items()}


def slice_arguments(module: nn.Module, cuts: Mapping[str, tuple[int, int]], mesh: DeviceMesh) -> None:
    """Let ``module`` take its part of ``cuts``, the dimension and the number of heads of each argument, from now on.

    A call without the argument, or with None, is left alone.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = named_arguments(module, args, kwargs)
        present = {name: cut for name, cut in cuts.items() if given.get(name) is not None}
        parts = {name: _part(name, given[name], *cut, mesh) for name, cut in present.items()}
        return with_arguments(module, args, kwargs, parts)

    module.register_forward_pre_hook(before, with_kwargs=True)


def _part(name: str, value: Any, dim: int, heads: int, mesh: DeviceMesh) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim] % heads:
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor with runs of {heads} heads in dimension {dim}, got {what}")
    runs = value.unflatten(dim, (-1, heads))
    return shard(runs, mesh, dim=dim + 1, shard_sizes=unit_sizes(heads, mesh.size())).flatten(dim, dim + 1)
