"""What single architectures are called with, where the names of arguments do not say it: data only.

``INPUTS``: arguments by name: ("int", shape, below), ("float", shape), ("uniform", shape) between 0 and 1,
("ones", shape), ("mask", shape) for ones that are integers, as processors give them, ("no", shape) and ("yes", shape)
for masks of booleans, ("words", length, id, count) for ids of which ``count`` from the second on are a placeholder,
("is", value) for integers that are written out, ("tuples", dict) for tuples of these by key, or ("exactly", value) for
what is no tensor.
"""

from __future__ import annotations

from typing import Any

__all__ = ["INPUTS"]

_IDS = ("int", (2, 7), 64)
_GLOBAL = ("is", [[1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0]])
"""Words that attend to all others."""
_SERIES = {
    "past_values": ("float", (2, 15)),
    "past_time_features": ("float", (2, 15, 1)),
    "past_observed_mask": ("ones", (2, 15)),
    "future_values": ("float", (2, 4)),
    "future_time_features": ("float", (2, 4, 1)),
}

_GRID = ("is", [[1, 4, 4]] * 2)
_VIDEO = ("float", (2, 4, 3, 32, 32))
_PATCHES = ("float", (2, 16, 192))
_IMAGE = ("float", (2, 3, 32, 32))

_SPEECH = {
    "input_ids": ("int", (2, 5), 20),
    "attention_mask": ("mask", (2, 5)),
    "duration_labels": ("is", [[1, 2, 1, 2, 1], [2, 1, 1, 1, 2]]),
    "pitch_labels": ("float", (2, 5, 1)),
    "energy_labels": ("float", (2, 5, 1)),
    "spectrogram_labels": ("float", (2, 7, 16)),
}

_GROUNDING = {"input_ids": _IDS, "pixel_values": ("float", (2, 3, 128, 128))}
"""Large enough for two pixels in the coarsest features: the norm of a single one has no gradient but rounding."""

_PLACES = ("is", [[[x, y] for y in range(3) for x in range(3)]] * 2)
"""Of nine patches, of which pooling makes one."""

INPUTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), _GROUNDING),
    **dict.fromkeys(("fastspeech2_conformer", "fastspeech2_conformer_with_hifigan"), _SPEECH),
    "audioflamingo3_encoder": {"input_features": ("float", (2, 16, 128)), "input_features_mask": ("mask", (2, 128))},
    "autoformer": _SERIES,
    "bark fine": {"codebook_idx": ("exactly", 2), "input_ids": ("int", (2, 7, 8), 64)},
    "blip_2_qformer": {"query_embeds": ("float", (2, 4, 32)), "encoder_hidden_states": ("float", (2, 5, 32))},
    "blt": {"input_ids": _IDS, "patch_lengths": ("is", [[1, 2, 4], [1, 3, 3]])},
    "bros": {"input_ids": _IDS, "bbox": ("float", (2, 7, 4))},
    "clap": {"input_ids": _IDS, "input_features": ("float", (2, 1, 64, 32))},
    "clvp": {"input_ids": _IDS, "input_features": ("float", (2, 32, 20))},
    "decision_transformer": {
        "states": ("float", (2, 5, 17)),
        "actions": ("float", (2, 5, 4)),
        "rewards": ("float", (2, 5, 1)),
        "returns_to_go": ("float", (2, 5, 1)),
        "timesteps": ("int", (2, 5), 5),
        "attention_mask": ("ones", (2, 5)),
    },
    "depth_pro": {"pixel_values": ("float", (2, 3, 128, 128))},
    "dia": {"input_ids": _IDS, "decoder_input_ids": ("int", (2, 5, 9), 64)},
    "diffusion_gemma": {
        "input_ids": ("words", 8, 85, 1),
        "decoder_input_ids": ("int", (2, 8), 64),
        "pixel_values": ("uniform", (2, 9, 192)),
        "image_position_ids": _PLACES,
    },
    "efficientloftr": {"pixel_values": ("float", (2, 2, 3, 64, 64))},
    "esm": {"input_ids": ("int", (2, 7), 30)},
    "esmc": {"input_ids": ("int", (2, 7), 30)},
    "evolla": {
        "input_ids": _IDS,
        "protein_input_ids": ("words", 5, 0, 0),
        "protein_attention_mask": ("mask", (2, 5)),
    },
    "fun_asr_nano_encoder": {"input_features": ("float", (2, 20, 112)), "input_features_mask": ("mask", (2, 20))},
    "gemma3n_audio": {"audio_mel": ("float", (2, 32, 16)), "audio_mel_mask": ("no", (2, 32))},
    "gemma4_audio": {"input_features": ("float", (2, 32, 8)), "attention_mask": ("ones", (2, 32))},
    "gemma4_vision": {
        "pixel_values": ("uniform", (2, 9, 192)),
        "pixel_position_ids": _PLACES,
    },
    "gemma4_unified_assistant": {
        "inputs_embeds": ("float", (2, 7, 64)),
        "shared_kv_states": (
            "tuples",
            {
                "sliding_attention": [("float", (2, 2, 5, 8))] * 2,
                "full_attention": [("float", (2, 2, 5, 512))] * 2,
            },
        ),
    },
    "granite4_vision": {
        "input_ids": ("words", 17, 85, 10),
        "pixel_values": ("float", (2, 2, 3, 32, 32)),
        "image_sizes": ("is", [[32, 32]] * 2),
    },
    "granite_docling_vision": {"pixel_values": _IMAGE, "fine": ("exactly", True)},
    "granite_speech5_ctc": {"input_features": ("float", (2, 40, 64))},
    "granite_speech5_encoder": {"input_features": ("float", (2, 40, 64))},
    "idefics": {
        "input_ids": _IDS,
        "pixel_values": ("float", (2, 1, 3, 32, 32)),
        "image_attention_mask": ("ones", (2, 7, 1)),
    },
    "informer": _SERIES,
    "inkling2_vision": {"pixel_values": ("float", (32, 16, 16, 3)), "image_grid_thw": _GRID},
    "instructblip": {"input_ids": ("words", 11, 90, 4), "qformer_input_ids": _IDS, "pixel_values": _IMAGE},
    "instructblipvideo": {"input_ids": ("words", 23, 91, 16), "qformer_input_ids": _IDS, "pixel_values": _VIDEO},
    "kimi_k25_vision": {"pixel_values": ("float", (32, 3, 8, 8)), "grid_thw": _GRID},
    "kosmos-2": {
        "input_ids": ("int", (2, 11), 64),
        "pixel_values": _IMAGE,
        "image_embeds_position_mask": ("is", [[0] + [1] * 4 + [0] * 6] * 2),
    },
    "kosmos-2.5": {
        "input_ids": ("int", (2, 11), 64),
        "flattened_patches": ("uniform", (2, 8, 34)),
        "image_embeds_position_mask": ("is", [[0] + [1] * 4 + [0] * 6] * 2),
    },
    "kyutai_speech_to_text": {"input_ids": ("int", (2, 7, 5), 32)},
    "led": {"input_ids": _IDS, "decoder_input_ids": ("int", (2, 5), 64), "global_attention_mask": _GLOBAL},
    "lightglue": {"pixel_values": ("float", (2, 2, 3, 64, 64))},
    "longformer": {"input_ids": _IDS, "global_attention_mask": _GLOBAL},
    "luke": {
        "input_ids": _IDS,
        "entity_ids": ("int", (2, 3), 64),
        "entity_position_ids": ("is", [[[1, 2, -1], [3, -1, -1], [4, 5, 6]]] * 2),
    },
    "lxmert": {"input_ids": _IDS, "visual_feats": ("float", (2, 4, 2048)), "visual_pos": ("float", (2, 4, 4))},
    "mimi_decoder": {"latents": ("float", (2, 32, 4))},
    "minicpm_ocr_vision": {"pixel_values": ("float", (1, 3, 8, 256)), "target_sizes": ("is", [[4, 4], [4, 4]])},
    "minicpmv4_7_vision": {"pixel_values": ("float", (1, 3, 8, 256)), "target_sizes": ("is", [[4, 4], [4, 4]])},
    "mllama": {
        "input_ids": _IDS,
        "pixel_values": ("float", (2, 1, 4, 3, 32, 32)),
        "aspect_ratio_ids": ("is", [[1], [6]]),
        "aspect_ratio_mask": ("is", [[[1, 0, 0, 0]], [[1, 1, 1, 1]]]),
        "cross_attention_mask": ("mask", (2, 7, 1, 4)),
    },
    "molmo2": {
        "input_ids": ("words", 11, 90, 4),
        "pixel_values": ("float", (2, 16, 192)),
        "image_token_pooling": ("is", [[16 * i + 4 * j + k for k in range(4)] for i in range(2) for j in range(4)]),
        "image_grids": ("is", [[2, 2, 0, 0], [2, 2, 0, 0]]),
        "image_num_crops": ("is", [1, 1]),
        "mm_token_type_ids": ("is", [[0] + [1] * 4 + [0] * 6] * 2),
    },
    "moonshine": {"input_values": ("float", (2, 4000)), "decoder_input_ids": ("int", (2, 5), 64)},
    "muse_glimmer_assistant": {
        "noise_embeds": ("float", (2, 7, 32)),
        "context_hidden_states": ("float", (2, 7, 32)),
        "attention_mask": ("ones", (2, 14)),
    },
    "muse_glimmer_vision": {"pixel_values": ("float", (32, 384)), "grid_thw": _GRID},
    "muse_spark_audio": {"input_values": ("float", (2, 3840))},
    "muse_spark_vision": {"pixel_values": ("float", (32, 384)), "grid_thw": _GRID},
    "musicgen": {"input_ids": _IDS, "decoder_input_ids": ("int", (8, 5), 64)},
    "musicgen_melody": {
        "input_ids": _IDS,
        "input_features": ("float", (2, 6, 12)),
        "decoder_input_ids": ("int", (8, 5), 64),
    },
    "neucodec": {"input_values": ("float", (2, 1, 640)), "input_features": ("float", (2, 160, 160))},
    "omdet-turbo": {
        "pixel_values": ("float", (2, 3, 64, 64)),
        "classes_input_ids": ("int", (4, 5), 64),
        "classes_attention_mask": ("mask", (4, 5)),
        "tasks_input_ids": ("int", (2, 6), 64),
        "tasks_attention_mask": ("mask", (2, 6)),
        "classes_structure": ("is", [2, 2]),
    },
    "paddleocr_vl": {
        "input_ids": ("words", 11, 90, 4),
        "pixel_values": ("float", (32, 3, 8, 8)),
        "image_grid_thw": _GRID,
        "mm_token_type_ids": ("is", [[0] + [1] * 4 + [0] * 6] * 2),
    },
    "patchtsmixer": {"past_values": ("float", (2, 32, 1))},
    "patchtst": {"past_values": ("float", (2, 32, 1))},
    "pe_audio": {"input_ids": _IDS, "input_values": ("float", (2, 1, 7680))},
    "pe_audio_encoder": {"input_values": ("float", (2, 1, 7680))},
    "pi0": {
        "state": ("float", (2, 32)),
        "noise": ("float", (2, 4, 32)),
        "timestep": ("uniform", (2,)),
        "actions": ("float", (2, 4, 32)),
        "input_ids": ("words", 23, 90, 16),
        "pixel_values": ("float", (2, 1, 3, 32, 32)),
        "pixel_attention_mask": ("yes", (2, 1)),
    },
    "pix2struct": {"flattened_patches": ("uniform", (2, 8, 34)), "decoder_input_ids": ("int", (2, 5), 64)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": ("float", (2, 32, 7))},
    "qwen2_5_omni_dit": {
        "hidden_states": ("float", (2, 8, 80)),
        "condition_vector": ("float", (2, 20, 80)),
        "speaker_embedding": ("float", (2, 8, 32)),
        "quantized_code": ("int", (2, 4), 64),
        "time_step": ("uniform", (2,)),
    },
    "qwen2_5_omni_talker": {"inputs_embeds": ("float", (2, 7, 32)), "thinker_reply_part": ("float", (2, 3, 32))},
    "qwen3_asr": {
        "input_ids": ("words", 20, 92, 13),
        "input_features": ("float", (2, 16, 100)),
        "input_features_mask": ("mask", (2, 100)),
    },
    "qwen3_asr_encoder": {"input_features": ("float", (2, 16, 100)), "input_features_mask": ("mask", (2, 100))},
    "qwen3_omni_moe_talker_code_predictor": {"inputs_embeds": ("float", (2, 3, 32))},
    "reformer": {"input_ids": ("int", (2, 16), 64)},
    "seggpt": {"pixel_values": _IMAGE, "prompt_pixel_values": _IMAGE, "prompt_masks": _IMAGE},
    "siglip2": {
        "pixel_values": _PATCHES,
        "pixel_attention_mask": ("mask", (2, 16)),
        "spatial_shapes": ("is", [[4, 4], [2, 8]]),
    },
    "siglip2_vision_model": {
        "pixel_values": _PATCHES,
        "pixel_attention_mask": ("mask", (2, 16)),
        "spatial_shapes": ("is", [[4, 4], [2, 8]]),
    },
    "speech-encoder-decoder": {"input_values": ("float", (2, 1200)), "decoder_input_ids": ("int", (2, 5), 64)},
    "superglue": {"pixel_values": ("float", (2, 2, 3, 64, 64))},
    "time_series_transformer": _SERIES,
    "timesfm": {"past_values": ("float", (2, 24)), "freq": ("is", [0, 1])},
    "timesfm2_5": {"past_values": ("float", (2, 24))},
    "trocr": {"input_ids": _IDS, "encoder_hidden_states": ("float", (2, 5, 32))},
    "tvp": {
        "input_ids": ("int", (1, 7), 64),
        "pixel_values": ("float", (1, 2, 3, 128, 128)),
        "attention_mask": ("mask", (1, 7)),
    },
    "udop": {
        "input_ids": _IDS,
        "decoder_input_ids": ("int", (2, 5), 64),
        "bbox": ("uniform", (2, 7, 4)),
        "pixel_values": _IMAGE,
    },
    "univnet": {"input_features": ("float", (2, 10, 16)), "noise_sequence": ("float", (2, 10, 8))},
    "uvdoc": {"pixel_values": ("float", (2, 3, 64, 64))},
    "vibevoice_acoustic_tokenizer": {"input_values": ("float", (2, 1, 64)), "sample": ("exactly", False)},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": ("float", (2, 32, 8))},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": ("float", (2, 1, 64))},
    "video_llama_3_vision": {"pixel_values": ("float", (32, 192)), "grid_thw": _GRID, "merge_sizes": ("is", [2, 2])},
    "videomae": {"pixel_values": _VIDEO},
    "videoprism": {"input_ids": _IDS, "pixel_values_videos": ("float", (2, 16, 3, 32, 32))},
    "vilt": {
        "input_ids": _IDS,
        "pixel_values": _IMAGE,
        "pixel_mask": ("ones", (2, 32, 32)),
    },
    "vit_mae": {"pixel_values": _IMAGE, "noise": ("uniform", (2, 16))},
    "vits": {"input_ids": ("int", (2, 7), 38)},
    "vivit": {"pixel_values": _VIDEO},
    "voxtral_realtime": {"input_ids": ("int", (2, 8), 64), "input_features": ("float", (2, 16, 64))},
    "xclip": {"input_ids": _IDS, "pixel_values": ("float", (2, 8, 3, 32, 32))},
    "xcodec2": {"input_values": ("float", (2, 1, 640)), "input_features": ("float", (2, 160, 160))},
}
