"""Modules whose code multiplies by a layer's weight itself, ``F.linear(x, self.qkv.weight, bias)``, and call it there.

::

    F.linear(x, layer.weight, layer.bias)   runs as   layer(x)
    F.linear(x, layer.weight, bias)         runs as   layer(x) + bias     (of a layer without a bias of its own)

It owns what such a call is, for the planner that records it and for the parallel model that makes it.  A product with
another bias than that, and every other use of a weight, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpkernels.nn.function_modes import run_within

__all__ = ["WeightCalls", "call_by_weight"]


class WeightCalls(TorchFunctionMode):
    """Within it, a product with the weight of one of ``layers`` is a call of the layer."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = layers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = _operands(*args, **kwargs)
            layer = self.layer_of(weight)
            if layer is not None:
                own = layer._parameters.get("bias")
                if bias is own:
                    return layer(x)
                if own is None:
                    y = layer(x)
                    return y + bias.to(y.dtype)  # under autocast, F.linear takes the bias in the product's dtype
        return func(*args, **kwargs)

    def layer_of(self, weight: Any) -> nn.Module | None:
        """The layer whose weight this is, None for every other tensor."""
        return next((layer for layer in self.layers if layer._parameters.get("weight") is weight), None)


def _operands(input: Any, weight: Any, bias: Tensor | None = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def call_by_weight(readers: Mapping[str, Sequence[str]], modules: Mapping[str, nn.Module]) -> None:
    """Let the code of each of ``readers`` call its layers where it multiplies by their weights, from now on."""
    for name, layers in readers.items():
        run_within(modules[name], WeightCalls, [modules[layer] for layer in layers])
