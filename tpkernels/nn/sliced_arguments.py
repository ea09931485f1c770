"""Arguments of a module of which a rank takes its heads' part: alibi, or keys and values that somebody else has made.

::

    module(..., name=a)   runs as   module(..., name=[this rank's heads of run 0 of a | of run 1 | ...])

The dimension consists of runs of ``heads`` elements (``[batch * heads, 1, length]``), or of one run.  The gradient of
the part is gathered to that of ``a``, which is whole on every rank.  What stands in a tuple, a list or a dict has a
name as well: ``turns[0]``, ``shared['full'][1]``; the module gets a copy of what holds it, and must not change that,
because nobody else would see the change.  It assumes that a plan has proven that the module needs no more.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.ops import shard
from tpkernels.partition import unit_sizes

__all__ = ["Holders", "named_arguments", "slice_arguments", "with_arguments"]

DEPTH = 4
"""Of tuples, lists and dicts within one another; one may hold itself."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _names(module: nn.Module) -> list[str]:
    forward = getattr(type(module), "forward", None)
    if forward is None:  # a layer of Keras
        return []
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, and what stands in tuples, lists and dicts among them; further positional ones
    have no names, nor have those of a module without ``forward``, and what is in a dict by another key than a word."""
    named = dict(zip(_names(module), args, strict=False)) | dict(kwargs)
    return named | {path: item for name, one in named.items() for path, item in _within(name, one, DEPTH)}


def _within(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    for key, item in _items(value).items() if depth else ():
        if type(key) is int or key.isidentifier():
            path = f"{name}[{key!r}]"
            yield path, item
            yield from _within(path, item, depth - 1)


def _items(value: Any) -> dict[Any, Any]:
    """What a tuple, a list or a dict with words for keys holds."""
    if type(value) in (tuple, list):
        return dict(enumerate(value))
    held = value.data if isinstance(value, UserDict) else value
    return held if type(held) is dict and all(type(key) is str for key in held) else {}


def with_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with other values for some of its arguments, and for some of what stands in them."""

    def changed(name: str, value: Any) -> Any:
        if name in values:
            return values[name]
        if not any(path.startswith(f"{name}[") for path in values):
            return value
        items = {key: changed(f"{name}[{key!r}]", item) for key, item in _items(value).items()}
        if isinstance(value, UserDict):
            other = copy.copy(value)
            other.data = items
            return other
        return items if type(value) is dict else type(value)(items.values())

    names = _names(module)[: len(args)]
    first = [changed(name, value) for name, value in zip(names, args, strict=False)]
    return (*first, *args[len(names) :]), {name: changed(name, value) for name, value in kwargs.items()}


class Holders:
    """What the tuples, lists and dicts of a call hold of whose items, ``names``, a rank takes its part."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Iterable[str]
    ) -> None:
        outer = {name.partition("[")[0] for name in names if "[" in name}
        given = dict(zip(_names(module), args, strict=False)) | dict(kwargs)
        self._held = {name: (given[name], _held(given[name], DEPTH)) for name in sorted(outer & given.keys())}

    @property
    def changed(self) -> list[str]:
        """The arguments that hold something else now."""
        return [name for name, (one, held) in self._held.items() if not _alike(held, _held(one, DEPTH))]


def _held(value: Any, depth: int) -> list[tuple[Any, Any, Any]]:
    """By key: each item, and what is in it."""
    return [(key, item, _held(item, depth - 1)) for key, item in _items(value).items()] if depth else []


def _alike(some: list[tuple[Any, Any, Any]], others: list[tuple[Any, Any, Any]]) -> bool:
    return len(some) == len(others) and all(
        one[0] == other[0] and one[1] is other[1] and _alike(one[2], other[2])
        for one, other in zip(some, others, strict=True)
    )


def slice_arguments(module: nn.Module, cuts: Mapping[str, tuple[int, int]], mesh: DeviceMesh) -> None:
    """Let ``module`` take its part of ``cuts``, the dimension and the number of heads of each argument, from now on.

    A call without the argument, or with None, is left alone.  One in which the module changes what holds an argument
    raises behind it, where it is not compiled.
    """
    calls: list[Holders] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = named_arguments(module, args, kwargs)
        present = {name: cut for name, cut in cuts.items() if given.get(name) is not None}
        parts = {name: _part(name, given[name], *cut, mesh) for name, cut in present.items()}
        args, kwargs = with_arguments(module, args, kwargs, parts)
        if not torch.compiler.is_compiling():
            calls.append(Holders(module, args, kwargs, parts))
        return args, kwargs

    def behind(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if calls and (changed := calls.pop().changed):
            raise ValueError(
                f"the module changes what {', '.join(changed)} holds, of which it has a part: this call takes "
                "another path than those that the plan was proven for; make the plan with example_inputs like those of "
                "this call"
            )

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(behind, with_kwargs=True, always_call=True)


def _part(name: str, value: Any, dim: int, heads: int, mesh: DeviceMesh) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() <= dim or value.shape[dim] % heads:
        what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a tensor with runs of {heads} heads in dimension {dim}, got {what}")
    runs = value.unflatten(dim, (-1, heads))
    return shard(runs, mesh, dim=dim + 1, shard_sizes=unit_sizes(heads, mesh.size())).flatten(dim, dim + 1)
