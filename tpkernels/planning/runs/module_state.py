"""What a run's code changes of the model's modules: it is noted, and put back when the run ends.

A model may keep something of one call for the next: a table of positions, or the kind of attention that is right for
inputs as short as these.  Runs of a trace are compared, so each has to begin as the other did.  It owns
:class:`Noting`, which sees what code sets and registers, and :func:`put`, which gives modules what they had.

It does not see what code changes within a dict, a list or a configuration that a module has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

if TYPE_CHECKING:
    from tpkernels.planning.runs.session import Session

__all__ = ["Held", "Noting", "State", "put"]

_PLACES = ("_parameters", "_buffers", "_modules", "")
"""Of a module's attributes: the dicts that have some of them, and the module's own."""
_CHANGING = ("__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module")


class Held(NamedTuple):
    """An attribute of a module; ``place`` is the dict that has it, "" for the module's own."""

    place: str
    value: Any

    def same(self, other: Held | None) -> bool:
        if other is None or self.place != other.place:
            return False
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
        self._original: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Noting:
        for method in _CHANGING:
            self._original[method] = getattr(nn.Module, method)
            setattr(nn.Module, method, self._noting(self._original[method]))
        return self

    def __exit__(self, *exception: object) -> None:
        for method, original in self._original.items():
            setattr(nn.Module, method, original)

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        known = {id(module): name for name, module in self.session.shadow.modules.items()}

        @functools.wraps(method)
        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            attribute = args[0] if args else kwargs.get("name")
            owner = known.get(id(module))
            if owner is None or not isinstance(attribute, str) or isinstance(module, LazyModuleMixin):
                return method(module, *args, **kwargs)
            old = _held(module, attribute)
            result = method(module, *args, **kwargs)
            new = _held(module, attribute)
            if not (new is old is None or (new is not None and new.same(old))):
                self.before.setdefault((owner, attribute), old)
                self.session.changed((owner, attribute), new)
            return result

        return noted


def _dict_of(module: nn.Module, place: str) -> dict[str, Any]:
    found: dict[str, Any] = vars(module)[place] if place else vars(module)
    return found


def _held(module: nn.Module, name: str) -> Held | None:
    for place in _PLACES:
        if name in _dict_of(module, place):
            return Held(place, _dict_of(module, place)[name])
    return None
