"""Seeded faults: each mistake that an adapter like this one can make changes numbers that these tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import linear

import tpkernels as tpk
from tests.integrations.keras import models
from tests.integrations.keras.test_training import TIMEOUT
from tpkernels.ops import all_reduce
from tpkernels.testing.spawn import Pools

pytest.importorskip("keras")
pytestmark = pytest.mark.gloo


def no_input_gradient_sum(x: Any, w: Any, group: Any, *, bias: Any = None) -> Any:
    """In the place of ``copy_matmul``: the same output, and dx of this rank's part alone."""
    return linear(x, w, bias)


def bias_on_every_rank(x: Any, w: Any, group: Any, *, bias: Any = None) -> Any:
    """In the place of ``matmul_all_reduce``: the bias is in every summand."""
    return all_reduce(linear(x, w, bias), group)


def keras_ddp(model: Any) -> None:
    """What ``Trainer._initialize_ddp`` of Keras 3.16 does on a CPU; earlier versions have none."""
    if not hasattr(model, "ddp_model"):
        made = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        object.__setattr__(model, "ddp_model", made)


def keras_metric_sum(model: Any) -> Any:
    """What ``Trainer.get_metrics_result`` of Keras 3.16 does where processes are ranks of data parallelism."""
    keras = models.keras_on_torch()
    sums = [(variable, variable.value.clone()) for variable in model.metrics_variables]
    for _, value in sums:
        dist.all_reduce(value)
    with keras.StatelessScope(state_mapping=sums):
        return keras.Model.get_metrics_result(model)


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``holder`` has ``value`` under ``name``; None: what it inherits."""
    missing = object()
    kept = vars(holder).get(name, missing)
    if value is None:
        delattr(holder, name)
    else:
        setattr(holder, name, value)
    try:
        yield
    finally:
        if kept is missing:
            delattr(holder, name)
        else:
            setattr(holder, name, kept)


@contextmanager
def ddp_left_on() -> Iterator[None]:
    keras = models.keras_on_torch()
    kind = tpk.keras.TensorParallel
    with replaced(kind, "_initialize_ddp", None):
        if hasattr(keras.Model, "_initialize_ddp"):
            yield
            return
        make = kind.make_train_function

        def make_train_function(model: Any, force: bool = False) -> Any:
            keras_ddp(model)
            return make(model, force)

        with replaced(kind, "make_train_function", make_train_function):
            yield


def metrics_summed() -> Any:
    keras = models.keras_on_torch()
    own = hasattr(keras.Model, "_initialize_ddp")  # 3.16, whose own sum is what is inherited
    return replaced(tpk.keras.TensorParallel, "get_metrics_result", None if own else keras_metric_sum)


def faults() -> dict[str, Callable[[], Any]]:
    from tpkernels.integrations.keras import linears, optimizers

    return {
        "none": lambda: replaced(linears, "all_gather", linears.all_gather),
        "no input-gradient sum": lambda: replaced(linears, "copy_matmul", no_input_gradient_sum),
        "row bias on every rank": lambda: replaced(linears, "matmul_all_reduce", bias_on_every_rank),
        "clipping per rank": lambda: replaced(optimizers, "_whole_norms", lambda optimizer, shards: None),
        "LoRA gradient not summed": lambda: replaced(linears, "copy_to_group", lambda x, group: x),
        "DDP left on": ddp_left_on,
        "metrics summed over ranks": metrics_summed,
    }


def model() -> Any:
    """Two pairs of layers, so that a gradient passes a cut layer; LoRA on the second; parts of equal shapes."""
    keras = models.keras_on_torch()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = inputs = keras.Input((8,))
    for pair in ("first", "second"):
        h = layers.Dense(20, "tanh", name=f"{pair}_up", bias_initializer="normal")(x)
        x = layers.Dense(8, name=f"{pair}_down", bias_initializer="normal")(h) + x
    made = keras.Model(inputs, layers.Dense(4, "sigmoid", name="head")(x))
    for name in ("second_up", "second_down"):
        layer = made.get_layer(name)
        layer.enable_lora(2)
        layer.lora_kernel_b.assign(np.random.default_rng(2).normal(size=layer.lora_kernel_b.shape))
    return made


def run(plan: Any = None) -> dict[str, Any]:
    """Losses, weights, predictions and counts; the gradient's norm is over the bound of ``global_clipnorm``."""
    keras = models.keras_on_torch()
    random = np.random.default_rng(1)
    x, y = random.normal(size=(16, 8)), random.integers(0, 2, size=(16, 4))
    built = tpk.keras.TensorParallel(model(), plan=plan) if dist.get_world_size() > 1 else models.exact(model())
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=0.01)
    built.compile(optimizer, "mse", metrics=[keras.metrics.TruePositives()], jit_compile=False)
    history = built.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": {name: np.array(values) for name, values in history.items()},
        "weights": dict(enumerate(built.get_weights())),
        "predicted": built.predict(x, verbose=0),
    }


def every_fault() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plan = tpk.keras.make_plan(model(), dist.get_world_size())
    for name, seeded in faults().items():
        with seeded():
            found[name] = run(plan)
    return found


@pytest.mark.slow("11 s: trains once for each fault")
def test_each_seeded_fault_changes_what_training_is_compared_by(ranks: Pools) -> None:
    (expected,) = ranks(1).run(run, timeout=TIMEOUT)
    for found in ranks(2).run(every_fault, timeout=TIMEOUT):
        # Keras holds LoRA's factors in float32, and libraries round their product by its shape.
        models.assert_equal(found.pop("none"), expected, bound=1e-7)
        for name, numbers in found.items():
            wrong = "true_positives" if name == "metrics summed over ranks" else "loss"
            with pytest.raises(AssertionError, match=f"^/history/{wrong}: "):
                models.assert_equal(numbers, expected, bound=1e-9)
        assert len(found) == 6
