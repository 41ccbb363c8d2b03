"""Mix the documents of several sources, so that each has its share of the tokens, not of the documents.

A document of n tokens is due when its source should have given x + n / 2 tokens, after x tokens that it has given. The
next document is the one that is due first. So the tokens of a source differ from its share by about half a document,
as often above as below, whatever the lengths of its documents are.

A mixture is divided into equal pieces of all sources, and a piece is a mixture of its own: its shares are right, and it
ends when its sources end. Pieces begin at different places between two documents, so that their differences cancel.
The state of a mixture has the place in every source.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.columns import IGNORED_LABEL, LABELS, LOSS_MASKS, SOURCE, SOURCE_EPOCH
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import offsets_of
from hf_packing.rows.packed_rows import list_array
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.streams import upstream
from hf_packing.streams.reader import START, DocumentReader, Place, lengths_of
from hf_packing.streams.shards import equal_shares, fingerprint_of_files, sizes_of_shards
from hf_packing.streams.state import MadeFrom, StatefulExamples, load, save

Count = Literal["tokens", "trainable"]
StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]

_DOCUMENTS_AT_ONCE = 512


@dataclass(frozen=True)
class Mixture:
    """The way in which sources are mixed."""

    shares: Mapping[str, float]
    """The share of the tokens of each source, by name; the sum is 1."""
    schema: pa.Schema
    """Names and types of the token columns of all sources."""
    count: Count
    stopping_strategy: StoppingStrategy
    seed: int

    @property
    def features(self) -> datasets.Features:
        """Names and types of the columns of mixed documents."""
        schema = self.schema.append(pa.field(SOURCE, pa.list_(pa.int16())))
        if self.reads_again:
            schema = schema.append(pa.field(SOURCE_EPOCH, pa.list_(pa.int32())))
        return datasets.Features.from_arrow_schema(schema)

    @property
    def reads_again(self) -> bool:
        """True if a source may be read several times in an epoch of the mixture."""
        return self.stopping_strategy == "all_exhausted"

    def counted(self, documents: pa.Table, source: int, first: int) -> npt.NDArray[np.int64]:
        """Return what counts of each document, int64 [documents]: all tokens, or those that are trained on.

        Args:
            documents: documents of one source.
            source: the number of the source.
            first: the number of the first document in the source.
        """
        lengths = lengths_of(documents)
        if self.count == "tokens":
            return lengths
        try:
            columns = find_token_columns(documents)
        except PackingError as error:
            raise PackingError(
                f"streams[{list(self.shares)[source]!r}]: {error}. Rows are counted from document {first} of the source"
            ) from error
        trained, rows = np.ones(int(lengths.sum()), dtype=bool), np.arange(len(lengths))
        for name in columns.keys() & {LABELS, *LOSS_MASKS}:
            values = columns[name].gather(rows, np.zeros_like(rows), lengths)
            trained &= values != (IGNORED_LABEL if name == LABELS else 0)
        return np.diff(offsets_of(trained)[offsets_of(lengths)])

    def __str__(self) -> str:
        shares = ", ".join(f"{name} ({share:.6g})" for name, share in self.shares.items())
        return f"a mixture of {shares} by {self.count}, {self.stopping_strategy}, seed {self.seed}"


@dataclass
class Balance:
    """Counts for each source of a mixture."""

    total: list[int] | None = None
    """What was counted of each source; None before the first document."""
    paused: int | None = None
    """The source whose document was the last, if the document counted nothing."""

    def choose(
        self, shares: Sequence[float], counts: Mapping[int, Sequence[int]], phases: Sequence[float]
    ) -> tuple[list[int], int | None]:
        """Choose the sources of the next documents, until the documents at hand of a source end.

        After a document that counts nothing, another source is next, so that a source with many such documents in a row
        does not keep the others from their turns.

        Args:
            shares: the share of each source.
            counts: what counts of each document at hand of a source, in their order; empty if the source has ended.
            phases: the place between two documents, from 0 to 1, at which each source begins.

        Returns:
            The sources of the documents, in order; and a source that is due but has ended, or None.
        """
        if self.total is None:
            first = [next(iter(counts.get(source, ())), 0) for source in range(len(shares))]
            self.total = [
                0 if phase == 0.5 else round((phase - 0.5) * count / (1 - share))
                for phase, count, share in zip(phases, first, shares, strict=True)
            ]
        total = self.total
        chosen: list[int] = []
        used = dict.fromkeys(sorted(counts), 0)

        def due(source: int) -> float:
            following = counts[source][used[source]] if counts[source] else 0
            return (total[source] + following / 2) / shares[source]

        at = {source: due(source) for source in used}
        while len(chosen) < _DOCUMENTS_AT_ONCE:
            source = min(at, key=at.__getitem__)
            if source == self.paused:
                others = [each for each in at if each != source and counts[each]]
                source = min(others, key=at.__getitem__, default=source)
            if not counts[source]:
                return chosen, source
            counted = counts[source][used[source]]
            self.paused = None if counted else source
            total[source], used[source] = total[source] + counted, used[source] + 1
            chosen.append(source)
            if used[source] == len(counts[source]):
                break
            at[source] = due(source)
        return chosen, None


def _phases_of(shares: Sequence[float], piece: int, pieces: int, seed: int) -> list[float]:
    """Return where between two documents each source begins in a piece of a mixture.

    The pieces begin at evenly spaced places, each source in another order. The source with the largest share makes up
    for the others.
    """
    if pieces < 2:
        return [0.5] * len(shares)
    phases = [
        (int(np.random.default_rng([seed, source, pieces]).permutation(pieces)[piece]) + 0.5) / pieces
        for source in range(len(shares))
    ]
    phases[shares.index(max(shares))] = 0.5
    return phases


@dataclass
class _SourceProgress:
    """The place in one source of a mixture."""

    place: tuple[Any, ...] = tuple(START)
    """The fields of a Place."""
    passes: int = 0
    """The number of times that its documents ended."""
    empty_passes: int = 0
    """The number of these times without a document."""
    documents: int = 0
    """The documents that it has given in this pass."""
    counted: int = 0
    """What was counted of them."""

    def begin_pass(self) -> None:
        """Begin to read the source again."""
        self.empty_passes += not self.documents
        self.place, self.documents, self.counted = tuple(START), 0, 0


class MixedExamples(StatefulExamples):
    """The documents of several sources, mixed, for an IterableDataset.

    Args:
        examples: the objects that read the sources.
        mixture: how they are mixed.
        piece: the number of the piece to read.
        pieces: the number of equal pieces of all sources; 0 to read nothing.
    """

    def __init__(self, examples: list[upstream.Examples], mixture: Mixture, piece: int = 0, pieces: int = 1) -> None:
        super().__init__()
        self.ex_iterables, self.mixture = examples, mixture
        self._piece, self._pieces = piece, pieces

    @property
    def features(self) -> datasets.Features:
        return self.mixture.features

    def shuffle_data_sources(self, generator: np.random.Generator) -> "MixedExamples":
        shuffled = [upstream.shuffled(each, generator) for each in self.ex_iterables]
        return MixedExamples(shuffled, self.mixture, self._piece, self._pieces)

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "MixedExamples":
        del contiguous  # a piece is divided into pieces of its own
        pieces = min(num_shards, self.num_shards)  # since datasets leaves ranks and workers without a shard out
        return self.piece(index, pieces) if index < pieces else MixedExamples(self.ex_iterables, self.mixture, 0, 0)

    def piece(self, number: int, of: int) -> "MixedExamples":
        """Return one of any number of equal pieces of this one."""
        return MixedExamples(self.ex_iterables, self.mixture, self._piece * of + number, self._pieces * of)

    def reshard_data_sources(self) -> "MixedExamples":
        resharded = [each.reshard_data_sources() for each in self.ex_iterables]
        return MixedExamples(resharded, self.mixture, self._piece, self._pieces)

    @property
    def num_shards(self) -> int:
        return max(max(map(upstream.num_shards, self.ex_iterables)) // self._pieces, 1) if self._pieces else 0

    def _init_state_dict(self) -> dict[str, Any]:
        state = super()._init_state_dict()
        save(state, MadeFrom(str(self)), None)  # since `map` reads its first batch again from here
        return state

    def __str__(self) -> str:
        return f"{self.mixture}" + (f", piece {self._piece} of {self._pieces}" if self._pieces > 1 else "")

    def tables(self, one_row: bool = False) -> Iterator[pa.Table]:
        state, made_from = self.state, MadeFrom(str(self), fingerprint_of_files(self))
        progress, balance, out = [_SourceProgress() for _ in self.ex_iterables], Balance(), 0
        if (saved := load(state, made_from)) is not None:
            sources, (total, paused), out = saved
            progress = [_SourceProgress(*each) for each in sources]
            balance = Balance(None if total is None else list(total), paused)
        shares = list(self.mixture.shares.values())
        phases = _phases_of(shares, self._piece, self._pieces, self.mixture.seed)
        readers = [self._reader(number, source) for number, source in enumerate(progress)]
        active = self._active(progress)
        while active:
            counts = {
                number: self.mixture.counted(
                    readers[number].at_hand().slice(0, _DOCUMENTS_AT_ONCE), number, progress[number].documents
                ).tolist()
                for number in active
            }
            here = _saved(progress, balance)
            chosen, due = balance.choose(shares, counts, phases)
            table = self._take(readers, progress, chosen)
            for first in range(out, table.num_rows, 1 if one_row else max(table.num_rows - out, 1)):
                end = first + 1 if one_row else table.num_rows
                save(state, made_from, (*here, end))
                yield table.slice(first, end - first)
            out = 0
            for number, source in enumerate(progress):
                documents = chosen.count(number)
                source.place = tuple(readers[number].place)
                source.documents += documents
                source.counted += sum(counts.get(number, [])[:documents])
            if due is not None and not self._go_on(due, readers, progress, active):
                break
        save(state, made_from, (*_saved(progress, balance), 0))

    def _reader(self, number: int, source: _SourceProgress) -> DocumentReader:
        """Return a reader of a source that goes on where the mixture stands.

        In every pass, a source is read in another order, and a piece of the mixture reads the next piece of the source.
        """
        examples = upstream.copied(self.ex_iterables[number])  # two sources may be the same stream
        order, share = np.random.default_rng([self.mixture.seed, source.passes]), None
        if self._pieces > 1:
            shares = equal_shares(sizes_of_shards(examples), self._pieces)
            share = shares[(self._piece + source.passes) % self._pieces]
            if source.passes:
                share = tuple(share[part] for part in order.permutation(len(share)))
        elif source.passes:
            examples = upstream.shuffled(examples, order)
        return DocumentReader(examples, self.mixture.schema, Place(*source.place), share)

    def _active(self, progress: list[_SourceProgress]) -> set[int]:
        """Return the sources that still have documents for the mixture; none if the mixture has ended."""
        sources = set(range(len(progress) if self._pieces else 0))
        ended = {number for number in sources if progress[number].passes}
        how = self.mixture.stopping_strategy
        if how == "all_exhausted_without_replacement":
            return sources - ended
        return set() if ended and (how == "first_exhausted" or ended == sources) else sources

    def _take(self, readers: list[DocumentReader], progress: list[_SourceProgress], chosen: list[int]) -> pa.Table:
        """Return the chosen documents, with the columns of their sources."""
        order = np.argsort(np.array(chosen, dtype=np.int64), kind="stable")
        parts = [reader.take(chosen.count(number)) for number, reader in enumerate(readers)]
        table = pa.concat_tables(parts).take(np.argsort(order))
        lengths, sources = lengths_of(table), np.array(chosen, dtype=np.int16)
        table = table.append_column(SOURCE, list_array(np.repeat(sources, lengths), lengths))
        if self.mixture.reads_again:
            epochs = np.array([each.passes - each.empty_passes for each in progress], dtype=np.int32)[sources]
            table = table.append_column(SOURCE_EPOCH, list_array(np.repeat(epochs, lengths), lengths))
        return table

    def _go_on(
        self, due: int, readers: list[DocumentReader], progress: list[_SourceProgress], active: set[int]
    ) -> bool:
        """Return whether the mixture goes on after a source that is due has ended, and prepare it.

        Raises:
            PackingError: nothing counts of all documents of the source.
        """
        source = progress[due]
        if not source.counted:
            self._check_counts(due)
        source.passes += 1
        active &= self._active(progress)
        if due in active:
            source.begin_pass()
            readers[due] = self._reader(due, source)
        return bool(active)

    def _check_counts(self, number: int) -> None:
        """Refuse a source of whose documents nothing counts, in any piece of it."""
        reader, documents = DocumentReader(upstream.copied(self.ex_iterables[number]), self.mixture.schema), 0
        while rows := (table := reader.at_hand()).num_rows:
            if self.mixture.counted(table, number, documents).any():
                return
            documents += rows
            reader.take(rows)
        raise PackingError(
            f"streams[{list(self.mixture.shares)[number]!r}]: expected documents with tokens to count, as "
            f"count={self.mixture.count!r} says, got {documents} documents without; leave the source out"
        )


def _saved(progress: list[_SourceProgress], balance: Balance) -> tuple[Any, ...]:
    """Return the progress of all sources, and their balance, as plain values."""
    total = None if balance.total is None else tuple(balance.total)
    return tuple(tuple(vars(each).values()) for each in progress), (total, balance.paused)


def mixtures_in(examples: upstream.Examples) -> list[MixedExamples]:
    """Return the mixtures that an object reads."""
    if isinstance(examples, MixedExamples):
        return [examples]
    return [mixture for each in upstream.inner(examples) for mixture in mixtures_in(each)]


def is_mixture(examples: upstream.Examples) -> bool:
    """Return whether an object reads a mixture, also through `map` and the like, so that its pieces are mixtures."""
    if upstream.depends_on_places(examples):
        return False
    while getattr(examples, "ex_iterable", None) is not None:
        examples = examples.ex_iterable
    return isinstance(examples, MixedExamples)


def piece_of(examples: upstream.Examples, number: int, of: int) -> upstream.Examples:
    """Return a new object that reads one of so many pieces of a mixture, for which `is_mixture` is true."""
    if isinstance(examples, MixedExamples):
        return examples.piece(number, of)
    around = copy(examples)
    around.ex_iterable = piece_of(examples.ex_iterable, number, of)
    return around
