"""What the layers of a plan send in one training step, in bytes of one rank.

It owns the numbers that a plan prints; tests compare them with the calls that are made.  An all-reduce moves
``2 (n - 1) / n`` of its tensor at best, an all-gather ``(n - 1) / n``.  A layer before which nothing is trained sums no
gradient of its input.  What an optimizer gathers, and what ranks compare, is not in them.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.cuts import Cut
from tpkernels.integrations.keras.shadow import Equation
from tpkernels.planning.runs.trace import Recording

__all__ = ["Traffic"]


class Traffic:
    """Of the layers that ``recording`` has seen, on ``world_size`` ranks."""

    def __init__(self, recording: Recording, world_size: int) -> None:
        self._recording, self._world_size = recording, world_size

    def linear(self, name: str, layer: Any, equation: Equation, style: str, cuts: dict[str, Cut]) -> int | None:
        """Of a Dense or EinsumDense layer; None where its rows are not known."""
        rows = self._recording.layer_rows.get(name)
        if rows is None or style == "whole":
            return None if rows is None else 0
        goes_back = self._recording.gradient_rows[name] * equation.in_features
        comes_out = rows * equation.out_features
        if style == "row":
            sent = self._share(2 * comes_out, layer)
        elif style == "row_split":
            sent = self._share(2 * comes_out, layer) + self._share(goes_back, layer)
        else:
            gathered = comes_out if style == "column_gather" else 0
            sent = self._share(2 * goes_back, layer) + self._share(gathered, layer)
        calls = len(self._recording.layer_reads[name])
        if style == "copied":
            merged = layer.lora_enabled or backend.kernel_of(layer).trainable
            used = [backend.kernel_of(layer)] * merged + [
                one for one in (layer.bias,) if one is not None and one.trainable
            ]
            return sent + calls * sum(self._share(2 * _numbers(one), layer) for one in used)
        factors = (layer.lora_kernel_a, layer.lora_kernel_b) if layer.lora_enabled else ()
        return sent + calls * sum(self._summed(one, layer) for one in factors if one.path not in cuts)

    def table(self, name: str, layer: Any) -> int:
        """Of an embedding that is cut by its rows, and of its head."""
        total, features = backend.plain_shape(backend.table_of(layer))
        factor = self._summed(layer.lora_embeddings_b, layer) if layer.lora_enabled else 0
        sent = 0
        for scope in self._recording.scopes:
            if scope.name != name:
                continue
            x = scope.args[0]
            if scope.kwargs.get("reverse", scope.args[1:] == (True,)):
                rows = x.numel() // x.shape[-1]
                sent += self._share(2 * x.numel(), layer) * scope.trained + self._share(rows * total, layer)
                sent += factor * layer.tie_weights
            else:
                sent += self._share(2 * x.numel() * features, layer) + factor
        return sent

    def whole(self, layer: Any, summed: set[str]) -> int:
        """Of a layer that is whole: gradients of those variables that meet parts are summed."""
        met = [variable for variable in backend.weights_of(layer) if variable.path in summed and variable.trainable]
        return sum(self._share(2 * _numbers(variable), layer, variable.dtype) for variable in met)

    def _summed(self, factor: Any, layer: Any) -> int:
        """Of the gradient of a factor of LoRA, which Keras keeps in float32 under any policy that casts nothing."""
        mixed = layer.compute_dtype != layer.variable_dtype
        return self._share(2 * _numbers(factor), layer, None if mixed else factor.dtype) if factor.trainable else 0

    def _share(self, elements: int, layer: Any, dtype: str | None = None) -> int:
        item = int(backend.torch_dtype(dtype or layer.compute_dtype).itemsize)
        return elements * item * (self._world_size - 1) // self._world_size


def _numbers(variable: Any) -> int:
    return prod(backend.plain_shape(variable))
