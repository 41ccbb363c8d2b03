"""Mask documents with the user's masking collator, each by itself, with seeds that only depend on the document.

A document's seed is a hash of the masking's seed, the epoch and the number of the document in the dataset. So masks do
not depend on batches, ranks, workers or a resumed run. Documents are masked together if the collator masks as those of
transformers do. For any other, the collator's generator gets the seed, and its method is called for each document.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import DataCollatorForLanguageModeling, TrainingArguments

from hf_packing.batch.collate import read_integers, read_segment_lengths
from hf_packing.columns import INPUT_IDS, LABELS, OFFSET_MAPPING, SEGMENT_COLUMNS, SPECIAL_TOKENS_MASK
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.rows import Row
from hf_packing.training.drawn_masks import draw_masks, masks_as_stock
from hf_packing.training.ranks import PlannedFrom

_NOT_SETTINGS = {"seed", "return_tensors", "pad_to_multiple_of"}
"""Attributes of collators that do not change masks, and `seed`, which `Masking` has itself."""

Place = tuple[int, int]
"""The number of a row in the dataset, and the index of the first of the row's tokens that are read."""


@dataclass(frozen=True)
class Masking:
    """A collator with a method torch_mask_tokens, and the seed of all masks.

    Raises:
        PackingError: the collator changes batches in other ways too, or does not draw masks from its generator.
    """

    collator: Any
    seed: int

    def __post_init__(self) -> None:
        stock, kind = DataCollatorForLanguageModeling, type(self.collator)
        for name in ("__call__", "torch_call") if isinstance(self.collator, stock) else ():
            if getattr(kind, name) is not getattr(stock, name):
                raise PackingError(
                    f"data_collator: expected the method {name} of {stock.__name__}, got {kind.__name__}, which "
                    "overrides it; attach only calls torch_mask_tokens, so change this method instead"
                )
        ids = np.arange(64)
        document = {
            INPUT_IDS: ids % 5,
            SPECIAL_TOKENS_MASK: ids < 0,
            OFFSET_MAPPING: np.stack([2 * ids, 2 * ids + 1], 1),
        }
        first, again = self.mask([document, document], [(0, 0), (0, 0)], 0)
        if any(not np.array_equal(first[name], again[name]) for name in (INPUT_IDS, LABELS)):
            raise PackingError(
                f"data_collator: expected a collator whose torch_mask_tokens draws from self.generator, got "
                f"{kind.__name__}, whose masks differ from call to call although the generator has the same seed"
            )

    def __str__(self) -> str:
        plain = {name: value for name, value in vars(self.collator).items() if isinstance(value, (str, int, float))}
        settings = [f"{name}={plain[name]!r}" for name in sorted(plain.keys() - _NOT_SETTINGS)]
        return f"{type(self.collator).__name__}({', '.join([*settings, f'seed={self.seed}'])})"

    @property
    def whole_words(self) -> bool:
        return bool(getattr(self.collator, "whole_word_mask", False))

    def mask(self, rows: Iterable[Row], places: Iterable[Place], epoch: int) -> list[Row]:
        """Return the rows with masked tokens, and with the tokens to predict as labels.

        Each segment of a packed row is masked by itself.

        Args:
            rows: documents or packed rows, with the tokenizer's columns that the masking needs.
            places: where each row comes from.
            epoch: number of the epoch.
        """
        rows = list(rows)
        documents = [
            _Document.of(row, f"{self.seed} {epoch} {number} {start}")
            for row, (number, start) in zip(rows, places, strict=True)
        ]
        masked = self._together(documents) if masks_as_stock(self.collator) else self._one_by_one(documents)
        unread = (SPECIAL_TOKENS_MASK, OFFSET_MAPPING)
        kept = ({name: values for name, values in row.items() if name not in unread} for row in rows)
        return [{**row, INPUT_IDS: tokens, LABELS: labels} for row, (tokens, labels) in zip(kept, masked, strict=True)]

    def _together(self, documents: list["_Document"]) -> list[tuple[IntArray, IntArray]]:
        """Return the masked tokens and the labels of each row, int64 [tokens]."""
        offsets = None
        if self.whole_words:
            of_rows = (np.asarray(document.row[OFFSET_MAPPING], dtype=np.int64) for document in documents)
            offsets = np.concatenate([pairs.reshape(-1, 2) for pairs in of_rows])
        masked, labels = draw_masks(
            self.collator,
            np.concatenate([document.tokens for document in documents]),
            np.array([length for document in documents for length in document.lengths]),
            np.array([seed for document in documents for seed in document.seeds], dtype=np.uint64),
            np.concatenate([self._is_special(document) for document in documents]),
            offsets,
        )
        ends = np.cumsum([len(document.tokens) for document in documents])[:-1]
        return list(zip(np.split(masked, ends), np.split(labels, ends), strict=True))

    def _is_special(self, document: "_Document") -> npt.NDArray[np.bool_]:
        if SPECIAL_TOKENS_MASK in document.row:
            return np.asarray(document.row[SPECIAL_TOKENS_MASK], dtype=bool)
        tokenizer = self.collator.tokenizer
        special = tokenizer.get_special_tokens_mask(document.tokens.tolist(), already_has_special_tokens=True)
        return np.array(special, dtype=bool)

    def _one_by_one(self, documents: list["_Document"]) -> list[tuple[IntArray, IntArray]]:
        """Return the masked tokens and the labels of each row, int64 [tokens]."""
        generator, before = torch.Generator(), getattr(self.collator, "generator", None)
        self.collator.generator = generator
        try:
            return [self._masked(document, generator) for document in documents]
        finally:
            self.collator.generator = before

    def _masked(self, document: "_Document", generator: torch.Generator) -> tuple[IntArray, IntArray]:
        row, of_token = document.row, {}
        if SPECIAL_TOKENS_MASK in row:
            of_token[SPECIAL_TOKENS_MASK] = torch.from_numpy(np.array(row[SPECIAL_TOKENS_MASK], dtype=bool))[None]
        if self.whole_words:
            of_token[OFFSET_MAPPING] = torch.from_numpy(np.array(row[OFFSET_MAPPING], dtype=np.int64))[None]
        inputs = torch.from_numpy(document.tokens)[None]
        masked = []
        for seed, (begin, end) in zip(
            document.seeds, pairwise(np.cumsum([0, *document.lengths]).tolist()), strict=True
        ):
            generator.manual_seed(seed)
            given = {name: values[:, begin:end] for name, values in of_token.items()}
            masked.append(self.collator.torch_mask_tokens(inputs[:, begin:end], **given))
        tokens, labels = masked[0] if len(masked) == 1 else (torch.cat(each, 1) for each in zip(*masked, strict=True))
        return tokens[0].numpy(), labels[0].numpy()


