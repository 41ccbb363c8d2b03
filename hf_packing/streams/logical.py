"""Pack a stream as a fixed number of logical streams, whose rows do not depend on the number of ranks or workers.

A logical stream is an equal share of the shards, with its own windows and its own state. Rows are taken from the
logical streams in turn. Ranks and workers own logical streams, not files: `datasets` sees a logical stream as a shard.
So a state that was saved on one number of ranks can be loaded on another.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy.typing as npt
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.streams import upstream
from hf_packing.streams.mix import is_mixture, mixtures_in, piece_of
from hf_packing.streams.packed import PackedExamples, StreamPacking, made_by, warn_of_losses
from hf_packing.streams.shards import Share, equal_shares, fingerprint_of_files, sizes_of_shards
from hf_packing.streams.state import STATE, Counts, MadeFrom, load, save


class Position(NamedTuple):
    """The progress of a logical stream."""

    turns: int
    """The number of its turns so far."""
    saved: Any
    """The state of its packed rows, as `state.save` writes it; None if the stream has not begun."""


_START = Position(0, None)


class Turn(NamedTuple):
    """One turn of a logical stream."""

    stream: int
    """The number of the logical stream."""
    row: pa.Table | None
    """The row of the turn, a table with one row; None if the logical stream has ended."""
    position: Position
    """How far the logical stream has come with this turn."""

    def values(self, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
        """Return the row's values in some columns, integers [tokens] or [segments]."""
        assert self.row is not None
        return {name: self.row.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in names}


class LogicalStreams(PackedExamples):
    """The packed rows of some of the logical streams of a source, taken from each logical stream in turn.

    Args:
        examples: the object that reads the documents.
        packing: how rows are made.
        streams: the number of logical streams of the source.

    Attributes:
        owned: the logical streams to read.
    """

    def __init__(self, examples: upstream.Examples, packing: StreamPacking, streams: int) -> None:
        super().__init__(examples, packing)
        self.streams, self.owned = streams, tuple(range(streams))

    def tables(self, one_row: bool = False) -> Iterator[pa.Table]:
        """Yield the rows of a round of turns together, or one by one."""
        turns, at_once = self.turns(), 1 if one_row else len(self.owned)
        while taken := list(islice(turns, at_once)):
            if found := [turn.row for turn in taken if turn.row is not None]:
                yield pa.concat_tables(found)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Self:
        chosen = self.split_shard_indices_by_worker(num_shards, index, contiguous)
        return self.changed(owned=tuple(self.owned[number] for number in chosen))

    @property
    def num_shards(self) -> int:
        return len(self.owned)

    def turns(self) -> Iterator[Turn]:
        """Yield the turns of the logical streams: one turn of each, in order, until all have ended.

        Raises:
            PackingError: the state is of other logical streams, or of other files.
        """
        state, made_from = self.state, self._made_from()
        positions = load(state, made_from) or dict.fromkeys(self.owned, tuple(_START))
        if missing := sorted(set(self.owned) - positions.keys()):
            raise PackingError(
                f"state_dict: expected the states of the logical streams {self.owned}, got a state without "
                f"{missing}, which another rank or worker has read; load the state that this rank or worker has saved, "
                "or one that a single process has saved of all logical streams"
            )
        positions = {stream: positions[stream] for stream in self.owned}
        save(state, made_from, positions)
        shares = []
        if not is_mixture(self.ex_iterable):
            shares = equal_shares(sizes_of_shards(self.ex_iterable), self.streams)
        parts = {stream: self._part(stream, shares) for stream in self.owned}
        for stream, part in parts.items():
            part._init_state_dict()[STATE] = positions[stream][1]
        rows = {stream: part.tables(one_row=True) for stream, part in parts.items()}
        turn, left = min((turns for turns, _ in positions.values()), default=0), set(rows)
        while left:
            for stream in self.owned:
                if positions[stream][0] > turn:
                    continue  # this stream had its turn before the state was saved
                row = next(rows[stream], None)
                if row is None:
                    left.discard(stream)
                positions[stream] = turn + 1, parts[stream]._state_dict[STATE]
                yield Turn(stream, row, Position(*positions[stream]))
            turn += 1
        counts = reduce(Counts.plus, (part.counts for part in parts.values()), Counts())
        warn_of_losses(counts, self.packing.strategy)

    def state_at(self, positions: Mapping[int, Position]) -> dict[str, Any]:
        """Return the state of all logical streams, for `load_state_dict`. Those without a position have not begun."""
        state = self.changed().state
        if positions:  # or else the state is of an epoch that has not begun, which any stream may read
            at = {stream: tuple(positions.get(stream, _START)) for stream in range(self.streams)}
            save(state, self._made_from(), at)
        return state

    def positions_in(self, state: dict[str, Any]) -> dict[int, Position]:
        """Return the positions of the logical streams in a state, of those that have begun.

        Raises:
            PackingError: the state is of other logical streams, or of other files.
        """
        saved = load(state, self._made_from()) or {}
        return {stream: Position(*position) for stream, position in saved.items() if position[0]}

    def _made_from(self) -> MadeFrom:
        made = f"{made_by(self.packing, self.ex_iterable)}, in {self.streams} logical streams"
        return MadeFrom(made, fingerprint_of_files(self.ex_iterable))

    def _part(self, stream: int, shares: Sequence[Share]) -> PackedExamples:
        """Return the packed rows of a logical stream, given the shares of a source that is no mixture."""
        packing = replace(self.packing, stream=stream)
        if shares:
            return PackedExamples(self.ex_iterable, packing, shares[stream])
        return PackedExamples(piece_of(self.ex_iterable, stream, self.streams), packing)


def warn_of_reading(examples: upstream.Examples, streams: int) -> None:
    """Warn if a source has fewer shards than logical streams, since each of these reads its shards to their end."""
    sources = {"the stream": examples}
    if mixtures := mixtures_in(examples):
        sources = {
            f"streams[{name!r}] of the mixture": source
            for each in mixtures
            for name, source in zip(each.mixture.shares, each.ex_iterables, strict=True)
        }
    for name, source in sources.items():
        if streams > (shards := upstream.num_shards(source)):
            warnings.warn(
                f"pack reads {name} about {streams / shards:.0f} times, since {streams} logical streams share {shards} "
                "shards: each reads a shard to its end, and keeps its share of the documents. Call reshard() on a "
                "stream of parquet files, write more files, or pass a smaller number of streams",
                stacklevel=2,
            )
