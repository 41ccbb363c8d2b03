"""Restore the documents of lazy packs, for `unpack`."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.columns import BUCKET, INPUT_IDS, LABELS, POSITION_IDS, SEQ_LENGTHS
from hf_packing.errors import PackingError
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.lazy.packed_tokens import PackedTokens, cells_of, split_cells
from hf_packing.rows.lazy.stored_packs import open_packs
from hf_packing.rows.packed_rows import list_array


def unpack_lazy_packs(packed: datasets.Dataset, plan: PackingPlan | None) -> pa.Table:
    """Return the documents that were packed, in the original order, without the tokens that packing dropped.

    Args:
        packed: all rows of `pack(..., lazy=True)`, in their order.
        plan: the plan of the rows; None for the one that is stored.

    Raises:
        PackingError: the rows are not all rows of one plan, or a column is not one that `pack` made.
    """
    table, features = packed.data.table, packed.features
    lazy = [name for name in table.column_names if isinstance(features[name], PackedTokens)]
    for name in table.column_names:
        if name not in (*lazy, SEQ_LENGTHS, BUCKET):
            raise PackingError(
                f"column {name!r}: expected the columns of lazy packs, got {table.schema.field(name).type}, which was "
                "added or replaced; remove the column before unpacking"
            )
    folders = [number for number, _, _ in split_cells(table.column(INPUT_IDS).to_numpy())]
    folder = features[INPUT_IDS].folder(folders[0]) if folders else features[INPUT_IDS].folders[0]
    packs = open_packs(folder)
    if plan is not None and plan.fingerprint != packs.facts["plan"]:
        raise PackingError(
            "plan: expected the plan that these rows were packed with, which has the fingerprint "
            f"{packs.facts['plan']}, got {plan!r}; leave plan out to use the stored plan"
        )
    expected = cells_of(Path(folder), len(packs.pack_tokens))
    for name in lazy:
        if not np.array_equal(table.column(name).to_numpy(), expected):
            raise PackingError(
                f"packed: expected all {len(expected)} rows that were packed, in their order, got {len(packed)} rows, "
                "of which some are missing, repeated or in another place"
            )
    order = np.lexsort((packs.begin, packs.document))
    document_tokens = np.zeros(packs.facts["documents"], dtype=np.int64)
    np.add.at(document_tokens, packs.document, packs.segment_length)
    stored, arrays = packs.facts["columns"], {}
    for name in lazy:
        if name == POSITION_IDS or (name == LABELS and packs.facts["packing"]["labels_made"]):
            continue
        values = packs.read(name, packs.begin[order], packs.segment_length[order])
        arrays[name] = list_array(values, document_tokens, stored.get(name, stored[INPUT_IDS])["large"])
    return pa.table(arrays)
