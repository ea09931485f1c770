"""Models, data and one training run for the tests of ``tpk.keras``; in float64, so that bounds are tight.

Keras itself multiplies float64 tensors in float32 (``keras.ops.matmul``, in Dense), and 3.16 adds them in float32, too
(``keras.ops.add``, in EinsumDense).  :func:`exact` has both layers of an unsharded model compute in float64, as the
reference of the parallel one.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import tpkernels as tpk

BOUND = 1e-12
"""Relative; float64, models of a few thousand weights, a few steps."""


def keras_on_torch() -> Any:
    """Keras, on its torch backend, in float64."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    assert keras.config.backend() == "torch"
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return keras


def small(*, dropout: float = 0.0, seed: int = 0, heads: int = 4, policy: str = "float64", **dense: Any) -> Any:
    """An encoder's block with every kind of cut: odd widths, grouped queries, a table, a softmax head."""
    keras = keras_on_torch()
    keras.utils.clear_session()  # names are numbered anew, as a plan for one model and another like it needs them
    if policy != "float64":
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(51, 10, name="table")(ids)
    x = layers.EinsumDense("abc,cd->abd", (None, 12), bias_axes="d", name="widen")(x)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.MultiHeadAttention(heads, 4, dropout=dropout, name="attention")(x, x) + x
    h = layers.Dense(31, activation="tanh", name="up", **dense)(x)
    h = layers.Dropout(dropout, name="drop")(h)
    x = layers.Dense(12, name="down", **dense)(h) + x
    x = layers.GroupQueryAttention(3, 4, 1, name="grouped")(x, x) + x
    x = layers.BatchNormalization(name="batch")(layers.GlobalAveragePooling1D(name="mean")(x))
    return keras.Model(ids, layers.Dense(5, name="head", activation="softmax")(x))


_PLANS: dict[int, Any] = {}


def parallel_small(**options: Any) -> Any:
    """:func:`small` over all ranks.  Its plan is found once in a process: that costs more than training."""
    model, world = small(**options), dist.get_world_size()
    if world not in _PLANS:
        _PLANS[world] = tpk.keras.make_plan(model, world)
    return tpk.keras.TensorParallel(model, plan=_PLANS[world])


def data(rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.integers(0, 51, size=(rows, 6)).astype("int32"), random.integers(0, 5, size=(rows,))


def exact(model: Any) -> Any:
    """Compute in float64 in the Dense and EinsumDense layers of an unsharded model."""
    keras = keras_on_torch()
    for layer in model._flatten_layers():
        if type(layer) in (keras.layers.Dense, keras.layers.EinsumDense):
            object.__setattr__(layer, "call", _Exact(layer))
    return model


class _Exact:
    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: torch.Tensor, training: object = None) -> Any:
        layer = self.layer
        kernel = layer._kernel.value
        if layer.lora_enabled:
            scale = layer.lora_alpha / layer.lora_rank
            kernel = kernel + scale * (layer.lora_kernel_a.value @ layer.lora_kernel_b.value).to(kernel.dtype)
        y = torch.einsum(getattr(layer, "equation", "...i,io->...o"), x, kernel)
        y = y if layer.bias is None else y + layer.bias.value
        return y if layer.activation is None else layer.activation(y)


class ExactClip:
    """In the place of an optimizer's ``_clip_by_norm``, which in Keras 3.16 multiplies float64 tensors in float32."""

    def __init__(self, most: float | None) -> None:
        self.most = most

    def __call__(self, gradient: torch.Tensor) -> Any:
        norm = keras_on_torch().ops.maximum(gradient.square().sum().sqrt(), self.most)  # float32, as ours
        return gradient * self.most / norm.to(gradient.dtype)


def trained(model: Any, optimizer: Any, *, epochs: int = 2, seed: int = 5, **fit: Any) -> dict[str, Any]:
    """Compile, fit, predict, evaluate: what a user does, and every number that comes of it."""
    keras = keras_on_torch()
    x, y = data()
    keras.utils.set_random_seed(seed)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, **fit).history
    return {
        "history": {name: np.array(values) for name, values in history.items()},
        "weights": dict(zip([v.path for v in model.weights], model.get_weights(), strict=True)),
        "predicted": model.predict(x, verbose=0),
        "evaluated": np.array(model.evaluate(x, y, verbose=0)),
    }


PASSES = {
    "tpkernels.all_reduce": 2, "tpkernels.matmul_all_reduce": 2, "tpkernels.copy_matmul_backward": 2,
    "tpkernels.all_gather": 1,
}  # fmt: skip
"""Collectives that a cut Keras model calls, by the passes of a ring over what comes out of them."""


class Sent(TorchDispatchMode):
    """Adds up the bytes that one rank sends at best in the collectives of tpkernels, of a forward and a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        passes = PASSES.get(str(func).removesuffix(".default"))
        if passes:
            whole = out[0] if isinstance(out, (tuple, list)) else out
            world = dist.get_world_size()
            self.count += passes * whole.numel() * whole.element_size() * (world - 1) // world
        return out


def bytes_of_a_step(model: Any, x: Any) -> int:
    with Sent() as sent:
        out = model(x, training=True)
        out.square().sum().backward()
    model.zero_grad()
    return sent.count


def assert_equal(found: Any, expected: Any, what: str = "", bound: float = BOUND) -> None:
    """Every number within ``bound`` of the largest one of its array; losses are kept in float32 by Keras.

    Arrays below 1e-5 are held against that: biases before a normalization are rounding alone.
    """
    if isinstance(expected, dict):
        assert list(found) == list(expected), (what, list(found), list(expected))
        for name in expected:
            assert_equal(found[name], expected[name], f"{what}/{name}", bound)
        return
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if "history" in what or "evaluated" in what:
        bound = max(bound, 1e-6)
    limit = bound * max(1e-5, float(np.abs(expected).max(initial=0.0)))
    worst = float(np.abs(found.astype("float64") - expected.astype("float64")).max(initial=0.0))
    assert worst <= limit, f"{what}: {worst} is more than {limit}"


def assert_all_equal(found: list[Any], expected: Any) -> None:
    """Every rank's numbers are the expected ones, and, replicas included, those of rank 0 bit for bit."""
    for one in found:
        assert_equal(one, expected)
        assert_equal(one, found[0], "on another rank than 0: ", bound=0.0)
