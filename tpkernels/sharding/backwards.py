"""What a model's code does to gradients, which a run without gradients does not show: that it does, is reported.

Owns: :func:`code_of_gradients`.  A ``torch.autograd.Function`` has a backward of its own, a hook on a tensor changes
what passes.  Both are code over whole tensors, and what they make of a part is not known.  Code that asks a tensor
whether it requires a gradient before it hooks it is told so where a training step would.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from tpkernels.sharding.session import Session

__all__ = ["code_of_gradients"]

_NOT_THE_MODELS = ("torch.utils.checkpoint", "torch._dynamo")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_INTERNAL = frozenset({"torch", "tpkernels"})


@contextmanager
def code_of_gradients(session: Session) -> Iterator[None]:
    """Within: custom functions and hooks tell ``session``, and what they make is taken for activations."""
    original = torch.autograd.Function.__dict__["apply"]

    def told(name: str, tensors: list[Tensor], made: list[Tensor]) -> None:
        session.gradient_code_called(name, tensors)
        if any(session.has_origin(tensor) for tensor in tensors):
            for tensor in made:
                session.set_origin(tensor, None)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        out = original.__func__(cls, *args, **kwargs)
        if not cls.__module__.startswith(_NOT_THE_MODELS):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            told(cls.__name__, tensors, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        with _hooks_told(told), _requiring_gradients(session):
            yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _hooks_told(told: Callable[[str, list[Tensor], list[Tensor]], None]) -> Iterator[None]:
    """Within: a hook on a tensor is told, and not installed."""
    before = {name: getattr(Tensor, name) for name in _HOOKS}

    def hooking(name: str) -> Callable[..., Any]:
        def hook(self: Tensor, function: Any) -> torch.utils.hooks.RemovableHandle:
            told(f"a gradient hook ({getattr(function, '__name__', function)})", [self], [self])
            return torch.utils.hooks.RemovableHandle(OrderedDict())

        hook.__name__ = name
        return hook

    for name in _HOOKS:
        setattr(Tensor, name, hooking(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(Tensor, name, function)


@contextmanager
def _requiring_gradients(session: Session) -> Iterator[None]:
    """Within: to the model's code, what comes from parameters or activations requires a gradient."""
    base: Any = torch._C.TensorBase.requires_grad

    def asked(self: Tensor) -> bool:
        if base.__get__(self):
            return True
        asking = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        can = self.is_floating_point() or self.is_complex()
        return can and asking not in _INTERNAL and session.has_origin(self)

    Tensor.requires_grad = property(asked, base.__set__)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.requires_grad
