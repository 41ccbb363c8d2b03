"""Read the rows of one rank's logical streams, in the order of their turns, in DataLoader workers if asked for.

Workers read ahead of the training, so a worker sends how far its logical streams have come along with every
micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from hf_packing.columns import SOURCE
from hf_packing.planning.lengths import IntArray
from hf_packing.streams.logical import PackedExamples, Position, Turn

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


class MicroBatch(NamedTuple):
    """The next rows of a rank, joined to one batch."""

    batch: dict[str, Any] | None
    """The batch; None if the logical streams of all its turns have ended."""
    positions: dict[int, Position]
    """How far its logical streams have come, by their numbers."""
    ended: list[int]
    """Its logical streams that have ended."""
    of_sources: IntArray
    """int64 [sources]: the number of tokens of each source of a mixture."""


class RankTurns(torch.utils.data.IterableDataset[MicroBatch]):
    """The micro-batches of one rank: its rows in the order of the turns of all logical streams, without an end.

    After all logical streams of the rank have ended, micro-batches without a row follow.

    Args:
        streams: the logical streams of this rank.
        positions: how far they have come, by their numbers; those without a position have not begun.
        rows_per_batch: number of rows in a micro-batch.
        collate: function that joins rows to a batch.
        names: names of the columns to read.
        sources: number of sources of the mixture; 0 without a mixture.
    """

    def __init__(
        self,
        streams: PackedExamples,
        positions: Mapping[int, Position],
        rows_per_batch: int,
        collate: Collate,
        names: Sequence[str],
        sources: int,
    ) -> None:
        self._streams, self._state = streams, streams.state_at(positions)
        self._batches_done = sum(turns for turns, *_ in positions.values()) // rows_per_batch
        self._rows_per_batch, self._collate, self._sources = rows_per_batch, collate, sources
        self._names = [*names, SOURCE] if sources else names

    def loader(self, workers: int, seed: int, **options: Any) -> DataLoader[MicroBatch]:
        """Return a DataLoader of the micro-batches. The seeds of workers follow from `seed`, not from torch's own."""
        workers = self.usable_workers(workers)
        if not workers:
            options = {name: value for name, value in options.items() if name == "pin_memory"}
        as_it_is: Any = _as_it_is
        seeds = torch.Generator().manual_seed(seed)
        return DataLoader(self, batch_size=None, collate_fn=as_it_is, num_workers=workers, generator=seeds, **options)

    def usable_workers(self, workers: int) -> int:
        """Return how many of some workers can share the logical streams, so that rows keep their order."""
        owned = len(self._streams.owned)
        fits = (count for count in range(workers, 1, -1) if owned % (count * self._rows_per_batch) == 0)
        return next(fits, min(workers, 1))

    def __iter__(self) -> Iterator[MicroBatch]:
        streams, size = self._streams, self._rows_per_batch
        if (info := get_worker_info()) is not None and info.num_workers > 1:
            # torch takes micro-batches from the workers in turn, beginning with worker 0
            first = (info.id + self._batches_done) % info.num_workers
            mine = range(first * size, len(streams.owned), info.num_workers * size)
            streams = streams.changed(owned=tuple(each for at in mine for each in streams.owned[at : at + size]))
        streams = streams.changed()
        streams.load_state_dict(self._state)
        turns = _without_end(streams)
        while True:
            yield self._joined(list(islice(turns, size)))

    def _joined(self, turns: Sequence[Turn]) -> MicroBatch:
        """Return the micro-batch of some turns."""
        rows: list[dict[str, Any]] = [turn.values(self._names) for turn in turns if turn.row is not None]
        of_sources = np.zeros(self._sources, np.int64)
        for row in rows if self._sources else ():  # no model takes the sources
            of_sources += np.bincount(row.pop(SOURCE), minlength=self._sources)
        positions = {turn.stream: turn.position for turn in turns}
        ended = [turn.stream for turn in turns if turn.row is None]
        return MicroBatch(self._collate(rows) if rows else None, positions, ended, of_sources)


def _without_end(streams: PackedExamples) -> Iterator[Turn]:
    """Yield turns, and then turns of ended logical streams, without an end."""
    last: dict[int, Turn] = {}
    for turn in streams.turns():
        last[turn.stream] = turn
        yield turn
    while True:
        for stream in streams.owned:
            turns_so_far, window, rows_out = last[stream].position
            last[stream] = Turn(stream, None, (turns_so_far + 1, window, rows_out))
            yield last[stream]


def _as_it_is(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch
