"""What the ranks of a command show each other at its end: values as JSON, of types that the receiver names.

Nothing is unpickled that came from another rank.  Values are dataclasses, named tuples, lists, tuples, dictionaries
with words as keys, dtypes, numbers, words, truth values and None.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tpkernels.comm.device_backends import DeviceBackends

__all__ = ["from_all_ranks", "from_plain", "to_plain"]

_T = TypeVar("_T")


def from_all_ranks(mine: _T, kind: type[_T] | Any = None, group: dist.ProcessGroup | None = None) -> list[_T]:
    """What each rank of the group (by default of the default one) has, by rank; ``kind``: its type, as in a hint.

    Raises:
        ValueError: what a rank said is no value of that type.
    """
    pg = dist.group.WORLD if group is None else group
    assert pg is not None
    device = DeviceBackends.of(pg).meeting_device()
    text = torch.frombuffer(bytearray(json.dumps(to_plain(mine)).encode()), dtype=torch.uint8)
    size = torch.tensor([text.numel()], device=device)
    sizes = [torch.zeros_like(size) for _ in range(pg.size())]
    dist.all_gather(sizes, size, group=pg)
    padded = torch.zeros(max(int(one) for one in sizes), dtype=torch.uint8)
    padded[: text.numel()] = text
    padded = padded.to(device)
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=pg)
    said = [bytes(one[: int(length)].tolist()) for one, length in zip(texts, sizes, strict=True)]
    return [from_plain(type(mine) if kind is None else kind, json.loads(one)) for one in said]


def to_plain(value: Any) -> Any:
    """What JSON has for a value; it can be read back only by :func:`from_plain`, with the value's type.

    Raises:
        TypeError: a value of another kind.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_plain(one) for key, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be shown to other ranks: {value!r}")


def from_plain(kind: Any, said: Any) -> Any:
    """The value of type ``kind`` that :func:`to_plain` made ``said`` of.

    Raises:
        ValueError: it is no such value.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(said, dict):
        hints = typing.get_type_hints(kind)
        fields = {name: from_plain(hints[name], one) for name, one in said.items() if name in hints}
        if fields.keys() == said.keys() == {field.name for field in dataclasses.fields(kind)}:
            made: Any = kind
            return made(**fields)
    elif hasattr(kind, "_fields") and isinstance(said, list):
        hints = typing.get_type_hints(kind)
        if len(said) == len(kind._fields):
            return kind(*(from_plain(hints[name], one) for name, one in zip(kind._fields, said, strict=True)))
    elif kind is torch.dtype and isinstance(getattr(torch, str(said), None), torch.dtype):
        return getattr(torch, said)
    elif origin is list and isinstance(said, list):
        return [from_plain(arguments[0], one) for one in said]
    elif origin is tuple and isinstance(said, list):
        each = (arguments[0],) * len(said) if arguments[-1] is Ellipsis else arguments
        if len(each) == len(said):
            return tuple(from_plain(one, value) for one, value in zip(each, said, strict=True))
    elif origin is dict and isinstance(said, dict):
        return {key: from_plain(arguments[1], one) for key, one in said.items()}
    elif origin in (typing.Union, types.UnionType):
        return None if said is None else from_plain(next(one for one in arguments if one is not type(None)), said)
    elif origin is typing.Literal and said in arguments:
        return said
    elif isinstance(kind, type) and (type(said) is kind or (kind is float and type(said) is int)):
        return said
    raise ValueError(f"a rank said {said!r:.200}, which is no {kind}")
