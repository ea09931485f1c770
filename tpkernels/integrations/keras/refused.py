"""Methods that change a layer's variables, and come too late once a model is cut: each says the right order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tpkernels.integrations.keras import backend

__all__ = ["refuse_late"]

LATE = ("enable_lora", "quantize")
"""Each replaces or adds variables of the whole layer's sizes."""


def refuse_late(layers: Iterable[Any]) -> None:
    """Let these methods raise ValueError on every layer that has them, models among them, before they change one."""
    for layer in layers:
        for method in LATE:
            if hasattr(layer, method):
                backend.bare(layer, method, _refusal(method))


def _refusal(method: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{method} comes too late: call {method} on the whole model first, and then TensorParallel")

    return refuse
