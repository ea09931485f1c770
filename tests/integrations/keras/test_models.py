"""Other kinds of models, precisions and ways to train, each against the unsharded model."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.keras import models
from tests.integrations.keras.test_training import TIMEOUT
from tpkernels.testing.spawn import Pools

pytest.importorskip("keras")
pytestmark = pytest.mark.gloo


def made(model: Any, **options: Any) -> Any:
    return tpk.keras.TensorParallel(model, **options) if dist.get_world_size() > 1 else models.exact(model)


def small() -> Any:
    return models.parallel_small() if dist.get_world_size() > 1 else models.exact(models.small())


def scale() -> Any:
    """A layer whose variables, a scalar among them, are whole on every rank, and meet the parts of a cut layer."""
    keras = models.keras_on_torch()

    class Scale(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.factor = self.add_weight(shape=(), initializer="ones", name="factor", regularizer="l2")
            self.shift = self.add_weight(shape=(1,), initializer="ones", name="shift", regularizer="l1")

        def call(self, x: Any) -> Any:
            return x * self.factor + self.shift

    return Scale(name="scale")


def perceptron(kind: str) -> Any:
    """Two Dense layers and a head: in a row, nested, with a layer between, called twice, or in a model's own call."""
    keras = models.keras_on_torch()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    up, down, head = layers.Dense(30, "relu", name="up"), layers.Dense(9, name="down"), layers.Dense(4, name="head")
    inputs = keras.Input((9,))
    if kind == "sequential":
        return made(keras.Sequential([inputs, up, down, head]))
    if kind == "nested":
        inner = keras.Sequential([keras.Input((9,)), up, down], name="block")
        return made(keras.Model(inputs, head(inner(inputs) + inputs)))
    if kind == "scaled":
        return made(keras.Model(inputs, head(down(scale()(up(inputs))))))
    if kind.startswith("shared"):
        model = keras.Model(inputs, head(down(up(down(up(inputs))))))
        up.trainable = down.trainable = kind != "shared, frozen"
        if kind == "shared, LoRA":
            up.enable_lora(2)
        return made(model)

    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.head = up, down, head

        def call(self, x: Any) -> Any:
            return self.head(self.down(self.up(x)) + x)

        def fit(
            self, x: Any = None, y: Any = None, batch_size: Any = None, sample_weight: Any = None, **rest: Any
        ) -> Any:
            """In another order than Keras's, as KerasHub's tasks have it."""
            return super().fit(x, y, batch_size=batch_size, sample_weight=sample_weight, **rest)

    model = Own()
    model(np.zeros((2, 9)))
    if dist.get_world_size() == 1:
        return made(model)
    with pytest.raises(ValueError, match="example_inputs"):
        made(model)
    example = torch.zeros(3, 9, dtype=torch.float64)
    return made(model, plan=tpk.keras.make_plan(model, dist.get_world_size(), example_inputs=example))


def every_kind() -> dict[str, Any]:
    keras = models.keras_on_torch()
    random = np.random.default_rng(0)
    x, y = random.normal(size=(24, 9)), random.normal(size=(24, 4))
    found = {}
    for kind in ("sequential", "nested", "scaled", "shared", "subclassed", "shared, frozen", "shared, LoRA"):
        model = perceptron(kind)
        if dist.get_world_size() > 1:
            plan = model.tensor_parallel_plan
            assert {layer.style for layer in plan.layers} > {"column", "row"}, kind
            sent, planned = models.bytes_of_a_step(model, x[:3]), sum(layer.sent for layer in plan.layers)
            assert sent == planned > 0, (kind, sent, planned)
        if "," in kind:
            continue  # what is sent differs, and nothing else
        counts = [keras.metrics.FalsePositives()]
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse", metrics=counts, jit_compile=False)
        history = model.fit(x, (y > 0).astype(float), batch_size=8, epochs=3, verbose=0).history
        found[kind] = {
            "history": {name: np.array(values) for name, values in history.items()},
            "weights": dict(enumerate(model.get_weights())),
            "predicted": model.predict(x, verbose=0),
            "evaluated": np.array(model.evaluate(x, (y > 0).astype(float), verbose=0)),
        }
    return found


