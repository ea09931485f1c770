"""A module whose code reads the width of its input to view what its layers give, and finds this rank's width there.

::

    batch, length, width = x.shape                      of x [batch, length, 32], on one of two ranks: width is 16
    qkv = self.qkv(x).view(batch, length, 3, heads, width // heads)             and self.qkv takes all of x

The module is called with the first features of x, as many as say this rank's width; its ``layers`` take x itself
where they are given that.  It assumes that a plan has proven that nothing else is done with x there.

Where code *moves* rows before the layers take them (``x.transpose(0, 1)``; some rows, written to a tensor of zeros), or
adds others to them (``x + places``), what is shown is a :class:`MovedWidth`, which does the same with x itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpkernels.nn.sliced_arguments import named_arguments, with_arguments

__all__ = ["ADDS", "MOVES", "MovedWidth", "ShownWidth", "show_width"]

_ROWS = {Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.contiguous, Tensor.__getitem__}
ADDS = frozenset([Tensor.__add__, Tensor.__radd__, Tensor.add, torch.add])
MOVES = frozenset([*_ROWS, *ADDS, Tensor.__setitem__, Tensor.new_zeros])
"""Functions of a :class:`MovedWidth` that give or change one."""


class MovedWidth(Tensor):
    """The first features of ``whole``; what moves its rows moves those of ``whole`` as well, and gives another one; so
    does what adds as many features as ``whole`` has.

    Any other function sees a plain tensor.
    """

    whole: Tensor

    @staticmethod
    def of(whole: Tensor, width: int) -> MovedWidth:
        """Show ``width`` features of a tensor."""
        return _shown(whole.narrow(-1, 0, width), whole)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ADDS and (both := _both(args)) is not None:
                shown, other = both
                added = func(shown.whole, other, *args[2:], **kwargs)
                return _shown(added.narrow(-1, 0, shown.shape[-1]), added)
            if func is Tensor.__setitem__ and isinstance(args[0], MovedWidth):
                func(args[0].whole, args[1], args[2].whole if isinstance(args[2], MovedWidth) else args[2])
            out = func(*args, **kwargs)
            if not args or not isinstance(args[0], MovedWidth):
                return out
            shown, whole = args[0], args[0].whole
            if func in _ROWS:
                moved = func(whole, *args[1:], **kwargs)
                alike = out.shape == (*moved.shape[:-1], shown.shape[-1]) and moved.shape[-1:] == whole.shape[-1:]
                return _shown(out, moved) if alike else out
            if func is Tensor.new_zeros and out.dim() and out.shape[-1] == shown.shape[-1]:
                dtype = kwargs.get("dtype", whole.dtype)
                return _shown(out, whole.new_zeros((*out.shape[:-1], whole.shape[-1]), dtype=dtype, device=out.device))
            return out


def _both(args: Any) -> tuple[MovedWidth, Tensor] | None:
    """A tensor that shows a width, first, and all features of what is added to it."""
    one, other = args[:2] if len(args) > 1 else (None, None)
    other = other.whole if isinstance(other, MovedWidth) else other
    if not isinstance(one, MovedWidth) or not isinstance(other, Tensor):
        return None
    return (one, other) if other.dim() and other.shape[-1] == one.whole.shape[-1] else None


def _shown(first: Tensor, whole: Tensor) -> MovedWidth:
    made = first.as_subclass(MovedWidth)
    made.whole = whole
    return made


class ShownWidth:
    """What a module is called with as ``argument``, and what its layers take instead; hooks of both.

    It holds the tensors of one call, until the call returns, or until the next one where it raises.
    """

    def __init__(self, argument: str, width: int, *, moved: bool = False) -> None:
        self.argument, self.width = argument, width
        self._show: Callable[[Tensor, int], Tensor] = MovedWidth.of if moved else _first
        self._shown: Tensor | None = None
        self._whole: Tensor | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Of the module: show the width.  A call without the argument, or with None, is left alone."""
        x = named_arguments(module, args, kwargs).get(self.argument)
        if x is None:
            return None
        if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] <= self.width:
            what = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{self.argument} must be a tensor with more than {self.width} features, got {what}")
        self._shown, self._whole = self._show(x, self.width), x
        return with_arguments(module, args, kwargs, {self.argument: self._shown})

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Of the module: its call is over."""
        self._shown = self._whole = None

    def within(self, layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Of a layer: take the whole tensor for the one that is shown."""
        if self._shown is None:
            return None
        named = {name: self._taken(value) for name, value in kwargs.items()}
        return tuple(self._taken(value) for value in args), named

    def _taken(self, value: Any) -> Any:
        if isinstance(value, MovedWidth):
            return value.whole
        return self._whole if value is self._shown else value


def _first(x: Tensor, width: int) -> Tensor:
    return x.narrow(-1, 0, width)


def show_width(
    module: nn.Module, argument: str, layers: Iterable[nn.Module], width: int, *, moved: bool = False
) -> None:
    """Let the code of ``module`` find ``width`` as the size of ``argument``'s last dimension, from now on; ``moved``:
    its layers may take rows of it in other places."""
    shown = ShownWidth(argument, width, moved=moved)
    module.register_forward_pre_hook(shown.before, with_kwargs=True)
    module.register_forward_hook(shown.after)
    for layer in layers:
        layer.register_forward_pre_hook(shown.within, prepend=True, with_kwargs=True)
