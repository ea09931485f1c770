"""Files hold whole variables and load anywhere; dropout; what a wrapped model says of itself; errors on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.keras import models
from tests.integrations.keras.test_training import TIMEOUT
from tpkernels.integrations.keras.optimizers import ELEMENTWISE
from tpkernels.testing.spawn import Pools

pytest.importorskip("keras")
pytestmark = pytest.mark.gloo


def made(**options: Any) -> Any:
    return models.parallel_small(**options) if dist.get_world_size() > 1 else models.exact(models.small(**options))


def adam() -> Any:
    return models.keras_on_torch().optimizers.Adam(1e-2, epsilon=1e-3)


def save_and_go_on(folder: str, start: str) -> dict[str, Any]:
    """Train, save, train on; and again from the file ``start``, whose optimizer was saved by another world."""
    x, y = models.data()
    world = dist.get_world_size()
    model = made()
    models.trained(model, adam())
    model.save(f"{folder}/{world}.keras")
    callback = models.keras_on_torch().callbacks.ModelCheckpoint(f"{folder}/{world}.weights.h5", save_weights_only=True)
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    found = {"went on": model.get_weights()}
    other = gone_on(start or f"{folder}/{world}.keras")
    found["resumed"] = other.get_weights()
    other.load_weights(f"{folder}/{world}.weights.h5")
    found["checkpoint"] = other.get_weights()
    lines = io.StringIO()
    model.summary(print_fn=lambda line: lines.write(line + "\n"))
    found["summary"] = [line for line in lines.getvalue().splitlines() if "params" in line]
    config = model.get_config()
    found["said"] = [model.count_params(), type(model.from_config(config)).__name__, len(model.to_json())]
    model.set_weights([2 * weight for weight in found["went on"]])
    for layer in model.layers:
        layer.set_weights(layer.get_weights())
    found["doubled"] = [weight / 2 for weight in model.get_weights()]
    found["slots"] = sum(np.prod(variable.shape) for variable in model.optimizer.variables)
    if world > 1:
        check_bytes(model)
        check_clone(model, x)
        check_clone(tpk.keras.TensorParallel(own_heads()), np.random.default_rng(3).normal(size=(2, 6, 8)))
        check_lora(folder)
    return found


def check_clone(model: Any, x: np.ndarray) -> None:
    """It is whole, of Keras's own class, has weights of its own, and is compiled where the model is."""
    clone = models.keras_on_torch().models.clone_model(model)
    assert type(clone).__module__.startswith("keras.") and not isinstance(clone, tpk.keras.TensorParallel)
    assert clone.compiled is model.compiled
    clone.set_weights(model.get_weights())
    found, expected = clone.predict(x, verbose=0), model.predict(x, verbose=0)
    models.assert_equal(found, expected, "clone", bound=1e-5)  # Keras multiplies in float32


def own_heads() -> Any:
    """A user's layer that computes with its number of heads: a cut one has that of a rank, and describes the whole."""
    keras = models.keras_on_torch()
    keras.utils.clear_session()

    class Heads(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, num_heads: int, **options: Any) -> None:
            super().__init__(**options)
            self.num_heads = num_heads
            self.inner = [keras.layers.Dense(8) for _ in range(3)]
            self.outer = keras.layers.Dense(8)

        def build(self, shape: Any) -> None:
            for layer in (*self.inner, self.outer):
                layer.build(shape)

        def call(self, x: Any) -> Any:
            length = x.shape[1]
            parts = (keras.ops.reshape(layer(x), (-1, length, self.num_heads, 2)) for layer in self.inner)
            q, k, v = (keras.ops.transpose(part, (0, 2, 1, 3)) for part in parts)
            y = keras.ops.softmax(q @ keras.ops.transpose(k, (0, 1, 3, 2))) @ v
            return self.outer(keras.ops.reshape(keras.ops.transpose(y, (0, 2, 1, 3)), (-1, length, 2 * self.num_heads)))

        def get_config(self) -> dict[str, Any]:
            return super().get_config() | {"num_heads": self.num_heads}

    x = keras.Input((6, 8))
    return keras.Model(x, Heads(4)(x))


