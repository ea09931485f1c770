"""What single architectures need beyond the rules: data only.

``CONFIGS``: fields of the configuration, those of a part in a dict of their own.  ``INPUTS``: arguments of the call by
name, ("int", shape, below) or ("float", shape), which win over what the names of arguments suggest.  ``KINDS``: the
class to build where it is not the preferred one.  ``NEEDS``: why an architecture cannot be built here at all.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CONFIGS", "INPUTS", "KINDS", "NEEDS"]

_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_STAGES = {"depths": [1, 1], "num_heads": [2, 4], "image_size": 16, "patch_size": 2, "window_size": 4}
_SHARED_CACHE = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
_RESNET = {
    "use_timm_backbone": False,
    "backbone_config": {"model_type": "resnet", "embedding_size": 8, "out_features": ["stage2", "stage3", "stage4"]},
}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _RESNET),
    "deepseek_v2": _EXPERTS,
    "dots1": _EXPERTS | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gemma3n_text": _SHARED_CACHE | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "swin": _STAGES,
    "swinv2": _STAGES,
}

INPUTS: dict[str, dict[str, Any]] = {}

KINDS: dict[str, str] = {}

NEEDS: dict[str, str] = {}
