"""`unpack` restores the documents of a packed dataset."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.columns import LABELS, LOSS_MASKS, TREE_INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.cache import PLAN, ROWS, Origin
from hf_packing.rows.lazy import DocumentRows, lazy_rows, refuse_cells
from hf_packing.rows.packed_rows import unpack_rows
from hf_packing.rows.token_columns import row_numbers
from hf_packing.trees.restore import unpack_tree_rows


def unpack(packed: datasets.Dataset, plan: PackingPlan | None = None) -> datasets.Dataset:
    """Restore the documents of a packed dataset, in the original order, with their token columns.

    Documents that were dropped come back empty. Truncated documents come back without the tokens that were cut off.

    Args:
        packed: a dataset that `pack` returned, neither shuffled nor selected from.
        plan: the plan that the rows were packed with; None to use the plan that `pack` saved beside the rows. Pass a
            plan if the rows were saved elsewhere, without the saved plan. In this case, labels keep the -100 at the
            start of segments, and rows with equal seq_lengths can change places without an error.

    Returns:
        A Dataset in memory, with one row for each document.

    Raises:
        PackingError: the plan of the rows is unknown, or the rows do not match the plan.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> hfp.unpack(hfp.pack(documents, hfp.BestFit(4)))["input_ids"][:]
        [[1, 2, 3], [4, 5], [6]]
    """
    if not isinstance(packed, datasets.Dataset):
        raise PackingError(f"packed: expected a Dataset that pack() returned, got {type(packed).__name__}")
    if row_numbers(packed) is not None:
        raise PackingError(
            "packed: expected all rows in the order of packing, but rows of this dataset were shuffled or selected"
        )
    if (lazy := lazy_rows(packed)) is not None:
        table, origin = _rebuild(*lazy)
    elif packed.format["type"] == "custom":
        raise PackingError(
            "packed: expected a dataset as pack() returned it, got one with another transform, or with columns that "
            "were added or replaced"
        )
    else:
        refuse_cells(packed)
        table, origin = packed.data.table, _stored_origin(packed, plan)
    if plan is not None and plan != origin.plan:
        raise PackingError(
            "plan: expected the plan that these rows were packed with, which has the fingerprint "
            f"{origin.plan.fingerprint}, got {plan!r}; leave plan out to use the stored plan"
        )
    restore = unpack_tree_rows if TREE_INPUT_IDS in table.column_names else unpack_rows
    documents = restore(table, origin.plan, origin.first_labels)
    if origin.facts["labels_made"] and LABELS in documents.column_names:
        documents = documents.drop_columns([LABELS])
    return datasets.Dataset(documents, split=packed.split)


def _rebuild(rows: DocumentRows, packs: IntArray) -> tuple[pa.Table, Origin]:
    """Build all rows of a lazy dataset, and return what they are made from."""
    if not np.array_equal(packs, np.arange(rows.plan.num_packs)):
        raise PackingError(
            f"packed: expected all {rows.plan.num_packs} rows that were packed, in their order, got {len(packs)} rows, "
            "of which some are missing, repeated or in another place"
        )
    built = rows.build(packs)
    labels_made = rows.columns.keys().isdisjoint((LABELS, *LOSS_MASKS))
    return built.table, Origin(rows.plan, {"labels_made": labels_made}, built.first_labels)


def _stored_origin(packed: datasets.Dataset, plan: PackingPlan | None) -> Origin:
    """Return what `pack` has stored beside the rows; if it has stored nothing, the plan that the user has given."""
    files = [Path(file["filename"]) for file in packed.cache_files]
    if len(files) == 1 and files[0].name == ROWS and (files[0].parent / PLAN).exists():
        origin = Origin.load(files[0].parent)
        if len(packed) != origin.plan.num_packs:
            raise PackingError(f"packed: expected all {origin.plan.num_packs} rows that were packed, got {len(packed)}")
        return origin
    if not isinstance(plan, PackingPlan):
        raise PackingError(
            "plan: expected the PackingPlan of these rows, since pack() has stored no plan beside the rows, got "
            f"{plan!r}"
        )
    return Origin(plan, {"labels_made": False})
