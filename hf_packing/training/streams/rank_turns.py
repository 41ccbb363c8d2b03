"""Read the rows of one rank's logical streams, in the order of their turns, in DataLoader workers if asked for.

Workers read ahead of the training, so a worker sends how far its logical streams have come along with every
micro-batch. The start of a window, which can be large, is sent only once.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from hf_packing.columns import (
    ENDS,
    INPUT_IDS,
    LABELS,
    PARENTS,
    SEGMENT_COLUMNS,
    SEGMENT_LENGTHS,
    SEQ_LENGTHS,
    SOURCE,
    SOURCE_EPOCH,
    TOKEN_TYPE_IDS,
    TREE_COLUMNS,
)
from hf_packing.planning.lengths import IntArray
from hf_packing.streams.logical import PackedExamples, Position, Turn
from hf_packing.streams.mix import MixedExamples
from hf_packing.streams.packed import Window
from hf_packing.trees.segments import TreeSegments

Row = dict[str, Any]
Collate = Callable[[list[Row]], dict[str, Any]]


class Move(NamedTuple):
    """The progress of a logical stream in one turn."""

    stream: int
    turns: int
    rows_out: int
    """Number of rows of the window that are out."""
    window: Window | None
    """The start of the window; None if it is as in the stream's turn before."""
    ended: bool


class MicroBatch(NamedTuple):
    """The next rows of a rank, joined to one batch."""

    batch: dict[str, Any] | None
    """The batch; None if the logical streams of all its turns have ended."""
    moves: list[Move]
    documents: IntArray | None
    """int64 [4, segments]: the source, number of tokens, epoch of the source and logical stream of each document, or
    piece of one, of a mixture; None without a mixture, and without a row."""


class _Moves:
    """Describes turns as moves, without what was already sent."""

    def __init__(self) -> None:
        self._windows: dict[int, Any] = {}

    def of(self, turn: Turn) -> Move:
        turns, window, rows_out = turn.position
        known = self._windows.get(turn.stream)
        self._windows[turn.stream] = window
        return Move(turn.stream, turns, rows_out, None if known is window else window, turn.row is None)


def moved(before: Position | None, move: Move) -> Position:
    """Return the position of a logical stream after a move."""
    window = move.window
    if window is None:
        assert before is not None
        _, window, _ = before
    return move.turns, window, move.rows_out


class RankTurns(torch.utils.data.IterableDataset[MicroBatch]):
    """The micro-batches of one rank: its rows in the order of the turns of all logical streams, without an end.

    Rank r of n owns the logical streams r, r + n, r + 2n and so on. After all of them have ended, micro-batches without
    a row follow.

    Args:
        streams: all logical streams.
        rank: number of this rank.
        world_size: number of ranks, which divides the number of logical streams.
        rows_per_batch: number of rows in a micro-batch.
        collate: function that joins rows to a batch.
        state: the state of the logical streams of this rank, for `PackedExamples.load_state_dict`.
        first: the number of the first micro-batch, counted from the beginning of the epoch.
        token_types: whether rows keep `token_type_ids`.
        more: names of further columns with one number for each token to read.
    """

    def __init__(
        self,
        streams: PackedExamples,
        rank: int,
        world_size: int,
        rows_per_batch: int,
        collate: Collate,
        state: dict[str, Any] | None,
        first: int,
        token_types: bool,
        more: Sequence[str] = (),
    ) -> None:
        self.owned = streams.owned[rank::world_size]
        self._streams, self._state, self._first = streams, state, first
        self._rows_per_batch, self._collate = rows_per_batch, collate
        names = [INPUT_IDS, LABELS, *([TOKEN_TYPE_IDS] if token_types else []), *SEGMENT_COLUMNS, *TREE_COLUMNS]
        names += more
        names += [SOURCE, SOURCE_EPOCH] if isinstance(streams.ex_iterable, MixedExamples) else []
        self._names = [name for name in names if name in streams.features]

    def usable_workers(self, workers: int) -> int:
        """Return how many of some workers can share the logical streams, so that rows keep their order."""
        fits = (count for count in range(workers, 1, -1) if len(self.owned) % (count * self._rows_per_batch) == 0)
        return next(fits, min(workers, 1))

    def __iter__(self) -> Iterator[MicroBatch]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        batches_per_round = max(len(self.owned) // self._rows_per_batch, 1)
        owned = self.owned
        if workers > 1:
            mine = [
                number for number in range(batches_per_round) if number % workers == (worker + self._first) % workers
            ]
            size = self._rows_per_batch
            owned = tuple(stream for number in mine for stream in owned[number * size : (number + 1) * size])
        streams = self._streams.changed(owned=owned)
        streams._init_state_dict()
        if self._state is not None:
            streams.load_state_dict(self._state)
        turns, moves = _without_end(streams.turns(), owned), _Moves()
        while True:
            yield self._joined(list(islice(turns, self._rows_per_batch)), moves)

    def _joined(self, turns: Sequence[Turn], moves: _Moves) -> MicroBatch:
        rows = [turn.values(self._names) for turn in turns if turn.row is not None]
        streams = [turn.stream for turn in turns if turn.row is not None]
        documents = [_documents(row, stream) for row, stream in zip(rows, streams, strict=True) if SOURCE in row]
        batch = self._collate(rows) if rows else None
        together = np.concatenate(documents, axis=1) if documents else None
        return MicroBatch(batch, [moves.of(turn) for turn in turns], together)


def _documents(row: Row, stream: int) -> IntArray:
    """Return what `MicroBatch.documents` says of a row, and remove the columns of sources, which no model takes."""
    if PARENTS in row:
        trees = TreeSegments.from_arrays(row[SEGMENT_LENGTHS], row[PARENTS])
        first = trees.begins[row[ENDS]]
        lengths = (trees.depths + np.array(trees.lengths))[row[ENDS]].astype(np.int64)
    else:
        lengths = row[SEQ_LENGTHS].astype(np.int64)
        first = np.cumsum(lengths) - lengths
    source = row.pop(SOURCE)
    epoch = row.pop(SOURCE_EPOCH, np.zeros_like(source))
    return np.stack([source[first], lengths, epoch[first], np.full_like(lengths, stream)])


def _without_end(turns: Iterator[Turn], owned: Sequence[int]) -> Iterator[Turn]:
    """Yield turns, and then turns of ended logical streams, without an end."""
    last: dict[int, Turn] = {}
    for turn in turns:
        last[turn.stream] = turn
        yield turn
    while True:
        for stream in owned:
            turns_so_far, window, rows_out = last[stream].position
            last[stream] = Turn(stream, None, (turns_so_far + 1, window, rows_out))
            yield last[stream]


def turns_loader(turns: RankTurns, workers: int, seed: int, **options: Any) -> DataLoader[MicroBatch]:
    """Return a DataLoader of a rank's micro-batches. The seeds of workers follow from `seed`, not from torch's own."""
    usable = turns.usable_workers(workers)
    if not usable:
        options = {name: value for name, value in options.items() if name == "pin_memory"}
    as_it_is: Any = _as_it_is
    seeds = torch.Generator().manual_seed(seed)
    return DataLoader(turns, batch_size=None, collate_fn=as_it_is, num_workers=usable, generator=seeds, **options)


def _as_it_is(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch
