"""Find the tokens of documents in the Arrow files of a dataset, and read slices of them without Arrow.

An Arrow file holds the values of a list column one after the other, in record batches. The tokens of a dataset are
numbered as they lie in its table, those of rows that were filtered away included. From a token's number follow its
record batch, and its place in the file.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.columns import INPUT_IDS
from hf_packing.data.lazy.upstream import mapped_tables
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

_COMPARED = 4096
"""Bytes at both ends of a file by which it is known again."""

_SAVE = "call documents.save_to_disk(path) and pack datasets.load_from_disk(path)"


@dataclass(frozen=True)
class SourceFile:
    """An Arrow file of documents, and how it was when the documents were packed."""

    path: str
    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last write, in nanoseconds since 1970."""

    @classmethod
    def at(cls, path: str) -> "SourceFile":
        """Return the file at a path as it is now.

        Raises:
            PackingError: there is no such file.
        """
        try:
            status = os.stat(path)
        except OSError as error:
            raise PackingError(
                f"lazy: expected the documents' file {path!r}, from which lazy packs read their tokens, got the error: "
                f"{error.strerror}; put the file back, or load the documents and pack them again"
            ) from error
        return cls(path, status.st_size, status.st_mtime_ns)

    def check(self) -> None:
        """Raise PackingError if the file is gone, or was written to since the documents were packed."""
        with suppress(OSError):  # SourceFile.at says what is wrong
            status = os.stat(self.path)
            if status.st_size == self.size and status.st_mtime_ns == self.mtime_ns:
                return
        now = SourceFile.at(self.path)
        raise PackingError(
            f"lazy: expected the documents' file {self.path!r} as it was when they were packed, with {self.size:,} "
            f"bytes and last written at {self.mtime_ns} ns, got {now.size:,} bytes, written at {now.mtime_ns} ns; load "
            "the documents and pack them again"
        )


@dataclass(frozen=True)
class StoredColumn:
    """How the values of a token column are stored."""

    dtype: str
    """NumPy's name of the value type, such as "int32"."""
    large: bool
    """True if the Arrow lists have 64-bit offsets."""


@dataclass(frozen=True)
class TokenFiles:
    """Where the tokens of a dataset lie. A chunk is a record batch of a file, or a slice of one."""

    files: tuple[SourceFile, ...]
    columns: dict[str, StoredColumn]
    """The token columns, by name."""
    first_token: IntArray
    """int64 [chunks + 1]: the number of the first token of each chunk, and the number of tokens in the dataset."""
    file_of_chunk: IntArray
    """int32 [chunks]: index of the file that holds the chunk."""
    places: IntArray
    """int64 [columns, chunks]: the place of the chunk's first value in its file, counted in values of the column."""


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


class TokenReader:
    """Reads slices of token columns from memory-mapped files, and checks that the files do not change.

    Args:
        tokens: where the tokens lie.

    Raises:
        PackingError: a file is gone, or has changed since the documents were packed.
    """

    def __init__(self, tokens: TokenFiles) -> None:
        for file in tokens.files:
            file.check()
        buffers = [pa.memory_map(file.path).read_buffer() for file in tokens.files]
        self._files = tokens.files
        self._checked = [time.monotonic()] * len(tokens.files)
        self._first_token = tokens.first_token[:-1]
        self._file_of_chunk = tokens.file_of_chunk
        self._dtypes = {name: np.dtype(column.dtype) for name, column in tokens.columns.items()}
        self._values = {name: [_values(buffer, dtype) for buffer in buffers] for name, dtype in self._dtypes.items()}
        self._shifts = {
            name: places - self._first_token for name, places in zip(tokens.columns, tokens.places, strict=True)
        }

    def read(self, name: str, begin: IntArray, length: IntArray, check_after: float = 0) -> npt.NDArray[Any]:
        """Return slices of a column, concatenated, as a copy in the column's dtype.

        Args:
            name: name of the column.
            begin: int64 [slices]: number of the first token of each slice. A slice is within one document.
            length: integers [slices]: tokens of each slice.
            check_after: seconds for which a file need not be checked again.

        Raises:
            PackingError: a file with one of the slices is gone, or has changed since the documents were packed.
        """
        values = self._values[name]
        chunk = self._first_token.searchsorted(begin, side="right") - 1
        start = begin + self._shifts[name][chunk]
        bounds = zip(start.tolist(), (start + length).tolist(), strict=True)
        files = self._file_of_chunk[chunk].tolist()
        now = time.monotonic()
        for file in set(files):
            if now - self._checked[file] >= check_after:
                self._files[file].check()
                self._checked[file] = now
        slices = [values[file][a:b] for file, (a, b) in zip(files, bounds, strict=True)]
        return np.concatenate(slices) if slices else np.zeros(0, dtype=self._dtypes[name])


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


class _Bits:
    """Booleans of a file, of which Arrow stores eight in a byte."""

    def __init__(self, values: npt.NDArray[np.uint8]) -> None:
        self._bytes = values

    def __getitem__(self, part: slice) -> npt.NDArray[np.bool_]:
        first = part.start // 8
        bits = np.unpackbits(self._bytes[first : -(-part.stop // 8)], bitorder="little")
        return bits[part.start - first * 8 : part.stop - first * 8].astype(bool)


def _values(buffer: pa.Buffer, dtype: np.dtype[Any]) -> Any:
    """Return a file as values of a type, of which only those of the columns mean something."""
    if dtype == np.bool_:
        return _Bits(np.frombuffer(buffer, dtype=np.uint8))
    return np.frombuffer(buffer, dtype=dtype, count=buffer.size // dtype.itemsize)


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
