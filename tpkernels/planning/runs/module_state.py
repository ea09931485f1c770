"""What a run's code changes of the model's modules: it is noted, and put back when the run ends.

A model may keep something of one call for the next: a table of positions, or the kind of attention that is right for
inputs as short as these.  Its first call may register hooks and note that they are there, as transformers does to
collect hidden states: a run that found the hooks without the note would register them again, and collect each state
twice.  Runs of a trace are compared, so each has to begin as the other did.  It owns :class:`Noting`, which sees what
code sets, registers and removes, and :func:`put`, which gives modules what they had.

Of what code changes within containers it sees tensors that come into a dict, or leave it, which is an attribute of a
module: LeViT keeps the biases of its scores by the name of their device.  They are told when the run ends, so that each
run begins with a dict of its own.  It does not see what else changes within a dict, a list or a configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session

__all__ = ["Held", "Noting", "State", "put"]

_PLACES = ("_parameters", "_buffers", "_modules", "")
"""Of a module's attributes: the dicts that have some of them, and the module's own."""
_CHANGING = ("__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module")
_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
"""Dicts of a module, which handles refer to: each stays the same one, and what is in it is held."""
_HOOKING = (
    "register_forward_pre_hook", "register_forward_hook",
    "register_full_backward_pre_hook", "register_full_backward_hook", "register_backward_hook",
)  # fmt: skip


class Held(NamedTuple):
    """An attribute of a module; ``place`` is the dict that has it, "" for the module's own.

    Of hooks, "hooks", the value is what is in their dict.
    """

    place: str
    value: Any

    def same(self, other: Held | None) -> bool:
        if other is None or self.place != other.place:
            return False
        if self.place == "hooks":
            return [(number, id(hook)) for number, hook in self.value] == [(n, id(hook)) for n, hook in other.value]
        plain = isinstance(self.value, bool | int | float | str) and type(self.value) is type(other.value)
        return self.value is other.value or (plain and bool(self.value == other.value))


State = dict[tuple[str, str], Held | None]
"""By module and name: an attribute, or None where there is none."""


def put(modules: Mapping[str, nn.Module], state: State) -> State:
    """Give ``modules`` the attributes of ``state``; what they had instead."""
    before: State = {}
    for (module, name), held in state.items():
        owner = modules[module]
        before[module, name] = _held(owner, name)
        if name in _HOOKS and held is not None:
            vars(owner)[name].clear()
            vars(owner)[name].update(held.value)
            continue
        for place in _PLACES:
            if held is not None and held.place == place:
                _dict_of(owner, place)[name] = held.value
            else:
                _dict_of(owner, place).pop(name, None)
    return before


class Noting:
    """Within it, a change of an attribute of the session's modules is told to ``session``.

    ``before`` is what the attributes were.  A lazy module is left alone: it becomes one of another class for good.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.before: State = {}
        self._names = {id(module): name for name, module in session.shadow.modules.items()}
        self._original: dict[str, Callable[..., Any]] = {}
        self._remove = RemovableHandle.remove
        self._dicts: dict[tuple[str, str], tuple[dict[Any, Any], dict[Any, Any]]] = {}
        """Dicts of modules when the run began, and what was in them."""

    def __enter__(self) -> Noting:
        for methods, noting in ((_CHANGING, self._noting), (_HOOKING, self._noting_hooks)):
            for method in methods:
                self._original[method] = getattr(nn.Module, method)
                setattr(nn.Module, method, noting(self._original[method]))
        RemovableHandle.remove = self._noting_removal(self._remove)  # type: ignore[method-assign, assignment]
        self._dicts = {
            (owner, name): (one, dict(one))
            for owner, module in self.session.shadow.modules.items()
            for name, one in vars(module).items() if type(one) is dict and not name.startswith("_")
        }  # fmt: skip
        return self

    def __exit__(self, *exception: object) -> None:
        for method, original in self._original.items():
            setattr(nn.Module, method, original)
        RemovableHandle.remove = self._remove  # type: ignore[method-assign]
        self._tell_of_dicts()

    def _tell_of_dicts(self) -> None:
        """Tell of tensors that came into dicts, or have left them, and put back what was there."""
        for (owner, name), (one, was) in self._dicts.items():
            now = vars(self.session.shadow.modules[owner]).get(name)
            if not _tensors_in(was) and not _tensors_in(one):
                continue
            if now is one and {key: id(x) for key, x in one.items()} != {key: id(x) for key, x in was.items()}:
                self.before.setdefault((owner, name), Held("", one))
                self.session.changed((owner, name), Held("", dict(one)))
            one.clear()
            one.update(was)

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            attribute = args[0] if args else kwargs.get("name")
            if not isinstance(attribute, str):
                return method(module, *args, **kwargs)
            return self._told(module, (attribute,), lambda: method(module, *args, **kwargs))

        return noted

    def _noting_hooks(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._told(module, _HOOKS, lambda: method(module, *args, **kwargs))

        return noted

    def _noting_removal(self, remove: Callable[[RemovableHandle], None]) -> Callable[[RemovableHandle], None]:
        @functools.wraps(remove)
        def noted(handle: RemovableHandle) -> None:
            hooks = handle.hooks_dict_ref()
            for module in self.session.shadow.modules.values():
                if hooks is not None and any(vars(module).get(name) is hooks for name in _HOOKS):
                    self._told(module, _HOOKS, lambda: remove(handle))
                    return
            remove(handle)

        return noted

    def _told(self, module: nn.Module, attributes: tuple[str, ...], change: Callable[[], Any]) -> Any:
        """Make a change of a module, and tell the session what has become of these attributes."""
        owner = self._names.get(id(module))
        if owner is None or isinstance(module, LazyModuleMixin):
            return change()
        old = {attribute: _held(module, attribute) for attribute in attributes}
        result = change()
        for attribute, was in old.items():
            new = _held(module, attribute)
            if not (new is was is None or (new is not None and new.same(was))):
                self.before.setdefault((owner, attribute), was)
                self.session.changed((owner, attribute), new)
        return result


def _dict_of(module: nn.Module, place: str) -> dict[str, Any]:
    found: dict[str, Any] = vars(module)[place] if place else vars(module)
    return found


def _tensors_in(one: dict[Any, Any]) -> bool:
    return any(isinstance(value, Tensor) for value in one.values())


def _held(module: nn.Module, name: str) -> Held | None:
    if name in _HOOKS:
        return Held("hooks", tuple(vars(module)[name].items()))
    for place in _PLACES:
        if name in _dict_of(module, place):
            return Held(place, _dict_of(module, place)[name])
    return None
