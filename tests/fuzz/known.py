"""Failures that are known and not mended yet: what is taken out of random models because of them.

Each has a name, which every summary prints with the number of models that it changed.  The list is to be empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.vocabulary import Spec

__all__ = ["KNOWN"]


def _changed(value: Any, change: Callable[[Spec], Spec]) -> Any:
    """``value`` with every dictionary in it changed."""
    if isinstance(value, dict):
        return change({key: _changed(item, change) for key, item in value.items()})
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return value


def _no_writing_to_outputs(spec: Spec) -> Spec:
    def change(item: Spec) -> Spec:
        if item.get("is") == "in_place_mlp":
            item = {**item, "is": "mlp"}
            del item["how"]
        if item.get("residual") == "in place":
            item = {**item, "residual": "add"}
        return item

    found: Spec = _changed(spec, change)
    return found


KNOWN: dict[str, Callable[[Spec], Spec]] = {
    "in-place work on a layer's output raises in training": _no_writing_to_outputs,
}
