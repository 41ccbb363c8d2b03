"""Mix the documents of several sources, so that each has its share of the tokens, not of the documents.

A document of n tokens is due when its source should have given x + n / 2 tokens, after x tokens that it has given. The
next document is the one that is due first. So the tokens of a source differ from its share by about half a document,
as often above as below, whatever the lengths of its documents are.

A mixture is divided into equal pieces of all sources, and a piece is a mixture of its own: its shares are right, and it
ends when its sources end. The state of a mixture has the place in every source.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.checks import check_choice, check_real, check_seed, check_type
from hf_packing.columns import SOURCE, SOURCE_EPOCH, refuse_columns
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, IntArray, total_of
from hf_packing.rows.changes import describe_changes, warn_of_changes
from hf_packing.rows.packed_rows import list_array
from hf_packing.streams.reader import (
    START,
    DocumentReader,
    Place,
    Source,
    lengths_of,
    open_source,
    shares_of,
)
from hf_packing.streams.state import STATE, StatefulExamples
from hf_packing.upstream import datasets as upstream

StoppingStrategy = Literal["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]

_MOST_SHARDS = 64
_DOCUMENTS_AT_ONCE = 512


def mix(
    streams: Mapping[str, datasets.IterableDataset | datasets.Dataset],
    tokens: Mapping[str, float],
    *,
    stopping_strategy: StoppingStrategy = "first_exhausted",
    seed: int = 0,
) -> datasets.IterableDataset:
    """Mix tokenized streams and datasets so that each has its share of the tokens.

    After every document, the tokens of a source differ from its share by about half a document.
    `datasets.interleave_datasets` draws by documents instead, so that sources with long documents get more tokens than
    their share. The state of the mixture is exact. Other shares count from the next epoch on. Logical streams, ranks
    and workers have mixtures of their own, of equal pieces of all sources; of n together, the tokens of a source differ
    from its share by at most about n documents.

    Args:
        streams: IterableDatasets or Datasets with `input_ids`, by name. All have the same token columns; other columns
            are left out.
        tokens: share of the tokens of each source, by name; positive numbers, which are divided by their sum.
        stopping_strategy: as in `datasets.interleave_datasets`. "first_exhausted" ends the mixture when a source is due
            but has no more documents; "all_exhausted" reads such a source again, its shards in another order, until
            every source was read once; "all_exhausted_without_replacement" goes on with the other sources.
        seed: seed for the order of the shards of sources that are read again.

    Returns:
        IterableDataset with the token columns, and a column `source`: the number of the document's source, for every
        token, so that packed rows have it too. With "all_exhausted", the column `source_epoch` has the number of times
        that the source, or this mixture's piece of it, was read before the document.

    Raises:
        PackingError: the names differ, a share is not positive, a source has no documents or other token columns, or
            a stream has a shuffle buffer. While the mixture is read: all documents of a source are empty, or a loaded
            state is of other shares.

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
    opened = {name: _open_source(name, stream) for name, stream in streams.items()}
    first = next(iter(opened.values()))
    for name, source in opened.items():
        if source.schema.names != first.schema.names:
            raise PackingError(
                f"streams[{name!r}]: expected the token columns {', '.join(first.schema.names)}, as in "
                f"{next(iter(opened))!r}, got {', '.join(source.schema.names)}"
            )
    left_out = list(dict.fromkeys(each for source in opened.values() for each in source.left_out))
    warn_of_changes(describe_changes({}, left_out=left_out), "mix", stacklevel=2)
    examples = [source.examples for source in opened.values()]
    mixed = MixedExamples(examples, shares, first.schema, stopping_strategy, check_seed(seed))
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
    check_type(f"streams[{name!r}]", stream, datasets.IterableDataset, "an IterableDataset or a Dataset")
    source = open_source(f"streams[{name!r}]", stream)
    refuse_columns(
        (SOURCE, SOURCE_EPOCH),
        source.schema.names,
        f"no such column with a number for each token in streams[{name!r}], since the mixture makes a column of this "
        "name; rename the column",
    )
    return source


