"""Pack a stream as a fixed number of logical streams, whose rows do not depend on the number of ranks or workers.

A logical stream is an equal share of the shards, with its own windows and its own state. Rows are taken from the
logical streams in turn. Ranks and workers own logical streams, not files: `datasets` sees a logical stream as a shard.
So a state that was saved on one number of ranks can be loaded on another.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from itertools import count, islice
from typing import Any, NamedTuple

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.streams import upstream
from hf_packing.streams.mixtures_in import divided_mixture, fixed_shares
from hf_packing.streams.packed_examples import PackedExamples, StreamPacking, warn_of_losses
from hf_packing.streams.saved_state import STATE, MadeFrom, load, new_state, save
from hf_packing.streams.shard_sizes import fingerprint_of_files, sizes_of_shards
from hf_packing.streams.shares import ShareOfShards, equal_shares
from hf_packing.streams.window_start import Counts


class Position(NamedTuple):
    """The progress of a logical stream."""

    turns: int
    """The number of its turns so far."""
    saved: Any
    """The state of its packed rows, as `saved_state.save` writes it; None if the stream has not begun."""


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


class LogicalStreams(upstream.TypedExamples):
    """The packed rows of some of the logical streams of a source, taken from each logical stream in turn.

    Args:
        examples: the object that reads the documents.
        packing: how rows are made.
        streams: the number of logical streams of the source.
        owned: the logical streams to read; None for all.
    """

    def __init__(
        self, examples: upstream.Examples, packing: StreamPacking, streams: int, owned: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        mixture = divided_mixture(examples, streams)
        self._is_divided_mixture = mixture is not None
        self.ex_iterable = examples if mixture is None else mixture
        self.packing, self.streams = packing, streams
        self.owned = tuple(range(streams)) if owned is None else owned

    @property
    def features(self) -> datasets.Features:
        return self.packing.features

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, turn in enumerate(self.turns()):
            if turn.row is not None:
                yield f"turn {number}", turn.row.to_pylist()[0]

    def _iter_arrow(self) -> Iterator[tuple[str, pa.Table]]:
        """Yield the rows of a round of turns together, since readers copy the state for every table."""
        turns, rows = iter(self.turns()), len(self.owned)
        for number in count():
            taken = [turn.row for turn in islice(turns, rows)]
            if not taken:
                return
            if found := [row for row in taken if row is not None]:
                yield f"round {number}", pa.concat_tables(found)

    def shuffle_data_sources(self, generator: np.random.Generator) -> "LogicalStreams":
        packing = self.packing.for_epoch(generator)
        return LogicalStreams(upstream.shuffled(self.ex_iterable, generator), packing, self.streams, self.owned)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "LogicalStreams":
        chosen = self.split_shard_indices_by_worker(num_shards, index, contiguous)
        owned = tuple(self.owned[number] for number in chosen)
        return LogicalStreams(self.ex_iterable, self.packing, self.streams, owned)

    def reshard_data_sources(self) -> "LogicalStreams":
        return LogicalStreams(self.ex_iterable.reshard_data_sources(), self.packing, self.streams, self.owned)

    @property
    def num_shards(self) -> int:
        return len(self.owned)

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict: dict[str, Any] = new_state(type(self))
        return self._state_dict

    def turns(self) -> Iterator[Turn]:
        """Yield the turns of the logical streams: one turn of each, in order, until all have ended.

        Raises:
            PackingError: the state is of other logical streams, or of other files.
        """
        state = self._init_state_dict() if self._state_dict is None else self._state_dict
        made_from = self._made_from()
        parts = self._parts(made_from.files)
        live: dict[int, dict[str, Any]] = {
            stream: {"turns": 0, "state": part._init_state_dict()} for stream, part in parts.items()
        }
        if (saved := load(state, made_from)) is not None:
            self._load(dict(saved), parts, live)
        save(state, made_from, tuple(live.items()))
        rows = {stream: part.tables(one_row=True) for stream, part in parts.items()}
        turn, left = min((each["turns"] for each in live.values()), default=0), set(rows)
        while left:
            for stream, progress in live.items():
                if progress["turns"] > turn:
                    continue  # this stream had its turn before the state was saved
                progress["turns"] = turn + 1
                row = next(rows[stream], None) if stream in left else None
                if row is None:
                    left.discard(stream)
                yield Turn(stream, row, Position(turn + 1, progress["state"][STATE]))
            turn += 1
        counts = reduce(Counts.plus, (part.counts for part in parts.values()), Counts())
        warn_of_losses(counts, self.packing.strategy)

    def state_at(self, positions: Mapping[int, Position]) -> dict[str, Any]:
        """Return the state of all logical streams, for `load_state_dict`. Those without a position have not begun."""
        state, parts = new_state(type(self)), []
        for stream in range(self.streams):
            at = positions.get(stream, Position(0, None))
            parts.append((stream, {"turns": at.turns, "state": {STATE: at.saved, "type": PackedExamples.__name__}}))
        save(state, self._made_from(), tuple(parts))
        return state

    def positions_in(self, state: dict[str, Any]) -> dict[int, Position]:
        """Return the positions of the logical streams in a state, of those that have begun.

        Raises:
            PackingError: the state is of other logical streams, or of other files.
        """
        saved = load(state, self._made_from()) or ()
        return {stream: Position(part["turns"], part["state"][STATE]) for stream, part in saved if part["turns"]}

    def _made_from(self) -> MadeFrom:
        shares = "" if self._is_divided_mixture else fixed_shares(self.ex_iterable)
        return MadeFrom(str(self.packing) + shares, self.streams, fingerprint_of_files(self.ex_iterable))

    def _parts(self, files: str) -> dict[int, PackedExamples]:
        """Return the packed rows of each owned logical stream."""
        packings = {stream: replace(self.packing, stream=stream, turns=self.streams) for stream in self.owned}
        if self._is_divided_mixture:
            read = [self.ex_iterable.shard_data_sources(self.streams, stream) for stream in self.owned]
        else:
            shares = equal_shares(sizes_of_shards(self.ex_iterable), self.streams)
            read = [ShareOfShards(self.ex_iterable, shares[stream]) for stream in self.owned]
        return {
            stream: PackedExamples(each, packings[stream], files) for stream, each in zip(self.owned, read, strict=True)
        }

    def _load(
        self, saved: dict[int, dict[str, Any]], parts: dict[int, PackedExamples], live: dict[int, dict[str, Any]]
    ) -> None:
        """Load the saved progress of each owned logical stream."""
        if missing := sorted(set(self.owned) - saved.keys()):
            raise PackingError(
                f"state_dict: expected the states of the logical streams {self.owned}, got a state without "
                f"{missing}, which another rank or worker has read; load the state that this rank or worker has saved, "
                "or one that a single process has saved of all logical streams"
            )
        for stream, part in parts.items():
            part.load_state_dict(saved[stream]["state"])
            live[stream] = {"turns": saved[stream]["turns"], "state": part._state_dict}
