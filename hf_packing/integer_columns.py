"""Read a column of a row of a dataset as integers."""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

Row = Mapping[str, Any]
"""One row of a dataset, as a mapping from column name to value."""


def read_integers(name: str, row: Row, number: int) -> IntArray:
    """Return a column of a row as a NumPy array; Python lists and torch tensors are converted.

    Args:
        name: the column's name.
        row: the row, as a mapping from column name to value.
        number: the row's number, for error messages.

    Returns:
        Integers [values]; an empty column may have any dtype.

    Raises:
        PackingError: the row does not have the column, or the column is not a list of integers.
    """
    if name not in row:
        raise PackingError(
            f"column {name!r}: expected this column in every row; columns of row {number}: {', '.join(row) or 'none'}"
        )
    try:
        values = _array_of_list(row[name]) if type(row[name]) is list else np.asarray(row[name])
    except ValueError as error:
        raise PackingError(
            f"column {name!r}: expected a list of integers, but NumPy cannot read the values of row {number}: {error}"
        ) from error
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise PackingError(
            f"column {name!r}: expected a list of integers, got {values.dtype} of shape {values.shape} in row {number}"
        )
    return values


def _array_of_list(values: list[Any]) -> npt.NDArray[Any]:
    """Return a list as a NumPy array. For integers, this function takes half as long as np.asarray."""
    try:
        return np.frombuffer(array("q", values), dtype=np.int64)
    except (TypeError, ValueError, OverflowError):  # an empty list raises ValueError
        return np.asarray(values)
