"""Documents longer than the budget become pieces, none of which is longer; everything else is a piece of its own."""

from dataclasses import dataclass, replace

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.overflow import Overflow, Pieces, cut_to_pieces
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
    lost_tokens: int
    """Tokens of dropped and truncated documents."""


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
        return Cut(sizes, None, np.flatnonzero(sizes.tokens > 0), 0)
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
        kept = np.flatnonzero((sizes.tokens > 0) & (sizes.tokens <= max_tokens))
        return Cut(sizes, None, kept, int(sizes.tokens[too_long].sum()))
    pieces = cut_to_pieces(sizes.tokens, max_tokens, overflow)
    cut = replace(sizes_of_documents(pieces.length), bucket=None)
    return Cut(cut, pieces, np.arange(len(pieces.length)), int(sizes.tokens.sum() - pieces.length.sum()))
