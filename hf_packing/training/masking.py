"""Mask documents with the user's masking collator, each by itself and anew in every epoch.

The masks of a document depend on the seed, the epoch and the document's number in the dataset alone, so they do not
change with batches, ranks, workers or a resumed run. The collator's method is called once for each document, which
takes about 50 ms for 16,384 tokens; with workers, training does not wait for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling

from hf_packing.attention import temporarily
from hf_packing.batch.collate import read_integers, read_segment_lengths
from hf_packing.columns import (
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    OFFSET_MAPPING,
    SPECIAL_TOKENS_MASK,
)
from hf_packing.errors import PackingError
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import Row, SampledRows
from hf_packing.sampling.sampler import RankBatchSampler

_NOT_SETTINGS = {"seed", "return_tensors", "pad_to_multiple_of"}
"""Attributes of collators that do not change masks, and `seed`, which `Masking` has itself."""


@dataclass(frozen=True)
class Masking:
    """A collator with a method torch_mask_tokens, and the seed of all masks.

    Raises:
        PackingError: the collator changes batches in other ways too.
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

    def __str__(self) -> str:
        plain = {name: value for name, value in vars(self.collator).items() if isinstance(value, (str, int, float))}
        settings = [f"{name}={plain[name]!r}" for name in sorted(plain.keys() - _NOT_SETTINGS)]
        return f"{type(self.collator).__name__}({', '.join([*settings, f'seed={self.seed}'])})"

    @property
    def columns(self) -> list[str]:
        """The columns of a tokenizer that the collator reads."""
        whole_words = getattr(self.collator, "whole_word_mask", False)
        return [SPECIAL_TOKENS_MASK, OFFSET_MAPPING] if whole_words else [SPECIAL_TOKENS_MASK]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context manager: within the block, the collator draws from torch's generator, which is restored after it."""
        with temporarily(self.collator, generator=torch.default_generator), torch.random.fork_rng(devices=[]):
            yield

    def mask(self, row: Row, key: Sequence[int]) -> Row:
        """Return a row with masked tokens, and with the tokens to predict as labels, within `drawing`.

        Args:
            row: a document, or a packed row, each of whose segments is masked by itself.
            key: numbers, not negative, that decide the masks together with the seed.
        """
        row = dict(row)
        tokens = read_integers(INPUT_IDS, row, 0).astype(np.int64)
        lengths = read_segment_lengths([row], [tokens])
        given = {name: torch.from_numpy(np.array(row.pop(name), np.int64)) for name in self.columns if name in row}
        masked = []
        for segment, (begin, end) in enumerate(pairwise(np.cumsum([0, *lengths]).tolist())):
            (drawn,) = np.random.SeedSequence((self.seed, *key, segment)).generate_state(1, np.uint64)
            torch.default_generator.manual_seed(int(drawn))
            own = {name: values[None, begin:end] for name, values in given.items()}
            masked.append(self.collator.torch_mask_tokens(torch.from_numpy(tokens[None, begin:end].copy()), **own))
        ids, labels = (torch.cat(each, 1)[0].numpy() for each in zip(*masked, strict=True))
        return {**row, INPUT_IDS: ids, LABELS: labels}


class MaskedRows(SampledRows):
    """The rows that a sampler selects, masked anew in every epoch. The rows have no labels in the dataset.

    The rows of evaluations, which are in the order of the dataset, are masked in the same way each time.

    Args:
        dataset: the map-style dataset that the sampler was made for.
        sampler: the EpochSampler of this rank.
        masking: how tokens are masked.
        unread: names of columns that are not read.
        more: names of further per-token columns to read.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: RankBatchSampler,
        masking: Masking,
        unread: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        super().__init__(dataset, sampler, unread, more=[*more, *masking.columns])
        self.masking = masking
        sampler.more_inputs["data_collator"] = str(masking)

    def __getitems__(self, micro_batch: Sequence[tuple[Any, ...]]) -> list[Row]:
        """Return the rows of a micro-batch: a list of (row number, True if the row is a copy, epoch)."""
        rows, pieces = super().__getitems__([row[:2] for row in micro_batch]), self.sampler.rows.pieces
        with self.masking.drawing():
            for place, (number, is_copy, epoch) in enumerate(micro_batch):
                if not is_copy:
                    of_document = (number, 0) if pieces is None else (pieces.document[number], pieces.start[number])
                    rows[place] = self.masking.mask(rows[place], (epoch, *map(int, of_document)))
        return rows

    def _with_labels(self, row: Row) -> Row:
        """Refuse labels and loss masks, since the collator makes the labels."""
        if found := row.keys() & {LABELS, *LOSS_MASKS}:
            raise PackingError(
                f"data_collator: expected a collator that does not mask tokens, since the dataset has a column "
                f"{min(found)!r}, got {type(self.masking.collator).__name__} with mlm=True, which would overwrite the "
                "labels. Remove the column, or pass a collator that does not mask tokens"
            )
        return row


class EpochSampler(RankBatchSampler):
    """A sampler that adds the epoch, from 1, to every row, since workers do not learn that an epoch has begun.

    It is 0 in evaluations.
    """

    def __iter__(self) -> Iterator[Any]:
        epoch = 0 if isinstance(self.batching, InOrder) else self.epoch.number + 1
        return ([(*row, epoch) for row in batch] for batch in super().__iter__())
