"""Keras on JAX: one process, and devices that are not there. `.ci/run` installs JAX (130 MB), the quick run does not.

XLA optimizes nothing here, which halves the time that it takes: what is compared is how it lays variables out.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 500
WITHOUT = "--full: where jax is installed, as .ci/run does"
BUILD = """
import sys, warnings
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
"""
ON_TORCH = """
open("4.json", "w").write(tpk.keras.make_plan(build(), 4).to_json())
"""
ON_JAX = """
def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=0.05, epsilon=1e-3), loss, metrics=["accuracy"])
    return model

def trained(model):
    random = np.random.default_rng(1)
    x, y = random.integers(0, 50, size=(16, 6)).astype("int32"), random.integers(0, 5, size=(16,))
    keras.utils.set_random_seed(3)
    compiled(model).fit(x, y, batch_size=8, epochs=2, verbose=0)
    return [*model.get_weights(), model.predict(x, verbose=0)]

def moved(n, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if n < 4:
            options["device_ids"] = [f"cpu:{one}" for one in range(n)]
        model = tpk.keras.TensorParallel(build(), **options)
    said = [str(one.message) for one in seen if "these stay whole" in str(one.message)]
    assert len(said) == (n > 1) and all("odd/kernel (9), odd/bias (9)" in one for one in said), (n, said)
    for mine, whole in zip(trained(model), expected, strict=True):
        assert np.abs(mine - whole).max() < 1e-5, n
    for name, shape in (("up", (8, 32 // n)), ("down", (32 // n, 8)), ("odd", (8, 9))):
        parts = {shard.data.shape for shard in model.get_layer(name).kernel.value.addressable_shards}
        assert parts == {shape}, (n, name, parts)
    slots = [v.value.addressable_shards[0].data.shape for v in model.optimizer.variables if "up_kernel" in v.path]
    assert slots == [(8, 32 // n)] * 2
    split = n if options.get("shard_optimizer_states", True) else 1
    slots = [v.value.addressable_shards[0].data.shape for v in model.optimizer.variables if "odd_kernel" in v.path]
    assert slots == [(8 // split, 9)] * 2, (n, slots)
    return model

expected = trained(build())
two = moved(1) and moved(2).tensor_parallel_plan.to_json()
model = moved(4)
assert "is not known: the backend chooses" in str(model.tensor_parallel_plan), "JAX chooses what is sent"
text = open("4.json").read()
given = {"world_size": 4, "distributed_backend": "jax", "shard_optimizer_states": False}
from_torch = moved(4, plan=tpk.keras.KerasPlan.from_json(text), **given)
styles = {layer.name: layer.style for layer in from_torch.tensor_parallel_plan.layers}
assert styles["attention.query"] == "column" and styles["attention.attention_output"] == "row", styles
mesh = keras.distribution.DeviceMesh((1, 4), ("batch", "model"), keras.distribution.list_devices())
with warnings.catch_warnings(record=True):
    layouts = tpk.keras.layout_map(text, mesh)
assert tuple(layouts["up/kernel"].axes) == (None, "model") and tuple(layouts["up/bias"].axes) == ("model",)
assert tuple(layouts["attention/query/kernel"].axes) == (None, "model", None)
assert layouts["odd/kernel"] is None and layouts["more/up/kernel"] is None, "paths are matched exactly"
with warnings.catch_warnings(record=True):
    for alone in ({"world_size": 4}, {"distributed_backend": "jax"}):
        assert tpk.keras.TensorParallel(build(), **alone).tensor_parallel_plan == model.tensor_parallel_plan, alone
for method in (model.get_layer("up").enable_lora, model.quantize):
    try:
        method(2)
    except ValueError as error:
        assert "on the whole model first, and then TensorParallel" in str(error), error
    else:
        raise AssertionError("LoRA's variables would be on one device")
model.save("model.keras")
assert type(keras.models.load_model("model.keras")).__module__.startswith("keras")
assert type(keras.models.clone_model(model)) is type(model.from_config(model.get_config())) is type(build())
parts = [variable.value.sharding for variable in [*model.variables, *model.optimizer.variables]]
slots = [variable.numpy() for variable in model.optimizer.variables]
before = model.get_weights()
model.set_weights([2 * weight for weight in before])
again = tpk.keras.TensorParallel(compiled(build()))  # before it is cut; the optimizer has no state yet
for one in (model, again):
    one.load_weights("model.keras")
    assert [variable.value.sharding for variable in [*one.variables, *one.optimizer.variables]] == parts
    for mine, theirs in zip([*one.get_weights(), *map(np.array, one.optimizer.variables)], [*before, *slots]):
        assert np.array_equal(mine, theirs)
again.train_on_batch(np.zeros((8, 6), "int32"), np.zeros(8))
content = open("model.keras", "rb").read()
open("damaged.keras", "wb").write(content[: len(content) // 2])
open("damaged.weights.h5", "wb").write(content)
other = keras.distribution.DeviceMesh((4,), ("rows",), keras.distribution.list_devices())
other_model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
for words, attempt in (
    ("JAX has 4 devices", lambda: tpk.keras.TensorParallel(build(), world_size=3)),
    ("must be a list of some of", lambda: tpk.keras.TensorParallel(build(), device_ids=["tpu:0"])),
    ("does not fit Keras's backend", lambda: tpk.keras.TensorParallel(build(), distributed_backend="gloo")),
    ("is for 2 ranks", lambda: tpk.keras.TensorParallel(build(), plan=tpk.keras.KerasPlan.from_json(two))),
    ("not for this Sequential", lambda: tpk.keras.TensorParallel(other_model, plan=model.tensor_parallel_plan)),
    ("parallel already", lambda: tpk.keras.TensorParallel(model)),
    ("an axis 'model'", lambda: tpk.keras.layout_map(two, other)),
    ("must be a keras.distribution.DeviceMesh", lambda: tpk.keras.layout_map(two, 5)),
    ("cannot be read as a weight file", lambda: model.load_weights("damaged.keras")),
    ("load_weights('damaged.weights.h5')", lambda: model.load_weights("damaged.weights.h5")),
    ("load_weights('missing.weights.h5')", lambda: model.load_weights("missing.weights.h5")),
):
    try:
        attempt()
    except ValueError as error:
        assert words in str(error), (words, error)
    else:
        raise AssertionError(words)
assert all(map(np.array_equal, model.get_weights(), before)), "what is refused changes nothing"
print("all of it ran")
"""

HUB = """
import sys, warnings
import keras
import numpy as np
import keras_hub
import tpkernels as tpk
from tests.integrations.keras.hub import BACKBONES, data, prompts

def backbone(name, lora=0):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    kind, arguments = BACKBONES[name]
    body = getattr(keras_hub.models, kind + "Backbone")(**arguments)
    if lora:
        body.enable_lora(lora)
    return body

def classifier(name, lora):
    body = backbone(name, lora)
    out = body.output["sequence_output"] if isinstance(body.output, dict) else body.output
    pooled = keras.layers.GlobalAveragePooling1D()(out)
    return keras.Model(body.input, keras.layers.Dense(3, name="head")(pooled))

def language_model(name):
    kind = BACKBONES[name][0] + "CausalLM"
    return getattr(keras_hub.models, kind)(backbone=backbone(name), preprocessor=None)

def trained(model):
    x, y = data(model)
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = model.fit(x, y, batch_size=4, epochs=3, verbose=0, shuffle=False).history["loss"]
    return [np.array(losses), *model.get_weights(), model.predict(x, verbose=0)]

def tokens(model):
    model.compile(sampler="greedy")
    return model.generate(prompts(), stop_token_ids=None)["token_ids"]

def moved(model, n):
    with warnings.catch_warnings(record=True):  # what stays whole
        model = tpk.keras.TensorParallel(model, world_size=n, device_ids=[f"cpu:{one}" for one in range(n)])
    cut = [v for v in model.trainable_variables if v.value.addressable_shards[0].data.shape != v.value.shape]
    assert cut, "nothing is cut"
    return model

for name in BACKBONES:
    for lora in (0, 4) if name.split()[0] in ("Llama", "Mistral", "Gemma") else (0,):
        expected = trained(classifier(name, lora))
        for n in (2, 4):
            for mine, whole in zip(trained(moved(classifier(name, lora), n)), expected, strict=True):
                assert np.abs(mine - whole).max() <= 1e-5 * max(1e-5, np.abs(whole).max()), (name, lora, n)
for name in ("GPT-2", "Gemma 4/1", "Llama"):
    expected = tokens(language_model(name))
    for n in (2, 4):
        assert np.array_equal(tokens(moved(language_model(name), n)), expected), (name, n)
print("all of it ran")
"""


@pytest.mark.cpu
@pytest.mark.full("minutes of XLA's compiling, and jax has to be installed")
def test_models_of_keras_hub_train_and_generate_as_without(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("jax", "keras", "keras_hub")):
        pytest.skip(WITHOUT)
    assert "all of it ran" in run(HUB, "jax", tmp_path)


@pytest.mark.cpu
def test_a_model_trains_on_one_two_and_four_devices_as_without(tmp_path: Path) -> None:
    """With the rules' plan, and with one that was made on torch; one process takes some of its four devices."""
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("keras") is None:
        pytest.skip(WITHOUT)
    run(BUILD + ON_TORCH, "torch", tmp_path)
    assert "all of it ran" in run(BUILD + ON_JAX, "jax", tmp_path)


def run(program: str, backend: str, folder: Path) -> str:
    environment = os.environ | {
        "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }  # fmt: skip
    argv = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
