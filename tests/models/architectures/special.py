"""What single architectures need of their configuration beyond the rules: data only.

``CONFIGS``: fields of the configuration, those of a part in a dict of their own.  ``CLASSES``: what is built where the
head that the catalogue would take is a part of the model alone, or draws random numbers that a call cannot give.
``PARTS``: models of a part that the whole runs in its ``generate`` alone, with the field of the configuration and the
class.  ``SEEDED``: those that draw random numbers in every forward; all draw the same, which does not depend on the
floating dtype.  ``REMEMBERS``: caches, by attribute, that a model keeps between calls with the graph that made them;
they are emptied before each call.  ``VARIANTS``: other configurations of an architecture whose defaults leave out what
is of interest, under a name of their own.
"""

from __future__ import annotations

from typing import Any

__all__ = ["CLASSES", "CONFIGS", "PARTS", "REMEMBERS", "SEEDED", "VARIANTS"]

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

_CODEC = {
    "num_filters": 4,
    "codebook_size": 32,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_key_value_heads": 4,
}
_SAM_PARTS = {
    "vision_config": {"output_channels": 32, "num_pos_feats": 16},
    "prompt_encoder_config": {"image_embedding_size": 4, "mask_input_channels": 4},
}
_ENCODEC = {"num_filters": 4, "hidden_size": 16, "codebook_size": 32, "codebook_dim": 16}
_MUSICGEN = {"audio_encoder": _ENCODEC}
_NEUCODEC = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 2], "quantization_dim": 64, "num_key_value_heads": 4}
_BARK = {"input_vocab_size": 96, "output_vocab_size": 96, "block_size": 64}
_COMPASS_ROPE = {
    kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    for kind in ("full_attention", "sliding_attention")
}
_DOTS3 = {
    "per_layer_config": {1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 8, "head_dim": 12}},
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SPEECH5 = {"context_size": 16, "num_key_value_heads": 4}
_QWEN4 = {
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
}
_VIBE = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_HGNET = {
    "embedding_size": 8,
    "hidden_sizes": [16, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 24],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 24, 32],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
}
_HGNET_DETR = {"backbone_config": _HGNET, "encoder_in_channels": [16, 24, 32], "decoder_in_channels": [32] * 3}
_HIERA = {
    "embed_dim_per_stage": [8, 16, 24, 32],
    "num_attention_heads_per_stage": [1, 2, 2, 4],
    "blocks_per_stage": [1, 1, 2, 1],
    "global_attention_blocks": [3],
    "hidden_size": 8,
    "num_attention_heads": 1,
    "image_size": [64, 64],
    "window_positional_embedding_background_size": [4, 4],
    "window_size_per_stage": [4, 2, 2, 1],
}
_HIERA_NECK = {
    "backbone_config": _HIERA,
    "backbone_channel_list": [32, 24, 16, 8],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
_SAM2 = {
    "vision_config": _HIERA_NECK,
    "prompt_encoder_config": {"image_size": 64, "patch_size": 16, "mask_input_channels": 4},
}
_ROI = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_RT_DETR = {"backbone_config": _ROI, "encoder_in_channels": [16, 24, 32], "decoder_in_channels": [32] * 3}
_VOCAB = {"vocab_size": 96}
_WAV = {"num_filters": 4, "upsampling_ratios": [2, 2], "hidden_size": 32, "codebook_dim": 32, "codebook_size": 8}
_LATENT_ROPE = {"qk_rope_head_dim": 8, "index_head_dim": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("d_fine", "deimv2"), _HGNET_DETR),
    **dict.fromkeys(("detr", "conditional_detr", "deformable_detr", "dab-detr", "table-transformer"), _RESNET),
    **dict.fromkeys(("donut-swin", "maskformer-swin", "swin", "swinv2"), _STAGES),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_vl_text"), _HEAD),
    **dict.fromkeys(("informer", "time_series_transformer"), _FORECAST),
    **dict.fromkeys(("mimi", "mimi_encoder", "mimi_decoder"), _CODEC),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _MUSICGEN),
    **dict.fromkeys(("neucodec", "xcodec2"), _NEUCODEC),
    **dict.fromkeys(("rt_detr", "rt_detr_v2"), _RT_DETR),
    **dict.fromkeys(("sam2", "sam2_video", "edgetam_video"), _SAM2),
    **dict.fromkeys(("wav2vec2-bert", "wav2vec2-conformer"), _VOCAB),
    **dict.fromkeys(("wavtokenizer", "wavtokenizer_encoder"), _WAV),
    "align": {
        "projection_dim": 80,
        "vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 80},
    },
    "apertus1p5": {
        "vision_config": {
            **{"base_channels": 32, "latent_channels": 16, "embed_dim": 16, "codebook_size": 8},
            **{"channel_multiplier": [1, 1], "num_res_blocks": 1},
        },
        "audio_config": _WAV,
        "image_token_offset": 72,
        "audio_token_offset": 80,
    },
    "autoformer": _FORECAST | {"label_length": 4},
    "bark": {
        "codec_config": _ENCODEC,
        **dict.fromkeys(("semantic_config", "coarse_acoustics_config", "fine_acoustics_config"), _BARK),
    },
    "bit": {"num_groups": 4},
    "blip-2": {"image_token_id": 90},
    "blip_2_qformer": {"encoder_hidden_size": 32},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "global_config": {"hidden_size": 64, "head_dim": 16},
    },
    "bridgetower": {"hidden_size": 128, "text_config": {"hidden_size": 128}, "vision_config": {"hidden_size": 128}},
    "bros": {"hidden_size": 64},
    "chameleon": {"vocabulary_map": {"<image>": 90}, "vq_config": _CODES},
    "chmv2": {"post_process_channels": [8, 16, 24, 32], "number_output_channels": 16},
    "clap": {
        "audio_config": {
            "patch_embeds_hidden_size": 8,
            "window_size": 2,
            "num_attention_heads": [2, 2, 4, 4],
            "hidden_size": 64,
            "num_mel_bins": 32,
            "spec_size": 64,
        }
    },
    "clvp": {
        part: {"hidden_size": 128, "projection_dim": 128} for part in ("text_config", "speech_config", "decoder_config")
    }
    | {"projection_dim": 128},
    "cohere_compass": {"text_config": {"rope_parameters": _COMPASS_ROPE}},
    "cohere_compass_text": {"rope_parameters": _COMPASS_ROPE},
    "csm": {
        "codec_config": _CODEC,
        "num_codebooks": 4,
        "depth_decoder_config": {"num_codebooks": 4, "backbone_hidden_size": 32},
    },
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_shared_experts": 1},
        "vision_config": {"sam_config": {"output_channels": 32, "downsample_channels": [32, 32]}},
    },
    "deepseek_v2": _EXPERTS,
    "depth_pro": {
        "patch_size": 32,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "scaled_images_feature_dims": [32, 32, 32],
    },
    "diffllama": {"num_key_value_heads": 4},
    "diffusion_gemma": {
        "text_config": {
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "canvas_length": 8,
    },
    "dory": {"num_hidden_layers": 3, **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1)}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "dots1": _EXPERTS | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS3,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientloftr": {
        "hidden_size": 32,
        "fine_fusion_dims": [32, 16, 16],
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "out_features": [16, 16, 16, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "num_attention_layers": 2,
    },
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "emu3": {"vocabulary_map": {"<image>": 90}, "vq_config": _CODES},
    "encodec": {"num_filters": 4, "hidden_size": 16, "codebook_size": 32, "codebook_dim": 16},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [1, 1, 2]}}
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "esmc": {"num_key_value_heads": 4},
    "exaone4_5": {"image_token_id": 90},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_audio": {"input_feat_size": 16, "sscp_conv_channel_size": [8, 4]},
    "gemma3n_text": _SHARED_CACHE
    | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "gemma4_audio": {"subsampling_conv_channels": [8, 4]},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 32}},
    "granite4_vision": {
        "vision_config": {"hidden_size": 128},
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1, 1, 1, 1],
        "image_grid_pinpoints": [[32, 32]],
        "downsample_rate": "1/2",
        "qformer_config": {"encoder_hidden_size": 32},
    },
    "granite_speech5_ctc": {"encoder_config": _SPEECH5},
    "granite_speech5_encoder": _SPEECH5,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "grounding-dino": {"num_queries": 3},
    "hgnet_v2": _HGNET,
    "hunyuan_v1_moe": _HEAD | {"num_experts": 4, "moe_topk": 2},
    "hunyuan_vl": {"text_config": _HEAD},
    "hy_v4_vl": {"text_config": _LATENT_ROPE},
    "hy_v4_vl_text": _LATENT_ROPE,
    "instructblip": {"image_token_index": 90, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 91, "num_query_tokens": 4},
    "janus": {"vq_config": _CODES},
    "kosmos-2": {"latent_query_num": 4, "text_config": {"layers": 2}},
    "kosmos-2.5": {"latent_query_num": 4},
    "kyutai_speech_to_text": {
        "codec_config": _CODEC,
        "num_codebooks": 4,
        "codebook_vocab_size": 33,
        "audio_bos_token_id": 32,
        "audio_pad_token_id": 69,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "lw_detr": {"projector_scale_factors": [1.0], "num_queries": 4, "group_detr": 2},
    "mamba2": {"num_heads": 8},
    **{key: {"insert_layer_id": 0} for key in ("minicpm_ocr_vision", "minicpmv4_7_vision")},
    "ministral": {"head_dim": 8},
    "mllama": {"vision_config": {"vision_output_dim": 64}},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "molmo2": {
        "adapter_config": {"vision_feature_layer": [1, 0]},
        "vision_config": {"num_position_embeddings": 16},
        "image_patch_id": 90,
    },
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4, "encoder_config": {"num_key_value_heads": 4}},
    "mpnet": {"relative_attention_num_buckets": 32},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_glimmer_assistant": {"target_layer_ids": [0]},
    "muse_spark": {"out_hidden_size": 128, "audio_config": {"num_hidden_layers": 4}},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "omdet-turbo": {
        "use_timm_backbone": False,
        "backbone_config": {
            "model_type": "swin",
            "embed_dim": 16,
            "depths": [2, 2, 2],
            "num_heads": [2, 4, 8],
            "window_size": 4,
            "image_size": 64,
            "out_features": ["stage1", "stage2", "stage3"],
        },
        "encoder_in_channels": [16, 32, 64],
        "apply_layernorm_after_vision_backbone": False,
        "text_projection_in_dim": 64,
        "text_projection_out_dim": 64,
        "class_embed_dim": 64,
        "text_config": {"hidden_size": 64},
        "vision_features_channels": [32, 32, 32],
        "task_encoder_hidden_dim": 48,
    },
    "paddleocr_vl": {"image_token_id": 90},
    "phi4_multimodal": {
        "audio_config": {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16}
    },
    "perceiver": {"d_latents": 32, "num_self_attends_per_block": 2},
    "pocket_tts": {"flow_head_config": {"condition_dim": 32}},
    "pp_doclayout_v2": _HGNET_DETR | {"class_thresholds": [0.5, 0.5], "class_order": [0, 1]},
    "pp_doclayout_v3": _HGNET_DETR | {"x4_feat_dim": 16, "mask_feature_channels": [8, 8]},
    "pp_doclayout_v4": _HGNET_DETR,
    "qwen3_asr": {"audio_token_id": 92, "audio_config": {"downsample_hidden_size": 8}},
    "qwen3_asr_encoder": {"downsample_hidden_size": 8},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "hash_seed": 0,
        "max_position_embeddings": 16,
        "num_hidden_layers": 2,
    },
    "sam": _SAM_PARTS,
    "sam2_hiera_det_model": _HIERA,
    "sam2_vision_model": _HIERA_NECK,
    "sam3_tracker": {
        "vision_config": {
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "backbone_config": {"global_attn_indexes": [1]},
        }
    },
    "sam_hq": _SAM_PARTS | {"mask_decoder_config": {"vit_dim": 32}},
    "sapiens2": {"head_config": {"upsample_out_channels": [8, 8], "conv_out_channels": [8]}},
    "seggpt": {
        "merge_index": 0,
        "image_size": [64, 32],
        "intermediate_hidden_state_indices": [1, 2, 3, 4],
        "num_hidden_layers": 5,
    },
    "speech_to_text": {"conv_channels": 48, "input_feat_per_channel": 16},
    "step3p7": {"text_config": {"sliding_window": 4}},
    "superglue": {
        "hidden_size": 64,
        "keypoint_encoder_sizes": [8, 16, 32, 64],
        "keypoint_detector_config": {"descriptor_decoder_dim": 64, "decoder_hidden_size": 64},
        "gnn_layers_types": ["self", "cross"],
    },
    "t5gemma2_encoder": {"mm_tokens_per_image": 4, "image_token_index": 90, "text_config": {"dropout_rate": 0.0}},
    "textnet": {"stem_out_channels": 8},
    "timesfm": {"patch_length": 8, "context_length": 32, "horizon_length": 8},
    "timesfm2_5": {"patch_length": 8, "context_length": 32, "horizon_length": 8},
    "tvp": {"backbone_config": _ROI, "max_img_size": 128, "visual_prompt_size": 8, "num_frames": 2},
    "udop": {"relative_attention_num_buckets": 32},
    "unlimited_ocr": {"vision_config": {"sam_config": {"output_channels": 32, "downsample_channels": [32, 32]}}},
    "univnet": {"kernel_predictor_hidden_channels": 8, "model_hidden_channels": 8, "model_in_channels": 8},
    "uvdoc": {"backbone_config": {"out_features": [f"stage{number}" for number in range(1, 7)]}},
    "vibevoice": {"audio_config": _VIBE, "semantic_model_config": _VIBE},
    "vibevoice_acoustic_tokenizer": _VIBE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBE,
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _VIBE, "semantic_tokenizer_encoder_config": _VIBE},
    "videomae": {"num_frames": 4},
    "vits": {
        "noise_scale": 0.0,
        "noise_scale_duration": 0.0,
        "spectrogram_bins": 17,
        "flow_size": 32,
        "duration_predictor_filter_channels": 32,
    },
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zoedepth": {"bottleneck_features": 32, "bin_embedding_dim": 16, "num_attractors": [4, 4, 2, 1]},
}

