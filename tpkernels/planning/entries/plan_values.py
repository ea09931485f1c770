"""Values of a plan's JSON form: names, sizes and counts, each refused where it is of another kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import prod
from typing import Any

__all__ = [
    "check_keys",
    "check_kinds",
    "cut_result",
    "dimensions",
    "for_each_rank",
    "is_count",
    "is_count_or_none",
    "is_flag",
    "is_text",
    "sizes",
    "text",
    "texts",
]

# No size, and no number of elements or bytes, is as large.
MOST = 1 << 56


def dimensions(body: dict[str, Any], what: str) -> dict[str, tuple[int, int]]:
    """By name: a dimension that is cut, and how many heads or features there are."""
    found, world_size = {}, body["world_size"]
    for key, cut in body[what].items():
        counts = len(cut) == 2 and all(map(is_count, cut))
        if not counts or cut[1] < world_size or (what == "kept" and cut[1] % world_size):
            raise ValueError(f"{what}: {key} must have a dimension and a number of heads or features, got {cut!r}")
        found[text(key)] = cut[0], cut[1]
    return found


def for_each_rank(what: str, given: Any, world_size: int) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Numbers by name: the model's, and that of each rank."""
    found = {text(key): (sizes([whole])[0], sizes(ranks)) for key, (whole, ranks) in given.items()}
    for key, (_, ranks) in found.items():
        if len(ranks) != world_size:
            raise ValueError(f"{what} {key} has values for {len(ranks)} ranks")
    return found


def cut_result(cut: Any, world_size: int) -> tuple[int, int, int]:
    found = sizes(cut)
    if len(found) != 3 or found[2] < world_size:
        raise ValueError(f"a result that is cut has a number, a dimension and its size there, got {cut!r}")
    return found[0], found[1], found[2]


def check_keys(what: str, value: Any, kind: Any) -> None:
    expected = {f.name for f in fields(kind)}
    if not isinstance(value, dict) or set(value) != expected:
        found = sorted(value) if isinstance(value, dict) else value
        raise ValueError(f"a {what} must have {sorted(expected)}, got {found}")


def check_kinds(what: str, values: Mapping[str, Any], **kinds: Callable[[Any], bool]) -> None:
    for name, fits in kinds.items():
        if not fits(values[name]):
            raise ValueError(f"{name} of a {what} has a value of another kind: {str(values[name])[:80]!r}")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def is_count_or_none(value: Any) -> bool:
    return value is None or is_count(value)


def sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(is_count, value)) or not is_count(prod(filter(None, value))):
        raise ValueError(f"a shape must be a list of sizes, got {value!r}")
    return tuple(value)


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name must be text, got {value!r}")
    return value


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"names must be a list, got {value!r}")
    return tuple(text(item) for item in value)
