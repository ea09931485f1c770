"""Column layers on one input: query, key and value, or gate and up, as one op.

It owns :func:`run_together`, which feeds any number of column layers with one gather of x, or with one sum of its
gradient, and :class:`SharedInput`, which does so for layers that a model's own code calls one after the other.

::

    first call     y_1, ..., y_n = all_gather_matmul(x, [w_1, ..., w_n])
    other calls    take the y that waits for them

A result belongs to one tensor object, at one version, in one grad mode; a call with another one computes anew.  Results
wait only until all layers have been called.  What an error leaves behind goes with the next call, or with
:meth:`SharedInput.forget`.

It assumes that all ranks call the same layers in the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.ops import all_gather_matmul, copy_matmul
from tpkernels.ops.shapes import only_row

__all__ = ["ColumnLike", "SharedInput", "run_gated", "run_together"]


class ColumnLike(Protocol):
    """What a column layer must offer to run with others; such layers agree in all but their weights."""

    sequence_parallel: bool
    sequence_dim: int
    implementation: str
    save_gathered: bool
    activation: str | None

    @property
    def mesh(self) -> DeviceMesh: ...

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weights ``[N_i, K]`` that this rank multiplies x with, and their biases."""
        ...

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """The layer's output from its parts' outputs."""
        ...


def run_together(
    layers: Sequence[ColumnLike], x: Tensor, mesh: DeviceMesh, shard_sizes: Sequence[int] | None
) -> list[Tensor]:
    """Outputs of layers of equal options on one x: one gather, or one all-reduce of dx, for all of them."""
    if x.dim() == 1:  # the ops take rows
        return [only_row(y) for y in run_together(layers, x.unsqueeze(0), mesh, shard_sizes)]
    parts = [layer.parts() for layer in layers]
    rest = iter(_products(layers[0], parts, layers[0].activation, x, mesh, shard_sizes))
    return [layer.joined([next(rest) for _ in some]) for layer, some in zip(layers, parts, strict=True)]


def run_gated(
    layers: Sequence[ColumnLike], activation: str, x: Tensor, mesh: DeviceMesh, shard_sizes: Sequence[int] | None
) -> Tensor:
    """``act(gate(x)) * up(x)`` of two layers of equal options and sizes, gate and up, in one op."""
    if x.dim() == 1:
        return only_row(run_gated(layers, activation, x.unsqueeze(0), mesh, shard_sizes))
    y: Tensor = _products(layers[0], [layer.parts() for layer in layers], activation, x, mesh, shard_sizes)
    return y


def _products(
    first: ColumnLike,
    parts: Sequence[Sequence[tuple[Tensor, Tensor | None]]],
    activation: str | None,
    x: Tensor,
    mesh: DeviceMesh,
    shard_sizes: Sequence[int] | None,
) -> Any:
    weights = [weight for some in parts for weight, _ in some]
    biases = [bias for some in parts for _, bias in some]
    common: dict[str, Any] = {"bias": biases, "activation": activation, "implementation": first.implementation}
    if first.sequence_parallel:
        return all_gather_matmul(
            x,
            weights,
            mesh,
            gather_dim=first.sequence_dim,
            shard_sizes=shard_sizes,
            save_gathered=first.save_gathered,
            **common,
        )
    return copy_matmul(x, weights, mesh, **common)


class SharedInput:
    """Layers that a model calls one after the other on one tensor; the first call runs them all.

    Their hooks run at their own calls.  Layers that turn out to be called with different tensors go apart, with a
    warning: their values are right either way, but each call would compute for all.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[ColumnLike]) -> None:
        self.names, self.layers = tuple(names), tuple(layers)
        self.apart = False
        self._key: tuple[Any, ...] = ()
        self._waiting: dict[int, Tensor] = {}
        self._unused = 0
        """Calls that computed for all since a layer last took what waited for it."""

    def run(self, layer: ColumnLike, x: Tensor, source: Tensor, shard_sizes: Sequence[int] | None) -> Tensor:
        """The output of ``layer``; ``source`` is the tensor that the model's code gave, x what became of it."""
        mesh = layer.mesh
        if self.apart or not self._is_worth_it(layer, mesh):
            return run_together([layer], x, mesh, shard_sizes)[0]
        index = next(i for i, other in enumerate(self.layers) if other is layer)
        key = _key(source)
        if index in self._waiting and self._key[0] is source and self._key[1:] == key[1:]:
            y = self._waiting.pop(index)
            self._unused = 0
            if not self._waiting:
                self.forget()
            return y
        self._unused += 1
        if self._unused > len(self.layers):
            self._part()
            return run_together([layer], x, mesh, shard_sizes)[0]
        outputs = run_together(self.layers, x, mesh, shard_sizes)
        self._key, self._waiting = key, {i: y for i, y in enumerate(outputs) if i != index}
        return outputs[index]

    def forget(self) -> None:
        """Drop the results that wait, because no call will take them."""
        self._key, self._waiting = (), {}

    def has_use(self, layer: ColumnLike) -> bool:
        """Whether a call of ``layer`` sends anything, now or for a gradient."""
        return layer.sequence_parallel or torch.is_grad_enabled()

    def _is_worth_it(self, layer: ColumnLike, mesh: DeviceMesh) -> bool:
        """Whether data is sent, and all layers have their weights (FSDP2 may hold them in parts until their call)."""
        return self.has_use(layer) and all(other.mesh == mesh for other in self.layers)

    def _part(self) -> None:
        self.apart = True
        self.forget()
        warnings.warn(
            f"{', '.join(self.names)} read one tensor when the plan was made, and different ones now: each gathers or "
            "sums by itself from here on; make the plan with example_inputs that take the same way",
            stacklevel=3,
        )


def _key(source: Tensor) -> tuple[Any, ...]:
    """The facts that a result and a call must share; the compiler sees writes to a tensor by itself."""
    tracked = not torch.compiler.is_compiling() and not source.is_inference()
    return source, source._version if tracked else 0, torch.is_grad_enabled()
