"""Divide the shards of a stream into shares of equal size, and read one share.

A shard is a file or a row group of a parquet file. A share is a list of parts of shards. A part is a whole shard, or
the documents of a shard whose number, modulo a fixed number, is in a range. So shards of any number and any sizes can
be divided into any number of shares, and nobody has to know how many documents a shard has.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hf_packing.streams import upstream

_FINENESS = 16
"""A shard has this many parts for each share, so that a part is a small piece of a share."""


class Part(NamedTuple):
    """The documents of a shard whose number, modulo `of`, is at least `first` and below `end`."""

    shard: int
    first: int
    end: int
    of: int

    @property
    def is_whole(self) -> bool:
        """True if all documents of the shard are in the part."""
        return self.end - self.first == self.of


Share = tuple[Part, ...]


def equal_shares(sizes: Sequence[float], shares: int) -> list[Share]:
    """Divide shards into shares of equal size.

    The shards are laid end to end and cut into shares, so that neighbouring documents are in the same share, except
    within shards that are divided.

    Args:
        sizes: the size of every shard, such as its bytes; any unit. Shards of size 0 are in a share, too.
        shares: the number of shares.

    Returns:
        The parts of every share. Every document is in exactly one share. A share is empty if there are too few shards.

    Example:
        >>> [[(part.shard, part.first, part.end, part.of) for part in share] for share in equal_shares([2, 1], 3)]
        [[(0, 0, 24, 48)], [(0, 24, 48, 48)], [(1, 0, 48, 48)]]
    """
    of = _FINENESS * shares
    weight = np.maximum(np.asarray(sizes, dtype=np.float64), 0)
    weight = weight / weight.sum() if weight.sum() else np.full(len(weight), 1 / max(len(weight), 1))
    border = np.concatenate([[0.0], np.cumsum(np.repeat(weight / of, of))])  # before and after every part
    target = np.arange(1, shares) / shares
    after = np.clip(np.searchsorted(border, target), 1, len(border) - 1)
    cuts = np.where(border[after] - target < target - border[after - 1], after, after - 1)
    borders = np.concatenate([[0], cuts, [of * len(weight)]])
    return [
        tuple(
            Part(shard, max(begin - shard * of, 0), min(stop - shard * of, of), of)
            for shard in range(begin // of, -(-stop // of))
            if begin < stop
        )
        for begin, stop in pairwise(borders.tolist())
    ]


class ShareOfShards(upstream.ExamplesAround):
    """The documents of one share of a stream's shards, one part after the other.

    The state holds the number of the part and the state of its shard, however many shards the share has.

    Args:
        examples: the object that reads all shards.
        share: the parts to read.
    """

    def __init__(self, examples: upstream.Examples, share: Share) -> None:
        super().__init__(examples)
        self.share = share

    @property
    def num_shards(self) -> int:
        return 1

    def shuffle_data_sources(self, generator: np.random.Generator) -> "ShareOfShards":
        order = generator.permutation(len(self.share)).tolist()
        return ShareOfShards(self.ex_iterable, tuple(self.share[number] for number in order))

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict = {"part": 0, "shard": None, "document": 0, "type": type(self).__name__}
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for part, shard, state in self._shards():
            for number, (key, example) in enumerate(shard, start=state["document"]):
                state["document"] = number + 1
                if part.first <= number % part.of < part.end:
                    yield key, example

    def _iter_arrow(self) -> Iterator[tuple[Any, pa.Table]]:
        for part, shard, state in self._shards():
            for key, table in shard.iter_arrow():
                number = np.arange(state["document"], state["document"] + table.num_rows)
                state["document"] += table.num_rows
                if not part.is_whole:
                    place = number % part.of
                    table = table.take(np.flatnonzero((place >= part.first) & (place < part.end)))
                if table.num_rows:
                    yield key, table

    def _shards(self) -> Iterator[tuple[Part, upstream.Examples, dict[str, Any]]]:
        """Yield the parts that are left, with the object that reads the part's shard, and keep the state."""
        state: dict[str, Any] = self._init_state_dict() if self._state_dict is None else self._state_dict
        for number in range(state["part"], len(self.share)):
            part = self.share[number]
            shard = self.ex_iterable.shard_data_sources(self.ex_iterable.num_shards, part.shard)
            shard._init_state_dict()
            if state["shard"] is not None:
                shard.load_state_dict(state["shard"])
            state["shard"] = shard._state_dict  # which the shard changes as it is read
            yield part, shard, state
            state.update(part=number + 1, shard=None, document=0)
