"""The column names of datasets and batches, and functions that apply TRL's loss masks to labels.

A segment is a document, or a part of a document, in a packed row.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError

INPUT_IDS = "input_ids"
LABELS = "labels"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPE_IDS = "token_type_ids"

POSITION_IDS = "position_ids"
"""The column with the position of each token in the token's segment, from 0."""
SEQ_LENGTHS = "seq_lengths"
"""The column with the number of tokens in each segment; TRL uses the same column name."""
BUCKET = "bucket"
"""The column with the capacity of the pack in tokens; only strategies with several capacities write this column."""
SEQ_IDX = "seq_idx"
"""The column with the index of the segment that each token belongs to."""
PADDING_SEGMENT = -1
"""The segment index of tokens that only fill up a segment or a batch, as in the kernels of causal-conv1d."""
COPIED_SEGMENT = -2
"""The segment index of a copy's tokens: a row that stands in for one that is missing, so that all ranks have a batch. A
second segment of copies has the index -3, and so on. Only tokens with an index of at least 0 are those of a dataset."""
CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""The cumulative segment lengths, starting with 0. FlashAttention takes them separately for queries and for keys."""
MAX_LENGTHS = ("max_length_q", "max_length_k")
"""The length of the longest segment in tokens. FlashAttention takes it separately for queries and for keys."""

SEGMENT_COLUMNS = (SEQ_LENGTHS, *CU_SEQ_LENS, SEQ_IDX, POSITION_IDS)
"""Columns that give the segment borders of a row; only packed rows have such columns."""

TREE_INPUT_IDS = "tree_input_ids"
"""The tokens of a row of trees, in which each shared prefix stands once. The name differs from `input_ids`, so that
trainers and collators that know no trees raise an error."""
TREE_LABELS = "tree_labels"
"""The label of each token of a row of trees, where any document trains on it, and otherwise -100."""
SEGMENT_LENGTHS = "segment_lengths"
"""The number of tokens in each segment of a row of trees."""
PARENTS = "parents"
"""The index of each segment's parent in a row of trees; -1 for a root."""
ENDS = "ends"
"""For each document of a row of trees, the index of the segment in which the document ends."""
TRAINED = "trained"
"""The tokens that documents of a row of trees train on, as runs of three numbers: the index of the document in the row,
the place in the document at which the run begins, and the number of tokens of the run."""
TREE_BORDERS = (PARENTS, SEGMENT_LENGTHS)
"""The columns from which a model reads the trees of a row."""
TREE_COLUMNS = (TREE_INPUT_IDS, TREE_LABELS, SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED)
"""The columns of a row of trees."""

COMPLETION_MASK = "completion_mask"
ASSISTANT_MASKS = "assistant_masks"
LOSS_MASKS = (COMPLETION_MASK, ASSISTANT_MASKS)
"""TRL's masks of the tokens to train on. A token is trained on if every mask of the row has a 1 for the token."""

LABEL_COLUMNS = (LABELS, *LOSS_MASKS)
"""The columns that say which tokens are trained on; without them, all tokens are."""

LOSS_WEIGHTS = "loss_weights"
"""The column with the weight of each token's label in the loss; without it, every label has the weight 1."""
LOSS_WEIGHT = "loss_weight"
"""The column with one weight for all labels of a document; packed rows have `loss_weights` instead."""

SPECIAL_TOKENS_MASK = "special_tokens_mask"
"""The column of a tokenizer with a 1 for every special token, which is never masked."""
OFFSET_MAPPING = "offset_mapping"
"""The column of a tokenizer with the first and the last character of every token, which tells where words begin."""

SOURCE = "source"
"""The column of a mixture with the number of the document's source, for every token."""
SOURCE_EPOCH = "source_epoch"
"""The column of a mixture with the number of times that the source was read before this document, for every token. Only
mixtures whose sources are read again have it."""

