"""Build tiny models that see pictures, and the inputs for documents with and without pictures."""

import dataclasses
import inspect
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from hf_packing.attention.tiny_model import inner_configs, small_config, tiny_model

PICTURE, START, END = 5, 3, 4
"""Token ids for places of a picture, and before and after a picture."""

SIDE, PATCH = 16, 4
"""Height of a picture, and of one of its patches, in pixels."""

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
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MROPE_TEXT = {"text_config": {"rope_parameters": _MROPE}}
_INTERLEAVED_TEXT = {"text_config": {"rope_parameters": _MROPE | {"mrope_interleaved": True}}}
_SQUARE = {"vision_config": {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}}
_PARTLY_ROTARY = {"text_config": {"rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]}}}
_TILES = {"image_grid_pinpoints": [[SIDE, SIDE], [SIDE, 2 * SIDE]]}

_OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("internvl", "qianfan_ocr"), _SQUARE),
    **dict.fromkeys(("qwen2_5_vl", "glm4v", "glm46v", "paddleocr_vl", "hunyuan_vl"), _MROPE_TEXT),
    **dict.fromkeys(("glm_ocr", "glmga", "glm4v_moe"), _PARTLY_ROTARY),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _INTERLEAVED_TEXT),
    **dict.fromkeys(("cosmos3_omni", "cosmos3_edge"), _INTERLEAVED_TEXT),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"), _TILES),
    "qwen2_vl": _MROPE_TEXT | {"vision_config": {"hidden_size": 64}},
    "qwen2_5_omni_thinker": _MROPE_TEXT | {"vision_start_token_id": START},
    "qwen3_omni_moe_thinker": _INTERLEAVED_TEXT | {"vision_start_token_id": START},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "gemma4": {"vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 64}, "audio_config": None},
    "hunyuan_vl": _MROPE_TEXT | {"vision_config": {"max_image_size": 64, "min_image_size": 8}},
    "idefics": {"vision_config": {"num_attention_heads": 4}},
    "kimi_k25": {"projection_hidden_size": 32},
    "llama4": {"vision_config": {"vision_output_dim": 64, "projector_input_dim": 32, "projector_output_dim": 64, "intermediate_size": 128}},
    "mllama": {"vision_config": {"num_global_layers": 1, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]}, "text_config": {"cross_attention_layers": [1]}},
    "minicpm_ocr": {"vision_config": {"insert_layer_id": 1}, "insert_layer_id": 1},
    "minicpmv4_6": {"vision_config": {"insert_layer_id": 1}, "insert_layer_id": 1},
    "minicpmv4_7": {"vision_config": {"insert_layer_id": 1}, "insert_layer_id": 1},
    "vipllava": {"vision_feature_layer": [-2, -3]},
}

_VISION_NAMES = ("vision_config", "high_res_vision_config")


def picture_model(name: str) -> PreTrainedModel:
    """Build a tiny model of an architecture that sees pictures, in float64."""
    cls = CONFIG_MAPPING[name]
    names = {each.name for each in dataclasses.fields(cls)}
    of_type = _OF_TYPE.get(name, {})
    changes: dict[str, Any] = {key: value for key, value in _TOP.items() if key in names}
    for inner, kind in inner_configs(cls).items():
        known = {each.name for each in dataclasses.fields(kind)}
        small = {key: value for key, value in _VISION.items() if key in known} if inner in _VISION_NAMES else {}
        if inner in _VISION_NAMES or inner in of_type:
            changes[inner] = small_config(kind, "inner", small | of_type.get(inner, {})).to_dict()
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


Inputs = dict[str, Any]


@dataclass
class Document:
    """The tokens of a document, and the inputs for its pictures, with the pictures in the first axis."""

    tokens: list[int]
    pictures: Inputs = field(default_factory=dict)


def _noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def _patches(model: PreTrainedModel, width: int) -> tuple[int, int]:
    return SIDE // PATCH, SIDE // PATCH * width


