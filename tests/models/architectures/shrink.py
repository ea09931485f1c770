"""Small configurations, made from the default ones by the names of their fields.

Owns: the rules.  A field that no rule names keeps its default, a rule never makes a field larger, and fields that say
the same thing in different words get values that fit each other: 4 heads of 8 features are 32, 2 layers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["HEAD_DIM", "HIDDEN", "VOCABULARY", "small_config"]

VOCABULARY, HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM, INTERMEDIATE = 96, 32, 4, 2, 8, 48
LAYERS = r"(num_|n_)?(\w+_)?(hidden_|conformer_|encoder_|decoder_)?(layers|layer|blocks)|\w+_depth|depth"
RULES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_)?vocab_size|(src|tgt|decoder|text|entity|char|vision)_vocab_size|vocab_size_per_layer_input", 96),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|context_length", 64),
    (r"max_(encoder|decoder)_position_embeddings|max_sequence_length|model_max_length", 64),
    (r"qk_rope_head_dim|d_rel|rotary_dim", 4),
    (r"qk_head_dim", 12),
    (r"(\w+_)?head_dim|d_kv|d_head|dim_head|kv_channels|\w+_dim_head|mamba_d_head|attention_head_dim|key_dim", 8),
    (r"query_pre_attn_scalar", 8),
    (r"kv_lora_rank|o_lora_rank", 16),
    (r"q_lora_rank", 24),
    (r"(num_|n_)?(\w+_)?(key_value|kv)_heads|num_kv_heads", KEY_VALUE_HEADS),
    (r"linear_num_key_heads", 2),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"num_kv_shared_layers", 0),
    (r"index_kpool", 2),
    (r"upsample_groups", 32),
    (r"upsample_initial_channel", 64),
    (r"num_windows", 4),
    (r"num_feat_extract_layers|num_encoder_blocks|num_adapter_layers", 99),
    (r"(num_|n_)?(\w+_)?heads?|encoder_attention_heads|decoder_attention_heads", HEADS),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|num_experts_per_topk|experts_per_token", 2),
    (r"(moe_num|num|n)_(local_|routed_)?experts|zero_expert_num|moe_num_experts", 4),
    (r"n_group|num_expert_group", 2),
    (r"topk_group|first_k_dense_replace|n_shared_experts", 1),
    (r"index_topk|index_topk_blocks", 4),
    (r"(\w+_)?moe_(intermediate|hidden)_size|expert_ffn_hidden_size|shared_experts?_intermediate_size", 24),
    (r"(\w+_)?(intermediate|ffn_hidden|feedforward)_(size|dim)(_mlp)?|(\w+_)?ffn_dim|d_ff|dff|dim_ff|d_inner", 48),
    (r"(\w+_)?mlp_(hidden_)?(dim|size)|encoder_linear_units|decoder_linear_units|dim_feedforward|n_inner", 48),
    (r"projector_hidden_size|projection_hidden_size", 32),
    (
        r"(\w+_)?hidden_(size|dim)(_per_layer_input)?|(\w+_)?d_model|n_embd|dim|(\w*)emb(ed)?_dim|embedding_(dim|size)",
        32,
    ),
    (r"(\w+_)?projection_dim|(\w+_)?output_dim|pooler_output_size|project_dim|word_embed_proj_dim|\w+_proj_dim", 32),
    (r"mask_feature_size|fpn_feature_size|feature_size|latent_dim|encoder_out_size", 32),
    (r"image_size|pretrain_image_size|input_size|spec_size|resolution", 32),
    (r"patch_size|stem_size", 8),
    (r"sliding_window(_size)?|window_size|local_attention|attention_window|attention_chunk_size|chunk_size", 4),
    (r"mamba_chunk_size|mamba_d_state|ssm_state_size|state_size", 8),
    (r"max_window_layers|num_conv_pos_embedding_groups|altup_num_inputs", 2),
    (r"num_conv_pos_embeddings", 8),
    (r"num_mel_bins|n_mel_bins", 16),
    (r"num_queries|num_query_tokens|num_object_queries|two_stage_num_proposals|num_latents|max_2d_positions", 12),
    (r"relative_attention_num_buckets", 8),
    (r"num_denoising|mask_time_length|mask_feature_length", 0),
    (LAYERS, 2),
)
SPECIAL_IDS = {"pad": 0, "bos": 1, "eos": 2, "sep": 3, "mask": 4, "unk": 5, "decoder_start": 1, "cls": 6}
PLACEHOLDERS = {"image": 90, "video": 91, "audio": 92, "vision_start": 93, "vision_end": 94}
KINDS = re.compile(r"(layer|block|indexer|attention|mlp)\w*_types?|layers_block_type|attention_layers")
INDICES = re.compile(r"(?!stage_)\w*(indexes|indices|idxs|_layers|hook_ids|layer_ids|out_indices)")
WIDTHS = re.compile(r"hidden_sizes|embed_dims?|(\w+_)?hidden_sizes|conv_dim|tdnn_dim|\w*_dims")
ZERO = re.compile(r"\w*(drop|layerdrop)\w*|mask_time_prob|mask_feature_prob|\w*jitter\w*|\w*noise_std")


def small_config(kind: Any, options: Mapping[str, Any], given: Any = None) -> Any:
    """An object of the configuration class ``kind`` with small sizes; ``options`` win, by field, into parts as well."""
    options = dict(options)
    if given is not None and options.get("model_type", given.model_type) != given.model_type:
        return small_config(_class(options.pop("model_type")), options)  # another part in its place
    default = given if given is not None else kind()
    fields = {key: value for key, value in vars(default).items() if not key.startswith("_")}
    fields = {key: value for key, value in fields.items() if key not in _NOT_PASSED}
    layers = _layers(fields, options)
    changed: dict[str, Any] = {}
    for key, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            inner = options.pop(key, {})
            changed[key] = small_config(type(value), inner, value) if isinstance(inner, Mapping) else inner
        else:
            new = small_value(key, value, layers)
            if new is not value:
                changed[key] = new
    _fit(changed, fields)
    changed |= {key: value for key, value in _stages(default, fields, changed, options).items() if given is not None}
    if fields.get("rope_parameters") and "mrope_section" in _modeling(kind):
        rope = dict(changed.get("rope_parameters", fields["rope_parameters"]))
        parts = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
        for part in parts[1:] or parts:
            whole = part.get("partial_rotary_factor", 1.0) >= 1
            part["mrope_section"] = [2, 1, 1] if whole else [1, 1, 0]
        changed["rope_parameters"] = rope
    kept = {key: value for key, value in fields.items() if given is not None and key not in changed}
    return kind(**{**kept, **changed, **options}) if given is None else _rebuilt(kind, kept, changed | options)


@cache
def _modeling(kind: Any) -> str:
    """The source of the model of a configuration."""
    path = Path(inspect.getfile(kind))
    path = path.with_name(path.name.replace("configuration_", "modeling_"))
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _class(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name]


def _stages(
    default: Any, fields: Mapping[str, Any], changed: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """A backbone hands on the features of as many stages as before; where layers are its stages, it has no fewer."""
    wanted = getattr(default, "_out_features", None) or []
    if len(wanted) < 2 or {"out_features", "out_indices", "_out_features"} & set(options):
        return {}
    if "num_hidden_layers" not in changed or "depths" in fields:
        return {"out_features": list(wanted)}
    layers = int(options.get("num_hidden_layers", len(wanted)))
    return {"num_hidden_layers": layers, "out_features": [f"stage{layers - i}" for i in reversed(range(len(wanted)))]}


_NOT_PASSED = {
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
    "model_type",
    "stage_names",
}


def _rebuilt(kind: Any, kept: Mapping[str, Any], changed: Mapping[str, Any]) -> Any:
    """A part of a configuration: what the whole one's defaults say of it beyond its class's own is kept."""
    own = vars(kind())
    differs = {key: value for key, value in kept.items() if key not in own or repr(own[key]) != repr(value)}
    return kind(**{**differs, **changed})


def _layers(fields: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """How many layers: two, or one of each kind that there is."""
    kinds = [value for key, value in fields.items() if KINDS.fullmatch(key) and isinstance(value, list | tuple)]
    count = max((len(_distinct(value)) for value in kinds), default=2)
    return int(options.get("num_hidden_layers", max(2, count)))


def _distinct(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def small_value(key: str, value: Any, layers: int) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and ZERO.fullmatch(key):
        return 0.0
    if isinstance(value, int):
        return _small_int(key, value, layers)
    if isinstance(value, list | tuple) and value:
        return _small_list(key, value, layers)
    if isinstance(value, Mapping) and "rope" in key:
        return _small_rope(value)
    return value


def _small_int(key: str, value: int, layers: int) -> int:
    if token := re.fullmatch(r"(\w+)_(token_)?(id|index|token_index)", key):
        name = token[1]
        if name in SPECIAL_IDS:
            return SPECIAL_IDS[name]
        known = [new for word, new in PLACEHOLDERS.items() if name == word]
        return known[0] if known else (80 + sum(map(ord, name)) % 10 if value >= VOCABULARY else value)
    for pattern, new in RULES:
        if re.fullmatch(pattern, key):
            new = layers if pattern == LAYERS and key in ("num_hidden_layers", "n_layer", "num_layers") else new
            return min(value, new)
    return value


def _small_list(key: str, value: Any, layers: int) -> Any:
    made = type(value)
    if KINDS.fullmatch(key) and isinstance(value[0], str):
        kinds = _distinct(value)
        return made((kinds + kinds[-1:] * layers)[:layers])
    if key in ("depths", "depth", "num_block_repeats", "block_sizes", "stage_num_blocks", "n_attn_blocks"):
        return made(1 for _ in value)
    if key in ("num_attention_heads", "num_heads") and all(isinstance(v, int) for v in value):
        return made(2 if index == 0 else 4 for index, _ in enumerate(value))
    if INDICES.fullmatch(key) and all(isinstance(v, int) for v in value):
        return made([v for v in value if v < layers] or [layers - 1])
    if WIDTHS.fullmatch(key) and all(isinstance(v, int) for v in value) and max(value) > 64:
        return made(max(8, round(v * 64 / max(value) / 8) * 8) if v > 3 else v for v in value)
    if key.endswith("token_id"):
        return SPECIAL_IDS.get(key.removesuffix("_token_id"), 7)
    if key == "image_size":
        return made(32 for _ in value)
    if key == "intermediate_size" or "sparsity" in key or len(value) > 16:
        small = value[:layers]
        return made(_small_int(key, v, layers) if isinstance(v, int) else v for v in small)
    return value


def _small_rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embeddings of heads of 8 features: 4 angles."""
    made = dict(value)
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            made[key] = _small_rope(inner)
        elif key == "mrope_section":
            made[key] = [2, 1, 1][: len(inner)]
        elif key in ("long_factor", "short_factor"):
            made[key] = [1.0] * (HEAD_DIM // 2)
    return made


def _fit(changed: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Latent attention makes keys and values for every head, and rotates a part of their features.

    Windows over merged patches are counted in pixels.
    """
    if {"window_size", "spatial_merge_size", "patch_size"} <= fields.keys():
        changed["window_size"] = 2 * fields["spatial_merge_size"] * changed.get("patch_size", fields["patch_size"])
    if fields.get("qk_rope_head_dim") and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        changed["head_dim"] = changed.get("qk_rope_head_dim", fields["qk_rope_head_dim"])
    for key in list(changed):
        if "key_value_heads" in key and fields.get("kv_lora_rank"):
            changed[key] = changed.get(key.replace("key_value", "attention"), HEADS)
