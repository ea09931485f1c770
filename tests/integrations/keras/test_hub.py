"""KerasHub's models, small and random, each against the unsharded one."""

from __future__ import annotations

import runpy
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.keras import hub, models
from tests.integrations.keras.test_meta import most_memory_during
from tests.integrations.keras.test_training import TIMEOUT
from tpkernels.testing.spawn import Pools

keras_version = pytest.importorskip("keras").__version__
if tuple(map(int, keras_version.split(".")[:2])) < (3, 15):
    pytest.skip(f"KerasHub needs Keras 3.15, and this is {keras_version}", allow_module_level=True)
pytest.importorskip(
    "keras_hub",
    reason="KerasHub is missing, or not for this Keras: pip install --no-deps keras-hub",
    exc_type=ImportError,
)
pytestmark = pytest.mark.gloo

BOUND = 1e-6
"""Relative: Keras keeps the factors of LoRA in float32, and KerasHub normalizes in it."""
EXAMPLE = Path(__file__).parents[3] / "examples" / "keras_gemma_lora.py"
GENERATING = ("GPT-2", "Gemma 4/1", "Llama", "Gemma 8/4", "Mistral", "OPT")


def generated(names: tuple[str, ...], folder: str) -> dict[str, Any]:
    """Greedy tokens of each model, sampled ones of the last, which is trained and saved as a preset, too."""
    keras = models.keras_on_torch()
    found = {}
    for name in names:
        model = hub.made(hub.language_model(name))
        model.compile(sampler="greedy")
        found[name] = model.generate(hub.prompts(), stop_token_ids=None)["token_ids"]
        logits = model(hub.prompts())
        found[f"{name}, stopped"] = model.generate(hub.prompts(), stop_token_ids=[int(found[name][0, 6])])
        found[f"{name}, logits"] = keras.ops.convert_to_numpy(logits)
    found["trained"] = trained_and_kept(model, f"{folder}/of {dist.get_world_size()}")
    model.compile(sampler="top_k")
    if dist.get_world_size() > 1:
        keras.utils.set_random_seed(dist.get_rank())
        found["sampled"] = model.generate(hub.prompts(), stop_token_ids=None)["token_ids"]
        prompts = hub.prompts()
        prompts["token_ids"][0, 0] += dist.get_rank()
        with pytest.raises(ValueError, match="different prompts"):
            model.generate(prompts, stop_token_ids=None)
        with pytest.raises(ValueError, match="generate of Own keeps a cache that tpkernels does not know"):
            refused().generate(hub.prompts(), stop_token_ids=None)
    return found


def trained_and_kept(model: Any, folder: str) -> dict[str, Any]:
    """Steps of a task by its own methods (``fit`` needs grain, 10 MB), and a preset, which has whole weights."""
    import keras_hub

    labels = np.roll(hub.prompts()["token_ids"], -1, axis=1)
    losses = [model.train_on_batch(hub.prompts(), labels) for _ in range(2)]
    model.save_to_preset(folder)
    kept = keras_hub.models.CausalLM.from_preset(folder, preprocessor=None)
    assert type(kept).__module__.startswith("keras_hub.")
    for mine, saved in zip(model.get_weights(), kept.get_weights(), strict=True):
        models.assert_equal(saved, mine, "preset")
    clone = models.keras_on_torch().models.clone_model  # which unties the head from the table
    assert [v.shape for v in clone(model).variables] == [v.shape for v in clone(kept).variables]
    return {"history": np.array(losses), "weights": dict(enumerate(model.get_weights()))}


def refused() -> Any:
    import keras_hub

    class Own(keras_hub.models.GPT2CausalLM):  # type: ignore[misc]
        """Its ``_build_cache`` could do anything."""

    return hub.made(Own(backbone=hub.backbone("GPT-2"), preprocessor=None))


@pytest.mark.slow("11 s: models of KerasHub")
def test_greedy_tokens_are_those_of_the_unsharded_model(ranks: Pools, tmp_path: Path, full: bool) -> None:
    names = GENERATING if full else GENERATING[1:2]
    (expected,) = ranks(1).run(generated, names, str(tmp_path), timeout=TIMEOUT)
    for world_size in (2, 3, 4) if full else (2,):
        found = ranks(world_size).run(generated, names, str(tmp_path), timeout=TIMEOUT)
        sampled = [one.pop("sampled") for one in found]
        for one, drawn in zip(found, sampled, strict=True):
            assert np.array_equal(drawn, sampled[0])
            models.assert_equal(one, expected, bound=1e-5)  # the unsharded head multiplies in float32
            for name in names:
                assert np.array_equal(one[name], expected[name]), (name, world_size)
    for name in names:
        assert not np.array_equal(expected[name], hub.prompts()["token_ids"]), name


def trained(names: tuple[str, ...], rank_of_lora: int) -> dict[str, Any]:
    keras = models.keras_on_torch()
    found = {}
    for name in names:
        model = hub.made(hub.classifier(name, rank_of_lora))
        x, y = hub.data(model)
        optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
        history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0).history
        found[name] = {
            "history": history["loss"] + history["accuracy"],
            "weights": dict(zip([v.path for v in model.weights], model.get_weights(), strict=True)),
            "predicted": model.predict(x, verbose=0),
            "evaluated": model.evaluate(x, y, verbose=0),
        }
        if dist.get_world_size() > 1:
            found[name]["styles"] = {layer.name: layer.style for layer in model.tensor_parallel_plan.layers}
            sent = models.bytes_of_a_step(model, {key: rows[:3] for key, rows in x.items()})
            planned = sum(layer.sent for layer in model.tensor_parallel_plan.layers)
            assert 0 < sent == planned, (name, sent, planned)
            found[name]["cuts"] = sorted(model.tensor_parallel_plan.cuts)
    return found


