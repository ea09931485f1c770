"""What leaves a model, by path: the tensors in nested results, and the objects that keep tensors.

Containers (tuples, lists, mappings, dataclasses) are rebuilt with other tensors in them.  Any other object stays the
same object, because the next call of the model may want it back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Leaf", "Path", "leaves", "look", "name_of", "outline", "replaced"]

Path = tuple[Any, ...]
"""Keys, indices and, as :class:`str` after a dot, attributes."""

_OPAQUE = (type, nn.Module, DeviceMesh, ModuleType, FunctionType, MethodType, torch.dtype, torch.device, str, bytes)
_DEEPEST = 8


@dataclass(frozen=True)
class Leaf:
    """A tensor at ``path``; ``holder`` is the path of the object that keeps it as attribute ``path[len(holder)]``."""

    path: Path
    tensor: Tensor
    holder: Path | None


def leaves(value: Any) -> Iterator[Leaf]:
    """All tensors of a nested value, those that objects keep included."""
    yield from _leaves(value, (), None, set())


def _leaves(value: Any, path: Path, holder: Path | None, seen: set[int]) -> Iterator[Leaf]:
    if isinstance(value, Tensor):
        yield Leaf(path, value, holder)
        return
    if len(path) > _DEEPEST or id(value) in seen:
        return
    if _is_container(value):
        for key, item in _items(value):
            yield from _leaves(item, (*path, key), holder, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        seen.add(id(value))
        for name, item in vars(value).items():
            yield from _leaves(item, (*path, f".{name}"), path, seen)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or (is_dataclass(value) and not isinstance(value, type))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    else:
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in fields(value))


def look(value: Any, path: Path) -> Any:
    """What is at ``path``; attributes are read past properties."""
    for key in path:
        if isinstance(key, str) and key.startswith("."):
            value = vars(value)[key[1:]]
        else:
            value = value[key]
    return value


def replaced(value: Any, changes: Mapping[Path, Callable[[Tensor], Tensor]]) -> Any:
    """``value`` with the tensors at some paths changed; containers on the way are copies."""
    if () in changes:
        return changes[()](value)
    below: dict[Any, dict[Path, Callable[[Tensor], Tensor]]] = {}
    for path, change in changes.items():
        below.setdefault(path[0], {})[path[1:]] = change
    items = {key: replaced(item, below[key]) for key, item in _items(value) if key in below}
    if isinstance(value, tuple):
        every = [items.get(index, item) for index, item in enumerate(value)]
        return type(value)(*every) if hasattr(value, "_fields") else type(value)(every)
    fresh = copy.copy(value)
    for key, item in items.items():
        if isinstance(fresh, MutableMapping | list):
            fresh[key] = item
        else:
            object.__setattr__(fresh, key[1:], item)
    return fresh


def name_of(path: Path) -> str:
    """A path as a user would write it: ``attentions[0]``, ``past_key_values.layers[1].keys``."""
    text = ""
    for key in path:
        if isinstance(key, str) and key.startswith("."):
            text += key
        elif isinstance(key, str) and not text:
            text = key
        else:
            text += f"[{key!r}]"
    return text.removeprefix(".") or "the output"


def outline(value: Any, depth: int = 3) -> Any:
    """What a result is made of, but for sizes and numbers of items: two outlines that differ are different results."""
    if value is None or isinstance(value, Tensor):
        return value is None
    if isinstance(value, Mapping):
        return tuple((key, outline(item, depth - 1)) for key, item in value.items()) if depth else len(value)
    if isinstance(value, list | tuple):
        return frozenset(outline(item, depth - 1) for item in value) if depth else 0
    return type(value).__name__
