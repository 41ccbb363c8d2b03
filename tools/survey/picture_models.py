"""Build tiny models that see pictures, with a tiny vision tower, for any such model type of transformers."""

import copy
import dataclasses
from contextlib import suppress
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from tools.tiny_model import inner_configs, small_config, tiny_model

PICTURE, START, END = 5, 3, 4
"""Token ids for places of a picture, and before and after a picture."""

SIDE, PATCH = 16, 4
"""Height of a picture, and of one of its patches, in pixels."""


def picture_model(name: str) -> PreTrainedModel:
    """Build a tiny model of an architecture that sees pictures, in float64, with random gates.

    Args:
        name: a model type of transformers, such as "llava".
    """
    cls = CONFIG_MAPPING[name]
    names = {each.name for each in dataclasses.fields(cls)}
    of_type = copy.deepcopy(_OF_TYPE.get(name, {}))  # since configurations change their settings
    changes: dict[str, Any] = {key: value for key, value in _TOP.items() if key in names}
    for inner, kind in inner_configs(cls).items():
        known = {each.name for each in dataclasses.fields(kind)}
        small = {key: value for key, value in _VISION.items() if key in known} if inner in _VISION_NAMES else {}
        if inner in _VISION_NAMES or inner in of_type:
            own = {key: value for key, value in of_type.get(inner, {}).items() if key in known}
            changes[inner] = small_config(kind, "inner", small | own).to_dict()
    changes |= {key: value for key, value in of_type.items() if key not in changes or not isinstance(value, dict)}
    model = tiny_model(name, "pictures", torch.float64, **changes)
    with suppress(Exception):  # a model without experts
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in model.parameters():
            if not each.any():  # such as a gate, which would hide the pictures
                each.copy_(torch.randn(each.shape, generator=generator) / 2)
    return model


_VISION: dict[str, Any] = {
    "image_size": SIDE,
    "patch_size": PATCH,
    "depth": 3,
    "num_hidden_layers": 3,
    "embed_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
    "projection_dim": 64,
    "num_position_embeddings": 64,
    "num_patches": 64,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "window_size": 16,
    "max_num_patches": 64,
}
"""Small settings of vision towers."""

_TOP: dict[str, Any] = {
    "image_token_index": PICTURE,
    "image_token_id": PICTURE,
    "video_token_index": 6,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "boi_token_index": START,
    "eoi_token_index": END,
    "projector_hidden_size": 64,
    "alignment_intermediate_size": 64,
    "mm_tokens_per_image": 4,
    "image_seq_length": 16,
    "projection_dim": 64,
    "projection_hidden_size": 64,
    "num_query_tokens": 4,
    "latent_query_num": 4,
    "out_hidden_size": 64,
}
"""Small settings of whole models, and token ids."""

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MROPE_TEXT = {"text_config": {"rope_parameters": _MROPE}}
_INTERLEAVED_TEXT = {"text_config": {"rope_parameters": _MROPE | {"mrope_interleaved": True}}}
_SQUARE = {"vision_config": {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}}
_PARTLY_ROTARY = {"text_config": {"rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]}}}
_MERGED = {"vision_config": {"insert_layer_id": 1}, "insert_layer_id": 1}
_CODES = {
    "num_embeddings": 8,
    "codebook_size": 8,
    "embed_dim": 32,
    "latent_channels": 32,
    "base_channels": 32,
    "channel_multiplier": [1, 1, 1],
    "num_res_blocks": 1,
    "resolution": SIDE,
    "num_patches": SIDE,
}
_CODE_TOKENS = {"<image>": PICTURE} | {f"IMGIMG{chr(65 + number)}Z": 8 + number for number in range(8)}
_KOSMOS_TEXT = {"embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4}
_TILES = {"image_grid_pinpoints": [[SIDE, SIDE], [SIDE, 2 * SIDE]]}

_OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("internvl", "qianfan_ocr"), _SQUARE),
    **dict.fromkeys(("qwen2_5_vl", "glm4v", "glm46v", "paddleocr_vl", "hunyuan_vl", "glm_ocr", "glmga"), _MROPE_TEXT),
    "glm4v_moe": _PARTLY_ROTARY,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _INTERLEAVED_TEXT),
    **dict.fromkeys(("cosmos3_omni", "cosmos3_edge"), _INTERLEAVED_TEXT),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"), _TILES),
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {"vq_config": _CODES, "vocabulary_map": _CODE_TOKENS},
    "emu3": {"vq_config": _CODES | {"out_channels": 3}, "vocabulary_map": _CODE_TOKENS},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32]}},
    "florence2": {
        "vision_config": {
            "num_heads": [4, 4],
            "num_groups": [4, 4],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [32, 32],
            "depths": [1, 1],
            "window_size": 4,
        }
    },
    "gemma4": {"vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 64}},
    "granite4_vision": _TILES
    | {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1, 1, 2, 2]}
    | {"vision_config": {"hidden_size": 64}},
    "hunyuan_vl": _MROPE_TEXT | {"vision_config": {"max_image_size": 64, "min_image_size": 8}},
    "janus": {"vq_config": _CODES | {"projection_dim": 64, "image_token_embed_dim": 64}},
    "kimi_k25": {"projection_hidden_size": 32},
    "kosmos-2": {"text_config": _KOSMOS_TEXT},
    "kosmos-2.5": {"text_config": _KOSMOS_TEXT},
    "llama4": {
        "vision_config": {
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
            "intermediate_size": 128,
        }
    },
    "mistral_large4": {"text_config": {"num_key_value_heads": 4, "head_dim": 8}},
    "mllama": {
        "vision_config": {
            "num_global_layers": 1,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
        "text_config": {"cross_attention_layers": [1]},
    },
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MERGED),
    "muse_glimmer": {"out_hidden_size": 128},
    "qwen2_5_omni_thinker": _MROPE_TEXT | {"vision_start_token_id": START},
    "qwen2_vl": _MROPE_TEXT | {"vision_config": {"hidden_size": 64}},
    "qwen3_omni_moe_thinker": _INTERLEAVED_TEXT | {"vision_start_token_id": START},
    "vipllava": {"vision_feature_layer": [-2, -3]},
}
"""Settings that a model type needs in addition."""

_VISION_NAMES = ("vision_config", "high_res_vision_config")
