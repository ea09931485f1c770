"""Small random backbones of KerasHub, and how they are made parallel and compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.keras import models

SMALL = {"vocabulary_size": 101, "num_layers": 1}
OLD = SMALL | {"num_heads": 4, "hidden_dim": 32, "intermediate_dim": 64, "max_sequence_length": 16, "dropout": 0.0}
GROUPED = SMALL | {"num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32, "intermediate_dim": 64}
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("Bert", OLD),
    "RoBERTa": ("Roberta", OLD),
    "GPT-2": ("GPT2", OLD),
    "GPT-2, 2 heads": ("GPT2", OLD | {"num_heads": 2}),
    "GPT-2, 5 heads": ("GPT2", OLD | {"num_heads": 5, "hidden_dim": 40, "intermediate_dim": 63}),
    "OPT": ("OPT", OLD),
    "Llama": ("Llama", GROUPED),
    "Mistral": ("Mistral", GROUPED),
    "Gemma 8/4": ("Gemma", GROUPED | {"num_query_heads": 8, "num_key_value_heads": 4, "hidden_dim": 64, "head_dim": 8}),
    "Gemma 4/1": ("Gemma", GROUPED | {"num_key_value_heads": 1, "head_dim": 8}),
}
"""Name, the start of the class's name, arguments."""


def backbone(name: str) -> Any:
    keras = models.keras_on_torch()
    import keras_hub

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    kind, arguments = BACKBONES[name]
    return getattr(keras_hub.models, f"{kind}Backbone")(**arguments)


def shaken(model: Any, by: float) -> Any:
    """With weights that are not at their initial values, of which biases and LoRA's second factors are zero."""
    random = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(variable.numpy() + by * random.normal(size=variable.shape))
    return model


def made(model: Any, **options: Any) -> Any:
    return tpk.keras.TensorParallel(model, **options) if dist.get_world_size() > 1 else models.exact(model)


def language_model(name: str) -> Any:
    whole = shaken(backbone(name), 0.3)
    import keras_hub

    return getattr(keras_hub.models, f"{BACKBONES[name][0]}CausalLM")(backbone=whole, preprocessor=None)


def prompts() -> dict[str, np.ndarray]:
    ids, mask = np.zeros((2, 9), "int32"), np.zeros((2, 9), "int32")
    ids[:, :4], mask[:, :4] = np.arange(8).reshape(2, 4) + 3, 1
    mask[1, 3] = 0
    return {"token_ids": ids, "padding_mask": mask}


def classifier(name: str, rank_of_lora: int = 0) -> Any:
    keras = models.keras_on_torch()
    body = backbone(name)
    if rank_of_lora:
        body.enable_lora(rank_of_lora)
    shaken(body, 0.1)
    out = body.output["sequence_output"] if isinstance(body.output, dict) else body.output
    pooled = keras.layers.GlobalAveragePooling1D(name="pooled")(out)
    return keras.Model(body.input, keras.layers.Dense(3, name="head")(pooled))


def data(model: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What the model takes, some of it padded, and classes."""
    random = np.random.default_rng(1)
    x = {name: random.integers(0, 2, size=(8, 7)).astype("int32") for name in sorted(model.input)}
    x["token_ids"] = random.integers(0, 101, size=(8, 7)).astype("int32")
    x["padding_mask"] = np.repeat([[1, 1, 1, 1, 1, 0, 0]], 8, axis=0).astype("int32")
    return x, random.integers(0, 3, size=(8,))