def _grid(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    vision, (high, wide) = model.config.vision_config, _patches(model, width)
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    square = model.config.model_type in ("paddleocr_vl", "kimi_k25")
    pixels = _noise(high * wide, *((3, PATCH, PATCH) if square else (3 * frames * PATCH**2,)), seed=seed)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, high, wide]])}


def _merged_grid(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    high, wide = _patches(model, width)
    return {
        "pixel_values": _noise(high * wide, 3 * PATCH**2, seed=seed),
        "image_grid_thw": torch.tensor([[1, high, wide]]),
        "image_merge_sizes": torch.tensor([2]),
    }


def _shapes(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    high, wide = _patches(model, width)
    return {
        "pixel_values": _noise(1, high * wide, 3 * PATCH**2, seed=seed),
        "pixel_attention_mask": torch.ones(1, high * wide, dtype=torch.long),
        "spatial_shapes": torch.tensor([[high, wide]]),
    }


def _places_of_patches(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    high, wide = _patches(model, 1)
    places = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)
    return {"pixel_values": _noise(1, high * wide, 3 * PATCH**2, seed=seed).abs(), "image_position_ids": places[None]}


def _strip(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    high, wide = _patches(model, width)
    return {
        "pixel_values": _noise(1, 3, PATCH, high * wide * PATCH, seed=seed),
        "target_sizes": torch.tensor([[high, wide]]),
    }


def _any_size(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    pixels = _noise(1, 3, SIDE, SIDE * width, seed=seed)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[SIDE, SIDE * width]])}


def _tiles(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    pixels = _noise(1, 1 + width, 3, SIDE, SIDE, seed=seed)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[SIDE, SIDE * width]])}


