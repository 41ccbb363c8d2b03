"""Count the labels in the rows that a sampler keeps: those that are left after rows were cut or left out."""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.columns import COMPLETION_MASK, IGNORED_LABEL, INPUT_IDS, LABELS, LOSS_MASKS, SEQ_LENGTHS
from hf_packing.planning.lengths import Pieces, offsets_of
from hf_packing.rows.changes import LabelCounts, count_labels
from hf_packing.rows.token_columns import TokenColumn, check_same_lengths, columns_of, visible_columns
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import RowSizes
from hf_packing.sampling.trees_of_documents import TreesOfDocuments


def kept_labels(
    dataset: Any,
    sampler: RankBatchSampler,
    unread: Sequence[str] = (),
    apply_masks: bool = True,
    keep_first: bool = False,
) -> LabelCounts | None:
    """Count the labels other than -100 in the rows of a sampler, and in all rows of its dataset.

    Args:
        dataset: the dataset that the sampler was made for.
        sampler: the sampler.
        unread: names of columns that are not read.
        apply_masks: whether rows without labels get labels from their loss masks.
        keep_first: whether the first token of a document has a label, as for masked language models.

    Returns:
        The counts; None if they are not known: for rows that were packed as trees, and for rows that are computed when
        they are read, unless tokens of them are lost.
    """
    rows, sizes = sampler.rows, sampler.sizes
    if isinstance(dataset, TreesOfDocuments):
        documents = Pieces.whole(dataset.plan.document_length)
        counts = (count_labels(dataset.columns, pieces) for pieces in (dataset.plan.segments, documents))
        return LabelCounts(*counts)
    in_table = isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"
    if sizes.trees is not None or not (in_table or rows.lost_tokens):
        return None
    columns = _in_table(dataset, unread, apply_masks) if in_table else _by_reading(dataset, sizes, unread, apply_masks)
    whole = Pieces.whole(sizes.tokens)
    if (segments := columns.pop(SEQ_LENGTHS, None)) is not None:
        lengths = segments.gather_rows(whole.document).astype(np.int64)
        row = np.repeat(whole.document, sizes.segments)
        whole = Pieces(row, offsets_of(lengths)[:-1] - offsets_of(sizes.tokens)[row], lengths)
    found = count_labels(columns, whole, keep_first)
    if rows.pieces is not None:
        left = rows.pieces.take(rows.kept)
    elif rows.lost_tokens:
        left = whole.take(np.flatnonzero(np.isin(whole.document, rows.kept)))
    else:
        return LabelCounts(found, found)
    return LabelCounts(count_labels(columns, left, keep_first), found)


def _in_table(dataset: datasets.Dataset, unread: Sequence[str], apply_masks: bool) -> dict[str, Any]:
    """Return the columns of a dataset that decide which tokens have labels, and seq_lengths."""
    names = [name for name in visible_columns(dataset) if name not in unread]
    deciding = [LABELS] if LABELS in names else [name for name in LOSS_MASKS if name in names and apply_masks]
    columns = columns_of(dataset, [INPUT_IDS, *deciding])
    check_same_lengths(columns)
    return columns | columns_of(dataset, [SEQ_LENGTHS] if SEQ_LENGTHS in names else [])


def _by_reading(dataset: Any, sizes: RowSizes, unread: Sequence[str], apply_masks: bool) -> dict[str, Any]:
    """Return the same columns of a dataset whose rows are computed when they are read."""
    rows = SampledRows(dataset, RankBatchSampler(InOrder(1), sizes), unread, apply_masks)
    trained, lengths = [], []
    for number in range(len(sizes)):
        row = rows[number]
        trained.append(np.asarray(row[LABELS]) != IGNORED_LABEL)
        lengths.append(np.asarray(row.get(SEQ_LENGTHS, []), np.int64))
    of_rows = {COMPLETION_MASK: trained} | ({SEQ_LENGTHS: lengths} if sizes.packed else {})
    return {name: TokenColumn(name, pa.chunked_array([pa.array(values)])) for name, values in of_rows.items()}
