"""A few random documents for a model: their lengths, their tokens, and where they are in a batch."""

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.collate import PackingCollator
from hf_packing.errors import ModelNotSupportedError, PackingError

Tokens = list[list[int]]

DOCUMENT_LENGTHS = ((13, 7, 21), (13, 9, 21), (17, 7, 23), (13, 11, 29))
"""Tokens of the three documents: all different, and longer than the kernels of convolutions. Their sum is a prime, so
that no axis of a model is likely to have as many entries; the first sum that none has is taken."""


def words_of(model: PreTrainedModel) -> Any:
    """The embedding of a model's tokens.

    Raises:
        ModelNotSupportedError: the model does not tell which module that is.
    """
    with suppress(NotImplementedError):
        if isinstance(getattr(words := model.get_input_embeddings(), "weight", None), Tensor):
            return words
    raise ModelNotSupportedError(
        f"model: expected a get_input_embeddings() that returns the module, with a weight, that input_ids go through; "
        f"{type(model).__name__} has none. Define it in your class, as the models of transformers do"
    )


def random_documents(model: PreTrainedModel, lengths: list[int], seed: int) -> tuple[Tokens, Tokens]:
    """Documents, and another one for each. No token but that of a mask occurs in two documents, and a document and its
    replacement differ in every token.

    Args:
        model: whose tokens they are.
        lengths: of the documents.
        seed: of the random tokens.

    Raises:
        PackingError: the vocabulary is too small for it.
    """
    words = words_of(model)
    known_size = getattr(model.config.get_text_config(), "vocab_size", len(words.weight))
    vocabulary = min(known_size, getattr(words, "num_embeddings", known_size))  # tables may go on, for prompts
    settings = vars(model.config) | vars(model.config.get_text_config())
    special = {value for name, value in settings.items() if name.endswith("_token_id") and isinstance(value, int)}
    known = np.array([token for token in range(1, vocabulary) if token not in special])
    if len(known) < 2 * len(lengths):
        raise PackingError(f"model: expected at least {2 * len(lengths)} tokens that are not special, got {len(known)}")
    generator = np.random.default_rng(seed)
    mask = settings.get("mask_token_id")
    documents, others = [], []
    for number, length in enumerate(lengths):
        own = known[number :: len(lengths)]
        tokens = generator.integers(0, len(own), length)
        documents.append(own[tokens].tolist())
        others.append(own[(tokens + generator.integers(1, len(own), length)) % len(own)].tolist())
        if isinstance(mask, int) and 0 <= mask < vocabulary:  # some models look at the share of what is hidden
            documents[-1][2::5] = [mask] * len(documents[-1][2::5])
            others[-1][1::3] = [mask] * len(others[-1][1::3])
    return documents, others


def pad_token_of(model: PreTrainedModel) -> int | None:
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else None


def in_one_row(documents: Tokens) -> dict[str, Any]:
    return PackingCollator()([{"input_ids": tokens} for tokens in documents])


def in_two_rows(documents: Tokens) -> dict[str, Any]:
    """As `in_one_row`, for documents whose first and second half have as many tokens."""
    half = len(documents) // 2
    rows = [in_one_row(each) for each in (documents[:half], documents[half:])]
    return {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}


def find_documents(documents: Tokens, input_ids: Tensor) -> list[slice]:
    """Where documents stand in the rows of a batch, laid end to end."""
    ids = input_ids.flatten()
    places = []
    for tokens in documents:
        starts = (ids.unfold(0, len(tokens), 1) == torch.tensor(tokens, device=ids.device)).all(1).nonzero()
        if len(starts) != 1:
            raise PackingError(
                f"collator: expected a batch with each document whole and once, one of {len(tokens)} tokens is there "
                f"{len(starts)} times"
            )
        places.append(slice(int(starts[0, 0]), int(starts[0, 0]) + len(tokens)))
    return places


def unmistakable_lengths(model: nn.Module) -> list[int]:
    """Lengths of documents that make a row of a length that no parameter, buffer or integer setting has."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {value for value in vars(model.config).values() if isinstance(value, int)}
    for lengths in DOCUMENT_LENGTHS:
        if sum(lengths) not in sizes:
            return list(lengths)
    raise PackingError(f"model: expected one without axes of {', '.join(str(sum(each)) for each in DOCUMENT_LENGTHS)}")
