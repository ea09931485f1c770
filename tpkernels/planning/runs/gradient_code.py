"""What a model's code does to gradients, and asks about them, in a run where no tensor has one.

It owns :func:`code_of_gradients` and :class:`Requiring`.  A ``torch.autograd.Function`` has a backward of its own, and
a hook on a tensor changes the gradient that passes.  Both are code over whole tensors, and nobody knows what they make
of a part; this module reports that they exist, and how to find out whether a function takes each slice by itself.
Code that asks a tensor whether it requires a gradient gets the answer that it would get in a real run.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from tpkernels.planning.modules.element_code import works_on_elements, works_on_slices
from tpkernels.planning.runs.tensors import can_require_grad, storage_of

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session
    from tpkernels.planning.runs.shadow import Shadow

__all__ = ["Detached", "Requiring", "Works", "code_of_gradients"]

Works = Callable[[Sequence[int | None], int], bool]
"""Whether a function works on each slice by itself, where tensors among its arguments are cut in these dimensions, and
its result is in that one."""

_NOT_THE_MODELS = ("torch.utils.checkpoint", "torch._dynamo")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_INTERNAL = frozenset({"torch", "tpkernels"})


class Requiring:
    """Which tensors of a run would require a gradient: as autograd says it, without its graph."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self._storages: set[int] = set()
        self._detached: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        name = self.shadow.names.get(id(tensor))
        if name is not None:
            return name not in self.shadow.frozen
        return storage_of(tensor) in self._storages and id(tensor) not in self._detached

    def made(self, tensors: Iterable[Tensor]) -> None:
        """``tensors`` are results of parameters or of tensors that require a gradient."""
        for tensor in tensors:
            if torch.is_grad_enabled() and can_require_grad(tensor):
                self._storages.add(storage_of(tensor))
                self._detached.discard(id(tensor))

    def passed(self, func: Any, tensors: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """``func`` made ``outputs`` of ``tensors``, or wrote to them."""
        if torch.is_grad_enabled() and func.overloadpacket is not torch.ops.aten.detach:
            if any(tensor in self for tensor in tensors):
                self.made(outputs)
                return
        given = {id(tensor) for tensor in tensors}
        self._detached |= {id(out) for out in outputs if storage_of(out) in self._storages} - given


class Detached:
    """Which tensors of a run have no gradient, whatever is trained: the model's code has detached what they are of."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._ids: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._ids or not self.session.has_origin(tensor)

    def passed(self, func: Any, tensors: Sequence[Tensor], outputs: Iterable[Tensor]) -> None:
        """``func`` made ``outputs`` of ``tensors``, or wrote to them."""
        ids = {id(output) for output in outputs}
        cut = func.overloadpacket is torch.ops.aten.detach
        cut |= self.session.shadow.gradients and not torch.is_grad_enabled()  # within ``torch.no_grad()``
        if cut or all(tensor in self for tensor in tensors):
            self._ids |= ids
        else:
            self._ids -= ids


@contextmanager
def code_of_gradients(session: Session) -> Iterator[None]:
    """Within it, custom functions and hooks report to ``session``, and their results count as activations."""
    base: Any = torch.autograd.Function.__mro__[1]  # what apply of every function calls, also where code holds it

    def told(name: str, tensors: list[Tensor], made: list[Tensor], works: Works = lambda cuts, cut: False) -> None:
        session.gradient_code_called(name, tensors, made, works)
        if any(session.has_origin(tensor) for tensor in tensors):
            for tensor in made:
                session.set_origin(tensor, None)
        if any(tensor in session.requiring for tensor in tensors):
            session.requiring.made(made)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # what it runs again for the gradients is what counts
            run, _, *inputs = args
            return run(*inputs)
        original: Callable[..., Any] = super(base, cls).apply
        out = original(*args, **kwargs)
        if not cls.__module__.startswith(_NOT_THE_MODELS):
            tensors, made = (
                [leaf for leaf in tree_leaves(some) if isinstance(leaf, Tensor)] for some in ((args, kwargs), out)
            )

            def works(cuts: Sequence[int | None], cut: int) -> bool:
                on_elements = None not in cuts and works_on_elements(original, args, kwargs)
                return on_elements or works_on_slices(original, args, kwargs, cuts, cut)

            told(cls.__name__, tensors, made, works)
        return out

    before = vars(base).get("apply")
    base.apply = classmethod(apply)
    try:
        with _hooks_told(told), _requiring_gradients(session):
            yield
    finally:
        del base.apply
        if before is not None:
            base.apply = before


@contextmanager
def _hooks_told(told: Callable[[str, list[Tensor], list[Tensor]], None]) -> Iterator[None]:
    """Within it, a hook on a tensor is reported, and not installed."""
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
    """Within it, the model's code sees tensors require a gradient as they would in a real run."""
    base: Any = torch._C.TensorBase.requires_grad

    def asked(self: Tensor) -> bool:
        if base.__get__(self):
            return True
        asking = sys._getframe(1).f_globals.get("__name__", "").split(".")[0]
        return asking not in _INTERNAL and self in session.requiring

    Tensor.requires_grad = property(asked, base.__set__)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.requires_grad
