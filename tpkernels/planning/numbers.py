"""Numbers of features and heads that a module's code reads, and that are others on one rank.

It owns where they stand: in an attribute of the module (``num_heads``), or in the ``config`` that it shares with others
(``config.num_attention_heads``).  Only the module that reads it may see another number there, so it gets a view of the
config: an object of the same class that answers with this rank's numbers, and with the config's own for all else, also
when that changes later.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Container, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from tpkernels.planning.source_reads import methods_of, reached

__all__ = ["config_numbers", "number_of", "owner_of", "root_of", "set_number"]

CONFIG = "config"
_OWN = frozenset(("_tpk_view", "__class__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__copy__"))


def number_of(module: nn.Module, attribute: str) -> Any:
    """What ``module`` has as ``attribute``, or as ``config.attribute``; None where there is no such thing."""
    root, _, inner = attribute.partition(".")
    held = getattr(module, root, None)
    return getattr(held, inner, None) if inner else held


def owner_of(key: str, modules: Container[str]) -> tuple[str, str]:
    """The module and the attribute of ``module.attribute``, or of ``module.config.attribute``."""
    name, _, attribute = key.rpartition(".")
    outer, _, last = name.rpartition(".")
    return (outer, f"{CONFIG}.{attribute}") if last == CONFIG and name not in modules else (name, attribute)


def root_of(attribute: str) -> str:
    """The attribute of the module that :func:`set_number` replaces."""
    return attribute.partition(".")[0]


def set_number(module: nn.Module, attribute: str, value: int) -> None:
    """Let ``module`` alone see ``value`` there."""
    root, _, inner = attribute.partition(".")
    setattr(module, root, _view(getattr(module, root), {inner: value}) if inner else value)


def config_numbers(module: nn.Module) -> dict[str, int]:
    """The numbers of its ``config`` that the code of ``module`` reads, by ``config.name``."""
    config = vars(module).get(CONFIG)
    if config is None or isinstance(config, dict):
        return {}
    kind: Any = type(module)
    named = {name: getattr(config, name, None) for name in sorted(_reads(kind))}
    return {f"{CONFIG}.{name}": value for name, value in named.items() if type(value) is int}


@lru_cache(maxsize=512)
def _reads(cls: Any) -> frozenset[str]:
    """Names in ``self.config.name`` of the forward of a class, and of the methods that it names."""
    methods: dict[str, list[ast.FunctionDef]] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] not in ("torch", "builtins", "abc", "typing"):
            for method in methods_of(base) or ():
                methods.setdefault(method.name, []).append(method)
    return frozenset(
        node.attr for node in reached(methods, "forward")
        if isinstance(node.value, ast.Attribute) and node.value.attr == CONFIG
        and isinstance(node.value.value, ast.Name) and node.value.value.id == "self"
    )  # fmt: skip


def _view(config: Any, values: Mapping[str, int]) -> Any:
    shown: Any = type(config)
    kind = _class_of_views(shown)
    made = kind.__new__(kind)
    object.__setattr__(made, "_tpk_view", (config, dict(values)))
    return made


@lru_cache(maxsize=256)
def _class_of_views(kind: Any) -> Any:
    def get(self: Any, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        config, values = object.__getattribute__(self, "_tpk_view")
        return values[name] if name in values else getattr(config, name)

    def put(self: Any, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_tpk_view")[0], name, value)

    def deepcopy(self: Any, memo: Any) -> Any:
        config, values = self._tpk_view
        return _view(copy.deepcopy(config, memo), values)

    def reduce(self: Any, *_: object) -> Any:
        return _view, self._tpk_view

    members = {"__getattribute__": get, "__setattr__": put, "__deepcopy__": deepcopy, "__reduce_ex__": reduce}
    members |= {"__reduce__": reduce, "__copy__": lambda self: _view(*self._tpk_view)}
    return type(kind.__name__, (kind,), members | {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
