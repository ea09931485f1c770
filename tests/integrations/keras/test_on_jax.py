"""Keras on JAX: one process, and devices that are not there. JAX is 100 MB, and CI does not install it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 500
PROGRAM = """
import warnings
import keras
import numpy as np
import tpkernels as tpk

def build():
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(52, 8)(ids)
    x = layers.MultiHeadAttention(4, 4, name="attention")(x, x) + x
    x = layers.Dense(8, name="down")(layers.Dense(32, activation="tanh", name="up")(x)) + x
    x = layers.Dense(9, name="odd")(x)
    return keras.Model(ids, layers.Dense(5, name="head")(layers.GlobalAveragePooling1D()(x)))

def trained(model):
    random = np.random.default_rng(1)
    x, y = random.integers(0, 50, size=(16, 6)).astype("int32"), random.integers(0, 5, size=(16,))
    keras.utils.set_random_seed(3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=0.05, epsilon=1e-3), loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return [*model.get_weights(), model.predict(x, verbose=0)]

expected = trained(build())
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    model = tpk.keras.TensorParallel(build(), world_size=2)
assert any("odd/kernel (9)" in str(one.message) for one in seen)
for mine, whole in zip(trained(model), expected, strict=True):
    assert np.abs(mine - whole).max() < 1e-5
kernel = model.get_layer("up").kernel.value
assert kernel.addressable_shards[0].data.shape == (8, 16)
slots = [v.value.addressable_shards[0].data.shape for v in model.optimizer.variables if "up_kernel" in v.path]
assert slots == [(8, 16)] * 2
again = tpk.keras.KerasPlan.from_json(model.tensor_parallel_plan.to_json())
mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"))
layouts = tpk.keras.layout_map(again, mesh)
assert tuple(layouts["up/kernel"].axes) == (None, "model") and layouts["odd/kernel"] is None
model.save("model.keras")
assert type(keras.models.load_model("model.keras")).__module__.startswith("keras")
for wrong in ({"world_size": 3}, {"device_ids": ["tpu:0"]}, {"distributed_backend": "gloo"}):
    try:
        tpk.keras.TensorParallel(build(), **wrong)
    except ValueError as error:
        print(wrong, error)
    else:
        raise AssertionError(wrong)
"""


@pytest.mark.cpu
def test_a_model_trains_on_two_devices_as_on_one(tmp_path: Path) -> None:
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("keras") is None:
        pytest.skip("--full: only where jax, 100 MB, was installed by hand")
    environment = os.environ | {
        "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }  # fmt: skip
    argv = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
