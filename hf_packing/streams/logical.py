"""Pack a stream as a fixed number of logical streams, whose rows do not depend on the number of ranks or workers.

A logical stream is an equal share of the shards, with its own windows and its own place. Rows are taken from the
logical streams in turn. Ranks and workers own logical streams, not files: `datasets` sees a logical stream as a shard.
So a state that was saved on one number of ranks can be loaded on another. Without logical streams, the stream is packed
as if it were a single one, and ranks and workers divide its shards.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, Self

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.columns import SEQ_LENGTHS, loss_masks_in
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array
from hf_packing.rows.changes import describe_changes, warn_of_changes
from hf_packing.rows.packing import Packing
from hf_packing.rows.packing_trace import info_of_packed
from hf_packing.streams.mix import mixtures_in, piece_of
from hf_packing.streams.packed import StreamPacking, Window
from hf_packing.streams.reader import Share, documents_of_shards, documents_of_shares, open_source, shares_of
from hf_packing.streams.state import STATE, StatefulExamples
from hf_packing.upstream import datasets as upstream

_ROWS_AT_ONCE = 64
"""A table has about so many rows, since `datasets` copies the state for every table of a stream with a format."""

Position = tuple[int, Window | None, int]
"""The progress of a logical stream: the number of its turns so far, the start of its window (None if it has not begun),
and the number of rows of the window that are out."""

START: Position = (0, None, 0)


class Turn(NamedTuple):
    """One turn of a logical stream."""

    stream: int
    """The number of the logical stream."""
    row: pa.Table | None
    """The row of the turn, as a table of one; None if the logical stream has ended."""
    position: Position
    """How far the logical stream has come with this turn."""

    def values(self, names: Iterable[str]) -> dict[str, Array]:
        """Return the row's values in some columns, integers [tokens] or [segments]."""
        assert self.row is not None
        return {name: self.row.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in names}


class PackedExamples(StatefulExamples):
    """The packed rows of a stream, taken from each of its logical streams in turn.

    Args:
        examples: the object that reads the documents.
        packing: how rows are made.
        streams: the number of logical streams of the source; 0 to pack the source as it is.

    Attributes:
        owned: the logical streams to read; number 0 is the source as it is.
    """

    def __init__(self, examples: upstream.Examples, packing: StreamPacking, streams: int) -> None:
        super().__init__()
        self.ex_iterable, self.packing, self.streams = examples, packing, streams
        self.owned = tuple(range(max(streams, 1)))

    def __str__(self) -> str:
        made_by = ", from ".join(map(str, [self.packing, *mixtures_in(self.ex_iterable)]))
        return f"{made_by}, in {self.streams} logical streams" if self.streams else made_by

    @property
    def features(self) -> datasets.Features:
        return self.packing.features

    def shuffle_data_sources(self, generator: np.random.Generator) -> Self:
        epoch = int(deepcopy(generator).integers(2**63))
        return self.changed(
            ex_iterable=upstream.shuffled(self.ex_iterable, generator), packing=replace(self.packing, epoch=epoch)
        )

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Self:
        if not self.streams:
            return self.changed(ex_iterable=upstream.sharded(self.ex_iterable, num_shards, index, contiguous))
        chosen = self.split_shard_indices_by_worker(num_shards, index, contiguous)
        return self.changed(owned=tuple(self.owned[number] for number in chosen))

    def reshard_data_sources(self) -> Self:
        return self.changed(ex_iterable=self.ex_iterable.reshard_data_sources())

    @property
    def num_shards(self) -> int:
        return len(self.owned) if self.streams else upstream.num_shards(self.ex_iterable)

    def tables(self, one_row: bool = False) -> Iterator[pa.Table]:
        made_from = self.made_from()
        positions = self.progress(self._state_dict, made_from) or dict.fromkeys(self.owned, START)
        if missing := sorted(set(self.owned) - positions.keys()):
            raise PackingError(
                f"state_dict: expected the states of the logical streams {self.owned}, got a state without "
                f"{missing}, which another rank or worker has read; load the state that this rank or worker has saved, "
                "or one that a single process has saved of all logical streams"
            )
        positions = {stream: positions[stream] for stream in self.owned}
        self._state_dict[STATE] = (*made_from, positions)
        turns = self.turns(positions)
        while taken := list(islice(turns, 1 if one_row else _ROWS_AT_ONCE)):
            if rows := [turn.row for turn in taken if turn.row is not None]:
                yield pa.concat_tables(rows).combine_chunks()  # each piece of a column would take time

    def turns(self, positions: dict[int, Any]) -> Iterator[Turn]:
        """Yield the turns of the logical streams: one turn of each, in order, until all have ended.

        Args:
            positions: how far each of the owned logical streams has come; updated with every turn.
        """
        packing, sources = self.packing, self._sources()
        rows = {
            stream: replace(packing, stream=stream if self.streams else None).rows(*sources[stream], *at)
            for stream, (_, *at) in positions.items()
        }
        turn, left = min((turns for turns, *_ in positions.values()), default=0), set(rows)
        while left:
            for stream in self.owned:
                turns, *at = positions[stream]
                if turns > turn:
                    continue  # this stream had its turn before the state was saved
                row, *at = next(rows[stream], (None, *at))
                if row is None:
                    left.discard(stream)
                positions[stream] = turn + 1, *at
                yield Turn(stream, row, positions[stream])
            turn += 1
        counts = sum((Counter(window["counts"]) for _, window, _ in positions.values()), Counter())
        facts = {**counts, "strategy": repr(self.packing.strategy)}
        warn_of_changes(describe_changes(facts, of=" of a stream"), "pack", stacklevel=2)

    def _sources(self) -> list[tuple[upstream.Examples, Share | None]]:
        """Return what each logical stream reads: a piece of a mixture, or a share of the shards of another stream."""
        examples, streams = self.ex_iterable, self.streams
        if not streams:
            return [(examples, None)]
        pieces = [piece_of(examples, number, streams) for number in range(streams)]
        if None in pieces:
            return [(examples, share) for share in shares_of(examples, streams)]
        return [(piece, None) for piece in pieces]

    def state_at(self, positions: Mapping[int, Position]) -> dict[str, Any]:
        """Return a state with the positions of the logical streams that have begun, for `positions_in`."""
        # the state of an epoch that has not begun may be read by any stream
        return {STATE: (*self.made_from(), dict(positions)) if positions else None}

    def positions_in(self, state: dict[str, Any]) -> dict[int, Position]:
        """Return the positions of the logical streams in a state; none if the epoch has not begun.

        Raises:
            PackingError: the state is of other logical streams, or of other files.
        """
        return self.progress(state, self.made_from()) or {}