def compared(ranks: Pools, world_size: int, names: tuple[str, ...], rank_of_lora: int) -> dict[str, Any]:
    (expected,) = ranks(1).run(trained, names, rank_of_lora, timeout=TIMEOUT)
    said: dict[str, Any] = {}
    for found in ranks(world_size).run(trained, names, rank_of_lora, timeout=TIMEOUT):
        for name, numbers in found.items():
            said[name] = numbers.pop("styles"), numbers.pop("cuts")
            models.assert_equal(numbers, expected[name], name, bound=BOUND)
    return said


@pytest.mark.slow("3 s: models of KerasHub")
def test_backbones_train_as_unsharded(ranks: Pools, full: bool) -> None:
    names = tuple(hub.BACKBONES) if full else ("GPT-2, 5 heads",)
    said = compared(ranks, 2, names, 0)
    for name, (styles, _) in said.items():
        pairs = [style for style in styles.values() if style in ("column", "row")]
        assert len(pairs) >= 4, (name, styles)
    if full:
        enough = tuple(name for name in names if name != "GPT-2, 2 heads")  # more ranks than heads are refused
        for world_size in (3, 4):
            said = compared(ranks, world_size, enough, 0)
            for name in ("Llama", "Mistral", "Gemma 4/1"):
                copied = [layer for layer, style in said[name][0].items() if style == "copied"]
                assert len(copied) == 2, (name, world_size, said[name])


@pytest.mark.slow("5 s: models of KerasHub")
def test_lora_is_cut_with_its_layer(ranks: Pools, full: bool) -> None:
    names = GENERATING if full else ("Gemma 4/1",)
    for world_size in (2, 3, 4) if full else (2,):
        said = compared(ranks, world_size, names, 2)
        copied = [name for name, style in said["Gemma 4/1"][0].items() if style == "copied"]
        assert len(copied) == 2, "the only key-value head is on all ranks"
        for name, (_, cuts) in said.items():
            factors = [path.rpartition("_")[2] for path in cuts if "lora" in path]
            assert factors and set(factors) == {"a"}, (name, cuts)  # [features, heads, rank]; b has no heads


def kept_factors(folder: str) -> bool:
    """The factors of LoRA alone, in a file of a task's backbone, which each rank reads anew."""
    import keras_hub

    body = hub.backbone("Gemma 4/1")
    body.enable_lora(2)
    model = hub.made(keras_hub.models.GemmaCausalLM(backbone=hub.shaken(body, 0.1), preprocessor=None))
    factors = [variable for variable in model.variables if "lora" in variable.path]
    before = [factor.numpy() for factor in factors]
    model.backbone.save_lora_weights(f"{folder}/some.lora.h5")
    for factor in factors:
        factor.assign(0 * factor.value)
    model.backbone.load_lora_weights(f"{folder}/some.lora.h5")
    return len(factors) > 0 and all(np.array_equal(f.numpy(), b) for f, b in zip(factors, before, strict=True))


@pytest.mark.full("test_state.py has a part that writes and reads a file")
def test_a_backbone_keeps_its_factors_of_lora_in_a_file(ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(kept_factors, str(tmp_path), timeout=TIMEOUT) == [True, True]


def two_billion() -> tuple[dict[str, int], float, int]:
    """Styles of a plan for Gemma in the sizes of its 2B, on the meta device; CPU seconds; bytes of growth."""
    keras = models.keras_on_torch()
    import keras_hub

    keras.utils.clear_session()
    sizes = {"vocabulary_size": 256_000, "num_layers": 18, "num_query_heads": 8, "num_key_value_heads": 1}
    sizes |= {"hidden_dim": 2048, "intermediate_dim": 32_768, "head_dim": 256}
    with keras.device("meta"):
        built = keras_hub.models.GemmaBackbone(**sizes, dtype="bfloat16")
    assert built.count_params() > 2.5e9
    start = time.process_time()
    plan, grown = most_memory_during(lambda: tpk.keras.make_plan(built, 2))
    return Counter(layer.style for layer in plan.layers), time.process_time() - start, grown


def test_a_model_of_two_billion_weights_is_planned_in_a_minute_and_a_gigabyte(ranks: Pools, full: bool) -> None:
    if not full:
        pytest.skip("--full: a quarter of a minute of planning")
    ((styles, seconds, grown),) = ranks(1).run(two_billion, timeout=TIMEOUT)
    print(f"{seconds:.1f} CPU seconds, {grown / 2**20:.0f} MiB, {styles}")
    # Of each layer: query and two gates; output and down; key and value; three norms, the last one of the model.
    assert styles == {"vocabulary": 1, "column": 3 * 18, "row": 2 * 18, "copied": 2 * 18, "whole": 2 * 18 + 1}
    assert seconds < 60 and grown < 2**30


def example() -> list[float]:
    losses: list[float] = runpy.run_path(str(EXAMPLE))["main"]()
    return losses


@pytest.mark.slow("6 s: models of KerasHub")
def test_the_example_trains_gemma_with_lora(ranks: Pools) -> None:
    first, second = ranks(2).run(example, timeout=TIMEOUT)
    assert first == second and first[-1] < first[0], (first, second)
