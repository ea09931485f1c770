"""Styles from other sources than the data flow: a user's overrides, our plan files, transformers' ``tp_plan``.

It owns how patterns match module names: ``*`` matches within one part of a name, ``**`` matches any number of parts.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tpkernels.planning import plans
from tpkernels.planning.style_names import HUGGING_FACE, STYLES, as_style
from tpkernels.planning.styles import Style

__all__ = ["Hints", "hints_for", "match", "matches", "override_styles"]


@dataclass(frozen=True)
class Hints:
    """What a plan file or ``tp_plan`` says about a model, which proves nothing; ``origin`` is how to call it."""

    source: str
    origin: str
    styles: Mapping[str, tuple[str, Style]]
    """The name used there and the style, by module."""


def match(plan: Mapping[str, Style], model: nn.Module) -> dict[str, Style]:
    """Styles by module name; shared modules appear under each of their names.

    Raises:
        ValueError: a pattern matches no module, or two patterns contradict each other.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style in plan.items():
        matched = [name for name in names if matches(name, pattern)]
        if not matched:
            near = _near(pattern, names)
            raise ValueError(f"plan pattern {pattern!r} matches no module of {type(model).__name__}{near}")
        for name in matched:
            other, before = found.setdefault(name, (pattern, style))
            if before != style:
                raise ValueError(f"module {name!r} matches {other!r} with {before} and {pattern!r} with {style}")
    return {name: style for name, (_, style) in found.items()}


def override_styles(overrides: Mapping[str, object], model: nn.Module) -> dict[str, Style]:
    """A user's overrides: as :func:`match`, but ``*`` also stands for leading parts, so that ``*.lm_head`` finds it.

    Raises:
        ValueError: as :func:`match`; or a value that is no style.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plan: dict[str, Style] = {}
    for pattern, value in overrides.items():
        style = as_style(pattern, value)
        wide = f"**{pattern[1:]}" if pattern.startswith("*.") else pattern
        hits = [name for name in modules if name and matches(name, wide)]
        embedding = bool(hits) and all(isinstance(modules[name], nn.Embedding) for name in hits)
        plan[wide] = as_style(pattern, value, embedding=embedding) if embedding else style
    return match(plan, model)


def matches(name: str, pattern: str) -> bool:
    return _parts_match(name.split("."), pattern.split("."))


def _parts_match(name: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_parts_match(name[skip:], pattern[1:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _parts_match(name[1:], pattern[1:])


def _near(pattern: str, names: list[str]) -> str:
    """The closest module names, one per block of the model."""
    near = difflib.get_close_matches(pattern.replace("*", "0"), names, n=3, cutoff=0.5)
    if not near:
        near = [name for name in names if name.rpartition(".")[2] == pattern.rpartition(".")[2]][:3]
    if near:
        return f"; near: {', '.join(near)}"
    return f"; it has {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "; it has no submodules"


def hints_for(model: nn.Module) -> Hints | None:
    """What is known about this kind of model: a plan file of ours, else its own ``tp_plan``."""
    return _plan_file(model) or _tp_plan(model)


def _plan_file(model: nn.Module) -> Hints | None:
    classes = {type(module).__name__ for module in model.modules()}
    for info in pkgutil.iter_modules(plans.__path__):
        file: Any = importlib.import_module(f"{plans.__name__}.{info.name}")
        if not classes & set(file.CLASSES):
            continue
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        styles = {
            name: (str(value), STYLES[value] if isinstance(value, str) else value)
            for pattern, value in file.PLAN.items()
            for name in names
            if matches(name, pattern)
        }
        return Hints("plan file", f"tpkernels/planning/plans/{info.name}.py", styles)
    return None


def _tp_plan(model: nn.Module) -> Hints | None:
    """transformers keeps the plan of the whole model in ``_tp_plan``, and that of its base in the configuration."""
    config = getattr(model, "config", None)
    found: dict[str, str] = {}
    base = getattr(config, "base_model_tp_plan", None)
    if isinstance(base, Mapping):
        prefix = getattr(model, "base_model_prefix", "")
        inner = bool(prefix) and hasattr(model, prefix)
        found |= {f"{prefix}.{key}" if inner else key: value for key, value in base.items()}
    own = getattr(model, "_tp_plan", None)
    if isinstance(own, Mapping):
        found |= own
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    styles = {
        name: (value, HUGGING_FACE[value])
        for pattern, value in found.items()
        if value in HUGGING_FACE
        for name in names
        if matches(name, pattern)
    }
    if not styles:
        return None
    return Hints("tp_plan", f"{type(config).__name__}.base_model_tp_plan", styles)