def documents_of_streams(examples: upstream.Examples, streams: int) -> dict[str, list[int]]:
    """Return how many documents each logical stream gets of a stream, or of each source of a mixture, by name; without
    those of which it is not known."""
    return {
        name: documents_of_shares(documents, shares_of(source, streams))
        for name, source in _sources_of(examples).items()
        if (documents := documents_of_shards(source)) is not None
    }


def _sources_of(examples: upstream.Examples) -> dict[str, upstream.Examples]:
    """Return the sources of all mixtures in a stream, or the stream itself, by names for messages."""
    mixed = {
        f"streams[{name!r}] of the mixture": source
        for each in mixtures_in(examples)
        for name, source in zip(each.shares, each.ex_iterables, strict=True)
    }
    return mixed or {"the stream": examples}


def check_shares(examples: upstream.Examples, streams: int) -> None:
    """Warn if a source has fewer shards than logical streams, since each of these reads its shards to their end.

    Raises:
        PackingError: a logical stream is known to get no documents of a source.
    """
    for name, documents in documents_of_streams(examples, streams).items():
        if any(documents) and not all(documents):
            raise PackingError(
                f"streams: expected at most as many logical streams as {name} has documents for, got {streams} logical "
                f"streams for {sum(documents)} documents, of which number {documents.index(0)} gets none; pass a "
                "smaller number of streams, or shards of more equal size"
            )
    for name, source in _sources_of(examples).items():
        if streams > (shards := upstream.num_shards(source)):
            warnings.warn(
                f"pack reads {name} about {streams / shards:.2g} times, since {streams} logical streams share {shards} "
                "shards: each reads a shard to its end, and keeps its share of the documents. Call reshard() on a "
                "stream of parquet files, write more files, or pass a smaller number of streams",
                stacklevel=2,
            )


def pack_stream(
    stream: datasets.IterableDataset, packing: Packing, window_packs: int, streams: int | None
) -> datasets.IterableDataset:
    """Return an IterableDataset of packed rows. `hf_packing.pack` describes the arguments."""
    source = open_source("dataset", stream)
    packing.check_names(source.names)
    masks = loss_masks_in(source.schema.names)
    warn_of_changes(describe_changes({"loss_masks": masks}, left_out=source.left_out), "pack", stacklevel=3)
    if streams is not None:
        check_shares(source.examples, streams)
    packed = PackedExamples(source.examples, StreamPacking(packing, window_packs, source.schema), streams or 0)
    info = info_of_packed(stream.info, SEQ_LENGTHS in packed.features, packing.keep_first_labels)
    return upstream.stream_of(packed, stream, info)
