"""What some architectures need beside small sizes, to be built or to show all their kinds of layers."""

from typing import Any

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
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
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
