"""Make documents with and without pictures for models that see pictures, and padded batches of such documents."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.internals import tensors_in
from tools.survey.picture_models import END, PATCH, PICTURE, SIDE, START

Inputs = dict[str, Any]

_FORMATS: dict[str, str] = {
    "deepseek_vl_hybrid": "two sizes",
    "fuyu": "patches",
    "gemma4": "patches with places",
    "granite_docling": "rows with mask",
    "instructblip": "question",
    "kosmos-2.5": "flattened",
    "lfm2_vl": "patches with shapes",
    "mllama": "rows of tiles",
    "video_llama_3": "merged grid",
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "strip"),
    **dict.fromkeys(("emu3", "lighton_ocr", "mistral3", "mistral_large4"), "any size"),
    **dict.fromkeys(("granite4_vision", "llava_next", "llava_next_video", "llava_onevision"), "tiles"),
    **dict.fromkeys(("idefics", "idefics2", "idefics3", "smolvlm"), "rows"),
}
"""The form in which an architecture takes a picture; without an entry, a grid of patches or a square."""

_IN_EVERY_ROW = ("blip", "blip-2", "git", "idefics", "instructblip")
"""Architectures that need one picture for every row."""

_PLACES = {"llama4": 4, "kosmos-2": 4, "kosmos-2.5": 4} | dict.fromkeys(("blip", "git", "idefics", "mllama"), 0)
"""Numbers of tokens for a picture that cannot be read from the model's features; 0 where texts have no such tokens."""

_MASKS = {"idefics": "image_attention_mask", "mllama": "cross_attention_mask"}
"""Names of masks that say which tokens see which pictures."""

_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids", "image_embeds_position_mask")
"""Names of arguments that say which tokens are places of pictures."""


@dataclass(frozen=True)
class Document:
    """The tokens of a document, and the inputs for its pictures."""

    tokens: list[int]
    pictures: Inputs = field(default_factory=dict)


def make_documents(model: PreTrainedModel) -> list[Document]:
    """Return four documents: with one picture, without pictures, with two pictures, and without pictures; or all with
    one picture, if the model needs one."""
    generator = torch.Generator().manual_seed(0)

    def words(number: int) -> list[int]:
        return torch.randint(8, 120, (number,), generator=generator).tolist()

    all_widths: Sequence[tuple[int, ...]] = ((1,), (), (2, 1), ())
    if model.config.model_type in _IN_EVERY_ROW:
        all_widths = [(1,)] * 4
    documents = []
    for number, (length, widths) in enumerate(zip((6, 19, 4, 9), all_widths, strict=True)):
        tokens, pictures = words(3), []
        for width in widths:
            pictures.append(_picture(model, 10 * number + width, width))
            places = [PICTURE] * _count_places(model, pictures[-1])
            tokens += [START, *places, END, *words(2)] if places else []
        documents.append(Document([*tokens, *words(length)], _joined(pictures, 1 if _has_rows(model) else 0)))
    return documents


def batch_of(model: PreTrainedModel, documents: list[Document], side: str, more: int = 0) -> tuple[Inputs, list[slice]]:
    """Return a padded batch, and the places of the tokens in each row.

    Args:
        model: a model that takes the batch.
        documents: one document for each row.
        side: "right" or "left", where the padding is.
        more: number of tokens of padding in the longest row.
    """
    longest = max(len(each.tokens) for each in documents) + more
    ids = torch.full((len(documents), longest), model.config.get_text_config().pad_token_id or 0)
    mask, places = torch.zeros_like(ids), []
    for number, each in enumerate(documents):
        start = 0 if side == "right" else longest - len(each.tokens)
        places.append(slice(start, start + len(each.tokens)))
        ids[number, places[-1]], mask[number, places[-1]] = torch.tensor(each.tokens), 1
    taken = inspect.signature(type(model).forward).parameters
    batch = {"input_ids": ids, "attention_mask": mask}
    batch |= {name: (ids == PICTURE).long() for name in _TYPES if name in taken}
    pictures = [each.pictures for each in documents if each.pictures]
    if pictures and _has_rows(model):
        empty = {name: torch.zeros_like(value) for name, value in pictures[0].items()}
        pictures = [each.pictures or empty for each in documents]
    batch |= _joined(pictures)
    if pictures and (name := _MASKS.get(model.config.model_type)):
        batch[name] = _mask_of_pictures(documents, places, ids.shape, batch["pixel_values"].shape[1])
        batch[name] = batch[name][..., None] if name == "cross_attention_mask" else batch[name]
    return batch, places


def _mask_of_pictures(documents: list[Document], places: list[slice], shape: torch.Size, number: int) -> Tensor:
    """Return a mask of ones for the pictures of the document in each row, [rows, tokens, pictures]."""
    seen = torch.zeros(*shape, number, dtype=torch.long)
    for row, (each, place) in enumerate(zip(documents, places, strict=True)):
        seen[row, place, : each.pictures["pixel_values"].shape[1] if each.pictures else 0] = 1
    return seen