def check_lora(folder: str) -> None:
    """Files hold the kernel with its factors added, as Keras writes it, and the factors are zero where it is loaded.

    A model inside of the model is written from rank 0 alone, too.
    """
    keras = models.keras_on_torch()
    keras.utils.clear_session()
    layers = [keras.layers.Embedding(40, 8), keras.layers.Dense(20, "tanh"), keras.layers.Dense(8)]
    x = y = keras.Input((4, 8))
    for layer in (lambda z: keras.layers.GroupQueryAttention(4, 4, 2)(z, z), *layers[1:]):
        y = layer(y)
    inner = keras.Model(x, y, name="inner")
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layers[0], inner])
    for layer in layers:
        layer.enable_lora(2)
    for variable in model.trainable_variables:
        variable.assign(np.random.default_rng(2).normal(size=variable.shape))
    model = tpk.keras.TensorParallel(model)
    ids = models.data()[0][:, :4] % 40
    before = model.predict(ids, verbose=0)
    check_clone(model, ids)
    check_part(inner, folder)
    model.save_weights(f"{folder}/lora.weights.h5")
    model.load_weights(f"{folder}/lora.weights.h5")
    factors = [variable.numpy() for variable in model.variables if "lora" in variable.path]
    assert len(factors) == 6 and not any(factor.any() for factor in factors)
    found = model.predict(ids, verbose=0)
    models.assert_equal(found, before, "LoRA", bound=1e-5)  # Keras multiplies the factors in float32


def check_part(inner: Any, folder: str) -> None:
    """Of a parallel model; what it writes is read by one that is not, and by itself."""
    keras = models.keras_on_torch()
    for method in ("save", "save_weights", "load_weights"):
        with pytest.raises(ValueError, match=f"{method}: rank 0 names"):
            getattr(inner, method)(f"{folder}/of rank {dist.get_rank()}.weights.h5")
    inner.save(f"{folder}/inner.keras")
    inner.save_weights(f"{folder}/inner.weights.h5")
    plain = keras.models.load_model(f"{folder}/inner.keras")
    for model in (plain, inner):
        for variable in model.variables:
            variable.assign(0 * variable.value)
        model.load_weights(f"{folder}/inner.weights.h5")
    for variable, mine, theirs in zip(inner.weights, inner.get_weights(), plain.get_weights(), strict=True):
        models.assert_equal(mine, theirs, variable.path)
        assert mine.any() == ("lora" not in variable.path), variable.path


