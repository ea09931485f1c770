"""Layers of a class of their own, whose code multiplies by its own weight and returns more than the product.

::

    F.linear(x, self.weight, self.bias)     runs as   y = layer(x)
    F.embedding(ids, self.weight, ...)      runs as   y = layer(ids)

The layer is the parallel one that the module has become; its own code goes on around the call, with its buffers and
attributes, and gives what it makes of y, ``(y, None)`` for example.  It owns what such a product is, for the planner
that records it and for the parallel model that makes it.

A plan has proven the path that was recorded.  Code that takes another one, because a flag of the module has changed,
would read this rank's part as if it were the whole weight: every other use of a parameter raises ValueError, and so
does a call without the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial, wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["OwnCalls", "around_own_calls", "asks_alone", "called_within", "calls_itself"]

called_within: ContextVar[Callable[[nn.Module, Tensor, Tensor], None] | None] = ContextVar(
    "called_within", default=None
)
"""Who follows a call of the model is told of each product here: the module, what it took and what it gave."""

_ASKS = frozenset({
    "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "layout",
    "dim", "size", "numel", "is_floating_point", "is_complex", "get_device", "element_size", "__hash__",
})  # fmt: skip


def asks_alone(func: Any) -> bool:
    """Whether a call reads no numbers of a tensor."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property such as Tensor.shape
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name in _ASKS


class OwnCalls(TorchFunctionMode):
    """Within it, a product of ``module`` with its own weight is ``run(x)``.

    Args:
        padding: the row of a table that gets no gradient.
        strict: another use of the module's parameters raises.
    """

    def __init__(
        self, module: nn.Module, run: Callable[[Tensor], Tensor], *, padding: int | None = None, strict: bool = False
    ) -> None:
        super().__init__()
        self.module, self.run, self.padding, self.strict = module, run, padding, strict
        self.made = 0
        """How many of these products the code has made."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        x = self.taken(func, args, kwargs)
        if x is not None:
            self.made += 1
            return self.run(x)
        if self.strict and not asks_alone(func):
            own = [one for one in self.module._parameters.values() if one is not None]
            if any(leaf is one for leaf in tree_leaves((args, kwargs)) for one in own):
                raise ValueError(
                    f"a {type(self.module).__name__} uses a parameter otherwise than in the product that the plan was "
                    f"proven for ({getattr(func, '__name__', func)}): its code takes another path, as after a change "
                    "of one of its flags; set the flags before the plan is made"
                )
        return func(*args, **kwargs)

    def taken(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """What is multiplied, or looked up, by the module's own weight in this call; None if it is another call."""
        weight, bias = self.module._parameters["weight"], self.module._parameters.get("bias")
        if func is F.linear:
            x, matrix, vector = _of_linear(*args, **kwargs)
            return x if matrix is weight and vector is bias else None
        if func is F.embedding:
            x, table, padding, plain = _of_embedding(*args, **kwargs)
            alike = _row(padding, weight) == _row(self.padding, weight)
            return x if table is weight and plain and alike else None
        return None


def _row(padding: int | None, weight: Tensor | None) -> int | None:
    return padding if padding is None or weight is None or padding >= 0 else padding + weight.shape[0]


def _of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def _of_embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> tuple[Any, Any, int | None, bool]:
    """The last one: whether each row is looked up by itself, and its gradient is a plain sum."""
    return input, weight, padding_idx, max_norm is None and not scale_grad_by_freq and not sparse


def calls_itself(module: nn.Module) -> bool:
    """Whether a parallel layer has code of its own around its products."""
    return hasattr(type(module), "_tpkernels_own_code")


@lru_cache(maxsize=256)
def around_own_calls(code: type[nn.Module], layer: type[nn.Module]) -> type[nn.Module]:
    """``code``, a class upon the parallel ``layer``, whose ``forward`` has its products made by the layer's."""
    own: Any = code.forward

    @wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        padding = self.__dict__.get("padding_idx")
        calls = OwnCalls(self, partial(_told, self, layer), padding=padding, strict=True)
        with calls:
            out = own(self, *args, **kwargs)
        if not calls.made:
            raise ValueError(
                f"a {type(self).__name__} returns without the product that the plan was proven for: its code takes "
                "another path, as after a change of one of its flags; set the flags before the plan is made"
            )
        return out

    members = {"forward": forward, "_tpkernels_own_code": True, "__module__": code.__module__, "__doc__": code.__doc__}
    return cast("type[nn.Module]", type(code.__name__, (code,), members | {"__qualname__": code.__qualname__}))


def _told(module: nn.Module, layer: type[nn.Module], x: Tensor) -> Tensor:
    y: Tensor = layer.forward(module, x)
    if not torch.compiler.is_compiling() and (told := called_within.get()) is not None:
        told(module, x, y)
    return y
