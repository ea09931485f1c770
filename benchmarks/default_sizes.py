"""The sizes of an architecture's default configuration, and the least changes where that cannot be built.

It owns :data:`CHANGES`.  Each entry makes a default configuration buildable and leaves the sizes of layers as they are,
or says where one had to be chosen, because the default has none.
"""

from __future__ import annotations

import re
from collections import Counter
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from tests.models.architectures.catalogue import architectures, config_class

__all__ = ["CHANGES", "pattern", "published_bytes"]

_COMPASS_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
    for kind in ("full_attention", "sliding_attention")
}
_RESNET_50 = {
    "use_timm_backbone": False,
    "backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]},
}

CHANGES: dict[str, dict[str, Any]] = {
    # How many steps are predicted has no default; no layer's size depends on it.
    **{key: {"prediction_length": 24} for key in ("autoformer", "informer", "time_series_transformer")},
    # 1152 features do not make 14 heads; projections are as large with 16.
    "aya_vision": {"vision_config.num_attention_heads": 16},
    # The number of a token, which the vocabulary names.
    "chameleon": {"vocabulary_map": {"<image>": 8711}},
    "emu3": {"vocabulary_map": {"<image>": 151851}},
    # Rotations of positions have no default for each kind of layer; they have no parameters.
    "cohere_compass": {"text_config.rope_parameters": _COMPASS_ROPE},
    "cohere_compass_text": {"rope_parameters": _COMPASS_ROPE},
    # The same, of all layers.
    "dbrx": {"attn_config.rope_theta": 500000.0},
    # Which of the default's 32 layers are mixtures has no default: all but the first, as in DeepSeek's other models.
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", *["sparse"] * 31]},
    # Nor have the numbers of experts: those of dots.llm1.
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    # The vocabulary of ESM-2 and the places of its tokens, which have no default.
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    # The default's ResNet-50 is timm's, which is not installed; transformers' own has the same convolutions.
    **{key: _RESNET_50 for key in ("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer")},
    # The default's Swin is timm's as well, with norms behind it that transformers' own has in itself.
    "omdet-turbo": {
        "use_timm_backbone": False,
        "backbone_config": {"model_type": "swin", "image_size": 640, "out_indices": [2, 3, 4]},
        "apply_layernorm_after_vision_backbone": False,
    },
    # 4096 features over 32 heads.
    **{key: {"head_dim": 128} for key in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text")},
    "hunyuan_vl": {"text_config.head_dim": 128},
    # As many heads of keys as of queries, and features of a head that make up those of the model: other defaults' rule.
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
    # The channels of the head have no default: those of the first Sapiens for poses.
    "sapiens2": {"head_config": {"upsample_out_channels": [768, 768], "conv_out_channels": [768, 768]}},
    # Dropout has no default here.
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    # The vocabulary has no default: that of the base model of the first wav2vec 2.
    **{key: {"vocab_size": 32} for key in ("wav2vec2-bert", "wav2vec2-conformer")},
}
"""By architecture: arguments of its configuration; those of a part have its name before a dot."""


def pattern(name: str) -> str:
    """The name without the numbers of layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def published_bytes(name: str) -> Counter[str]:
    """Elements of the parameters in the default configuration, by name without the numbers of layers.

    Raises:
        Exception: the configuration cannot be built, and :data:`CHANGES` has nothing that helps.
    """
    import transformers

    known = architectures()[name]
    changes = CHANGES.get(name, {})
    config = config_class(known.model_type)(**{key: value for key, value in changes.items() if "." not in key})
    for key, value in changes.items():
        owner, _, attribute = key.rpartition(".")
        if owner:
            setattr(attrgetter(owner)(config), attribute, value)
    config = getattr(config, known.part) if known.part else config
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, known.kind)(config)
    found: Counter[str] = Counter()
    for key, parameter in model.named_parameters():
        found[pattern(key)] += parameter.numel()
    return found
