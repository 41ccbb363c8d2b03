"""Count the labels that are trained on, and those that are left after documents were cut or left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_packing.columns import IGNORED_LABEL, LABELS, LOSS_MASKS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.token_columns import TOKENS_AT_ONCE, blocks_of_rows


@dataclass(frozen=True)
class LabelCounts:
    """The number of labels that are left to train on, and of those that the documents have."""

    left: int
    documents: int

    def __str__(self) -> str:
        return f"{self.left:,} of {self.documents:,} labels are left"

    def check_some_left(self, name: str, value: object) -> None:
        """Raise PackingError if documents have labels, but none of them are left.

        Args:
            name: the argument that decides how documents are cut.
            value: the value of this argument.
        """
        if self.documents and not self.left:
            raise PackingError(
                f"{name}: {self}, so there would be nothing to train on, got {value!r}. Documents are cut or dropped "
                "where their labels are: raise the number of tokens, or use overflow='split'"
            )


def labels_left(columns: Mapping[str, Any], plan: PackingPlan) -> LabelCounts | None:
    """Count the labels that a plan leaves, if documents have labels, and the plan drops some of their tokens.

    Args:
        columns: as for `count_labels`.
        plan: the plan of the documents.

    Returns:
        The counts; None if nothing or everything is dropped, or if all tokens are labels.
    """
    segments = Pieces(plan.segment_document, plan.segment_start, plan.segment_length)
    lost_some = segments.length.sum(dtype=np.int64) not in (0, plan.document_length.sum(dtype=np.int64))
    if not lost_some or columns.keys().isdisjoint((LABELS, *LOSS_MASKS)):
        return None
    return LabelCounts(count_labels(columns, segments), count_labels(columns, Pieces.whole(plan.document_length)))


def count_labels(columns: Mapping[str, Any], pieces: Pieces, keep_first: bool = False) -> int:
    """Count the tokens of pieces of documents that are trained on.

    Args:
        columns: columns of documents by name, as TokenColumn or LazyColumn. Only labels and loss masks are read;
            without them, all tokens have labels.
        pieces: the pieces, which are segments of a row.
        keep_first: whether the first token of a piece has a label, as for masked language models.
    """
    read = {name: columns[name] for name in (LABELS, *LOSS_MASKS) if name in columns}
    if not read:
        return int(pieces.length.sum(dtype=np.int64)) - (0 if keep_first else int(np.count_nonzero(pieces.length)))
    found = 0
    for first, end in blocks_of_rows(pieces.length, TOKENS_AT_ONCE):
        document, start, length = (each[first:end] for each in (pieces.document, pieces.start, pieces.length))
        labeled = np.ones(int(length.sum(dtype=np.int64)), dtype=bool)
        for name, column in read.items():
            labeled &= column.gather(document, start, length) != (IGNORED_LABEL if name == LABELS else 0)
        if not keep_first:
            begins = np.cumsum(length, dtype=np.int64) - length
            labeled[begins[length > 0]] = False
        found += int(np.count_nonzero(labeled))
    return found