_EXPERT_BLOCKS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
_RELATIVE = {"use_relative_position_bias": True}
# As the published DeBERTa and DeBERTa-v3 are; the defaults of their configurations have no places in the scores.
_DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16}
_DISENTANGLED_3 = _DISENTANGLED | {"share_att_key": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "beit relative": ("beit", _RELATIVE),
    "data2vec-vision relative": ("data2vec-vision", _RELATIVE),
    "deberta relative": ("deberta", _DISENTANGLED),
    "deberta-v2 relative": ("deberta-v2", _DISENTANGLED_3),
    "gemma4_text experts": ("gemma4_text", _EXPERT_BLOCKS),
}

CLASSES: dict[str, str] = {
    "csm_depth_decoder_model": "CsmDepthDecoderForCausalLM",
    "qwen2_5_omni_dit": "Qwen2_5OmniToken2WavDiTModel",
    "qwen2_5_omni_talker": "Qwen2_5OmniTalkerForConditionalGeneration",
    "qwen3_omni_moe_talker_code_predictor": "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "vit_mae": "ViTMAEForPreTraining",
}

SEEDED: tuple[str, ...] = ("vilt",)

PARTS: dict[str, tuple[str, str, str]] = {
    "bark semantic": ("bark", "semantic_config", "BarkSemanticModel"),
    "bark fine": ("bark", "fine_acoustics_config", "BarkFineModel"),
}

REMEMBERS: dict[str, tuple[str, ...]] = {"omdet-turbo": ("language_cache_class", "language_cache_prompt")}
