"""What single architectures need beyond the rules: data only.

``CONFIGS``: fields of the configuration, those of a part in a dict of their own.  ``INPUTS``: arguments of the call by
name, ("int", shape, below), ("float", shape) or ("ones", shape), which win over what the names of arguments suggest.
``VARIANTS``: other configurations of an architecture whose defaults leave out what is of interest, under a name of
their own.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CONFIGS", "INPUTS", "VARIANTS"]

_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_STAGES = {"depths": [1, 1], "num_heads": [2, 4], "image_size": 16, "patch_size": 2, "window_size": 4}
_SHARED_CACHE = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_HEAD = {"head_dim": 8}
_CODES = {"base_channels": 32, "num_embeddings": 32, "embed_dim": 16, "latent_channels": 16}
_FORECAST = {"prediction_length": 4, "context_length": 8, "num_time_features": 1}
_RESNET = {
    "use_timm_backbone": False,
    "backbone_config": {"model_type": "resnet", "embedding_size": 8, "out_features": ["stage2", "stage3", "stage4"]},
}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("informer", "time_series_transformer"), _FORECAST),
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _RESNET),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"), _HEAD),
    **dict.fromkeys(("donut-swin", "maskformer-swin", "swin", "swinv2"), _STAGES),
    "autoformer": _FORECAST | {"label_length": 4},
    "bit": {"num_groups": 4},
    "blip-2": {"image_token_id": 90},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "bros": {"hidden_size": 64},
    "chameleon": {"vocabulary_map": {"<image>": 90}, "vq_config": _CODES},
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_v2": _EXPERTS,
    "dots1": _EXPERTS | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "emu3": {"vocabulary_map": {"<image>": 90}, "vq_config": _CODES},
    "encodec": {"num_filters": 4, "hidden_size": 16, "codebook_size": 32, "codebook_dim": 16},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": _SHARED_CACHE
    | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "dots3_note": {"vision_config": {"adapter_in_dim": 32}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "grounding-dino": {"num_queries": 3},
    "hunyuan_vl": {"text_config": _HEAD},
    "janus": {"vq_config": _CODES},
    "granite_speech5_ctc": {"encoder_config": {"context_size": 16}},
    "granite_speech5_encoder": {"context_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
}

_IDS = ("int", (2, 7), 64)
_SERIES = {
    "past_values": ("float", (2, 15)),
    "past_time_features": ("float", (2, 15, 1)),
    "past_observed_mask": ("ones", (2, 15)),
    "future_values": ("float", (2, 4)),
    "future_time_features": ("float", (2, 4, 1)),
}

INPUTS: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "bros": {"input_ids": _IDS, "bbox": ("float", (2, 7, 4))},
    "decision_transformer": {
        "states": ("float", (2, 5, 17)),
        "actions": ("float", (2, 5, 4)),
        "rewards": ("float", (2, 5, 1)),
        "returns_to_go": ("float", (2, 5, 1)),
        "timesteps": ("int", (2, 5), 5),
        "attention_mask": ("ones", (2, 5)),
    },
    "clvp": {"input_ids": _IDS, "input_features": ("float", (2, 32, 20))},
    "dia": {"input_ids": _IDS, "decoder_input_ids": ("int", (2, 5, 9), 64)},
    "esm": {"input_ids": ("int", (2, 7), 30)},
    "esmc": {"input_ids": ("int", (2, 7), 30)},
    "granite_speech5_ctc": {"input_features": ("float", (2, 40, 64))},
    "granite_speech5_encoder": {"input_features": ("float", (2, 40, 64))},
    "idefics": {
        "input_ids": _IDS,
        "pixel_values": ("float", (2, 1, 3, 32, 32)),
        "image_attention_mask": ("ones", (2, 7, 1)),
    },
    "informer": _SERIES,
    "lxmert": {"input_ids": _IDS, "visual_feats": ("float", (2, 4, 2048)), "visual_pos": ("float", (2, 4, 4))},
    "time_series_transformer": _SERIES,
}

_EXPERT_BLOCKS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
_RELATIVE = {"use_relative_position_bias": True}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "beit relative": ("beit", _RELATIVE),
    "data2vec-vision relative": ("data2vec-vision", _RELATIVE),
    "gemma4_text experts": ("gemma4_text", _EXPERT_BLOCKS),
}