class _Document(NamedTuple):
    """A row to mask, which is a document or a packed row of several segments."""

    row: Row
    tokens: IntArray
    """int64 [tokens]."""
    lengths: list[int]
    """Number of tokens in each segment."""
    seeds: list[int]
    """The seed of each segment's masks, below 2**64."""

    @classmethod
    def of(cls, row: Row, key: str) -> "_Document":
        """Return a row with its seeds; `key` and the number of a segment decide the segment's seed."""
        tokens = read_integers(INPUT_IDS, row, 0).astype(np.int64)
        lengths = [len(tokens)]
        if not row.keys().isdisjoint(SEGMENT_COLUMNS):
            lengths = list(read_segment_lengths([row], [tokens]))
        digests = (hashlib.blake2b(f"{key} {segment}".encode(), digest_size=8) for segment in range(len(lengths)))
        return cls(row, tokens, lengths, [int.from_bytes(digest.digest(), "little") for digest in digests])


def masking_of(collator: Any, args: TrainingArguments, planned_from: PlannedFrom | None = None) -> Masking:
    """Return how tokens are masked in the training of a Trainer, and note it for the comparison of ranks.

    Args:
        collator: the trainer's collator, with a method torch_mask_tokens.
        args: the trainer's arguments; data_seed or seed counts if the collator has no seed.
        planned_from: what the ranks compare.

    Raises:
        PackingError: the collator is not supported.
    """
    seeds = (getattr(collator, "seed", None), args.data_seed, args.seed)
    masking = Masking(collator, next(seed for seed in seeds if seed is not None))
    if planned_from is not None:
        planned_from.note_settings(data_collator=masking)
    return masking
