"""Read a batch of trees: which documents train on which tokens, with what weight, and what predicts each token."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import ENDS, LABELS, PARENTS, SEGMENT_LENGTHS, TRAINED, TREE_LABELS
from hf_packing.planning.lengths import indices_in_ranges
from hf_packing.trees.segments import Places, TreeSegments

TREE_KEYS = (SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED, TREE_LABELS)
"""The keys that only a batch of trees has."""

TREE_KEYS_OF_THE_LOSS = (ENDS, TRAINED, TREE_LABELS)
"""The keys of these that say what to train on, which a model does not need."""


def labels_key(batch: Mapping[str, Any]) -> str:
    """Return the key of the labels of a batch of a `PackingCollator`."""
    return TREE_LABELS if is_tree_batch(batch) else LABELS


def trees_of(batch: Mapping[str, Any]) -> TreeSegments:
    """Return the segments of a batch of trees. Waits for the device of the batch."""
    return TreeSegments.from_arrays(_array(batch[SEGMENT_LENGTHS]), _array(batch[PARENTS]))


def trained_per_tree_document(batch: Mapping[str, Any]) -> Tensor:
    """Return the number of tokens that each document of a batch of trees trains on, int64 [documents]."""
    document, _, length = batch[TRAINED].T
    return torch.zeros_like(batch[ENDS]).index_add_(0, document, length)


def documents_and_tokens(batch: Mapping[str, Any]) -> tuple[Places, Places]:
    """Return the document and the token of everything that documents of a batch of trees train on.

    Returns:
        The documents and the indices of the tokens in the batch, both int64 [trained tokens of all documents].
    """
    trained = _array(batch[TRAINED])
    ranges = trees_of(batch).find_runs(_array(batch[ENDS]), trained)
    return np.repeat(trained[ranges.part, 0], ranges.length), indices_in_ranges(ranges.begin, ranges.length)


def tree_weights(batch: Mapping[str, Any], *, by_document: bool) -> npt.NDArray[np.float64]:
    """Return each token's weight in the summed loss of a batch of trees, float64 [tokens].

    Args:
        batch: a batch of trees.
        by_document: False if the weight is the number of documents that train on the token; True if it is the sum of
            1 / n over these documents, where n is the number of tokens that a document trains on.
    """
    documents, tokens = documents_and_tokens(batch)
    shares = 1 / np.bincount(documents)[documents] if by_document else None
    return np.bincount(tokens, shares, minlength=int(batch[SEGMENT_LENGTHS].sum())).astype(np.float64)


def _array(values: Tensor) -> npt.NDArray[np.int64]:
    array: npt.NDArray[np.int64] = values.cpu().numpy()
    return array
