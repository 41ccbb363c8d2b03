"""Rows that are too large for a micro-batch: cut them, leave them out, or raise an error."""

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, Overflow, cut_to_pieces
from hf_packing.sampling.epoch_plan import FittedRows, RowSizes, keep_rows
from hf_packing.sampling.row_sizes import sizes_of_documents


def cut_long_rows(sizes: RowSizes, max_tokens: int, overflow: Overflow) -> FittedRows:
    """Return the rows that fit into micro-batches. Rows that are too long are cut or left out.

    Args:
        sizes: the sizes of the dataset's rows, at least one of which is too long.
        max_tokens: the most tokens that a micro-batch may have.
        overflow: treatment of a row with more than max_tokens tokens: "error" or "drop"; for documents also "split" or
            "truncate".

    Raises:
        PackingError: a row is too long and overflow is "error", or a packed row would have to be cut.
    """
    too_long = np.flatnonzero(sizes.tokens > max_tokens)
    if overflow == "error" or (sizes.packed and overflow != "drop"):
        row = int(too_long[0])
        accepted = (
            "pack into rows of at most max_tokens tokens, or use overflow='drop'"
            if sizes.packed
            else "use overflow='split', 'truncate' or 'drop'"
        )
        others = f" (rows that are too long: {len(too_long)} in all)" if len(too_long) > 1 else ""
        raise PackingError(
            f"max_tokens: row {row} has {sizes.tokens[row]} tokens, but a micro-batch may have at most "
            f"{max_tokens}{others}; {accepted}"
        )
    if overflow == "drop":
        return keep_rows(sizes, (sizes.tokens > 0) & (sizes.tokens <= max_tokens))
    pieces = cut_to_pieces(sizes.tokens, max_tokens, overflow)
    return FittedRows(
        sizes=sizes_of_documents(pieces.length),
        pieces=pieces,
        kept=np.arange(len(pieces.length)),
        left_out=np.setdiff1d(np.arange(len(sizes)), pieces.document),
        lost_tokens=int(sizes.tokens.sum() - pieces.length.sum()),
    )


_ROWS_WITH_FEWER = {
    "documents": "pack with a strategy that takes max_documents, such as BestFit(max_length, max_documents=...)",
    "patches": "raise max_patches, let the processor make smaller pictures",
}
"""What a user can do about rows with too many documents or patches, by unit."""


def leave_out_rows(rows: FittedRows, unit: str, has: IntArray, most: int, overflow: str) -> FittedRows:
    """Return the rows without those that have too many documents or patches.

    Args:
        rows: the rows that have few enough tokens.
        unit: "documents" or "patches".
        has: integers [rows]: how many each row has.
        most: the most that a micro-batch may have.
        overflow: treatment of a row with more: "drop", or anything else to raise an error.

    Raises:
        PackingError: a row has more than `most`, and overflow is not "drop".
    """
    too_many = rows.kept[has[rows.kept] > most]
    if not len(too_many):
        return rows
    if overflow != "drop":
        row = int(too_many[0])
        raise PackingError(
            f"max_{unit}: row {row} has {has[row]} {unit}, but a micro-batch may have at most {most} (rows with too "
            f"many: {len(too_many)} in all); {_ROWS_WITH_FEWER[unit]}, or use overflow='drop'"
        )
    keep = np.zeros(len(rows.sizes), dtype=bool)
    keep[np.setdiff1d(rows.kept, too_many)] = True
    return keep_rows(rows.sizes, keep)
