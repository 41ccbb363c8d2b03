"""Mix the documents of several sources, so that each has its share of the tokens, not of the documents.

A document of n tokens is due when its source should have given x + n / 2 tokens, after x tokens that it has given. The
next document is the one that is due first. So the tokens of a source differ from its share by about half a document,
as often above as below, whatever the lengths of its documents are.

A mixture is divided into equal pieces of all sources, and a piece is a mixture of its own: its shares are right, and it
ends when its sources end. Pieces begin at different places between two documents, so that their differences cancel.
The state of a mixture has the place in every source.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.checks import check_choice, check_seed, is_real
from hf_packing.columns import IGNORED_LABEL, LABELS, LOSS_MASKS, SOURCE, SOURCE_EPOCH
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import offsets_of
from hf_packing.rows.changes import describe_changes
from hf_packing.rows.packed_rows import list_array
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.streams import upstream
from hf_packing.streams.reader import START, DocumentReader, Place, Source, lengths_of, open_source
from hf_packing.streams.shards import equal_shares, fingerprint_of_files, sizes_of_shards
from hf_packing.streams.state import MadeFrom, StatefulExamples, load, save

Count = Literal["tokens", "trainable"]
StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]

_MOST_SHARDS = 64
_DOCUMENTS_AT_ONCE = 512


def mix(
    streams: Mapping[str, datasets.IterableDataset | datasets.Dataset],
    tokens: Mapping[str, float],
    *,
    stopping_strategy: StoppingStrategy = "first_exhausted",
    count: Count = "tokens",
    seed: int = 0,
) -> datasets.IterableDataset:
    """Mix tokenized streams and datasets so that each has its share of the tokens.

    After every document, the tokens of a source differ from its share by about half a document.
    `datasets.interleave_datasets` draws by documents instead, so that sources with long documents get more tokens than
    their share. The state of the mixture is exact. Other shares count from the next epoch on. Logical streams, ranks
    and workers have mixtures of their own, of equal pieces of all sources.

    Args:
        streams: IterableDatasets or Datasets with `input_ids`, by name. All have the same token columns; other columns
            are left out.
        tokens: share of the tokens of each source, by name; positive numbers, which are divided by their sum.
        stopping_strategy: as in `datasets.interleave_datasets`. "first_exhausted" ends the mixture when a source is due
            but has no more documents; "all_exhausted" reads such a source again, its shards in another order, until
            every source was read once; "all_exhausted_without_replacement" goes on with the other sources.
        count: "tokens" to count all tokens, "trainable" to count tokens with a label. After a document of which nothing
            counts, another source is next.
        seed: seed for the order of the shards of sources that are read again.

    Returns:
        IterableDataset with the token columns, and a column `source`: the number of the document's source, for every
        token, so that packed rows have it too. With "all_exhausted", the column `source_epoch` has the number of times
        that the source was read before the document.

    Raises:
        PackingError: the names differ, a share is not positive, a source has no documents or other token columns, or
            a stream has a shuffle buffer. While the mixture is read: nothing counts of all documents of a source, or a
            loaded state is of other shares.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> short = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3], [4]]})
        >>> long = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10]]})
        >>> mixed = hfp.mix({"short": short, "long": long}, tokens={"short": 0.5, "long": 0.5})
        >>> [document["input_ids"] for document in mixed]
        [[1], [2], [5, 6, 7], [3], [4]]
    """
    shares = _check_shares(streams, tokens)
    check_choice("stopping_strategy", stopping_strategy, StoppingStrategy)
    check_choice("count", count, Count)
    opened = {name: _open_source(name, stream) for name, stream in streams.items()}
    first = next(iter(opened.values()))
    for name, source in opened.items():
        if source.schema.names != first.schema.names:
            raise PackingError(
                f"streams[{name!r}]: expected the token columns {', '.join(first.schema.names)}, as in "
                f"{next(iter(opened))!r}, got {', '.join(source.schema.names)}"
            )
    left_out = list(dict.fromkeys(each for source in opened.values() for each in source.left_out))
    for change in describe_changes({}, left_out=left_out):
        warnings.warn(f"mix {change}", stacklevel=2)
    mixture = Mixture(shares, first.schema, count, stopping_strategy, check_seed(seed))
    examples = MixedExamples([source.examples for source in opened.values()], mixture)
    return datasets.IterableDataset(examples, info=datasets.DatasetInfo(features=mixture.features))


def _check_shares(streams: Any, tokens: Any) -> dict[str, float]:
    """Return the shares of the sources, in the order of the sources, with the sum 1."""
    if not isinstance(streams, Mapping) or not streams:
        raise PackingError(f"streams: expected a dict of streams, at least one, got {type(streams).__name__}")
    if not isinstance(tokens, Mapping) or set(tokens) != set(streams):
        raise PackingError(f"tokens: expected a share for each of {', '.join(map(str, streams))}, got {tokens!r}")
    for name, share in tokens.items():
        if not is_real(share) or not 0 < share < math.inf:
            raise PackingError(f"tokens[{name!r}]: expected a positive number, got {share!r}")
    whole = sum(tokens.values())
    return {name: float(tokens[name]) / whole for name in streams}


def _open_source(name: str, stream: Any) -> Source:
    if isinstance(stream, datasets.Dataset):
        if not len(stream):
            raise PackingError(f"streams[{name!r}]: expected documents, got an empty dataset")
        stream = stream.to_iterable_dataset(num_shards=min(len(stream), _MOST_SHARDS))
    if not isinstance(stream, datasets.IterableDataset):
        raise PackingError(f"streams[{name!r}]: expected an IterableDataset or a Dataset, got {type(stream).__name__}")
    source = open_source(f"streams[{name!r}]", stream)
    for column in (SOURCE, SOURCE_EPOCH):
        if column in source.schema.names:
            raise PackingError(
                f"streams[{name!r}]: expected no column {column!r} with a number for each token, since the mixture "
                "makes a column of this name; rename the column"
            )
    return source


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
class _OpenSource:
    """A source of a mixture that is read."""

    reader: DocumentReader
    passes: int = 0
    """The number of times that its documents ended."""
    empty_passes: int = 0
    """The number of these times without a document."""
    documents: int = 0
    """The documents that it has given in this pass."""
    counted: int = 0
    """What was counted of them."""

    def saved(self) -> tuple[Any, ...]:
        """Return the place in the source, and the numbers, as plain values."""
        return tuple(self.reader.place), self.passes, self.empty_passes, self.documents, self.counted


class MixedExamples(StatefulExamples):
    """The documents of several sources, mixed, for an IterableDataset.

    Args:
        examples: the objects that read the sources.
        mixture: how they are mixed.

    A piece of it has the number `_piece`, of `_pieces` equal pieces of all sources; of 0 pieces, nothing is read.
    """

    def __init__(self, examples: list[upstream.Examples], mixture: Mixture) -> None:
        super().__init__()
        self.ex_iterables, self.mixture = examples, mixture
        self._piece, self._pieces = 0, 1

    @property
    def features(self) -> datasets.Features:
        return self.mixture.features

    def shuffle_data_sources(self, generator: np.random.Generator) -> "MixedExamples":
        return self.changed(ex_iterables=[upstream.shuffled(each, generator) for each in self.ex_iterables])

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "MixedExamples":
        del contiguous  # a piece is divided into pieces of its own
        pieces = min(num_shards, self.num_shards)  # since datasets leaves ranks and workers without a shard out
        return self.piece(index, pieces) if index < pieces else self.piece(0, 0)

    def piece(self, number: int, of: int) -> "MixedExamples":
        """Return one of any number of equal pieces of this one."""
        return self.changed(_piece=self._piece * of + number, _pieces=self._pieces * of)

    def reshard_data_sources(self) -> "MixedExamples":
        return self.changed(ex_iterables=[each.reshard_data_sources() for each in self.ex_iterables])

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
        places, total, paused, out = load(state, made_from) or ([()] * len(self.ex_iterables), None, None, 0)
        sources = [self._open(number, *place) for number, place in enumerate(places)]
        while active := self._active(sources):
            at_hand = {number: sources[number].reader.at_hand().slice(0, _DOCUMENTS_AT_ONCE) for number in active}
            counts = {
                number: self.mixture.counted(documents, number, sources[number].documents).tolist()
                for number, documents in at_hand.items()
            }
            total = self._first_totals(counts) if total is None else list(total)
            here = [source.saved() for source in sources], tuple(total), paused
            chosen, due, paused = choose(list(self.mixture.shares.values()), counts, total, paused)
            table = self._take(sources, chosen)
            for first in range(out, table.num_rows, 1 if one_row else max(table.num_rows - out, 1)):
                end = first + 1 if one_row else table.num_rows
                save(state, made_from, (*here, end))
                yield table.slice(first, end - first)
            out = 0
            for number, counted in counts.items():
                documents = chosen.count(number)
                sources[number].documents += documents
                sources[number].counted += sum(counted[:documents])
            if due is not None:
                self._end_pass(due, sources)
        save(state, made_from, ([source.saved() for source in sources], total, paused, 0))

    def _open(self, number: int, place: tuple[Any, ...] = tuple(START), passes: int = 0, *counts: int) -> _OpenSource:
        """Return a source at a place, where the mixture stands.

        In every pass, a source is read in another order, and a piece of the mixture reads the next piece of the source.
        """
        examples = upstream.copied(self.ex_iterables[number])  # two sources may be the same stream
        order, share = np.random.default_rng([self.mixture.seed, passes]), None
        if self._pieces > 1:
            shares = equal_shares(sizes_of_shards(examples), self._pieces)
            share = shares[(self._piece + passes) % self._pieces]
            if passes:
                share = tuple(share[part] for part in order.permutation(len(share)))
        elif passes:
            examples = upstream.shuffled(examples, order)
        return _OpenSource(DocumentReader(examples, self.mixture.schema, Place(*place), share), passes, *counts)

    def _active(self, sources: Sequence[_OpenSource]) -> list[int]:
        """Return the sources that still have documents for the mixture; none if the mixture has ended."""
        everything = list(range(len(sources) if self._pieces else 0))
        going_on = [number for number in everything if not sources[number].passes]
        how = self.mixture.stopping_strategy
        if how == "all_exhausted_without_replacement" or going_on == everything:
            return going_on
        return everything if how == "all_exhausted" and going_on else []

    def _first_totals(self, counts: Mapping[int, Sequence[int]]) -> list[int]:
        """Return what counts as given of each source before its first document.

        The pieces begin at evenly spaced places between two documents, each source in another order. The source with
        the largest share makes up for the others.
        """
        shares, pieces = list(self.mixture.shares.values()), self._pieces
        totals = [0] * len(shares)
        for source in set(counts) - {shares.index(max(shares))}:
            order = np.random.default_rng([self.mixture.seed, source, pieces]).permutation(pieces)
            place = (int(order[self._piece]) + 0.5) / pieces
            totals[source] = round((place - 0.5) * sum(counts[source][:1]) / (1 - shares[source]))
        return totals

    def _take(self, sources: Sequence[_OpenSource], chosen: list[int]) -> pa.Table:
        """Return the chosen documents, with the columns of their sources."""
        numbers = np.array(chosen, dtype=np.int16)
        parts = [source.reader.take(chosen.count(number)) for number, source in enumerate(sources)]
        table = pa.concat_tables(parts).take(np.argsort(np.argsort(numbers, kind="stable")))
        lengths = lengths_of(table)
        table = table.append_column(SOURCE, list_array(np.repeat(numbers, lengths), lengths))
        if self.mixture.reads_again:
            epochs = np.array([each.passes - each.empty_passes for each in sources], dtype=np.int32)[numbers]
            table = table.append_column(SOURCE_EPOCH, list_array(np.repeat(epochs, lengths), lengths))
        return table

    def _end_pass(self, number: int, sources: list[_OpenSource]) -> None:
        """Note that a source has ended, and open it again if it is read again.

        Raises:
            PackingError: nothing counts of all documents of the source.
        """
        source = sources[number]
        if not source.counted:
            self._check_counts(number)
        source.passes += 1
        if number in self._active(sources):
            sources[number] = self._open(
                number, tuple(START), source.passes, source.empty_passes + (not source.documents)
            )

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


def choose(
    shares: Sequence[float], counts: Mapping[int, Sequence[int]], total: list[int], paused: int | None
) -> tuple[list[int], int | None, int | None]:
    """Choose the sources of the next documents, until the documents at hand of a source end.

    After a document that counts nothing, another source is next, so that a source with many such documents in a row
    does not keep the others from their turns.

    Args:
        shares: the share of each source.
        counts: what counts of each document at hand of a source, in their order; empty if the source has ended.
        total: what was counted of each source so far; updated.
        paused: the source whose document was the last, if the document counted nothing; else None.

    Returns:
        The sources of the documents, in order; a source that is due but has ended, or None; and `paused` after them.
    """
    chosen: list[int] = []
    used = dict.fromkeys(counts, 0)

    def due(source: int) -> float:
        following = counts[source][used[source]] if counts[source] else 0
        return (total[source] + following / 2) / shares[source]

    at = {source: due(source) for source in used}
    while len(chosen) < _DOCUMENTS_AT_ONCE:
        source = min(at, key=at.__getitem__)
        if source == paused:
            others = [each for each in at if each != source and counts[each]]
            source = min(others, key=at.__getitem__, default=source)
        if not counts[source]:
            return chosen, source, paused
        counted = counts[source][used[source]]
        paused = None if counted else source
        total[source], used[source] = total[source] + counted, used[source] + 1
        chosen.append(source)
        if used[source] == len(counts[source]):
            break
        at[source] = due(source)
    return chosen, None, paused


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
