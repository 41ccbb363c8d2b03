"""Cut rows that are longer than a micro-batch, or leave them out."""

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Overflow, cut_to_pieces
from hf_packing.sampling.epoch_plan import FittedRows, RowSizes, keep_rows
from hf_packing.sampling.row_sizes import sizes_of_documents


def cut_long_rows(sizes: RowSizes, max_tokens: int, overflow: Overflow) -> FittedRows:
    """Return the rows that fit into micro-batches. Rows that are too long are cut or left out.

    Args:
        sizes: the sizes of the dataset's rows.
        max_tokens: the most tokens that a micro-batch may have.
        overflow: treatment of a row with more than max_tokens tokens: "error" or "drop"; for documents also "split" or
            "truncate".

    Raises:
        PackingError: a row is too long and overflow is "error", or a packed row would have to be cut.
    """
    too_long = np.flatnonzero(sizes.tokens > max_tokens)
    if not len(too_long):
        return keep_rows(sizes, sizes.tokens > 0)
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
