"""Lay several packed rows end to end as a single row, for models that take one, and fold the outputs into rows."""

from typing import Any

from torch import Tensor

from hf_packing.attention.packed_row import PackedRow
from hf_packing.attention.token_axes import map_leaves
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError


def lay_end_to_end(name: str, value: Any, row: PackedRow) -> Any:
    """Return a tensor of shape [rows, tokens, ...] reshaped to [1, rows * tokens, ...], and any other value unchanged.

    Args:
        name: name of the argument.
        value: value of the argument.
        row: the borders of the packed rows.

    Raises:
        PackingError: `value` contains labels, and the first token of any row after the first row has a label. A causal
            model would predict this token from the end of the previous row.
    """
    if not isinstance(value, Tensor) or value.shape[:2] != (row.rows, row.tokens):
        return value
    if name == "labels" and bool((value[1:, 0] != IGNORED_LABEL).any()):
        raise PackingError(
            f"labels: expected {IGNORED_LABEL} at the first token of every packed row, got another label; this model "
            "gets several rows as a single row, and would predict the first token of a row from the previous row. Set "
            f"this label to {IGNORED_LABEL}, or pass one row at a time"
        )
    return value.reshape(1, row.rows * row.tokens, *value.shape[2:])


def fold_into_rows(value: Any, row: PackedRow) -> Any:
    """Return a model's outputs, with every tensor of shape [1, rows * tokens, ...] reshaped to [rows, tokens, ...]."""

    def fold(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, row.rows * row.tokens):
            return leaf.reshape(row.rows, row.tokens, *leaf.shape[2:])
        return leaf

    return map_leaves(value, fold)
