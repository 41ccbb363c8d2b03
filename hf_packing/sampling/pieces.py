"""Documents longer than the budget become pieces, none of which is longer; everything else is a piece of its own."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, Overflow, Pieces, cut_to_pieces
from hf_packing.sampling.sizes import RowSizes, sizes_of_documents


@dataclass(frozen=True, eq=False)
class Cut:
    """Rows under a budget."""

    sizes: RowSizes
    """Of the pieces."""
    pieces: Pieces | None
    """Which slice of which row each piece is; None where every row is one piece."""
    kept: IntArray
    """int64 [pieces that have a token and fit]: these share the micro-batches."""
    left_out: IntArray
    """int64 [rows without a piece]: the empty ones, and those that are dropped."""
    lost_tokens: int
    """Tokens of dropped and truncated documents."""


def whole_rows(sizes: RowSizes, fits: npt.NDArray[np.bool_]) -> Cut:
    """Rows that are not cut; those that do not fit are left out."""
    lost = int(sizes.tokens[~fits].sum())
    return Cut(sizes, None, np.flatnonzero(fits), np.flatnonzero(~fits), lost)


def cut_rows(sizes: RowSizes, max_tokens: int, overflow: Overflow) -> Cut:
    """The pieces of all rows.

    Args:
        sizes: of the rows.
        max_tokens: the budget of a micro-batch.
        overflow: what becomes of a row with more: "error"; "drop"; and of a document "split" or "truncate" too.

    Raises:
        PackingError: a row is too long, and overflow is "error", or the row is packed and would have to be cut.
    """
    too_long = np.flatnonzero(sizes.tokens > max_tokens)
    if not len(too_long):
        return whole_rows(sizes, sizes.tokens > 0)
    if overflow == "error" or (sizes.packed and overflow != "drop"):
        row = int(too_long[0])
        choices = (
            "pack rows of at most max_tokens, or overflow='drop'"
            if sizes.packed
            else "accepted with overflow='split', 'truncate' or 'drop'"
        )
        raise PackingError(
            f"max_tokens: row {row} has {sizes.tokens[row]} tokens, more than the {max_tokens} of a micro-batch, as "
            f"have {len(too_long) - 1} others; {choices}"
        )
    if overflow == "drop":
        return whole_rows(sizes, (sizes.tokens > 0) & (sizes.tokens <= max_tokens))
    pieces = cut_to_pieces(sizes.tokens, max_tokens, overflow)
    empty = np.setdiff1d(np.arange(len(sizes)), pieces.document)
    lost = int(sizes.tokens.sum() - pieces.length.sum())
    return Cut(sizes_of_documents(pieces.length), pieces, np.arange(len(pieces.length)), empty, lost)