def _has_rows(model: PreTrainedModel) -> bool:
    """Return whether pictures have an axis of rows, and then an axis of the pictures of a row."""
    return _FORMATS.get(model.config.model_type, "").startswith("rows")


def _count_places(model: PreTrainedModel, picture: Inputs) -> int:
    """Return the number of tokens for a picture."""
    if (known := _PLACES.get(model.config.model_type)) is not None:
        return known
    owner: Any = model if hasattr(model, "get_image_features") else model.model
    with torch.no_grad():
        found = owner.get_image_features(**picture)
    features = getattr(found, "pooler_output", found)
    features = found.last_hidden_state if features is None else features
    return sum(each.numel() for each in tensors_in(features)) // int(model.get_input_embeddings().weight.shape[1])


def _joined(pictures: list[Inputs], axis: int = 0) -> Inputs:
    """Join the inputs for pictures. Pictures in a strip are joined along the last axis."""
    names = dict.fromkeys(name for each in pictures for name in each)
    return {
        name: _cat([each[name] for each in pictures], 3 if name == "pixel_values" and "target_sizes" in names else axis)
        for name in names
    }


def _cat(parts: list[Tensor], axis: int) -> Tensor:
    """Join tensors along an axis, with zeros where others are larger in another axis."""
    largest = [max(sizes) for sizes in zip(*(each.shape for each in parts), strict=True)]
    padded = []
    for each in parts:
        missing = [size - own for size, own in zip(largest, each.shape, strict=True)]
        missing[axis] = 0
        padded.append(torch.nn.functional.pad(each, [side for one in reversed(missing) for side in (0, one)]))
    return torch.cat(padded, axis)


def _picture(model: PreTrainedModel, seed: int, width: int) -> Inputs:
    """Return the inputs for one random picture.

    Args:
        model: the model that takes the picture.
        seed: seed of the pixels.
        width: width of the picture, divided by its height. Some models take only squares.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    config, high, wide = model.config, SIDE // PATCH, SIDE // PATCH * width
    is_grid = "image_grid_thw" in inspect.signature(type(model).forward).parameters
    form = _FORMATS.get(config.model_type, "grid" if is_grid else "square")
    sizes, patches = torch.tensor([[SIDE, SIDE * width]]), torch.tensor([[high, wide]])
    ones = torch.ones(1, 1, dtype=torch.long)
    match form:
        case "grid" | "merged grid":
            frames = [getattr(config.vision_config, name, None) for name in ("temporal_patch_size", "patch_temporal")]
            is_square = config.model_type in ("paddleocr_vl", "kimi_k25")
            sides = (3, PATCH, PATCH) if is_square else (3 * next(filter(None, frames), 1) * PATCH**2,)
            grid = {"pixel_values": noise(high * wide, *sides), "image_grid_thw": torch.tensor([[1, high, wide]])}
            return grid | ({"image_merge_sizes": torch.tensor([2])} if form == "merged grid" else {})
        case "patches":
            return {"pixel_values": noise(1, 4, 3 * config.patch_size**2)}
        case "patches with shapes":
            pixels = noise(1, high * wide, 3 * PATCH**2)
            return {
                "pixel_values": pixels,
                "pixel_attention_mask": ones.expand(1, high * wide),
                "spatial_shapes": patches,
            }
        case "patches with places":
            places = torch.cartesian_prod(torch.arange(high), torch.arange(high)).flip(1)
            return {"pixel_values": noise(1, high * high, 3 * PATCH**2).abs(), "image_position_ids": places[None]}
        case "flattened":
            places = torch.cartesian_prod(torch.arange(1, high + 1), torch.arange(1, high + 1))
            pixels = noise(high * high, config.vision_config.patch_embed_hidden_size)
            return {"flattened_patches": torch.cat([places, pixels], 1)[None]}
        case "strip":
            return {"pixel_values": noise(1, 3, PATCH, high * wide * PATCH), "target_sizes": patches}
        case "any size":
            return {"pixel_values": noise(1, 3, SIDE, SIDE * width), "image_sizes": sizes}
        case "tiles":
            return {"pixel_values": noise(1, 1 + width, 3, SIDE, SIDE), "image_sizes": sizes}
        case "rows":
            return {"pixel_values": noise(1, 1, 3, SIDE, SIDE)}
        case "rows with mask":
            return {"pixel_values": noise(1, 1, 3, SIDE, SIDE), "pixel_attention_mask": ones.bool()}
        case "rows of tiles":
            ratios = {"aspect_ratio_ids": ones, "aspect_ratio_mask": ones[..., None]}
            return {"pixel_values": noise(1, 1, 1, 3, SIDE, SIDE), **ratios}
        case "question":
            question = {"qformer_input_ids": torch.tensor([[9, 10]]), "qformer_attention_mask": ones.expand(1, 2)}
            return {"pixel_values": noise(1, 3, SIDE, SIDE), **question}
        case "two sizes":
            side = config.high_res_vision_config.image_size
            return {"pixel_values": noise(1, 3, SIDE, SIDE), "high_res_pixel_values": noise(1, 3, side, side)}
    return {"pixel_values": noise(1, 3, SIDE, SIDE)}