def whole_layers() -> dict[str, Any]:
    """Training with layers that stay whole beside cut ones; the recurrent one multiplies in float32."""
    keras = models.keras_on_torch()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    quantized = layers.Dense(8, name="quantized", dtype="float32")
    inputs = keras.Input((6, 8))
    x = layers.LSTM(8)(layers.BatchNormalization()(layers.Conv1D(8, 2)(inputs)))
    x = layers.Dense(9, name="down")(layers.Dense(30, "tanh", name="up")(quantized(x) + x))
    whole = keras.Model(inputs, x)
    quantized.quantize("int8")
    model = made(whole)
    if dist.get_world_size() > 1:
        styles = [layer.style for layer in model.tensor_parallel_plan.layers]
        assert {"column", "row", "whole"} <= set(styles), styles
    random = np.random.default_rng(0)
    x, y = random.normal(size=(24, 6, 8)), random.normal(size=(24, 9))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    return {"weights": dict(enumerate(model.get_weights())), "predicted": model.predict(x, verbose=0)}


def compiled(compiler: str) -> dict[str, Any]:
    """Two of Keras's steps under ``torch.compile``, with this compiler behind it."""
    keras = models.keras_on_torch()
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 9)), random.normal(size=(8, 4))
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = made(keras.Sequential([keras.Input((9,)), keras.layers.Dense(30), keras.layers.Dense(4)]))
    parallel = dist.get_world_size() > 1
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.5), "mse", jit_compile=parallel)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    graphs, lowered = counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"]
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=compiler)):
        losses = [model.train_on_batch(x, y) for _ in range(2)]
    assert (counters["stats"]["unique_graphs"] > graphs) is parallel
    assert (counters["aot_autograd"]["total"] > lowered) is (parallel and compiler == "inductor")
    return {"weights": dict(enumerate(model.get_weights())), "history": np.array(losses)}


def every_way() -> dict[str, Any]:
    """Sample weights, validation, counting metrics, early stopping with the best weights, single batches; eagerly.

    Validation and evaluation use averages of the weights, which a callback puts in their place meanwhile.
    """
    keras = models.keras_on_torch()
    x, y = models.data(32)
    y = np.repeat((y > 2).astype("float64")[:, None], 5, axis=1)
    model = small()
    keras.utils.set_random_seed(5)
    counts = [keras.metrics.TruePositives()]
    averaging = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.8)
    model.compile(averaging, "mse", metrics=counts, jit_compile=False, run_eagerly=True)
    swap = keras.callbacks.SwapEMAWeights()
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=0, restore_best_weights=True, baseline=0.0)
    history = model.fit(
        x, y, batch_size=8, epochs=3, verbose=0, sample_weight=np.linspace(0.1, 2, 32), callbacks=[swap, stop],
        validation_data=(x[:16], y[:16]),
    ).history  # fmt: skip
    return {
        "history": {name: np.array(values) for name, values in history.items()},
        "weights": dict(enumerate(model.get_weights())),
        "swapped": model.predict(x, verbose=0, callbacks=[swap]),
        "evaluated": np.array([*model.test_on_batch(x[:8], y[:8]), *model.train_on_batch(x[:8], y[:8])]),
        "predicted": model.predict_on_batch(x[:4]),
    }


def interrupted(folder: str) -> dict[str, Any]:
    """A run that breaks off in its third epoch, and one that goes on from its backup."""
    keras = models.keras_on_torch()

    class Break(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2 and attempt == 0:
                raise KeyboardInterrupt

    x, y = models.data()
    for attempt in (0, 1):
        model = small()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", jit_compile=False)
        backup = keras.callbacks.BackupAndRestore(f"{folder}/{dist.get_world_size()}")
        try:
            model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[backup, Break()])
        except KeyboardInterrupt:
            assert attempt == 0
    return {"weights": dict(enumerate(model.get_weights()))}


def overflow() -> dict[str, Any]:
    """A weight on rank 0 that overflows in float16, in the first four steps; dynamic loss scaling."""
    keras = models.keras_on_torch()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    layers = keras.layers
    inputs = keras.Input((16,))
    up, down = layers.Dense(64, "relu", name="up"), layers.Dense(16, name="down")
    model = keras.Model(inputs, layers.Dense(1, name="head")(down(up(inputs))))
    if dist.get_world_size() > 1:
        model = tpk.keras.TensorParallel(model)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.0**10)
    scaled.dynamic_growth_steps = 2
    model.compile(scaled, "mse", jit_compile=False)
    kernel = model.get_layer("up").get_weights()[0]
    random = np.random.default_rng(1)
    x, y = random.normal(size=(64, 16)).astype("float32"), random.normal(size=(64, 1)).astype("float32")
    scales = []
    for step in range(8):
        broken = kernel.copy()
        broken[0, 0] = 60000.0 if step < 4 else kernel[0, 0]
        model.get_layer("up").kernel.assign(broken)
        model.train_on_batch(x[8 * step : 8 * step + 8], y[8 * step : 8 * step + 8])
        scales.append(float(scaled.dynamic_scale.numpy()))
    return {"scales": scales, "head": model.get_layer("head").get_weights()[0]}


