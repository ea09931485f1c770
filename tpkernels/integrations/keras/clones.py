"""What ``keras.models.clone_model`` asks a wrapped model for: a clone is whole, and not parallel.

It owns the layers' configurations, which say the numbers of the whole model, and the constructor under which Keras
makes the clone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.plan import KerasPlan
from tpkernels.integrations.keras.saved import plain
from tpkernels.integrations.keras.shadow import named_layers

__all__ = ["constructor", "describe_whole"]


def describe_whole(model: Any, plan: KerasPlan) -> None:
    """Let each layer whose numbers are those of a rank, of its heads for example, describe the whole."""
    layers = named_layers(model)
    for name in {numbers.name for numbers in plan.numbers if numbers.name}:
        backend.bare(layers[name], "get_config", _whole_config(model, layers[name]))


def _whole_config(model: Any, layer: Any) -> Callable[[], Any]:
    def get_config() -> Any:
        with plain(model):
            return type(layer).get_config(layer)

    return get_config


def constructor(kind: type) -> dict[str, Callable[..., Any]]:
    """Members of the class of a wrapped model, which was of class ``kind``: another one would be of that class."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind(*args, **kwargs)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # the wrapped model is made already
        pass

    __init__.__signature__ = inspect.signature(kind.__init__)  # type: ignore[attr-defined, misc]  # Keras looks at it
    return {"__new__": __new__, "__init__": __init__}
