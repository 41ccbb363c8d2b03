"""Write the packs of a plan to disk, without their tokens."""

from typing import NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import MemoryMappedTable

from hf_packing.columns import BUCKET, INPUT_IDS, LABELS, LOSS_MASKS, POSITION_IDS, SEQ_LENGTHS
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.label_counts import LabelCounts
from hf_packing.rows.lazy.find_tokens import find_tokens, first_tokens
from hf_packing.rows.lazy.packed_tokens import PackedTokens, cells_of
from hf_packing.rows.lazy.stored_packs import StoredPacks
from hf_packing.rows.lazy.token_files import TokenFiles
from hf_packing.rows.packed_rows import Origin, blocks_of_packs, list_array, pack_rows
from hf_packing.rows.token_columns import TOKENS_AT_ONCE, TokenColumns, row_numbers


class DocumentPlaces(NamedTuple):
    """The places of a dataset's documents in its files."""

    tokens: TokenFiles
    first_token: IntArray
    """int64 [documents]: the number of each document's first token."""

    @classmethod
    def find(cls, dataset: datasets.Dataset, table: pa.Table, columns: TokenColumns) -> "DocumentPlaces":
        """Return where the documents of a dataset lie.

        Args:
            dataset: the documents.
            table: the stored columns of the documents, as `with_typed_empty_lists` returns them.
            columns: the token columns of the documents.

        Raises:
            PackingError: the documents are in memory.
        """
        return cls(
            find_tokens(dataset, table, list(columns)), first_tokens(table.column(INPUT_IDS), row_numbers(dataset))
        )


def write_lazy_packs(
    documents: DocumentPlaces,
    columns: TokenColumns,
    plan: PackingPlan,
    strategy: str,
    extras: dict[str, bool],
    labels: LabelCounts | None,
    packs: StoredPacks,
) -> MemoryMappedTable:
    """Write the packs of a plan, and return their rows.

    Tokens are read only if there are loss masks, to count the labels that are left.

    Args:
        documents: where the documents lie.
        columns: the token columns of the documents.
        plan: the plan, which assigns slices of documents to packs.
        strategy: the strategy's repr.
        extras: whether packed rows get the columns `position_ids` and `bucket`.
        labels: the labels that are left, if tokens are dropped.
        packs: where to write.

    Raises:
        PackingError: a loss mask has other values than 0 and 1.
    """
    tokens = documents.tokens
    masks = tuple(name for name in LOSS_MASKS if name in columns)
    origin = Origin(
        plan=plan,
        strategy=strategy,
        labels_made=LABELS not in columns and not masks,
        first_labels=None,
        loss_masks=masks,
        trained_tokens=_count_trained_tokens(columns, plan) if masks else None,
        labels=labels,
    )
    begin = documents.first_token[plan.segment_document] + plan.segment_start
    others = [name for name in columns if name not in (INPUT_IDS, LABELS, *masks)]
    values = dict.fromkeys((INPUT_IDS, LABELS), "int32") | {name: tokens.columns[name].dtype for name in others}
    if extras["position_ids"]:
        values[POSITION_IDS] = "int32"
    cells = pa.array(cells_of(packs.folder, plan.num_packs))
    arrays = dict.fromkeys(values, cells)
    arrays[SEQ_LENGTHS] = list_array(plan.segment_length, np.diff(plan.pack_offsets))
    if extras["bucket"]:
        arrays[BUCKET] = pa.array(plan.pack_capacity, type=pa.int32())
    rows = pa.table(arrays)
    features = datasets.Features.from_arrow_schema(rows.schema)
    for name, dtype in values.items():
        features[name] = PackedTokens(name, [str(packs.folder)], dtype)
    rows = rows.replace_schema_metadata(features.arrow_schema.metadata)
    return packs.write(rows, origin, begin, tokens)


def _count_trained_tokens(columns: TokenColumns, plan: PackingPlan) -> int:
    """Return the number of labels that loss masks and the borders of segments leave."""
    needed = {name: columns[name] for name in (INPUT_IDS, LABELS, *LOSS_MASKS) if name in columns}
    return sum(
        pack_rows(needed, plan, packs, position_ids=False).trained_tokens
        for packs in blocks_of_packs(plan, TOKENS_AT_ONCE)
    )
