"""The values by which documents are compared: their tokens, and everything else that belongs to a token.

Documents share a token only if all of its values are equal, since a row has each value of a shared token once. Labels
are the exception: a row says for each document which tokens it trains on. So labels are compared only where they are
neither -100 nor the token itself.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABELS, LOSS_MASKS, apply_loss_masks
from hf_packing.planning.lengths import IntArray, Pieces
from hf_packing.rows.packed_rows import as_int32
from hf_packing.rows.token_columns import TokenColumn, TokenColumns


class TokenKeys(NamedTuple):
    """The values to compare, as 32-bit words."""

    words: npt.NDArray[np.int32]
    """int32 [tokens, words]: the token, followed by the words of the other columns."""
    columns: tuple[str, ...]
    """For each word, the name of its column."""


def read_keys(columns: TokenColumns, pieces: Pieces, are_beginnings: bool = True) -> TokenKeys:
    """Return the values by which pieces are compared, piece by piece.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of documents to read; they may be empty.
        are_beginnings: whether the first token of each piece is one that it would have in a row, so that it is not
            trained on.

    Raises:
        PackingError: a loss mask has a value other than 0 and 1, or input_ids or labels do not fit in 32 bits.
    """
    where = (pieces.document, pieces.start, pieces.length)
    input_ids = as_int32(INPUT_IDS, columns[INPUT_IDS].gather(*where))
    words, names = [input_ids[:, None]], [INPUT_IDS]
    labels = read_labels(columns, pieces)
    if labels is not None:
        labels[(labels == input_ids)] = IGNORED_LABEL
        if are_beginnings:
            labels[np.cumsum(pieces.length, dtype=np.int64) - pieces.length] = IGNORED_LABEL
        if (labels != IGNORED_LABEL).any():
            words.append(labels[:, None])
            names.append(LABELS)
    for name, column in columns.items():
        if name not in (INPUT_IDS, LABELS, *LOSS_MASKS):
            words.append(_as_words(column.gather(*where)))
            names += [name] * words[-1].shape[1]
    return TokenKeys(np.concatenate(words, axis=1) if len(words) > 1 else words[0], tuple(names))


def read_labels(columns: TokenColumns, pieces: Pieces) -> npt.NDArray[np.int32] | None:
    """Return the labels of pieces with loss masks applied, int32 [tokens]; None without labels and loss masks.

    The label of a piece's first token is included, although no earlier token can predict it.

    Args:
        columns: the token columns of the documents.
        pieces: the pieces of documents to read.
    """
    where = (pieces.document, pieces.start, pieces.length)
    masks = {name: columns[name].gather(*where) for name in LOSS_MASKS if name in columns}
    if LABELS not in columns and not masks:
        return None
    source = LABELS if LABELS in columns else INPUT_IDS
    labels = as_int32(source, columns[source].gather(*where))
    return apply_loss_masks(labels, masks) if masks else labels


def read_beginnings(column: TokenColumn, pieces: Pieces, tokens: int) -> npt.NDArray[np.int64]:
    """Return the first tokens of each piece, int64 [pieces, tokens]. No piece may be shorter than `tokens`."""
    length: IntArray = np.full(len(pieces.document), tokens)
    return column.gather(pieces.document, pieces.start, length).astype(np.int64).reshape(-1, tokens)


def _as_words(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return the bits of numbers as int32 [values, words]; numbers of at most 32 bits have one word."""
    if values.dtype.itemsize < 4:
        values = values.view(f"i{values.dtype.itemsize}").astype(np.int32)
    return values.view(np.int32).reshape(len(values), values.dtype.itemsize // 4)
