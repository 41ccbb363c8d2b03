"""Measure how much smaller documents would become if they shared their prefixes, without packing them."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.columns import INPUT_IDS, check_has_tokens
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_lengths, cut_to_pieces
from hf_packing.rows.token_columns import TokenColumn, TokenColumns, find_token_columns, row_numbers
from hf_packing.trees.find import find_trees
from hf_packing.trees.forest import FEWEST_SHARED, cut_large_trees

MEASURED_TOKENS = 1 << 23
"""Prefixes are looked for in the first documents that have about this many tokens together."""
_WORTH_SAYING = 1.05
"""The smallest ratio that is said."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Factor by which documents become smaller if they share their prefixes."""

    ratio: float
    """Tokens of the documents / tokens of rows of trees; 1 if no prefixes are shared."""
    documents: int
    """The number of documents in which prefixes were looked for: the first ones."""
    is_sample: bool
    """True if there are further documents."""

    def sentence(self) -> str:
        """Return what to say about the documents; empty if it is not worth it to share prefixes."""
        if self.ratio < _WORTH_SAYING:
            return ""
        source = f" (measured on the first {self.documents:,} documents)" if self.is_sample else ""
        gain = f"your data would shrink {self.ratio:.1f} times"
        return f"documents share prefixes: with share_prefixes=True, {gain}{source}"


def measure_shared_prefixes(documents: Any, max_length: int, num_documents: int | None = None) -> SharedPrefixes:
    """Measure how many times smaller documents become if they share prefixes of at least 16 tokens.

    Only tokens are compared: neither labels nor other columns, which may split prefixes.

    Args:
        documents: a Dataset with input_ids, or a list with the tokens of each document.
        max_length: capacity of a row in tokens. Longer documents are cut, and trees of documents that are larger.
        num_documents: the number of all documents, if `documents` are only the first ones.

    Raises:
        PackingError: `documents` are something else.
    """
    columns = _columns_of(documents)
    lengths = check_lengths(columns[INPUT_IDS].length)
    first = max(1, int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), MEASURED_TOKENS)))
    pieces = cut_to_pieces(lengths[:first], max_length, "split")
    forest = cut_large_trees(find_trees(columns, pieces, FEWEST_SHARED).forest, max_length)
    tokens, unique = int(forest.length.sum()), int(forest.sizes.sum())
    measured = min(first, len(lengths))
    return SharedPrefixes(tokens / unique if unique else 1.0, measured, measured < (num_documents or len(lengths)))


def _columns_of(documents: Any) -> TokenColumns:
    known = sys.modules.get("datasets")  # whoever has a Dataset has imported it
    if known is not None and isinstance(documents, known.Dataset):
        check_has_tokens(documents.column_names)
        return find_token_columns(documents.data.table.select([INPUT_IDS]), row_numbers(documents))
    try:
        column = pa.array([np.asarray(document) for document in documents], pa.list_(pa.int32()))
    except (ValueError, TypeError) as error:
        raise PackingError(
            f"documents: expected a Dataset with input_ids, or a list of lists of tokens, got the error: {error}"
        ) from error
    return {INPUT_IDS: TokenColumn(INPUT_IDS, pa.chunked_array([column]))}