KNOWN_COLUMNS = frozenset(
    (INPUT_IDS, LABELS, ATTENTION_MASK, TOKEN_TYPE_IDS, BUCKET, *SEGMENT_COLUMNS, *MAX_LENGTHS, *TREE_COLUMNS)
    + (*LOSS_MASKS, LOSS_WEIGHTS, LOSS_WEIGHT, SPECIAL_TOKENS_MASK, OFFSET_MAPPING, SOURCE, SOURCE_EPOCH)
)
"""Columns that packing and collators know. Others with one number for each token are passed on."""

IGNORED_LABEL = -100
"""The label that losses in transformers ignore. For models that predict the next token, the first token of every
segment gets this label, since no earlier token can predict the first token."""


def apply_loss_masks(labels: npt.NDArray[Any], masks: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return a copy of the labels, in which every token with a 0 in any mask has the label -100, as in TRL.

    Args:
        labels: integers [tokens].
        masks: one array [tokens] for each mask, by column name; all values are 0 or 1, as numbers or booleans.

    Returns:
        Integers [tokens], in the dtype of the labels, or int64 if that dtype is unsigned.

    Raises:
        PackingError: a mask has a value other than 0 and 1.
    """
    masked = labels.astype(np.int64 if labels.dtype.kind == "u" else labels.dtype)
    for name, mask in masks.items():
        wrong = mask[(mask != 0) & (mask != 1)] if mask.dtype.kind in "iufb" else mask
        if len(wrong):
            raise PackingError(f"column {name!r}: expected a 0 or a 1 for each token, got the value {wrong[0]}")
        masked[mask == 0] = IGNORED_LABEL
    return masked


def loss_masks_in(names: Collection[str]) -> list[str]:
    """Return the loss masks among some columns."""
    return [name for name in LOSS_MASKS if name in names]


def spread_weight(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with `loss_weights` in the place of `loss_weight`, if it has this column."""
    if LOSS_WEIGHT not in row:
        return row
    beside = f"no such column beside {LOSS_WEIGHT!r}; multiply the weights, or remove one of them"
    refuse_columns((LOSS_WEIGHTS,), row, beside)
    tokens = len(row[INPUT_IDS] if INPUT_IDS in row else row[TREE_INPUT_IDS])
    return {name: each for name, each in row.items() if name != LOSS_WEIGHT} | {
        LOSS_WEIGHTS: [row[LOSS_WEIGHT]] * tokens
    }


def rows_of(columns: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table, as dicts, given its columns by name."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check_are_documents(names: Collection[str]) -> None:
    """Raise PackingError if rows are packed already, or have no input_ids."""
    refuse_columns(
        (*SEGMENT_COLUMNS, TREE_INPUT_IDS),
        names,
        "documents that are not packed yet, but a dataset with this column seems to be packed already; remove the "
        "column if the dataset is not packed",
    )
    check_has_tokens(names)


def check_has_tokens(names: Collection[str]) -> None:
    """Raise PackingError if documents have no input_ids. For texts and chats, the message names `tokenize`."""
    if INPUT_IDS not in names:
        texts = {"text", "prompt", "completion", "messages"}.intersection(names)
        hint = "; hf_packing.tokenize makes it from texts and chats" if texts else ""
        check_columns((INPUT_IDS,), names, "in the dataset", hint)


def check_columns(needed: Iterable[str], names: Collection[str], where: str, hint: str = "") -> None:
    """Raise PackingError if a needed column is missing; the message says where it is expected, and ends with a hint."""
    for name in needed:
        if name not in names:
            found = ", ".join(names) or "none"
            raise PackingError(f"column {name!r}: expected this column {where}, got the columns {found}{hint}")


PICTURES = {"image", "images", "pixel_values"}
"""Columns of pictures, as collators of TRL and processors of transformers name them."""


def refuse_columns(refused: Iterable[str], names: Collection[str], expected: str) -> None:
    """Raise PackingError if there is a column that is refused; the message says what is expected instead."""
    for name in refused:
        if name in names:
            raise PackingError(f"column {name!r}: expected {expected}")
