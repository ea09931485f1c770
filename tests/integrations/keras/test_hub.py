"""KerasHub's models, small and random, each against the unsharded one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.integrations.keras import hub, models
from tests.integrations.keras.test_training import TIMEOUT
from tpkernels.testing.spawn import Pools

pytest.importorskip("keras")
pytest.importorskip("keras_hub", reason="KerasHub is missing: pip install --no-deps keras-hub")
pytestmark = pytest.mark.gloo

GENERATING = ("GPT-2", "Gemma 8/4", "Gemma 4/1", "Llama", "Mistral", "OPT")


def generated(names: tuple[str, ...]) -> dict[str, Any]:
    """Greedy tokens of each model, and sampled ones of the first."""
    keras = models.keras_on_torch()
    found = {}
    for name in names:
        model = hub.made(hub.language_model(name))
        model.compile(sampler="greedy")
        found[name] = model.generate(hub.prompts(), stop_token_ids=None)["token_ids"]
        logits = model(hub.prompts())
        found[f"{name}, stopped"] = model.generate(hub.prompts(), stop_token_ids=[int(found[name][0, 6])])
        found[f"{name}, logits"] = keras.ops.convert_to_numpy(logits)
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


def refused() -> Any:
    import keras_hub

    class Own(keras_hub.models.GPT2CausalLM):  # type: ignore[misc]
        """Its ``_build_cache`` could do anything."""

    return hub.made(Own(backbone=hub.backbone("GPT-2"), preprocessor=None))


def test_greedy_tokens_are_those_of_the_unsharded_model(ranks: Pools) -> None:
    (expected,) = ranks(1).run(generated, GENERATING, timeout=TIMEOUT)
    found = ranks(2).run(generated, GENERATING, timeout=TIMEOUT)
    assert np.array_equal(found[0]["sampled"], found[1]["sampled"])
    for one in found:
        del one["sampled"]
        models.assert_equal(one, expected, bound=1e-5)  # the unsharded head multiplies in float32; tokens are integers
        for name in GENERATING:
            assert np.array_equal(one[name], expected[name]), name
    for name in GENERATING:
        assert not np.array_equal(expected[name], hub.prompts()["token_ids"]), name
