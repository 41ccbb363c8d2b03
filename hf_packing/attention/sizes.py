"""Sizes that make a configuration tiny, by the names that transformers gives them."""

from typing import Any

VOCABULARY = 128

THRESHOLDS = dict.fromkeys(
    (
        *("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size", "window_size"),
        "index_topk",
    ),
    8,
) | {"block_size": 2}
"""Settings that change nothing until a document is longer: all of them shorter than the documents of the probe. BigBird
looks at everything until a document is longer than eleven blocks."""

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