def _one_size(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    return {"pixel_values": _noise(1, 3, SIDE, SIDE, seed=seed)}


def _two_sizes(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    high = model.config.high_res_vision_config.image_size
    return _one_size(model, seed, width) | {"high_res_pixel_values": _noise(1, 3, high, high, seed=seed + 100)}


def _row(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    return {"pixel_values": _noise(1, 1, 3, SIDE, SIDE, seed=seed)}


def _row_with_mask(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    return _row(model, seed, width) | {"pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}


def _row_of_tiles(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    return {
        "pixel_values": _noise(1, 1, 1, 3, SIDE, SIDE, seed=seed),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
    }


def _with_question(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    ids = torch.tensor([[9, 10, 11]])
    return _one_size(model, seed, width) | {"qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)}


def _embedded_patches(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    return {"pixel_values": _noise(1, 4, 3 * model.config.patch_size**2, seed=seed)}


_FORMATS = {
    "video_llama_3": _merged_grid,
    "lfm2_vl": _shapes,
    "gemma4": _places_of_patches,
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _strip),
    **dict.fromkeys(("mistral3", "mistral_large4", "lighton_ocr"), _any_size),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "granite4_vision"), _tiles),
    **dict.fromkeys(("idefics", "idefics2", "idefics3", "smolvlm"), _row),
    "granite_docling": _row_with_mask,
    "mllama": _row_of_tiles,
    "deepseek_vl_hybrid": _two_sizes,
    "instructblip": _with_question,
    "fuyu": _embedded_patches,
}

_ROWS = (_row, _row_with_mask, _row_of_tiles)
"""Formats whose first axis is the rows of a batch, and whose second axis is the pictures of a row."""

_IN_EVERY_ROW = ("blip", "blip-2", "instructblip", "git", "idefics")
"""Architectures that need one picture for every row."""

_BESIDE_THE_TEXT = ("blip", "git", "idefics", "mllama")
"""Architectures whose texts have no places for pictures."""

_MASKS = {"mllama": "cross_attention_mask", "idefics": "image_attention_mask"}
"""Names of masks that say which tokens see which pictures."""


def _format(model: PreTrainedModel) -> Any:
    taken = inspect.signature(type(model).forward).parameters
    return _FORMATS.get(model.config.model_type, _grid if "image_grid_thw" in taken else _one_size)


def _count_places(model: PreTrainedModel, pictures: Inputs) -> int:
    """Return the number of tokens for a picture."""
    if model.config.model_type in _BESIDE_THE_TEXT:
        return 0
    owner: Any = model if hasattr(model, "get_image_features") else model.model
    with torch.no_grad():
        found = owner.get_image_features(**pictures)
    found = getattr(found, "pooler_output", found)
    leaves = list(found) if isinstance(found, (list, tuple)) else [found]
    return sum(each.numel() for each in leaves) // model.get_input_embeddings().weight.shape[1]


def make_documents(model: PreTrainedModel) -> list[Document]:
    """Return documents with one picture, without pictures, with two pictures, and without pictures."""
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> list[int]:
        return torch.randint(8, 120, (number,), generator=generator).tolist()

    documents, make = [], _format(model)
    widths: tuple[tuple[int, ...], ...] = ((1,), (), (2, 1), ())
    if model.config.model_type in _IN_EVERY_ROW:
        widths = ((1,),) * 4
    for number, (length, own) in enumerate(zip((6, 19, 4, 9), widths, strict=True)):
        tokens, pictures = words(3), []
        for width in own:
            pictures.append(make(model, 10 * number + width, width))
            places = [PICTURE] * _count_places(model, pictures[-1])
            tokens += [START, *places, END, *words(2)] if places else []
        documents.append(Document([*tokens, *words(length)], _joined(pictures, int(make in _ROWS))))
    return documents


def _joined(pictures: list[Inputs], axis: int = 0) -> Inputs:
    names = dict.fromkeys(name for each in pictures for name in each)
    return {name: _cat([each[name] for each in pictures], 3 if axis == 0 and name == "pixel_values" and "target_sizes" in names else axis) for name in names}


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    """Join tensors along an axis, with zeros where others are larger in another axis."""
    largest = [max(sizes) for sizes in zip(*(each.shape for each in parts), strict=True)]
    padded = []
    for each in parts:
        missing = [0 if i == axis else size - own for i, (size, own) in enumerate(zip(largest, each.shape, strict=True))]
        padded.append(torch.nn.functional.pad(each, [side for one in reversed(missing) for side in (0, one)]))
    return torch.cat(padded, axis)


def batch_of(model: PreTrainedModel, documents: list[Document], side: str, more: int = 0) -> tuple[Inputs, list[slice]]:
    """Return a padded batch, and the places of the tokens in each row."""
    longest = max(len(each.tokens) for each in documents) + more
    ids = torch.full((len(documents), longest), model.config.get_text_config().pad_token_id or 0)
    mask, places = torch.zeros_like(ids), []
    for number, each in enumerate(documents):
        start = 0 if side == "right" else longest - len(each.tokens)
        places.append(slice(start, start + len(each.tokens)))
        ids[number, places[-1]], mask[number, places[-1]] = torch.tensor(each.tokens), 1
    taken = inspect.signature(type(model).forward).parameters
    batch = {name: (ids == PICTURE).long() for name in _TYPES if name in taken}
    pictures = [each.pictures for each in documents if each.pictures]
    if pictures and _format(model) in _ROWS:
        empty = {name: torch.zeros_like(value) for name, value in pictures[0].items()}
        pictures = [each.pictures or empty for each in documents]
    batch |= _joined(pictures)
    if (name := _MASKS.get(model.config.model_type)) and pictures:
        seen = torch.zeros(*ids.shape, batch["pixel_values"].shape[1], *((1,) if name == "cross_attention_mask" else ()), dtype=torch.long)
        for number, (each, place) in enumerate(zip(documents, places, strict=True)):
            if each.pictures:
                seen[number, place, : each.pictures["pixel_values"].shape[1]] = 1
        batch[name] = seen
    return {"input_ids": ids, "attention_mask": mask, **batch}, places


_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids")
