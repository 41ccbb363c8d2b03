"""Mix the documents of several sources, so that each has its share of the tokens, not of the documents.

A document of n tokens is due when its source should have given x + n / 2 tokens, after x tokens that it has given. The
next document is the one that is due first. So the tokens of a source differ from its share by about half a document,
as often above as below, whatever the lengths of its documents are.

A mixture is divided into equal pieces of all sources, and a piece is a mixture of its own: its shares are right, and it
ends when its sources end. Pieces begin at different places between two documents, so that their differences cancel.
The state of a mixture has the place in every source.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.checks import check_choice, check_real, check_seed
from hf_packing.columns import IGNORED_LABEL, SOURCE, SOURCE_EPOCH
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Pieces, offsets_of, sums_of
from hf_packing.rows.changes import describe_changes
from hf_packing.rows.packed_rows import list_array, read_labels
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.streams import upstream
from hf_packing.streams.reader import (
    START,
    DocumentReader,
    Place,
    Source,
    equal_shares,
    lengths_of,
    open_source,
    sizes_of_shards,
)
from hf_packing.streams.state import STATE, StatefulExamples

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
    read = [source.examples for source in opened.values()]
    mixed = MixedExamples(read, shares, first.schema, count, stopping_strategy, check_seed(seed))
    return datasets.IterableDataset(mixed, info=datasets.DatasetInfo(features=mixed.features))


def _check_shares(streams: Any, tokens: Any) -> dict[str, float]:
    """Return the shares of the sources, in the order of the sources, with the sum 1."""
    if not isinstance(streams, Mapping) or not streams:
        raise PackingError(f"streams: expected a dict of streams, at least one, got {type(streams).__name__}")
    if not isinstance(tokens, Mapping) or set(tokens) != set(streams):
        raise PackingError(f"tokens: expected a share for each of {', '.join(map(str, streams))}, got {tokens!r}")
    limits = sys.float_info.min, sys.float_info.max
    shares = {name: check_real(f"tokens[{name!r}]", tokens[name], *limits, "a positive number") for name in streams}
    return {name: share / sum(shares.values()) for name, share in shares.items()}


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

    @property
    def place(self) -> tuple[Any, ...]:
        """The place in the source, and the numbers, as plain values."""
        return self.reader.place, self.passes, self.empty_passes, self.documents, self.counted


class MixedExamples(StatefulExamples):
    """The documents of several sources, mixed, for an IterableDataset.

    Args:
        examples: the objects that read the sources.
        shares: the share of the tokens of each source, by name; the sum is 1.
        schema: names and types of the token columns of all sources.

    A piece of it has the number `_piece`, of `_pieces` equal pieces of all sources; of 0 pieces, nothing is read.
    """

    def __init__(
        self,
        examples: list[upstream.Examples],
        shares: Mapping[str, float],
        schema: pa.Schema,
        count: Count,
        stopping_strategy: StoppingStrategy,
        seed: int,
    ) -> None:
        super().__init__()
        self.ex_iterables, self.shares, self._schema, self._seed = examples, shares, schema, seed
        self._count, self._stopping_strategy = count, stopping_strategy
        self._piece, self._pieces = 0, 1

    def __str__(self) -> str:
        shares = ", ".join(f"{name} ({share:.6g})" for name, share in self.shares.items())
        piece = f", piece {self._piece} of {self._pieces}" if self._pieces > 1 else ""
        return f"a mixture of {shares} by {self._count}, {self._stopping_strategy}, seed {self._seed}{piece}"

    @property
    def features(self) -> datasets.Features:
        schema = self._schema.append(pa.field(SOURCE, pa.list_(pa.int16())))
        if self._stopping_strategy == "all_exhausted":
            schema = schema.append(pa.field(SOURCE_EPOCH, pa.list_(pa.int32())))
        return datasets.Features.from_arrow_schema(schema)

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

    def tables(self, one_row: bool = False) -> Iterator[pa.Table]:
        made_from = self.made_from()
        places, total, paused, rows_out = self.progress(made_from) or ([(START,)] * len(self.shares), None, None, 0)
        sources = [self._open(number, *place) for number, place in enumerate(places)]
        while active := self._active(sources):
            counts = {}
            for number in active:
                documents = sources[number].reader.at_hand().slice(0, _DOCUMENTS_AT_ONCE)
                counts[number] = self._counts(number, documents, sources[number].documents).tolist()
            before = total or self._first_totals(counts)
            begin, total = ([source.place for source in sources], before, paused), list(before)
            chosen, due, paused = choose(list(self.shares.values()), counts, total, paused)
            mixed = self._take(sources, chosen)
            rows = 1 if one_row else max(len(chosen), 1)
            for first in range(rows_out, len(chosen), rows):
                self._state_dict[STATE] = (*made_from, (*begin, first + rows))
                yield mixed.slice(first, rows)
            rows_out = 0
            for number in active:
                sources[number].counted += total[number] - before[number]
            if due is not None:
                self._end_pass(due, sources)
        self._state_dict[STATE] = (*made_from, ([source.place for source in sources], total, paused, 0))

    def _counts(self, number: int, documents: pa.Table, first: int) -> npt.NDArray[np.int64]:
        """Return what counts of each document, int64 [documents]: all tokens, or those that are trained on.

        Args:
            number: the number of the source.
            documents: documents of the source.
            first: the number of the first document in the source.
        """
        lengths = lengths_of(documents)
        if self._count == "tokens":
            return lengths
        try:
            columns = find_token_columns(documents)
        except PackingError as error:
            raise PackingError(
                f"streams[{list(self.shares)[number]!r}]: {error}. Rows are counted from document {first} of the source"
            ) from error
        labels = read_labels(columns, Pieces.whole(lengths), np.zeros(int(lengths.sum()), np.int32))
        return lengths if labels is None else sums_of(labels != IGNORED_LABEL, offsets_of(lengths))

    def _open(self, number: int, place: Place, passes: int = 0, *counts: int) -> _OpenSource:
        """Return a source at a place, where the mixture stands.

        In every pass, a source is read in another order, and a piece of the mixture reads the next piece of the source.
        """
        examples = upstream.copied(self.ex_iterables[number])  # two sources may be the same stream
        order, share = np.random.default_rng([self._seed, passes]), None
        if self._pieces > 1:
            shares = equal_shares(sizes_of_shards(examples), self._pieces)
            share = shares[(self._piece + passes) % self._pieces]
            if passes:
                share = tuple(share[part] for part in order.permutation(len(share)))
        elif passes:
            examples = upstream.shuffled(examples, order)
        return _OpenSource(DocumentReader(examples, self._schema, place, share), passes, *counts)

    def _active(self, sources: Sequence[_OpenSource]) -> list[int]:
        """Return the sources that still have documents for the mixture; none if the mixture has ended."""
        everything = list(range(len(sources) if self._pieces else 0))
        unread = [number for number in everything if not sources[number].passes]
        if self._stopping_strategy == "all_exhausted_without_replacement" or unread == everything:
            return unread
        return everything if self._stopping_strategy == "all_exhausted" and unread else []

    def _first_totals(self, counts: Mapping[int, Sequence[int]]) -> list[int]:
        """Return what counts as given of each source before its first document.

        The pieces begin at evenly spaced places between two documents, each source in another order. The source with
        the largest share makes up for the others.
        """
        shares, pieces = list(self.shares.values()), self._pieces
        totals = [0] * len(shares)
        for source in set(counts) - {shares.index(max(shares))}:
            order = np.random.default_rng([self._seed, source, pieces]).permutation(pieces)
            place = (int(order[self._piece]) + 0.5) / pieces
            totals[source] = round((place - 0.5) * sum(counts[source][:1]) / (1 - shares[source]))
        return totals

    def _take(self, sources: Sequence[_OpenSource], chosen: list[int]) -> pa.Table:
        """Return the chosen documents, with the columns of their sources."""
        numbers = np.array(chosen, dtype=np.int16)
        parts = []
        for source, documents in zip(sources, np.bincount(numbers, minlength=len(sources)).tolist(), strict=True):
            parts.append(source.reader.take(documents))
            source.documents += documents
        table = pa.concat_tables(parts).take(np.argsort(np.argsort(numbers, kind="stable")))
        lengths = lengths_of(table)
        made: dict[str, npt.NDArray[Any]] = {SOURCE: numbers}
        if self._stopping_strategy == "all_exhausted":
            made[SOURCE_EPOCH] = np.array([each.passes - each.empty_passes for each in sources], np.int32)[numbers]
        for name, values in made.items():
            table = table.append_column(name, list_array(np.repeat(values, lengths), lengths))
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
            sources[number] = self._open(number, START, source.passes, source.empty_passes + (not source.documents))

    def _check_counts(self, number: int) -> None:
        """Refuse a source of whose documents nothing counts, in any piece of it."""
        reader, documents = DocumentReader(upstream.copied(self.ex_iterables[number]), self._schema), 0
        while rows := (table := reader.at_hand()).num_rows:
            if self._counts(number, table, documents).any():
                return
            documents += rows
            reader.take(rows)
        raise PackingError(
            f"streams[{list(self.shares)[number]!r}]: expected documents with tokens to count, as "
            f"count={self._count!r} says, got {documents} documents without; leave the source out"
        )


def choose(
    shares: Sequence[float], counts: Mapping[int, list[int]], total: list[int], paused: int | None
) -> tuple[list[int], int | None, int | None]:
    """Choose the sources of the next documents, until the documents at hand of a source end.

    After a document that counts nothing, another source is next, so that a source with many such documents in a row
    does not keep the others from their turns.

    Args:
        shares: the share of each source.
        counts: what counts of each document at hand of a source, in their order, without those that are chosen; empty
            if the source has ended.
        total: what was counted of each source so far; updated.
        paused: the source whose document was the last, if the document counted nothing; else None.

    Returns:
        The sources of the documents, in order; a source that is due but has ended, or None; and `paused` after them.
    """
    chosen: list[int] = []

    def due(source: int) -> float:
        return (total[source] + sum(counts[source][:1]) / 2) / shares[source]

    at = {source: due(source) for source in counts}
    while len(chosen) < _DOCUMENTS_AT_ONCE:
        source = min(at, key=at.__getitem__)
        if source == paused:
            others = [each for each in at if each != source and counts[each]]
            source = min(others, key=at.__getitem__, default=source)
        if not counts[source]:
            return chosen, source, paused
        counted = counts[source].pop(0)
        total[source] += counted
        paused = None if counted else source
        chosen.append(source)
        if not counts[source]:
            break
        at[source] = due(source)
    return chosen, None, paused


def mixtures_in(examples: upstream.Examples) -> list[MixedExamples]:
    """Return the mixtures that an object reads."""
    if isinstance(examples, MixedExamples):
        return [examples]
    return [mixture for each in upstream.inner(examples) for mixture in mixtures_in(each)]


def piece_of(examples: upstream.Examples, number: int, of: int) -> upstream.Examples | None:
    """Return a new object that reads one of so many pieces of a mixture, also through `map` and the like.

    The result is None if an object reads something else than pieces of one mixture.
    """
    if isinstance(examples, MixedExamples):
        return examples.piece(number, of)
    inside = getattr(examples, "ex_iterable", None)
    if inside is None or upstream.depends_on_places(examples) or (piece := piece_of(inside, number, of)) is None:
        return None
    around = copy(examples)
    around.ex_iterable = piece
    return around