def rounded(policy: str) -> dict[str, Any]:
    """Three epochs in a policy of less precision; variables stay in float32."""
    keras = models.keras_on_torch()
    model = models.small(policy=policy)
    if dist.get_world_size() > 1:
        model = tpk.keras.TensorParallel(model)
        kernel = model.get_layer("up").kernel
        assert (kernel.dtype, kernel.value.dtype) == ("float32", torch.float32)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    x, y = models.data()
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    predicted = model.predict(x, verbose=0)
    assert model.get_layer("up").compute_dtype == policy.removeprefix("mixed_")
    return {"weights": np.concatenate([w.ravel() for w in model.get_weights()]), "predicted": predicted}


@pytest.mark.slow("4 s")
def test_less_precision_is_as_far_from_float64_as_on_the_unsharded_model(ranks: Pools, full: bool) -> None:
    (exact,) = ranks(1).run(rounded, "float64", timeout=TIMEOUT)
    for policy, least in (("mixed_bfloat16", 0.0), ("float32", 1e-5))[: 2 if full else 1]:
        (unsharded,) = ranks(1).run(rounded, policy, timeout=TIMEOUT)
        first, second = ranks(2).run(rounded, policy, timeout=TIMEOUT)
        for name, numbers in exact.items():
            assert np.array_equal(first[name], second[name]), (policy, name)
            own = np.linalg.norm(unsharded[name].astype("float64") - numbers)
            found = np.linalg.norm(first[name].astype("float64") - numbers)
            assert found <= max(3 * own, least * np.linalg.norm(numbers)), (policy, name, found, own)


@pytest.mark.slow("9 s: every way of building a model")
def test_sequential_nested_shared_and_subclassed_models(ranks: Pools, full: bool) -> None:
    (expected,) = ranks(1).run(every_kind, timeout=TIMEOUT)
    for world_size in (2, 3, 4) if full else (2,):
        found = ranks(world_size).run(every_kind, timeout=TIMEOUT)
        models.assert_all_equal(found, expected)
    if full:
        (expected,) = ranks(1).run(whole_layers, timeout=TIMEOUT)
        for found in ranks(2).run(whole_layers, timeout=TIMEOUT):
            models.assert_equal(found, expected, bound=1e-6)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_steps_that_keras_compiles_are_those_of_the_unsharded_model(ranks: Pools, compiler: str, full: bool) -> None:
    if not full:
        pytest.skip("--full: 18 seconds of tracing, 48 of compiling")
    (expected,) = ranks(1).run(compiled, compiler, timeout=TIMEOUT)
    for found in ranks(2).run(compiled, compiler, timeout=2 * TIMEOUT):
        models.assert_equal(found, expected)


@pytest.mark.slow("4 s")
def test_counts_validation_early_stopping_and_single_batches(ranks: Pools) -> None:
    (expected,) = ranks(1).run(every_way, timeout=TIMEOUT)
    models.assert_all_equal(ranks(2).run(every_way, timeout=TIMEOUT), expected)


@pytest.mark.slow("5 s")
def test_a_run_that_broke_off_goes_on_from_its_backup(ranks: Pools, tmp_path: Any) -> None:
    (expected,) = ranks(1).run(interrupted, str(tmp_path), timeout=TIMEOUT)
    for found in ranks(2).run(interrupted, str(tmp_path), timeout=TIMEOUT):
        models.assert_equal(found, expected, bound=1e-6)  # the learning rate is saved in float32
    assert not any(tmp_path.iterdir())


def test_an_overflow_on_one_rank_halves_the_scale_on_all(ranks: Pools) -> None:
    (expected,) = ranks(1).run(overflow, timeout=TIMEOUT)
    assert expected["scales"][3] == 64.0 and expected["scales"][7] > 64.0
    first, second = ranks(2).run(overflow, timeout=TIMEOUT)
    assert first["scales"] == second["scales"] == expected["scales"]
    assert np.array_equal(first["head"], second["head"])
    models.assert_equal(first["head"], expected["head"], bound=1e-2)  # float16
