"""A module whose code reads the width of its input to view what its layers give, and finds this rank's width there.

::

    batch, length, width = x.shape                      of x [batch, length, 32], on one of two ranks: width is 16
    qkv = self.qkv(x).view(batch, length, 3, heads, width // heads)             and self.qkv takes all of x

The module is called with the first features of x, as many as say this rank's width; its ``layers`` take x itself
where they are given that.  It assumes that a plan has proven that nothing else is done with x there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from tpkernels.nn.sliced_arguments import named_arguments, with_arguments

__all__ = ["ShownWidth", "show_width"]


class ShownWidth:
    """What a module is called with as ``argument``, and what its layers take instead; hooks of both.

    It holds the tensors of one call, until the call returns, or until the next one where it raises.
    """

    def __init__(self, argument: str, width: int) -> None:
        self.argument, self.width = argument, width
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
        self._shown, self._whole = x.narrow(-1, 0, self.width), x
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
        return self._whole if value is self._shown else value


def show_width(module: nn.Module, argument: str, layers: Iterable[nn.Module], width: int) -> None:
    """Let the code of ``module`` find ``width`` as the size of ``argument``'s last dimension, from now on."""
    shown = ShownWidth(argument, width)
    module.register_forward_pre_hook(shown.before, with_kwargs=True)
    module.register_forward_hook(shown.after)
    for layer in layers:
        layer.register_forward_pre_hook(shown.within, prepend=True, with_kwargs=True)