@dataclass
class _OpenSource:
    """A source of a mixture that is read."""

    reader: DocumentReader
    passes: int = 0
    """The number of times that its documents ended."""
    tokens: int = 0
    """The tokens that it has given."""
    tokens_before: int = 0
    """Those that it had given before this pass."""

    @property
    def place(self) -> tuple[Any, ...]:
        """The place in the source, and the numbers, as plain values."""
        return self.reader.place, self.passes, self.tokens, self.tokens_before


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
        stopping_strategy: StoppingStrategy,
        seed: int,
    ) -> None:
        super().__init__()
        self.ex_iterables, self.shares, self._schema, self._seed = examples, shares, schema, seed
        self._stopping_strategy, self._piece, self._pieces = stopping_strategy, 0, 1

    def __str__(self) -> str:
        shares = ", ".join(f"{name} ({share:.6g})" for name, share in self.shares.items())
        piece = f", piece {self._piece} of {self._pieces}" if self._pieces > 1 else ""
        return f"a mixture of {shares}, {self._stopping_strategy}, seed {self._seed}{piece}"

    @property
    def features(self) -> datasets.Features:
        schema = self._schema.append(pa.field(SOURCE, pa.list_(pa.int16())))
        if self._stopping_strategy == "all_exhausted":
            schema = schema.append(pa.field(SOURCE_EPOCH, pa.list_(pa.int32())))
        return datasets.Features.from_arrow_schema(schema)

    def shuffle_data_sources(self, generator: np.random.Generator) -> "MixedExamples":
        return self.changed(ex_iterables=[upstream.shuffled(each, generator) for each in self.ex_iterables])

    def shard_data_sources(
        self,
        num_shards: int,
        index: int,
        contiguous: bool = True,  # noqa: ARG002  # a piece is divided into pieces of its own
    ) -> "MixedExamples":
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
        places, rows_out = self.progress(self._state_dict, made_from) or ([(START,)] * len(self.shares), 0)
        sources = [self._open(number, *place) for number, place in enumerate(places)]
        while active := self._active(sources):
            begin = [source.place for source in sources]
            chosen, due = self._choose(sources, active)
            mixed = self._take(sources, chosen)
            rows = 1 if one_row else max(len(chosen), 1)
            for first in range(rows_out, len(chosen), rows):
                self._state_dict[STATE] = (*made_from, (begin, first + rows))
                yield mixed.slice(first, rows)
            rows_out = 0
            if due is not None:
                self._end_pass(due, sources)
        self._state_dict[STATE] = (*made_from, ([source.place for source in sources], 0))

    def _open(self, number: int, place: Place, passes: int = 0, *tokens: int) -> _OpenSource:
        """Return a source at a place, where the mixture stands.

        In every pass, a source is read in another order, and a piece of the mixture reads the next piece of the source.
        """
        examples = upstream.copied(self.ex_iterables[number])  # two sources may be the same stream
        order, share = np.random.default_rng([self._seed, passes]), None
        if self._pieces > 1:
            share = shares_of(self.ex_iterables[number], self._pieces)[(self._piece + passes) % self._pieces]
            if passes:
                share = tuple(share[part] for part in order.permutation(len(share)))
        elif passes:
            examples = upstream.shuffled(examples, order)
        return _OpenSource(DocumentReader(examples, self._schema, place, share), passes, *tokens)

    def _active(self, sources: Sequence[_OpenSource]) -> list[int]:
        """Return the sources that still have documents for the mixture; none if the mixture has ended."""
        everything = list(range(len(sources) if self._pieces else 0))
        unread = [number for number in everything if not sources[number].passes]
        if self._stopping_strategy == "all_exhausted_without_replacement" or unread == everything:
            return unread
        return everything if self._stopping_strategy == "all_exhausted" and unread else []

    def _choose(self, sources: Sequence[_OpenSource], active: Sequence[int]) -> tuple[IntArray, int | None]:
        """Choose the sources of the next documents, until the documents at hand of a source end.

        Returns:
            The source of each document, int16 [documents]; and a source that is due but has ended, or None.
        """
        due_at, shares = [], list(self.shares.values())
        for number in active:
            source = sources[number]
            lengths = lengths_of(source.reader.at_hand().slice(0, _DOCUMENTS_AT_ONCE))
            if source.reader.ended:
                lengths = np.zeros(1, np.int64)  # stands for the end
            due_at.append((source.tokens + np.cumsum(lengths) - lengths / 2) / shares[number])
        numbers = np.repeat(np.array(active, np.int16), [*map(len, due_at)])
        numbers = numbers[np.argsort(np.concatenate(due_at), kind="stable")]
        last = min(int(np.flatnonzero(numbers == number)[-1]) for number in active)
        if sources[numbers[last]].reader.ended:
            return numbers[:last], int(numbers[last])
        return numbers[: last + 1], None

    def _take(self, sources: Sequence[_OpenSource], chosen: IntArray) -> pa.Table:
        """Return documents of the chosen sources, with the columns of their sources."""
        parts = []
        for source, documents in zip(sources, np.bincount(chosen, minlength=len(sources)).tolist(), strict=True):
            parts.append(source.reader.take(documents))
            source.tokens += total_of(lengths_of(parts[-1]))
        table = pa.concat_tables(parts).take(np.argsort(np.argsort(chosen, kind="stable")))
        lengths = lengths_of(table)
        made: dict[str, Array] = {SOURCE: chosen}
        if self._stopping_strategy == "all_exhausted":
            made[SOURCE_EPOCH] = np.array([source.passes for source in sources], np.int32)[chosen]
        for name, values in made.items():
            table = table.append_column(name, list_array(np.repeat(values, lengths), lengths))
        return table

    def _end_pass(self, number: int, sources: list[_OpenSource]) -> None:
        """Note that a source has ended, and open it again if it is read again.

        Raises:
            PackingError: all documents of the source are empty, in all pieces of it; or in this piece, if the mixture
                ends with the source.
        """
        source = sources[number]
        if source.tokens == source.tokens_before:
            documents = DocumentReader(upstream.copied(self.ex_iterables[number]), self._schema).read(1, 0, 1)
            if not lengths_of(documents).any():
                raise PackingError(
                    f"streams[{list(self.shares)[number]!r}]: expected documents with tokens, got {len(documents)} "
                    "documents without; leave the source out"
                )
            if self._stopping_strategy == "first_exhausted" and self._pieces > 1:
                raise PackingError(
                    f"streams[{list(self.shares)[number]!r}]: expected a document for each of {self._pieces} logical "
                    "streams, ranks or workers, since each reads a piece of the mixture that ends with the first of "
                    "its sources, got a piece without. Pass fewer logical streams, or another stopping_strategy"
                )
        source.passes += 1
        if number in self._active(sources):
            sources[number] = self._open(number, START, source.passes, source.tokens, source.tokens)


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
