"""Compare documents, as they are read, with what the trainer's own collator makes of their rows.

`attach` takes the place of this collator. What it makes of rows would be lost in silence: other labels, such as those
of transformers' own for pad tokens, or further values for the model.
"""

from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch

from hf_packing.batch.collate import PackingCollator
from hf_packing.columns import ATTENTION_MASK, INPUT_IDS, KNOWN_COLUMNS, LABELS
from hf_packing.errors import PackingError
from hf_packing.training.kinds import labels_of
from hf_packing.training.losses import Batch
from hf_packing.training.sources import Source
from hf_packing.training.whole_rows import collate_rows
from hf_packing.upstream.accelerate import prepared_loaders

_ROWS = 64
"""The most rows that are compared."""


def check_as_own_collator(stock: Any, name: str, dataset: Any, source: Source, keep_first_labels: bool) -> None:
    """Compare documents of a dataset with what the trainer's own collator makes of each row, alone.

    Nothing is compared of packed rows, of trees and where the collator packs, or masks tokens; nor where the trainer
    cannot read its dataset by itself.

    Args:
        stock: the trainer without attach.
        name: the name of the dataset in messages.
        dataset: the dataset, which the trainer trains on if this is "train_dataset".
        source: reads the documents.
        keep_first_labels: whether the first token of a document has a label, as for masked language models.

    Raises:
        PackingError: the collator makes other tokens or labels, or has a value for the model that documents lack.
    """
    if isinstance(stock.data_collator, PackingCollator):
        return
    made: list[tuple[int, Any, Batch]] = []
    loaders = prepared_loaders(stock.accelerator)
    before = len(loaders)
    # making a loader may draw random numbers, and collators may raise anything
    with suppress(Exception), torch.random.fork_rng():
        loader = stock.get_train_dataloader() if name == "train_dataset" else stock.get_eval_dataloader(dataset)
        for number, row, document in source.documents_beside(loader.dataset, _ROWS):
            made.append((number, document, collate_rows(loader.collate_fn, [row])))
    del loaders[before:]
    collate = PackingCollator(keep_first_labels)
    for number, row, batch in made:
        # without labels, batches have values that the model does not take, if unused columns stay
        if len(row[INPUT_IDS]) and (batch.get(LABELS) is not None or stock.args.remove_unused_columns):
            (document,) = labels_of(collate([row])).documents()
            _compare(f"row {number} of {name}", document, batch, int(not keep_first_labels))


def _compare(where: str, document: Batch, batch: Batch, first: int) -> None:
    """Compare a document, whose first labels are left out, with a batch of its row alone."""
    is_token = batch.get(ATTENTION_MASK, torch.ones_like(batch[INPUT_IDS]))[0] > 0
    for name, begin in ((INPUT_IDS, 0), (LABELS, first)):
        if batch.get(name) is None:
            continue
        found, expected = (each[0, begin:].tolist() for each in (document[name], batch[name][:, is_token]))
        if found != expected:
            place = next(n for n, (one, other) in enumerate(zip_longest(found, expected)) if one != other)
            here = slice(place, place + 4)
            raise PackingError(
                f"{name}: expected those of the trainer's own collator, {expected[here]} from token {begin + place} of "
                f"{where} on, got {found[here]}. attach reads the columns of the dataset: give it the {name} that you "
                "want to train on, and the trainer no collator that changes them"
            )
    for name in sorted(batch.keys() - document.keys() - KNOWN_COLUMNS):
        raise PackingError(
            f"column {name!r}: expected no such value in batches of the trainer's own collator, since packed rows have "
            f"only numbers for each token, got one in the batch of {where}. Leave it out, or keep the trainer's "
            "batches with attach(trainer, None)"
        )
