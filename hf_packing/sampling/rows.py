"""Read the rows that a sampler selects: whole rows, pieces, copies with masked labels, or trees of documents; and count
the labels that are left in them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from hf_packing.columns import (
    ATTENTION_MASK,
    COMPLETION_MASK,
    COPIED_SEGMENT,
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_MASKS,
    LOSS_WEIGHT,
    LOSS_WEIGHTS,
    PARENTS,
    SEGMENT_COLUMNS,
    SEGMENT_LENGTHS,
    SEQ_IDX,
    SEQ_LENGTHS,
    TOKEN_TYPE_IDS,
    TRAINED,
    TREE_INPUT_IDS,
    TREE_LABELS,
    apply_loss_masks,
    loss_masks_in,
    spread_weight,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Overflow, Pieces, check_lengths, cut_to_pieces, offsets_of, total_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.changes import LabelCounts, count_labels
from hf_packing.rows.lazy import DocumentRows, lazy_rows
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import (
    TokenColumn,
    TokenColumns,
    check_same_lengths,
    columns_of,
    is_list,
    is_number,
    is_token_type,
    read_rows,
    shows_table,
    token_columns_of,
    visible_columns,
)
from hf_packing.sampling.batching import SampledRow
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import RowSizes, sizes_of_planned
from hf_packing.strategies.greedy import BestFit
from hf_packing.trees.find import find_trees

_PER_TOKEN = (INPUT_IDS, LABELS, ATTENTION_MASK, TOKEN_TYPE_IDS, *LOSS_MASKS, LOSS_WEIGHTS, TREE_INPUT_IDS, TREE_LABELS)

_OF_SEGMENTS = (SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED)

Row = dict[str, Any]


class SampledRows(torch.utils.data.Dataset[Row]):
    """A map-style dataset that a DataLoader indexes with the micro-batches of a RankBatchSampler.

    A micro-batch is a list of pairs (row number, True if the row is a copy). All labels of a copy are masked. A row
    without labels gets labels from its tokens and loss masks. If a row has labels and loss masks, the masks are passed
    on, and the collator compares the masks with the labels. If accelerate does not find the sampler, accelerate calls
    `set_epoch` on the dataset, so this class passes the epoch on to the sampler.

    Args:
        dataset: the map-style dataset that the sampler was made for.
        sampler: the sampler of this rank.
        unread: names of columns that are not read.
        apply_masks: whether to make labels for a row with loss masks but without labels; if False, the collator
            refuses such a row.
        more: names of further per-token columns to read.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: RankBatchSampler,
        unread: Sequence[str] = (),
        apply_masks: bool = True,
        more: Sequence[str] = (),
    ) -> None:
        self._in_table = False
        self._lazy = lazy_rows(dataset)
        self.apply_masks, self.sampler = apply_masks, sampler
        self._per_token = (*_PER_TOKEN, *more)
        known = (*self._per_token, LOSS_WEIGHT, *SEGMENT_COLUMNS, *_OF_SEGMENTS)
        names = [name for name in known if name not in unread]
        if self._lazy is not None:
            names = [name for name in names if name in dataset.format["columns"]]
        elif shows_table(dataset):
            shown, schema = visible_columns(dataset), dataset.data.table.schema
            names = [name for name in names if name in shown]
            # a subclass of Dataset may change rows when they are read
            is_stored = type(dataset) is datasets.Dataset
            self._in_table = is_stored and all(_has_numbers(schema.field(name)) for name in names)
            dataset = dataset.with_format("numpy", columns=names)
        self._names, self.dataset = names, dataset

    @cached_property
    def _columns(self) -> TokenColumns:
        """The columns of the table, as NumPy arrays that share its memory."""
        return columns_of(self.dataset, self._names)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle no views of memory-mapped files, which would be pickled as copies."""
        return {name: value for name, value in vars(self).items() if name != "_columns"}

    def __len__(self) -> int:
        return len(self.sampler.rows.sizes)

    def set_epoch(self, epoch: int) -> None:
        self.check_num_rows()
        self.sampler.set_epoch(epoch)

    def __getitem__(self, number: int) -> Row:
        return self.__getitems__([(number, False)])[0]

    def __getitems__(self, micro_batch: Sequence[SampledRow]) -> list[Row]:
        self.check_num_rows()
        sampled = [number for number, _ in micro_batch]
        pieces = self.sampler.rows.pieces
        numbers = sampled if pieces is None else pieces.document[sampled].tolist()
        rows = self._read(numbers)
        if len(rows) != len(numbers):
            raise PackingError(
                f"dataset: expected one row for each of {len(numbers)} row numbers, got {len(rows)} rows; a transform "
                "must return exactly one row for each input row"
            )
        made = []
        for (number, is_copy), stored, row in zip(micro_batch, numbers, rows, strict=True):
            self._check_lengths(stored, row)
            if pieces is not None:
                begin = pieces.start[number]
                row = {name: values[begin : begin + pieces.length[number]] for name, values in row.items()}
            made.append(_with_masked_labels(row) if is_copy else self._with_labels(row))
        return made

    def document(self, number: int, row: Any) -> Row:
        """Return a document of the dataset, not cut, with its labels; made of its row where rows are computed."""
        read = self._read([number])[0] if shows_table(self.dataset) else self._columns_read(row)
        return self._with_labels(read)

    def _read(self, numbers: Sequence[int]) -> list[Row]:
        """Return the columns to read of these rows, directly from the Arrow table if possible, since this is faster."""
        if self._in_table:
            return read_rows(self._columns, np.array(numbers, np.int64))
        if self._lazy is not None:
            lazy, packs = self._lazy
            rows = lazy.read(packs[numbers])
        else:
            rows = rows_by_number(self.dataset, numbers)
        return [self._columns_read(row) for row in rows]

    def _columns_read(self, row: Any) -> Row:
        """Return the columns to read of a row."""
        return dict(spread_weight({name: row[name] for name in self._names if name in row}))

    def check_num_rows(self) -> None:
        """Raise PackingError if rows were added or removed since the micro-batches were planned."""
        if (rows := len(self.dataset)) != (planned := len(self.sampler.sizes)):
            raise PackingError(
                f"dataset: expected {planned} rows, as when batches were planned, got {rows}; rows can only be "
                "added or removed between calls of train() or evaluate(), or before a call of prepare_dataloader"
            )

    def _with_labels(self, row: Row) -> Row:
        """Return the row with labels. If apply_masks is False, a row with loss masks but without labels stays
        unchanged, and the collator refuses it."""
        return row if loss_masks_in(row) and not self.apply_masks else with_labels(row)

    def _check_lengths(self, number: int, row: Row) -> None:
        """Raise PackingError if a row does not have its planned length, or a per-token column has another length."""
        tokens_in = TREE_INPUT_IDS if TREE_INPUT_IDS in row else INPUT_IDS
        tokens, planned = len(row[tokens_in]), self.sampler.sizes.tokens[number]
        if tokens != planned:
            raise PackingError(
                f"dataset: expected {planned} tokens in row {number}, as when batches were planned, got {tokens}; rows "
                "must not change from one reading to the next"
            )
        for name in self._per_token:
            if name in row and (found := _length_of(row[name])) != tokens:
                raise PackingError(
                    f"column {name!r}: expected {tokens} values in row {number}, as many as {tokens_in}, got {found}"
                )


def with_labels(row: Row) -> Row:
    """Return the row with labels. If the row has none, they are made from its tokens and loss masks."""
    if LABELS in row or TREE_LABELS in row:
        return row
    labels = row[INPUT_IDS]
    if masks := loss_masks_in(row):
        labels = apply_loss_masks(np.asarray(labels), {name: np.asarray(row.pop(name)) for name in masks})
    return {**row, LABELS: labels}


def rows_by_number(dataset: Any, numbers: Sequence[int]) -> list[Any]:
    """Return the rows with these numbers, as a DataLoader reads them."""
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(list(numbers)))
    return [dataset[number] for number in numbers]


def _length_of(values: Any) -> int | str:
    """Return the number of values in a list, or what there is instead of a list, as a text."""
    try:
        return len(values)
    except TypeError:
        return f"{values!r:.80}"


def _with_masked_labels(row: Row) -> Row:
    """Return the row with all labels masked, and with segments that are marked as those of a copy."""
    if TREE_LABELS in row:
        return {**row, TREE_LABELS: np.full(len(row[TREE_INPUT_IDS]), IGNORED_LABEL), TRAINED: np.zeros(0, np.int32)}
    tokens = len(row[INPUT_IDS])
    lengths = np.asarray(row.get(SEQ_LENGTHS, [tokens]), np.int64)  # np.repeat refuses uint64
    segments = np.repeat(COPIED_SEGMENT - np.arange(len(lengths)), lengths)
    return {**row, LABELS: np.full(tokens, IGNORED_LABEL), SEQ_IDX: segments}


def _has_numbers(field: pa.Field) -> bool:
    """Return whether a column has lists of numbers, or of pairs of numbers, or the weights of documents."""
    kind = field.type
    if field.name == LOSS_WEIGHT:
        return is_number(kind)
    return is_token_type(kind) or (is_list(kind) and is_token_type(kind.value_type))


_READ = (INPUT_IDS, LABELS, TOKEN_TYPE_IDS, *LOSS_MASKS, LOSS_WEIGHTS)
"""The columns that are read, beside those that are passed on."""


class TreesOfDocuments(DocumentRows):
    """The rows of a dataset's documents as trees: one row for each tree of documents that begin with the same tokens.

    A document that shares no prefix is a tree, too. Rows are built when they are read, from the documents' own columns.
    """

    @classmethod
    def find(
        cls,
        dataset: Any,
        max_tokens: int,
        fewest_shared: int,
        overflow: Overflow,
        unread: Sequence[str] = (),
        more: Sequence[str] = (),
        max_length: int | None = None,
    ) -> "TreesOfDocuments":
        """Find the trees of a dataset. Trees that are too large are cut where the fewest tokens are repeated.

        Args:
            dataset: the dataset.
            max_tokens: the most tokens of a tree.
            fewest_shared: the fewest tokens that documents share.
            overflow: treatment of documents with more than max_length tokens.
            unread: names of columns that are not read.
            more: names of further columns to read, which are passed on. Documents share no token whose values differ.
            max_length: the most tokens of a document; None for those of a tree.

        Raises:
            PackingError: the dataset is not a Dataset of documents, or a document is too long and overflow is "error".
        """
        if not isinstance(dataset, datasets.Dataset):
            raise PackingError(
                f"dataset: expected a Dataset of documents with share_prefixes, got {type(dataset).__name__}"
            )
        names = {*_READ, *more}.difference(unread)
        columns = {name: column for name, column in token_columns_of(dataset).items() if name in names}
        lengths = check_lengths(columns[INPUT_IDS].length)
        pieces = cut_to_pieces(lengths, max_length or max_tokens, overflow)
        forest = find_trees(columns, pieces, fewest_shared, max_tokens)
        segments = pieces.take(forest.order)
        plan = PackingPlan(
            document_length=lengths,
            segment_document=segments.document,
            segment_start=segments.start,
            segment_length=segments.length,
            pack_offsets=forest.offsets,
            pack_capacity=np.full(len(forest.offsets) - 1, max_tokens),
            segment_shared=forest.shared,
        )
        return cls(dataset, Packing(BestFit(max_tokens), fewest_shared=fewest_shared), plan, names)

    @property
    def sizes(self) -> RowSizes:
        """The sizes of all trees: unique tokens, documents, and twice the pairs of tokens that attention computes."""
        plan = self.plan
        sizes = sizes_of_planned(self, np.arange(plan.num_packs), (TREE_INPUT_IDS, TREE_LABELS))
        assert sizes.trees is not None
        counts = replace(
            sizes.trees,
            left_out=plan.num_documents - len(np.unique(plan.segment_document)),
            lost_tokens=total_of(plan.document_length) - sizes.trees.raw_tokens,
        )
        return replace(sizes, sample=sizes.sample + plan.fingerprint.encode(), trees=counts)

    def __len__(self) -> int:
        return self.plan.num_packs

    def __getitems__(self, numbers: Sequence[int]) -> list[Row]:
        """Return rows of trees by their numbers, as dicts of NumPy arrays."""
        return self.read(np.array(numbers, dtype=np.int64))


def trees_of_documents(documents: Sequence[Row]) -> list[Row]:
    """Return rows of trees of some documents, which share all tokens that they can."""
    most = sum(len(each[INPUT_IDS]) for each in documents)
    trees = TreesOfDocuments.find(datasets.Dataset.from_list([*documents]), most, 1, "error")
    return trees.read(np.arange(len(trees)))


def kept_labels(
    dataset: Any,
    sampler: RankBatchSampler,
    unread: Sequence[str],
    apply_masks: bool,
    keep_first: bool,
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
        columns, plan = dataset.columns, dataset.plan
        documents, left = Pieces.whole(plan.document_length), plan.segments
        weighted = count_labels(columns, left, weighted=True)
        return LabelCounts(count_labels(columns, left), count_labels(columns, documents), weighted)
    in_table = shows_table(dataset)
    if sizes.trees is not None or not (in_table or rows.lost_tokens):
        return None
    columns = _in_table(dataset, unread, apply_masks) if in_table else _by_reading(dataset, sizes, unread, apply_masks)
    whole = Pieces.whole(sizes.tokens)
    if sizes.seq_lengths is not None:
        row, lengths = np.repeat(whole.document, sizes.segments), sizes.seq_lengths
        whole = Pieces(row, offsets_of(lengths)[:-1] - offsets_of(sizes.tokens)[row], lengths)
    found = count_labels(columns, whole, keep_first)
    if rows.pieces is not None:
        left = rows.pieces
    elif rows.lost_tokens:
        left = whole.take(np.flatnonzero(np.isin(whole.document, rows.kept)))
    else:
        left = whole
    kept = found if left is whole else count_labels(columns, left, keep_first)
    return LabelCounts(kept, found, count_labels(columns, left, keep_first, weighted=True))


def _in_table(dataset: datasets.Dataset, unread: Sequence[str], apply_masks: bool) -> TokenColumns:
    """Return the columns of a dataset that decide which tokens have labels, and with which weights."""
    names = [name for name in visible_columns(dataset) if name not in unread]
    deciding = [LABELS] if LABELS in names else [name for name in LOSS_MASKS if name in names and apply_masks]
    weights = [name for name in (LOSS_WEIGHT, LOSS_WEIGHTS) if name in names]
    columns = columns_of(dataset, [INPUT_IDS, *deciding, *weights])
    check_same_lengths(columns)
    return columns


def _by_reading(dataset: Any, sizes: RowSizes, unread: Sequence[str], apply_masks: bool) -> TokenColumns:
    """Return a mask of the labels of a dataset whose rows are computed when they are read."""
    rows = SampledRows(dataset, RankBatchSampler(InOrder(1), sizes), unread, apply_masks)
    trained = [np.asarray(rows[number][LABELS]) != IGNORED_LABEL for number in range(len(sizes))]
    return {COMPLETION_MASK: TokenColumn(COMPLETION_MASK, pa.chunked_array([pa.array(trained)]))}
