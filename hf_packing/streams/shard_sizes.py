"""Find the sizes of a stream's shards, and a fingerprint of its files that changes when a file changes."""

import hashlib
import os
from functools import lru_cache

import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from hf_packing.errors import PackingError
from hf_packing.streams import upstream

_READ, _BLOCKS = 1 << 16, 16
"""For the fingerprint of a file, so many bytes are read at each of so many places, from its start to its end."""


def sizes_of_shards(examples: upstream.Examples) -> list[float]:
    """Return the bytes of every shard; 1 for each shard if the stream is not read from files.

    Args:
        examples: the object that reads the stream.

    Raises:
        PackingError: a parquet file has lost row groups since the stream was opened.
    """
    found = upstream.shard_files(examples)
    if found is None or len(found) != examples.num_shards:
        return [1.0] * examples.num_shards
    versions = {file: _fingerprint(file) for file in dict.fromkeys(file for file, _ in found)}
    return [_size(file, groups, versions[file]) for file, groups in found]


def fingerprint_of_files(examples: upstream.Examples) -> str:
    """Return a text that changes when a file of the stream changes, or the order or the number of its shards.

    Of local files, the size and blocks from the beginning to the end count, but not the time, so that copies of the
    files will do. Files of up to a megabyte are read whole. Of other files, the size and the tag that the storage gives
    to each version count.
    """
    if getattr(examples, "ex_iterables", None) is not None:
        return ",".join(map(fingerprint_of_files, examples.ex_iterables))
    if getattr(examples, "ex_iterable", None) is not None:
        return fingerprint_of_files(examples.ex_iterable)
    found = upstream.shard_files(examples)
    if found is None:
        return f"{examples.num_shards} shards"
    digest = hashlib.blake2b(digest_size=16)
    for file, groups in found:
        digest.update(_fingerprint(file) + repr(groups).encode())
    return digest.hexdigest()


@lru_cache(maxsize=100_000)
def _size(file: str, groups: tuple[int, ...] | None, version: bytes) -> float:
    """Return the bytes of a shard, given the fingerprint of its file."""
    if groups is None:
        system, path = url_to_fs(file)
        return float(system.size(path) or 0)
    sizes = _row_groups(file, version)
    if max(groups, default=0) >= len(sizes):
        raise PackingError(
            f"dataset: expected {max(groups) + 1} row groups or more in {file}, as when the stream was opened, got "
            f"{len(sizes)}; the file has changed, so open the stream again"
        )
    return float(sum(sizes[group] for group in groups))


@lru_cache(maxsize=10_000)
def _row_groups(file: str, _: bytes) -> list[int]:
    """Return the bytes of each row group of a parquet file with a fingerprint."""
    system, path = url_to_fs(file)
    with system.open(path, "rb") as stream:
        facts = pq.ParquetFile(stream).metadata
    return [facts.row_group(number).total_byte_size for number in range(facts.num_row_groups)]


def _fingerprint(file: str) -> bytes:
    system, path = url_to_fs(file)
    if not isinstance(system, LocalFileSystem):
        facts = system.info(path)
        tags = [str(facts.get(name)) for name in ("size", "ETag", "etag", "xet_hash", "blob_id", "version_id")]
        return "".join(tags).encode()
    facts = os.stat(path)
    return _fingerprint_of_local(path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=100_000)
def _fingerprint_of_local(path: str, size: int, _: int) -> bytes:
    """Return the fingerprint of a local file of a size, which was changed last at a time."""
    digest = hashlib.blake2b(b"%d" % size, digest_size=16)
    last = max(size - _READ, 0)
    with open(path, "rb") as file:
        for place in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
            file.seek(place)
            digest.update(file.read(_READ))
    return digest.digest()
