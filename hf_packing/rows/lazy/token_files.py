"""Read slices of the tokens of documents from Arrow files, without Arrow.

The tokens of a dataset are numbered as they lie in its table, those of rows that were filtered away included. From a
token's number follow its record batch, and its place in the file.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray


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
    """The way in which the values of a token column are stored."""

    dtype: str
    """NumPy's name of the value type, such as "int32"."""
    large: bool
    """True if the Arrow lists have 64-bit offsets."""


@dataclass(frozen=True)
class TokenFiles:
    """The places of a dataset's tokens in its files. A chunk is a record batch of a file, or a slice of one."""

    files: tuple[SourceFile, ...]
    columns: dict[str, StoredColumn]
    """The token columns, by name."""
    first_token: IntArray
    """int64 [chunks + 1]: the number of the first token of each chunk, and the number of tokens in the dataset."""
    file_of_chunk: IntArray
    """int32 [chunks]: index of the file that holds the chunk."""
    places: IntArray
    """int64 [columns, chunks]: the place of the chunk's first value in its file, counted in values of the column."""


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
