"""Files of numbered parts, each of which is found and checked without reading the rest of the file.

A file begins with an index of 24 bytes for each part: where it begins, where it ends, and its checksum. So a part takes
two reads of a range of bytes. A file that was cut off or damaged is noticed when a part of it is read.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hf_packing.fleet.store import Store
from hf_packing.planning.lengths import IntArray

_ENTRY = 3 * 8
"""Bytes of an entry of the index: three int64."""

Buffers = Sequence[Any]
"""Buffers of bytes, such as arrays, which are written one after the other."""


class DamagedFileError(Exception):
    """A file is gone, cut off or changed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def write_parts(store: Store, name: str, parts: Iterable[Buffers], number: int) -> None:
    """Write a file of parts.

    Args:
        store: the folder of the file.
        name: the file's name.
        parts: the parts, in order, each as buffers that are written one after the other.
        number: the number of parts.
    """
    index = np.zeros((number, 3), dtype="<i8")
    with store.create(name) as fresh, open(fresh, "wb") as file:
        file.seek(index.nbytes)
        end, written = index.nbytes, 0
        for buffers in parts:
            begin, check = end, 0
            for buffer in buffers:
                data = memoryview(buffer).cast("B") if len(buffer) else b""
                check = zlib.crc32(data, check)
                file.write(data)
                end += len(data)
            index[written] = begin, end, check
            written += 1
        if written != number:
            raise AssertionError(f"parts: expected {number} parts, got {written}")
        file.seek(0)
        file.write(index.tobytes())


def bytes_of_parts(parts: Sequence[Buffers]) -> bytes:
    """Return the content of a file of parts."""
    index, whole = np.zeros((len(parts), 3), dtype="<i8"), [b"".join(map(bytes, buffers)) for buffers in parts]
    end = index.nbytes
    for entry, data in zip(index, whole, strict=True):
        entry[:] = end, end + len(data), zlib.crc32(data)
        end += len(data)
    return index.tobytes() + b"".join(whole)


def read_part(store: Store, name: str, number: int) -> bytes:
    """Return one part of a file.

    Raises:
        DamagedFileError: the file is gone, or the part is not as it was written.
    """
    try:
        entry = store.read(name, number * _ENTRY, (number + 1) * _ENTRY)
        if len(entry) != _ENTRY:
            raise DamagedFileError(name)
        begin, end, check = np.frombuffer(entry, dtype="<i8").tolist()
        return _checked(name, store.read(name, begin, end) if 0 <= begin <= end else b"", end - begin, check)
    except FileNotFoundError:
        raise DamagedFileError(name) from None


def read_parts(store: Store, name: str, number: int) -> Iterator[bytes]:
    """Read a file as a whole, and yield its parts, of which there are `number`.

    Raises:
        DamagedFileError: the file is gone, or a part is not as it was written.
    """
    try:
        content = store.read(name)
    except FileNotFoundError:
        raise DamagedFileError(name) from None
    if len(content) < number * _ENTRY:
        raise DamagedFileError(name)
    for begin, end, check in np.frombuffer(content, dtype="<i8", count=3 * number).reshape(-1, 3).tolist():
        yield _checked(name, content[begin:end], end - begin, check)


def _checked(name: str, data: bytes, size: int, check: int) -> bytes:
    if len(data) != size or zlib.crc32(data) != check:
        raise DamagedFileError(name)
    return data


def int64(data: bytes) -> IntArray:
    """Return the int64 values in some bytes."""
    return np.frombuffer(data, dtype="<i8")
