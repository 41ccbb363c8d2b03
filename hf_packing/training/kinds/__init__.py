"""The labels of a batch, for each kind of batch: what predicts them, what they weigh, and whose they are.

Whoever computes or counts a loss asks `labels_of`, and knows no kind. A new kind is a file, and its class here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, LOSS_WEIGHTS
from hf_packing.errors import PackingError
from hf_packing.training.kinds.packed import PackedLabels
from hf_packing.training.kinds.split import PartLabels
from hf_packing.training.kinds.trees import TreeLabels
from hf_packing.training.losses import Batch

KINDS: tuple[type[PackedLabels], ...] = (PartLabels, TreeLabels, PackedLabels)
"""The kinds of batches; the first one that takes a batch has its labels."""


def labels_of(batch: Batch) -> PackedLabels:
    """Return the labels of a batch of a `PackingCollator`, or of a loader of `prepare_dataloader`."""
    return next(kind(batch) for kind in KINDS if kind.takes(batch))


def refuse_zero(batches: Sequence[Batch], items: Tensor) -> None:
    """Raise PackingError if the labels of an optimizer step have weights, all of which are 0.

    Args:
        batches: the micro-batches of this rank.
        items: the number of items of the step on all ranks.
    """
    for batch in batches:
        if LOSS_WEIGHTS in batch and not items:
            documents = labels_of(batch).documents()
            first = next((each for each in documents if (each[LABELS] != IGNORED_LABEL).any()), documents[0])
            raise PackingError(
                f"column {LOSS_WEIGHTS!r}: expected a weight other than 0 in every optimizer step, got a step whose "
                f"weights are all 0, as of the document that begins with the tokens {first[INPUT_IDS][0, :8].tolist()}"
            )


def check_keys(batch: Any) -> None:
    """Raise PackingError unless a batch has labels, and the borders of its documents."""
    found = batch if isinstance(batch, Mapping) else {}
    labels = labels_of(found)
    for name in (labels.key, *labels.borders):
        if name not in found:
            raise PackingError(
                f"batch: expected a batch from prepare_dataloader or PackingCollator, got {type(batch).__name__} "
                f"without {name!r}, with the keys: {', '.join(found) or 'none'}"
            )
