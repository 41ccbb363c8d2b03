"""Refuse labels from which a model would learn to copy, and data loaders that take packed rows for documents.

Masked language models see the input token at each label's position. In training, they would only learn to copy it if
labels repeat the input. And a batch of one document in each row does not show whether a collator has lost the borders.
So the collator of the data loader that accelerate is reading gets a row of two documents once, and its batch must show
both. Both checks wait for the device only until a batch decides them.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.layout import Layout, read_borders
from hf_packing.attention.route import PATCH, sees_labels
from hf_packing.batch.collate import active_loader
from hf_packing.columns import CU_SEQ_LENS, IGNORED_LABEL, INPUT_IDS, LABELS, POSITION_IDS, SEQ_IDX, SEQ_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.rows.packing_trace import has_packs, refuse_lost_borders, stored_datasets

_FEWEST = 3
"""The number of trained labels that are enough to tell whether labels repeat the input. Masked language models are
usually trained on 15 % of the tokens, and 10 % of the trained tokens are left unchanged. In only one of 300,000 correct
batches of 3 tokens, all tokens are trained on and left unchanged."""


def refuse_copied_labels(model: PreTrainedModel, input_ids: Any, labels: Any, cu_seq_lens: Tensor) -> None:
    """Raise PackingError if a model would only learn to copy its input.

    The check is made only for models that see the input token at each label's position, such as masked language models,
    and only if input_ids and labels are tensors of the same shape. A patched model makes it in training, until a batch
    or a sample of the data shows that labels differ from the input, or are those of chosen tokens.

    Args:
        model: a patched model.
        input_ids: integers [rows, tokens].
        labels: integers [rows, tokens].
        cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.

    Raises:
        PackingError: all labels only repeat the input tokens, and no segment has labels for only some of its tokens. A
            missing label at the first token is ignored.
    """
    both = isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    if not sees_labels(model) or not both or input_ids.shape != labels.shape:
        return
    ids, labels, borders = (each.flatten().cpu().numpy() for each in (input_ids, labels, cu_seq_lens))
    is_first = np.isin(np.arange(len(ids)), borders)
    trained = labels != IGNORED_LABEL
    ends_within = (trained[1:] != trained[:-1]) & ~is_first[1:] & ~is_first[:-1]  # of trained tokens, or a gap in them
    if (labels != ids)[trained].any() or ends_within.any():
        getattr(model, PATCH).knows_labels = True
    elif trained.sum() >= _FEWEST:
        name = type(model).__name__
        raise PackingError(
            f"labels: expected labels that differ from input_ids, got {trained.sum()} labels that only repeat "
            f"input_ids. {name} sees the input token at each label's position, and would only learn to copy this "
            "token. For a masked language model, mask tokens before packing, with Dataset.map or "
            "Dataset.with_transform, and set the labels of all other tokens to -100, as "
            "DataCollatorForLanguageModeling does. For a causal model that does not shift labels itself, shift the "
            "labels by one token"
        )


_TWO_DOCUMENTS = {
    INPUT_IDS: [1, 1, 1, 1],
    LABELS: [-100, 1, -100, 1],
    POSITION_IDS: [0, 1, 0, 1],
    SEQ_IDX: [0, 0, 1, 1],
    **{name: [0, 2, 4] for name in CU_SEQ_LENS},
    SEQ_LENGTHS: [2, 2],
}
"""A packed row, with all columns that collators read."""

_checked: "WeakSet[Any]" = WeakSet()
"""The data loaders that were checked."""


def check_loader(layout: Layout) -> None:
    """Check the data loader that is being read, if the rows of its dataset are packed.

    Args:
        layout: where the documents of the batch are. If there are more documents than rows were read, the borders of
            packed rows are known, however the caller has found them, and the collator is not asked.

    Raises:
        PackingError: the rows of the dataset have lost their borders, or packed rows were packed again; or the
            collator makes one document of a row.
    """
    loader = active_loader()
    if loader is None or loader in _checked:
        return
    rows_read = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    for dataset in stored_datasets(getattr(loader, "dataset", None)):
        names = _visible(dataset)
        if names and has_packs(dataset, names) and (rows_read is None or len(layout.lengths) <= rows_read):
            refuse_lost_borders(dataset, names)
            _ask(loader.collate_fn, names)
    _checked.add(loader)


def _visible(dataset: Any) -> list[str]:
    """Return the columns that a dataset of `datasets` shows; none for a stream whose columns are not known."""
    form, names = getattr(dataset, "format", None), getattr(dataset, "column_names", None)
    return list((form["columns"] if isinstance(form, dict) and not form["output_all_columns"] else names) or ())


def _ask(collate: Callable[[list[dict[str, Any]]], Any], names: list[str]) -> None:
    """Raise PackingError if a collator makes one document of a row of two documents with these columns."""
    row = {name: values for name, values in _TWO_DOCUMENTS.items() if name in names}
    try:
        with torch.random.fork_rng(devices=[]):
            batch = collate([row])
        borders = read_borders(len(batch[INPUT_IDS]), batch)
    except Exception:  # the collator needs other columns, or makes other batches: it cannot be asked
        return
    if borders is None or borders.tolist()[:3] != [0, 2, 4]:
        raise PackingError(
            "data_collator: expected a collator that reads where documents begin in packed rows, got "
            f"{type(getattr(collate, 'data_collator', collate)).__name__}, which makes one document of each row. Pass "
            "data_collator=PackingCollator() to Trainer, padding_free=True and max_length=None to SFTConfig, or call "
            "attach(trainer, TokenBudget(max_tokens))"
        )
