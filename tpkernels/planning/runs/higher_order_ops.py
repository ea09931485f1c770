"""``flex_attention`` as an op of a run: torch's one higher-order op that models call without compiling.

It owns :func:`as_op`.  The op's arguments are functions, which read tensors and numbers from their closures.  The
recorded event holds what can be compared: query, key, value, the tensors of the block mask, what the functions hold,
and the scale.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["as_op", "flex_attention"]

flex_attention: Any = torch.ops.higher_order.flex_attention
"""The packet of its events; arguments are query, key, value, tensors of the mask, what the functions hold, scale."""
DEPTH = 8


class _Flex:
    """Looks like an overload, and runs the op with the arguments that it came with."""

    overloadpacket = flex_attention
    namespace = "higher_order"
    tags: tuple[torch.Tag, ...] = ()
    _schema = types.SimpleNamespace(name="higher_order::flex_attention", is_mutable=False)

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return flex_attention(*self.args, **self.kwargs)


def as_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What runs, with arguments that can be recorded.

    Raises:
        NotImplementedError: another higher-order op.
    """
    if func is not flex_attention:
        raise NotImplementedError(f"the higher-order op {func} is not traced")
    query, key, value, score_mod, mask, scale = args[:6]
    tensors = [leaf for leaf in tree_leaves(mask) if isinstance(leaf, Tensor)]
    functions = [score_mod, *(leaf for leaf in tree_leaves(mask) if callable(leaf))]
    held = [value for function in functions for value in _held(function, DEPTH)]
    held += [leaf for leaf in tree_leaves(args[7:]) if isinstance(leaf, Tensor)]
    return _Flex(args, kwargs), (query, key, value, tensors, held, scale), {}


def _held(value: Any, depth: int) -> Iterator[Any]:
    """Tensors and numbers that a function reads from its closure, defaults and bound arguments."""
    if isinstance(value, Tensor | int | float | str | None):
        yield value
    elif depth == 0:
        raise NotImplementedError(f"a function given to flex_attention holds {type(value).__name__} too deep to follow")
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _held(item, depth - 1)
    elif isinstance(value, functools.partial):
        yield from _held([value.func, value.args, value.keywords], depth)
    elif isinstance(value, types.MethodType):
        yield from _held([value.__func__, value.__self__], depth)
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        yield from _held([*cells, value.__defaults__ or (), value.__kwdefaults__ or {}], depth)
    elif isinstance(value, nn.Module):
        yield from [*value.parameters(), *value.buffers()]
    else:
        yield type(value).__qualname__
