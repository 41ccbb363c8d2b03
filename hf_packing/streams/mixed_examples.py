"""Mix the documents of several sources, so that each has its share of the tokens, not of the documents.

`mixture_balance.py` chooses the source of the next document. The state has the place in every source. A mixture is
divided into equal pieces of all sources, and a piece is a mixture of its own: its shares are right, and it ends when
its sources end.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.columns import SOURCE, SOURCE_EPOCH
from hf_packing.errors import PackingError
from hf_packing.rows.packed_rows import list_array
from hf_packing.streams import upstream
from hf_packing.streams.document_reader import DocumentReader, Place, lengths_of
from hf_packing.streams.mixture import Mixture
from hf_packing.streams.mixture_balance import phases_of
from hf_packing.streams.mixture_progress import Given, MixtureProgress, Piece, SourceProgress, describe
from hf_packing.streams.saved_state import STATE, MadeFrom, load, new_state, save
from hf_packing.streams.shard_sizes import fingerprint_of_files, sizes_of_shards
from hf_packing.streams.shares import Part, Share, ShareOfShards, equal_shares

_DOCUMENTS_AT_ONCE = 512


class MixedExamples(upstream.TypedExamples):
    """The documents of several sources, mixed, for an IterableDataset.

    Args:
        examples: the objects that read the sources.
        mixture: how they are mixed.
        pieces: the number of equal pieces of each source; None for as many as a source has shards.
        shards: the pieces in each shard of the mixture; None for a shard for each piece.
    """

    def __init__(
        self,
        examples: list[upstream.Examples],
        mixture: Mixture,
        pieces: int | None = None,
        shards: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        super().__init__()
        self.ex_iterables, self.mixture = examples, mixture
        self._pieces = max(int(each.num_shards) for each in examples) if pieces is None else pieces
        self._shards = tuple((piece,) for piece in range(self._pieces)) if shards is None else shards
        self._owned = tuple(piece for shard in self._shards for piece in shard)
        self._piece: Piece = None if len(self._owned) == self._pieces else (self._pieces, self._owned)
        self._given_before: Given | None = None
        self._given = Given((), 0, self._piece)
        self._has_begun = False  # whether documents were read from the state on

    @property
    def features(self) -> datasets.Features:
        return self.mixture.features

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, table in enumerate(self.tables(one_row=True)):
            yield f"document {number}", table.to_pylist()[0]

    def _iter_arrow(self) -> Iterator[tuple[str, pa.Table]]:
        for number, table in enumerate(self.tables()):
            yield f"documents {number}", table

    def shuffle_data_sources(self, generator: np.random.Generator) -> "MixedExamples":
        shuffled = [upstream.shuffled(each, generator) for each in self.ex_iterables]
        return MixedExamples(shuffled, self.mixture, self._pieces, self._shards)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "MixedExamples":
        del contiguous  # fewer shards of the sources are divided if neighbors stay together
        chosen = self.split_shard_indices_by_worker(num_shards, index, contiguous=True)
        shards = tuple(self._shards[number] for number in chosen)
        return MixedExamples(self.ex_iterables, self.mixture, self._pieces, shards)

    def reshard_data_sources(self) -> "MixedExamples":
        if self._piece is not None:  # the pieces would have other documents
            return self
        return MixedExamples([each.reshard_data_sources() for each in self.ex_iterables], self.mixture)

    def with_shards(self, number: int) -> "MixedExamples":
        """Return the mixture with this number of shards, of equal sizes if it has not been sharded before."""
        if number == self.num_shards:
            return self
        if self._piece is None:
            return MixedExamples(self.ex_iterables, self.mixture, number)
        if number > self.num_shards:
            raise PackingError(
                f"streams: expected at most {self.num_shards}, the shards that are left of the mixture, got {number}; "
                "call shard on the streams before mix, not on the mixture"
            )
        borders = [self.num_shards * each // number for each in range(number + 1)]
        shards = tuple(sum(self._shards[a:b], ()) for a, b in pairwise(borders))
        return MixedExamples(self.ex_iterables, self.mixture, self._pieces, shards)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def _init_state_dict(self) -> dict[str, Any]:
        # `map` loads an older state after the newest one, passes over the documents between them, and saves the dict
        # of the newest one, so this has to be the same dict
        loaded: dict[str, Any] | None = self._state_dict
        state: dict[str, Any] = {} if loaded is None or self._has_begun else loaded
        if self._has_begun:
            self._given_before = None
        elif state.get(STATE) is not None:
            self.begin_with(self._given_in(state[STATE][-1]))
        for each in self.ex_iterables:
            each._init_state_dict()
        state.update(new_state(type(self)))
        self._has_begun = False
        self._state_dict: dict[str, Any] = state
        return state

    @property
    def given(self) -> Given:
        """The documents that the last iteration has given so far."""
        return self._given

    def begin_with(self, given: Given) -> None:
        """Make the next iteration give again what was given, by the shares of that time, from the state on."""
        if self._given_before is None or given.documents > self._given_before.documents:
            self._given_before = given

    def tables(self, one_row: bool = False) -> Iterator[pa.Table]:
        """Yield tables of documents, and note in the state before each that its documents are out.

        Args:
            one_row: True for tables of one document each.
        """
        state = self._init_state_dict() if self._state_dict is None else self._state_dict
        made_from = MadeFrom(str(self.mixture), None, fingerprint_of_files(self))
        progress, out = self._progress(load(state, made_from))
        self._has_begun, self._given_before = True, None
        readers = [self._reader(source, progress) for source in range(len(self.ex_iterables))]
        active = self._active(progress)
        while active:
            shares, most = progress.begin_table()
            here = progress.saved()
            counted, chosen, due = self._choose(readers, progress, active, shares, most)
            table = self._take(readers, progress, chosen)
            for first in range(out, table.num_rows, 1 if one_row else max(table.num_rows - out, 1)):
                end = first + 1 if one_row else table.num_rows
                save(state, made_from, (self._piece, here, end))
                self._given = Given(progress.history, progress.documents + end, self._piece)
                yield table.slice(first, end - first)
            out = 0
            for source, reader, counts in zip(progress.sources, readers, counted, strict=True):
                source.place = reader.place
                source.documents, source.counted = source.documents + len(counts), source.counted + sum(counts)
            if due is not None and not self._go_on(due, readers, progress, active):
                break
        save(state, made_from, (self._piece, progress.saved(), 0))

    def _progress(self, saved: Any) -> tuple[MixtureProgress, int]:
        """Return the progress from which to go on, and how many documents of its next table are out."""
        shares = tuple(self.mixture.shares.values())
        given = Given(((shares, None),), 0, self._piece)
        progress, out = MixtureProgress([SourceProgress() for _ in shares], given.history), 0
        if saved is not None:
            given = self._given_in(saved)
            progress, out = MixtureProgress.load(saved[1]), saved[2]
        for each in (given, self._given_before):
            if each is not None and each.piece != self._piece:
                raise PackingError(
                    f"state_dict: expected the state of {describe(self._piece)}, which this process reads, got the "
                    f"state of {describe(each.piece)}; load the state that this rank or worker has saved, on as many "
                    "ranks and workers as then, or pack the mixture with streams=64, and load the state of all "
                    "logical streams on any number of ranks"
                )
        if self._given_before is not None and self._given_before.documents > given.documents:
            given = self._given_before
        progress.history = given.history_with(shares)
        self._given = given
        return progress, out

    def _given_in(self, saved: Any) -> Given:
        piece, progress, out = saved
        loaded = MixtureProgress.load(progress)
        return Given.load((loaded.history, loaded.documents + out, piece))

    def _reader(self, number: int, progress: MixtureProgress) -> DocumentReader:
        """Return a reader of a source that goes on where the mixture stands.

        In every pass, a source is read in another order, and a mixture of some pieces reads the next pieces.
        """
        source = progress.sources[number]
        examples = upstream.copied(self.ex_iterables[number])  # two sources may be the same stream
        if self._piece is not None:
            shares = equal_shares(_sizes(examples), self._pieces)
            pieces = [(piece + source.passes) % self._pieces for piece in self._owned]
            examples = ShareOfShards(examples, _joined(part for piece in pieces for part in shares[piece]))
        if source.passes:
            examples = upstream.shuffled(examples, np.random.default_rng([self.mixture.seed, source.passes]))
        examples._init_state_dict()
        return DocumentReader(examples, self.mixture.schema, source.place)

    def _active(self, progress: MixtureProgress) -> set[int]:
        """Return the sources that still have documents for the mixture; none if the mixture has ended."""
        sources = set(range(len(progress.sources) if self._owned else 0))
        ended = {source for source in sources if progress.sources[source].passes}
        how = self.mixture.stopping_strategy
        if how == "all_exhausted_without_replacement":
            return sources - ended
        return set() if ended and (how == "first_exhausted" or ended == sources) else sources

    def _choose(
        self,
        readers: list[DocumentReader],
        progress: MixtureProgress,
        active: set[int],
        shares: tuple[float, ...],
        most: int | None,
    ) -> tuple[list[list[int]], list[int], int | None]:
        """Choose the sources of the next documents.

        Returns:
            What counts of each chosen document of each source; the sources of the documents, in order; and a source
            that is due but has ended, or None.
        """
        counts = {}
        for source in active:
            documents, known = readers[source].at_hand().slice(0, _DOCUMENTS_AT_ONCE), progress.sources[source]
            counts[source] = self.mixture.counted(documents, source, known.documents - known.before).tolist()
        phases = [0.5] * len(shares)
        if self._piece is not None:
            phases = phases_of(shares, self._owned[0], self._pieces, self.mixture.seed)
        most = _DOCUMENTS_AT_ONCE if most is None else min(most, _DOCUMENTS_AT_ONCE)
        chosen, due = progress.balance.choose(shares, counts, most, phases)
        return [counts.get(each, [])[: chosen.count(each)] for each in range(len(shares))], chosen, due

    def _take(self, readers: list[DocumentReader], progress: MixtureProgress, chosen: list[int]) -> pa.Table:
        """Return the chosen documents, with the columns of their sources."""
        order = np.argsort(np.array(chosen, dtype=np.int64), kind="stable")
        parts = [reader.take(chosen.count(source)) for source, reader in enumerate(readers)]
        table = pa.concat_tables(parts).take(np.argsort(order))
        lengths, sources = lengths_of(table), np.array(chosen, dtype=np.int16)
        table = table.append_column(SOURCE, list_array(np.repeat(sources, lengths), lengths))
        if self.mixture.reads_again:
            epochs = np.array([source.epoch for source in progress.sources], dtype=np.int32)[sources]
            table = table.append_column(SOURCE_EPOCH, list_array(np.repeat(epochs, lengths), lengths))
        return table

    def _go_on(self, due: int, readers: list[DocumentReader], progress: MixtureProgress, active: set[int]) -> bool:
        """Return whether the mixture goes on after a source that is due has ended, and prepare it.

        Raises:
            PackingError: nothing counts of all documents of the source.
        """
        source = progress.sources[due]
        if not source.counted:
            self._check_counts(due)
        source.passes += 1
        active &= self._active(progress)
        if due in active:
            source.begin_pass()
            readers[due] = self._reader(due, progress)
        return bool(active)

    def _check_counts(self, source: int) -> None:
        """Refuse a source of whose documents nothing counts, in any piece of it."""
        examples, documents = self.ex_iterables[source], 0
        for shard in range(examples.num_shards):
            shard_examples = examples.shard_data_sources(examples.num_shards, shard)
            shard_examples._init_state_dict()
            reader = DocumentReader(shard_examples, self.mixture.schema, Place(None, 0))
            while (table := reader.at_hand()).num_rows:
                if self.mixture.counted(table, source, 0).any():
                    return
                documents += table.num_rows
                reader.take(table.num_rows)
        what = "a token" if self.mixture.count == "tokens" else "a label to train on, since count='trainable'"
        got = f"{documents} documents without; leave the source out" if documents else "none"
        expected = f"documents with {what}" if documents else "documents"
        raise PackingError(f"streams[{list(self.mixture.shares)[source]!r}]: expected {expected}, got {got}")


def _sizes(examples: upstream.Examples) -> list[float]:
    """Return the size of every shard of a source, in rows if they are known."""
    rows = upstream.rows_of_shards(examples)
    return rows if rows is not None and len(rows) == examples.num_shards else sizes_of_shards(examples)


def _joined(parts: Iterable[Part]) -> Share:
    """Return parts of shards, in order, with neighbors of a shard as one part, so that the shard is read once."""
    joined: list[Part] = []
    for part in parts:
        if joined and (joined[-1].shard, joined[-1].end, joined[-1].of) == (part.shard, part.first, part.of):
            part = joined.pop()._replace(end=part.end)
        joined.append(part)
    return tuple(joined)
