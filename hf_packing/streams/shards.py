"""The shards of a stream: their sizes, whether their files have changed, and shares of them of equal size.

A shard is a file or a row group of a parquet file. A share is a list of parts of shards. A part is a whole shard, or
the documents of a shard whose number, modulo a fixed number, is in a range. So shards of any number and any sizes can
be divided into any number of shares, and nobody has to know how many documents a shard has.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from fsspec.core import url_to_fs

from hf_packing.files import size_and_version
from hf_packing.streams import upstream

_FINENESS = 16
"""A shard has this many parts for each share, so that a part is a small piece of a share."""


class Part(NamedTuple):
    """The documents of a shard whose number, modulo `of`, is at least `first` and below `end`."""

    shard: int
    first: int
    end: int
    of: int


Share = tuple[Part, ...]


def equal_shares(sizes: Sequence[float], shares: int) -> list[Share]:
    """Divide shards into shares of equal size.

    The shards are laid end to end and cut into shares, so that neighbouring documents are in the same share, except
    within shards that are divided. Every document is in exactly one share.

    Args:
        sizes: the size of every shard, such as its bytes; any unit, but positive.
        shares: the number of shares.

    Example:
        >>> [[tuple(part) for part in share] for share in equal_shares([2, 1], 3)]
        [[(0, 0, 24, 48)], [(0, 24, 48, 48)], [(1, 0, 48, 48)]]
    """
    of = _FINENESS * shares
    borders = np.concatenate([[0.0], np.cumsum(sizes)])
    targets = borders[-1] * np.arange(shares + 1) / shares
    cuts = np.interp(targets, borders, of * np.arange(len(borders))).round().astype(np.int64)
    return [
        tuple(
            Part(shard, max(begin - shard * of, 0), min(end - shard * of, of), of)
            for shard in range(begin // of, -(-end // of))
        )
        for begin, end in pairwise(cuts.tolist())
    ]


def sizes_of_shards(examples: upstream.Examples) -> list[float]:
    """Return the bytes of every shard, the row groups of a file counting alike; 1 each without files."""
    files, shards = upstream.shard_files(examples), upstream.num_shards(examples)
    if files is None or len(files) != shards:
        return [1.0] * shards
    shards_of = Counter(file for file, _ in files)
    size = {file: max(_name_and_version(file)[1] or 0, 1) for file in shards_of}
    return [size[file] / shards_of[file] for file, _ in files]


def fingerprint_of_files(examples: upstream.Examples) -> str:
    """Return a text that changes with the names, sizes or tags of a stream's files, or the number of its shards.

    The tag is the one that an object store gives to each version of a file. Folders and times do not count, so that
    copies of the files will do.
    """
    if inner := upstream.inner(examples):
        return ",".join(map(fingerprint_of_files, inner))
    files = upstream.shard_files(examples)
    if files is None:
        return f"{examples.num_shards} shards"
    versions = {file: _name_and_version(file) for file, _ in files}
    facts = repr([(versions[file], groups) for file, groups in files])
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def _name_and_version(file: str) -> tuple[str, int | None, str]:
    """Return the name of a file without its folder, its size in bytes, and the tag of its version."""
    system, path = url_to_fs(file)
    return path.rsplit("/", 1)[-1], *size_and_version(system, path, times=False)