def gone_on(start: str) -> Any:
    """A new model of other weights, with what the file says, after another epoch."""
    x, y = models.data()
    model = made(seed=9)
    model.compile(adam(), "sparse_categorical_crossentropy", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(start)
    model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    return model


def resumed(start: str) -> list[np.ndarray]:
    weights: list[np.ndarray] = gone_on(start).get_weights()
    return weights


def check_bytes(model: Any) -> None:
    """What this rank holds of variables and slots is what the plan says; replicas' slots are split by rows."""
    plan, rank, world = model.tensor_parallel_plan, dist.get_rank(), dist.get_world_size()
    held = sum(variable.value.nbytes for variable in model.variables)
    assert held == 8 * plan.elements_on(rank), "float64, and seeds of int64"
    split = {
        path: tpk.keras.Split(world).sizes(s)[rank] if s[0] >= world else s[0] for path, s in plan.variables.items()
    }
    rows = {path: split[path] * int(np.prod(shape[1:])) for path, shape in plan.variables.items()}
    parts = {path: int(np.prod(cut.shape_on(rank))) for path, cut in plan.cuts.items()}
    slots = [variable.value.nbytes for variable in model.optimizer.variables if variable.path.startswith("adam/")]
    expected = 2 * 8 * sum((rows | parts)[variable.path] for variable in model.trainable_variables)
    counters = sum(v.value.nbytes for v in model.optimizer.variables if not v.shape)
    assert sum(slots) - counters == expected, (slots, expected)
    whole = 8 * sum(int(np.prod(shape)) for shape in plan.variables.values())
    sent = models.bytes_of_a_step(model, models.data()[0][:3])
    assert sent == sum(layer.sent for layer in plan.layers) > 0
    assert f"each rank sends up to {sent:,} bytes in a training step on int32[3, 6]" in str(plan)
    print(f"rank {rank} sends {sent:,} bytes in forward and backward of 3 rows; ", end="")
    print(f"{held:,} of {whole:,} bytes of variables, {expected:,} bytes of slots")


@pytest.mark.slow("15 s: trains on five numbers of ranks")
def test_a_run_goes_on_from_its_files_at_another_world_size(ranks: Pools, tmp_path: Path, full: bool) -> None:
    (expected,) = ranks(1).run(save_and_go_on, str(tmp_path), "", timeout=TIMEOUT)
    results = ranks(2).run(save_and_go_on, str(tmp_path), str(tmp_path / "1.keras"), timeout=TIMEOUT)
    for found in results:
        for name in ("went on", "resumed", "checkpoint", "doubled"):
            for mine, whole in zip(found[name], expected["went on"], strict=True):
                models.assert_equal(mine, whole, name, bound=1e-6)  # the file has the learning rate in float32
        assert found["summary"] == expected["summary"] and found["said"] == expected["said"]
        assert found["slots"] < 0.7 * expected["slots"]
    for found in ranks(3).run(resumed, str(tmp_path / "2.keras"), timeout=TIMEOUT) if full else ():
        for mine, whole in zip(found, expected["went on"], strict=True):
            models.assert_equal(mine, whole, "on three ranks", bound=1e-6)
    loaded_without_tpkernels(tmp_path / "2.keras", results[0]["went on"])


ELSEWHERE = """
import sys
sys.modules["tpkernels"] = None
import keras, numpy as np
file, data, out = sys.argv[1:]
keras.config.set_floatx("float64")
model = keras.models.load_model(file)
assert type(model).__module__.startswith("keras.") and int(model.optimizer.iterations.numpy()) == 6
found = np.load(data)
model.fit(found["x"], found["y"], batch_size=8, epochs=1, shuffle=False, verbose=0)
np.savez(out, *model.get_weights())
"""


def loaded_without_tpkernels(file: Path, went_on: list[np.ndarray]) -> None:
    """An interpreter in which tpkernels cannot be imported loads the file of two ranks, and trains on as they did."""
    x, y = models.data()
    data, out = file.parent / "data.npz", file.parent / "out.npz"
    np.savez(data, x=x, y=y)
    argv = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, str(file), str(data), str(out)]
    environment = os.environ | {"KERAS_BACKEND": "torch"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    with np.load(out) as found:
        mine, theirs = [np.concatenate([np.ravel(w) for w in ws]) for ws in (found.values(), went_on)]
    models.assert_equal(mine, theirs, "weights", bound=1e-5)  # Keras multiplies in float32


def dropped() -> dict[str, Any]:
    model = tpk.keras.TensorParallel(models.small(dropout=0.3, seed=dist.get_rank()))
    captured: dict[str, np.ndarray] = {}

    def keep(layer: Any, inputs: Any, output: Any) -> None:
        captured[layer.name] = (output == 0).detach().numpy()

    for layer in (model.get_layer("drop"),):
        layer.register_forward_hook(keep)
    found = models.trained(model, models.keras_on_torch().optimizers.SGD(0.1), epochs=1)
    model(models.data()[0], training=True)
    return {"weights": found["weights"], "mask": captured["drop"]}


@pytest.mark.slow("3 s")
def test_dropout_differs_on_what_is_cut_and_leaves_the_replicas_equal(ranks: Pools) -> None:
    first, second = ranks(2).run(dropped, timeout=TIMEOUT)
    for path, weight in first["weights"].items():
        assert np.array_equal(weight, second["weights"][path]), path
    width = min(first["mask"].shape[-1], second["mask"].shape[-1])
    masks = [one["mask"][..., :width] for one in (first, second)]
    assert all(0.2 < mask.mean() < 0.4 for mask in masks) and not np.array_equal(*masks)


def refusals(folder: str) -> list[str]:
    keras = models.keras_on_torch()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = models.data()
    model = made()
    plan = model.tensor_parallel_plan
    models.trained(model, adam(), epochs=1)
    model.save_weights(f"{folder}/good.weights.h5")
    dist.barrier()
    if rank == 0:
        content = Path(f"{folder}/good.weights.h5").read_bytes()
        Path(f"{folder}/bad.weights.h5").write_bytes(content[: len(content) // 2])
        Path(f"{folder}/bad.keras").write_bytes(content)
    dist.barrier()
    before = model.get_weights()
    fresh = models.small()
    compiled = models.small()
    compiled.compile("sgd", "mse", jit_compile=False)
    compiled.optimizer.build(compiled.trainable_variables)
    untouched = fresh.get_weights()
    edited = dataclasses.replace(plan, notes=("edited",))
    wrap = tpk.keras.TensorParallel
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    narrow = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    first = rank == 0  # from here on also mistakes that one rank alone makes

    def load_from(current: str) -> None:
        with contextlib.chdir(current):  # where the file is for one rank, and not for the other
            model.load_weights("good.weights.h5")

    attempts: list[Callable[[], Any]] = [
        lambda: model.load_weights(f"{folder}/bad.weights.h5"),
        lambda: model.load_weights(f"{folder}/bad.keras"),
        lambda: load_from(folder if first else "/"),
        lambda: model.load_weights(f"{folder}/{'good' if first else 'bad'}.weights.h5"),
        lambda: model.save(f"{folder}/of rank {rank}.keras"),
        lambda: model.save_weights(f"{folder}/of rank {rank}.weights.h5"),
        lambda: keras.saving.save_model(model, f"{folder}/function {rank}.keras"),
        lambda: wrap(model),
        lambda: model.get_layer("up").enable_lora(2),
        lambda: model.quantize("int8"),
        lambda: model.compile(model.optimizer),
        lambda: model.compile("adam" if first else keras.optimizers.Lamb()),
        lambda: model.compile(keras.optimizers.SGD(0.1 if first else 0.2)),
        lambda: model.export(f"{folder}/export"),
        lambda: model.train_on_batch(x[rank : rank + 8], y[:8]),
        lambda: wrap(fresh, world_size=world + 1),
        lambda: wrap(fresh, device_ids=["cpu:0"]),
        lambda: wrap(fresh, device_ids=["cuda:0"] * world),
        lambda: wrap(fresh, device_ids="cpu:0"),
        lambda: wrap(fresh, device_ids=2),
        lambda: wrap(fresh, shard_optimizer_states="no"),
        lambda: wrap(fresh, shard_optimizer_states=first),
        *[lambda name=name: wrap(fresh, distributed_backend=name) for name in UNKNOWN],
        lambda: wrap(fresh, distributed_backend="jax"),
        *[lambda name=name: without_gpus(wrap, fresh, distributed_backend=name) for name in ("nccl", NCCL[rank])],
        lambda: wrap(unbuilt),
        lambda: wrap(fresh if first else unbuilt),
        lambda: wrap(fresh, None if first else 5),
        lambda: wrap(fresh, plan=plan if first else edited),
        lambda: wrap(narrow),
        lambda: wrap(compiled),
        lambda: wrap(other, plan=plan),
        lambda: wrap(fresh, plan=dataclasses.replace(plan, world_size=world + 1)),
        lambda: tpk.keras.make_plan(fresh, 100),
        lambda: tpk.keras.KerasPlan.from_json(plan.to_json().replace("table", "stable")),
    ]
    for name in sorted({name for name in vars(keras.optimizers) if name[0].isupper()} - {*ELEMENTWISE, *HOLDERS}):
        with pytest.raises(ValueError, match=f"{name} updates elements of a variable together"):
            model.compile(getattr(keras.optimizers, name)())
    said = []
    for attempt in attempts:
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("nothing")
    assert not list(Path(folder).glob("of rank*"))
    assert type(fresh).__name__ == "Functional" and not isinstance(fresh, tpk.keras.TensorParallel)
    for old, new in zip([*before, *untouched], [*model.get_weights(), *fresh.get_weights()], strict=True):
        assert np.array_equal(old, new)
    wrap(fresh, world, ["cpu:0"] * world, "gloo", plan=plan, shard_optimizer_states=False)  # and now it works
    alone: list[dict[str, Any]] = [{"world_size": world}, {"device_ids": ["cpu:0"] * world}]
    plan = tpk.keras.make_plan(other, world)
    for given in [*alone, {"distributed_backend": "gloo"}, {"plan": plan}, {"shard_optimizer_states": False}]:
        again = keras.models.clone_model(other)
        assert wrap(again, **given).tensor_parallel_plan == plan, given
    return said


def without_gpus(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        return call(*args, **kwargs)


HOLDERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
"""Classes of ``keras.optimizers`` that update nothing by themselves."""
NCCL = ("nccl", "auto")
"""On which of two ranks."""
UNKNOWN = ("tensorflow", "horovod", "fallback", "mpi")
WORDS = (
    "load_weights", "cannot be read as a weight file", "rank 1: ",
    *[f"{method}: rank 0 names" for method in ("load_weights", "save", "save_weights")],
    "all ranks would write one file",
    "parallel already", "enable_lora on the whole model first", "quantize on the whole model first",
    "has state already", "rank 1: Lamb updates", "rank 0 has the optimizer SGD", "exported", "different batches",
    "torchrun --nproc_per_node 3 script.py` or `tpkernels run --tp 3 script.py", "device_ids has 1 names", "kind cuda",
    *["must be a list of names"] * 2, "must be True or False", "differs between the ranks: [True, False]",
    *["must be one of ['auto', 'torch', 'gloo', 'nccl', 'jax']"] * len(UNKNOWN),
    "does not fit Keras's backend", "TensorParallel: distributed_backend 'nccl'", "rank 0: distributed_backend 'nccl'",
    "is not built", "rank 1: Sequential", "rank 1: world_size is 5",
    "different plans", "nothing of Sequential can be cut over 2 ranks", "load_weights, which brings",
    "not for this Sequential", "the plan is for 3 ranks", "use", "damaged",
)  # fmt: skip


@pytest.mark.slow("6 s")
def test_bad_input_raises_on_every_rank_and_changes_nothing(ranks: Pools, tmp_path: Path) -> None:
    for said in ranks(2).run(refusals, str(tmp_path), timeout=TIMEOUT):
        assert len(said) == len(WORDS)
        for words, message in zip(WORDS, said, strict=True):
            assert words in message, (words, message)
