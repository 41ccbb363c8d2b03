"""Sizes that make the configuration of any architecture tiny, and what some architectures need beside."""

from typing import Any

VOCABULARY = 128

THRESHOLDS = dict.fromkeys(
    (
        *("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size", "window_size"),
        *("index_topk", "block_size"),
    ),
    8,
)
"""Settings that change nothing until a document is longer: all of them shorter than the documents of the probe."""

WIDTHS = {
    64: (
        *("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size", "input_embedding_size", "lru_width"),
        *("output_embedding_size", "attention_hidden_size", "embedding_dim", "prediction_head_size", "rel_extent"),
        *("max_source_positions", "max_2d_position_embeddings", "local_attention_window_len"),
    ),
    96: (
        *(
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "hidden_dim",
            "dff",
            "dim_ff",
            "n_inner",
        ),
        *("ffn_hidden_size", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size", "d_inner"),
        *("prefix_dense_intermediate_size",),
    ),
    256: (
        *("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "n_ctx", "max_target_positions"),
    ),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input", "mamba_d_ssm", "entity_vocab_size"),
    32: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "num_buckets"),
        *("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"),
        *("pronunciation_vocab_size", "shape_vocab_size", "encoder_hash_byte_group_vocab"),
    ),
    24: ("q_lora_rank",),
    16: (
        *("head_dim", "kv_lora_rank", "v_head_dim", "qk_head_dim", "mamba_d_state", "mamba_d_head", "state_size"),
        *("mamba_head_dim", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
        *("index_head_dim", "swa_head_dim", "o_lora_rank", "kv_channels", "query_pre_attn_scalar", "dim_head"),
        *("attention_head_size", "d_head", "pronunciation_embed_dim", "shape_embed_dim", "attention_head_dim"),
        *("router_hidden_size", "ple_embed_dim", "embedding_rank", "local_attention"),
    ),
    8: (
        *("qk_rope_head_dim", "qk_nope_head_dim", "mamba_n_heads", "mamba_num_heads", "rotary_dim", "adapter_rank"),
        *("laurel_rank", "hidden_size_per_layer_input", "hc_lowrank", "mamba_chunk_size", "chunk_size", "d_rel"),
        *("num_landmarks", "num_latents"),
    ),
    5: ("image_token_id",),
    50: ("ngram_vocab_size_base",),
    6: ("video_token_id",),
    7: ("audio_token_id",),
    4: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_attention_heads", "n_head", "n_heads"),
        *("num_heads", "decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"),
        *("num_encoder_attention_heads", "attention_heads", "num_experts", "n_routed_experts", "num_local_experts"),
        *("moe_num_experts", "mamba_dt_rank", "time_step_rank", "linear_num_value_heads", "linear_num_heads"),
        *("swa_num_attention_heads", "mask_token_id", "prompt_length", "index_block_size", "gated_norm_rank"),
    ),
    3: ("decoder_layers", "num_decoder_layers", "moe_layer_end_index", "sep_token_id"),
    2: (
        *("encoder_layers", "num_encoder_layers", "num_key_value_heads", "num_kv_heads", "num_experts_per_tok"),
        *("moe_k", "moe_topk", "linear_num_key_heads", "type_vocab_size", "index_n_heads", "swa_num_key_value_heads"),
        *("zero_expert_num", "n_mamba_heads", "hc_sinkhorn_iters", "eos_token_id", "o_groups", "index_topk_blocks"),
        *("expansion_ratio", "n_layers_per_attn_res_block", "split_ngram_parts", "num_codebooks"),
    ),
    1: (
        *("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "bos_token_id"),
        *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "mamba_n_groups", "n_groups"),
        *("mamba_ngroups", "pretraining_tp", "decoder_start_token_id", "cls_token_id"),
    ),
    0: ("pad_token_id", "num_kv_shared_layers", "num_nextn_predict_layers", "num_mtp_layers"),
}
"""What to make of a field of a configuration, where it has one of that name."""

