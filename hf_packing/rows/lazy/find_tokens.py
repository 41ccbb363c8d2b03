"""Find where the tokens of a dataset lie in its Arrow files.

An Arrow file holds the values of a list column one after the other, in record batches. The address of the values in
memory tells their place in the file that is mapped there.
"""

from collections.abc import Mapping, Sequence

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.rows.lazy.token_files import SourceFile, StoredColumn, TokenFiles
from hf_packing.rows.lazy.upstream import mapped_tables

_COMPARED = 4096
"""Bytes at both ends of a file by which it is known again."""

_SAVE = "call documents.save_to_disk(path) and pack datasets.load_from_disk(path)"


def find_tokens(dataset: datasets.Dataset, table: pa.Table, columns: Sequence[str]) -> TokenFiles:
    """Return where the tokens of a dataset lie.

    Args:
        dataset: the documents.
        table: the stored columns of the documents, as `with_typed_empty_lists` returns them.
        columns: names of the token columns, input_ids among them.

    Raises:
        PackingError: documents are in memory, or the columns of a row do not lie in the same record batch of a file.
    """
    mappings = _mapped_files(dataset)
    numbers: dict[str, int] = {}
    ids = [_Lists(chunk) for chunk in table.column(INPUT_IDS).chunks]
    file_of_chunk = np.zeros(len(ids), dtype=np.int32)
    places = np.zeros((len(columns), len(ids)), dtype=np.int64)
    for name, place in zip(columns, places, strict=True):
        chunks = [_Lists(chunk) for chunk in table.column(name).chunks]
        if [chunk.rows for chunk in chunks] != [chunk.rows for chunk in ids]:
            _refuse_layout(name)
        for number, (chunk, of_ids) in enumerate(zip(chunks, ids, strict=True)):
            if not np.array_equal(chunk.borders, of_ids.borders):
                _refuse_layout(name)
            if not chunk.borders[-1]:
                continue
            path, place[number] = chunk.place(name, mappings)
            file = numbers.setdefault(path, len(numbers))
            if name == columns[0]:
                file_of_chunk[number] = file
            elif file_of_chunk[number] != file:
                _refuse_layout(name)
    types = {name: table.schema.field(name).type for name in columns}
    return TokenFiles(
        files=tuple(map(SourceFile.at, numbers)),
        columns={
            name: StoredColumn(np.dtype(kind.value_type.to_pandas_dtype()).name, pa.types.is_large_list(kind))
            for name, kind in types.items()
        },
        first_token=np.cumsum([0, *(int(chunk.borders[-1]) for chunk in ids)], dtype=np.int64),
        file_of_chunk=file_of_chunk,
        places=places,
    )


def first_tokens(column: pa.ChunkedArray, row_numbers: IntArray | None) -> IntArray:
    """Return the number of the first token of each row, int64 [rows].

    Args:
        column: the column input_ids.
        row_numbers: integers [rows]: indices of the rows, in the wanted order; None for all rows in stored order.
    """
    lengths = [np.diff(_Lists(chunk).borders) for chunk in column.chunks]
    tokens = np.concatenate([np.zeros(0, dtype=np.int64), *lengths])
    first: IntArray = np.cumsum(tokens, dtype=np.int64) - tokens
    return first if row_numbers is None else first[row_numbers]


class _Lists:
    """The lists in one chunk of a column: where they begin and end, and where their values lie."""

    def __init__(self, chunk: pa.Array) -> None:
        self.rows = len(chunk)
        if pa.types.is_fixed_size_list(chunk.type):
            offsets = (np.arange(len(chunk) + 1, dtype=np.int64) + chunk.offset) * chunk.type.list_size
        else:
            offsets = chunk.offsets.to_numpy().astype(np.int64)
        self._first = int(offsets[0])
        self._values = chunk.values
        self.borders = offsets - self._first
        """int64 [rows + 1]: where each list begins, counted from the beginning of the first."""

    def place(self, name: str, mappings: Mapping[int, str]) -> tuple[str, int]:
        """Return the path of the file with the values, and the place of the first one, counted in values.

        Args:
            name: name of the column.
            mappings: the path of each mapped file, by the address of its mapping.

        Raises:
            PackingError: the values are in memory.
        """
        data = self._values.buffers()[1]
        root = _root(data)
        if root.address not in mappings:
            raise PackingError(
                f"lazy: expected documents in Arrow files, from which lazy packs read their tokens, but the column "
                f"{name!r} is in memory, or its file has changed since the dataset was loaded; {_SAVE}"
            )
        place, rest = divmod((data.address - root.address) * 8, self._values.type.bit_width)
        assert not rest, "Arrow aligns values to 8 bytes"
        return mappings[root.address], place + self._values.offset + self._first


def _root(buffer: pa.Buffer) -> pa.Buffer:
    """Return the buffer that a buffer is a part of: for a memory-mapped table, the whole file."""
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer


def _mapped_files(dataset: datasets.Dataset) -> dict[int, str]:
    """Return the path of each file that a dataset is mapped from, by the address of the mapping.

    Files that were replaced since the dataset was loaded are left out.

    Raises:
        PackingError: a file is gone.
    """
    found: dict[int, str] = {}
    for path, table in mapped_tables(dataset):
        for column in table.columns:
            for buffer in column.chunk(0).buffers() if column.num_chunks else ():
                root = None if buffer is None else _root(buffer)
                if root is not None and root.address not in found and _is_mapped_from(root, path):
                    found[root.address] = path
    return found


def _is_mapped_from(buffer: pa.Buffer, path: str) -> bool:
    """Return whether a buffer and a file have the same size, beginning and end."""
    if SourceFile.at(path).size != buffer.size:
        return False
    length = min(buffer.size, _COMPARED)
    with pa.OSFile(path) as file:
        return all(
            buffer.slice(begin, length).to_pybytes() == file.read_at(length, begin)
            for begin in (0, buffer.size - length)
        )


def _refuse_layout(name: str) -> None:
    raise PackingError(
        f"lazy: expected the column {name!r} in the same record batches as input_ids, but the two are stored in "
        f"different ones; {_SAVE}"
    )
