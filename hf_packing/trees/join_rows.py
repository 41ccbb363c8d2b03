"""Join rows of trees: trees that were built as rows of their own, at other times or elsewhere, into the rows of a plan.

The trees of a row know nothing of each other. So the values of a column are laid end to end, and numbers of segments
and documents grow by what stands before their tree in the row.
"""

import numpy as np
import pyarrow as pa

from hf_packing.columns import ENDS, PARENTS, SEGMENT_LENGTHS, TRAINED
from hf_packing.planning.lengths import IntArray
from hf_packing.rows.packed_rows import list_array
from hf_packing.rows.token_columns import TokenColumns


def join_rows(columns: TokenColumns, some: IntArray, per_row: IntArray) -> pa.Table:
    """Return rows of trees, each joined from some of the given rows.

    Args:
        columns: all columns of the given rows of trees, by name.
        some: integers [joined]: indices of the given rows, in the order in which they are joined.
        per_row: integers [rows]: number of given rows that make each new row, at least 1; their sum is `joined`.
    """
    begin = np.cumsum(per_row, dtype=np.int64) - per_row
    segments, documents = columns[SEGMENT_LENGTHS].length[some], columns[ENDS].length[some]
    segments_before, documents_before = (_before_in_row(each, begin, per_row) for each in (segments, documents))
    arrays = {}
    for name, column in columns.items():
        length = column.length[some]
        values = column.gather(some, np.zeros_like(some), length)
        if name in (PARENTS, ENDS):
            values += np.where(values < 0, 0, np.repeat(segments_before, length)).astype(values.dtype)
        elif name == TRAINED:
            values[::3] += np.repeat(documents_before, length // 3).astype(values.dtype)
        of_row = np.add.reduceat(length, begin, dtype=np.int64) if len(begin) else begin
        arrays[name] = list_array(values, of_row, pa.types.is_large_list(column.type))
    return pa.table(arrays)


def _before_in_row(numbers: IntArray, begin: IntArray, per_row: IntArray) -> IntArray:
    """Return the sum of the numbers before each one in its row, int64 [joined].

    Args:
        numbers: integers [joined].
        begin: integers [rows]: index of the first number of each row.
        per_row: integers [rows]: how many numbers belong to each row.
    """
    before = np.cumsum(numbers, dtype=np.int64) - numbers
    in_row: IntArray = before - np.repeat(before[begin], per_row)
    return in_row
