"""What packing did to documents: what it dropped, cut, skipped or left out, as counts and as texts for warnings."""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import datasets
import numpy as np

from hf_packing.columns import IGNORED_LABEL, INPUT_IDS, LABEL_COLUMNS, LABELS, LOSS_WEIGHTS, loss_masks_in
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Pieces, offsets_of, total_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import read_labels
from hf_packing.rows.token_columns import TOKENS_AT_ONCE, TokenColumns, blocks_of_rows, token_columns_of


class LabelCounts(NamedTuple):
    """The number of labels that are left to train on, and of those that the documents have."""

    left: int
    documents: int
    weighted: int = 0
    """The number of labels that are left and have a weight other than 1."""

    def __str__(self) -> str:
        weighted = f", {self.weighted:,} with a weight other than 1" if self.weighted else ""
        return f"{self.left:,} of {self.documents:,} labels are left{weighted}"

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


def labels_left(columns: TokenColumns, plan: PackingPlan, keep_first: bool) -> LabelCounts | None:
    """Count the labels that a plan leaves, if it drops tokens, or if all tokens are labels.

    Args:
        columns: as for `count_labels`.
        plan: the plan of the documents.
        keep_first: as for `count_labels`.

    Returns:
        The counts; None if they were not counted.
    """
    is_whole = total_of(plan.segment_length) == total_of(plan.document_length)
    if is_whole and not columns.keys().isdisjoint(LABEL_COLUMNS):
        return None
    documents = Pieces.whole(plan.document_length)
    left = count_labels(columns, plan.segments, keep_first)
    return LabelCounts(left, count_labels(columns, documents, keep_first))


def count_labels(columns: TokenColumns, pieces: Pieces, keep_first: bool = False, weighted: bool = False) -> int:
    """Count the tokens of pieces of documents that are trained on.

    Args:
        columns: columns of documents by name. Only labels, loss masks and weights are read; without labels and masks,
            all tokens have labels.
        pieces: the pieces, which are segments of a row.
        keep_first: whether the first token of a piece has a label, as for masked language models.
        weighted: whether to count only the tokens with a weight other than 1.
    """
    if weighted and LOSS_WEIGHTS not in columns:
        return 0
    if not weighted and columns.keys().isdisjoint(LABEL_COLUMNS):
        return total_of(pieces.length) - (0 if keep_first else int(np.count_nonzero(pieces.length)))
    found = 0
    for first, end in blocks_of_rows(pieces.length, TOKENS_AT_ONCE):
        block = pieces.take(np.arange(first, end))
        tokens = total_of(block.length)
        labels = read_labels(columns, block, np.zeros(tokens, dtype=np.int32))
        trained = np.ones(tokens, dtype=bool) if labels is None else labels != IGNORED_LABEL
        if weighted:
            trained &= columns[LOSS_WEIGHTS].gather(block) != 1
        if not keep_first:
            trained[offsets_of(block.length)[:-1][block.length > 0]] = False
        found += int(np.count_nonzero(trained))
    return found


def count_trained(documents: datasets.Dataset) -> int | None:
    """Count the tokens of documents that are trained on; None for documents that `pack` refuses."""
    with suppress(PackingError):
        columns = token_columns_of(documents)
        return count_labels(columns, Pieces.whole(columns[INPUT_IDS].length))
    return None


def describe_counts(trained: int | None, tokens: int, skipped: Sequence[str] = ()) -> list[str]:
    """Return sentences on the tokens that are trained on, if their number is known, and on rows that were left out.

    Args:
        trained: the number of tokens that are trained on, or None.
        tokens: the number of tokens.
        skipped: the rows that were left out, with the reasons.
    """
    said = [] if trained is None else [f"{trained:,} of {tokens:,} tokens are trained on"]
    return said + [f"rows left out: {len(skipped):,}; the first one: {each}" for each in skipped[:1]]


def changes_of(columns: TokenColumns, plan: PackingPlan, strategy: str, keep_first: bool) -> dict[str, Any]:
    """Return what a plan does to documents, as a dict that can be saved as JSON; see `describe_changes`.

    Args:
        columns: the token columns of the documents.
        plan: the plan.
        strategy: the argument that decides what is dropped.
        keep_first: whether the first token of a segment keeps its label.
    """
    masks = loss_masks_in(columns)
    return {
        "labels_made": LABELS not in columns and not masks,
        "loss_masks": masks,
        "packed_tokens": total_of(plan.segment_length),
        "tokens": total_of(plan.document_length),
        "empty_documents": total_of(plan.document_length == 0),
        "labels_left": labels_left(columns, plan, keep_first),
        "strategy": strategy,
    }


def warn_of_changes(changes: Sequence[str], who: str, stacklevel: int) -> None:
    """Warn of changes, as `describe_changes` returns them, in the name of a function."""
    for change in changes:
        warnings.warn(f"{who} {change}", stacklevel=stacklevel + 1)


def describe_changes(facts: Mapping[str, Any], of: str = "", left_out: Sequence[str] = ()) -> list[str]:
    """Return phrases that say, in warnings, what packing did to documents, such as "drops 5 of 11 tokens".

    Args:
        facts: what `changes_of` returned, with `trained_tokens` if they are known. Facts that are missing are not
            described.
        of: whose tokens are counted, such as " of a batch".
        left_out: names and types of the columns that are left out.
    """
    said = []
    if masks := facts.get("loss_masks"):
        trained = facts.get("trained_tokens")
        counted = "tokens with a 0 are not trained on"
        if trained is not None:
            counted = f"{trained:,} of {facts['packed_tokens']:,} tokens are trained on"
        said.append(f"applies {' and '.join(masks)} to labels: {counted}")
    if dropped := facts.get("tokens", 0) - facts.get("packed_tokens", 0):
        labels = ""
        if facts.get("labels_left") and not facts["labels_made"]:
            labels = f"; {LabelCounts(*facts['labels_left'])}"
        elif lost := facts.get("lost_labels"):
            labels = f"; {lost:,} labels are lost"
        said.append(
            f"drops {dropped:,} of {facts['tokens']:,} tokens{of}, as configured by {facts['strategy']}{labels}"
        )
    if empty := facts.get("empty_documents"):
        said.append(f"skips {empty:,} document{'s' * (empty > 1)} without a token")
    if repeated := facts.get("tokens_not_shared"):
        said.append(f"shares {repeated:,} tokens less{of}, since other columns differ where tokens agree")
    if left_out:
        said.append(f"leaves out columns without one number for each token: {', '.join(left_out)}")
    return said
