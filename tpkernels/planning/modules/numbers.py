"""Numbers of features and heads that a module's code reads, and that are others on one rank.

It owns where they stand: in an attribute of the module (``num_heads``), in the ``config`` that it shares with others
(``config.num_attention_heads``), or in the shape of what it is called with (``width(x: qkv)``: the last dimension of
the argument x, which the layer qkv takes; ``width(x, moved: qkv)`` where that takes x transposed, or rows of x).  Only
the module that reads a config may see another number there, so it gets a view of it: an object of the same class that
answers with this rank's numbers, and with the config's own for all else, also when that changes later.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from tpkernels.nn.shown_width import show_width
from tpkernels.planning.modules.layers import layer_of
from tpkernels.planning.modules.source_reads import methods_of, reached

__all__ = ["config_numbers", "may_move", "number_of", "owner_of", "root_of", "set_number", "width_in", "width_name"]

CONFIG = "config"
_WIDTH = re.compile(r"width\((\w+)(, moved)?: ([^()]+)\)")
_OWN = frozenset(("_tpk_view", "__class__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__copy__"))


def number_of(module: nn.Module, attribute: str) -> Any:
    """What ``module`` has as ``attribute``, as ``config.attribute`` or as a width; None where there is none."""
    if (read := width_in(attribute)) is not None:
        layers = [layer_of(one) for name, one in module.named_modules() if name in read[1]]
        widths = {None if layer is None else layer.in_features for layer in layers}
        return widths.pop() if len(layers) == len(read[1]) and len(widths) == 1 else None
    root, _, inner = attribute.partition(".")
    held = getattr(module, root, None)
    return getattr(held, inner, None) if inner else held


def owner_of(key: str, modules: Container[str]) -> tuple[str, str]:
    """The module and the attribute of ``module.attribute``, ``module.config.attribute`` or ``module.width(...)``."""
    if (width := _WIDTH.search(key)) is not None:
        return key[: width.start()].removesuffix("."), width[0]
    name, _, attribute = key.rpartition(".")
    outer, _, last = name.rpartition(".")
    return (outer, f"{CONFIG}.{attribute}") if last == CONFIG and name not in modules else (name, attribute)


def root_of(attribute: str) -> str:
    """The attribute of the module that :func:`set_number` replaces."""
    return attribute.partition(".")[0]


def set_number(module: nn.Module, attribute: str, value: int) -> None:
    """Let ``module`` alone see ``value`` there."""
    if (read := width_in(attribute)) is not None:
        show_width(module, read[0], map(module.get_submodule, read[1]), value, moved=may_move(attribute))
        return
    root, _, inner = attribute.partition(".")
    setattr(module, root, _view(getattr(module, root), {inner: value}) if inner else value)


def width_name(argument: str, layers: Iterable[str], *, moved: bool = False) -> str:
    """How the width of an argument of a module is called, which these layers of it take; ``moved``: or take rows of it
    that stand in other places."""
    return f"width({argument}{', moved' if moved else ''}: {', '.join(layers)})"


def width_in(attribute: str) -> tuple[str, tuple[str, ...]] | None:
    """The argument and the layers, if the attribute is a width."""
    found = _WIDTH.fullmatch(attribute)
    return None if found is None else (found[1], tuple(found[3].split(", ")))


def may_move(attribute: str) -> bool:
    """Whether code may move the rows of the argument, whose width the attribute is, before layers take them."""
    found = _WIDTH.fullmatch(attribute)
    return found is not None and found[2] is not None


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