SETTINGS: dict[str, Any] = {name: size for size, names in WIDTHS.items() for name in names} | dict.fromkeys(
    (
        *("forced_eos_token_id", "final_logit_softcapping", "use_bidirectional_attention", "moe_latent_size"),
        *("mtp_layers_block_type",),
    )
)

SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONVOLUTION = {"layer_types": ["conv", "full_attention"] * 2}
SLIDING_QWEN = {"use_sliding_window": True, "max_window_layers": 2}
FOUR_HEADS = {"num_key_value_heads": 4}
SHARED_ATTENTION = {"attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4, "mamba_expand": 2}

OF_A_TYPE: dict[str, dict[str, Any]] = {
    "axk1": FOUR_HEADS,
    "axk2": FOUR_HEADS,
    "bailing_hybrid": LINEAR | FOUR_HEADS,
    "bamba": {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "cohere2": SLIDING,
    "cohere_compass_text": SLIDING,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": FOUR_HEADS | {"topk_method": "greedy"},
    "deepseek_v3": FOUR_HEADS,
    "deepseek_v32": FOUR_HEADS,
    "distilbert": {"hidden_dim": 96},
    "dots1": {"max_window_layers": 2},
    "esm": {"token_dropout": False, "position_embedding_type": "rotary"},
    "exaone4": SLIDING | {"sliding_window_pattern": 2},
    "falcon": {"alibi": False, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4},
    "falcon_h1": {"mamba_expand": 2},
    "falcon_mamba": {"num_hidden_layers": 2},
    "gemma2": SLIDING | {"attn_logit_softcapping": 50.0},
    "gemma3_text": SLIDING,
    "gemma3n_text": SLIDING | {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": SLIDING | {"num_global_key_value_heads": 2, "global_head_dim": 16},
    "glm4_moe_lite": FOUR_HEADS,
    "glm_moe_dsa": FOUR_HEADS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gpt_oss": SLIDING,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_expand": 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_expand": 2,
    },
    "kimi_linear": LINEAR | FOUR_HEADS,
    "lfm2": CONVOLUTION | {"block_multiple_of": 8},
    "lfm2_moe": CONVOLUTION | {"num_dense_layers": 1},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0] * 2},
    "longcat_flash": FOUR_HEADS | {"head_dim": 8, "num_layers": 2, "num_hidden_layers": 4, "qk_head_dim": None},
    "mamba": {"num_hidden_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "num_hidden_layers": 2},
    "minicpm3": FOUR_HEADS,
    "minimax": LINEAR,
    "mobilebert": {"intra_bottleneck_size": 64},
    "modernbert": SLIDING,
    "modernbert-decoder": SLIDING,
    "moshi": FOUR_HEADS,
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "expand": 2},
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "olmo3": SLIDING,
    "olmo_hybrid": LINEAR,
    "phi3": {"original_max_position_embeddings": 256},
    "qwen2": SLIDING_QWEN,
    "qwen2_moe": SLIDING_QWEN,
    "qwen3": SLIDING_QWEN,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_moe": {"use_sliding_window": True},
    "qwen3_next": LINEAR,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "is_decoder": True,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {"use_sliding_window": True},
    "xlstm": {"num_blocks": 2, "max_inference_chunksize": 256},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": FOUR_HEADS,
    "zamba": SHARED_ATTENTION
    | {"num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid"] * 2 + ["mamba"], "use_mamba_kernels": False},
    "zamba2": SHARED_ATTENTION
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8, "mamba_headdim": 16}
    | {"use_shared_attention_adapter": False},
}
"""What some architectures need beside, to be built or to show all their kinds of layers."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon with alibi": ("falcon", {"alibi": True, "multi_query": True}),
    "granitemoehybrid of attention": ("granitemoehybrid", {"layer_types": ["attention"] * 4}),
    "llama with dynamic rope": (
        "llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "nemotron_h of attention": ("nemotron_h", {"layers_block_type": ["attention", "moe"] * 2}),
    "phi3 with longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
            },
        },
    ),
}
