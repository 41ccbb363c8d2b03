"""Pack a stream window by window, as an object that `datasets` reads examples from.

A window has `window_packs` packs, or more if these have few documents. The emptiest packs of a window are not made:
their documents wait for the next window, at most four times. The rows depend only on the documents in their order, the
strategy and `window_packs`. The state of the stream is the start of the window and the number of rows that are out: a
resumed stream reads and plans its window again, and passes over the rows that are out.
"""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_lengths, sums_of
from hf_packing.planning.permutation import derive_key
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.windows import (
    WindowPlan,
    WindowSize,
    choose_waiting,
    order_by_cost,
    packs_with_room,
)
from hf_packing.rows.changes import describe_changes, labels_left
from hf_packing.rows.packed_rows import list_array
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import TokenColumns, blocks_of_rows, find_token_columns
from hf_packing.strategies.base import Strategy
from hf_packing.streams import upstream
from hf_packing.streams.mix import mixtures_in
from hf_packing.streams.reader import DocumentReader, lengths_of
from hf_packing.streams.shards import Share, fingerprint_of_files
from hf_packing.streams.state import Counts, MadeFrom, StatefulExamples, WindowStart, load, save

_TOKENS_AT_ONCE = 1 << 17
"""Rows are made in blocks of about so many tokens, so that the blocks of many logical streams fit in memory."""

_LEVEL_TOGETHER = 8
"""So many logical streams in a row yield packs of about the same cost in each turn, if packs are ordered by cost."""


@dataclass(frozen=True)
class StreamPacking:
    """The way in which the rows of a packed stream are made."""

    packing: Packing
    """How documents become rows."""
    window_packs: int
    schema: pa.Schema
    """Names and types of the documents' token columns, without attention_mask."""
    epoch: int | None = None
    """A number that changes the seed of the strategy, so that epochs differ; None for the first epoch."""
    stream: int | None = None
    """The number of the logical stream, which changes the seed of the strategy too."""
    linear_cost: float | None = None
    """The cost of a token, in units of the cost of a pair of tokens that attend to each other. Neighboring logical
    streams then yield packs of about the same cost in each turn. None to yield packs in the order of the plan."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that plans windows."""
        return self.packing.strategy

    @cached_property
    def features(self) -> datasets.Features:
        """Names and types of the columns of packed rows."""
        return datasets.Features.from_arrow_schema(self.packing.schema(self.schema))

    def plan(self, columns: TokenColumns, lengths: IntArray, number: int) -> WindowPlan:
        """Return the plan of a window, given the token columns and the lengths of its documents, and its number."""
        strategy = self.strategy
        if self.epoch is not None or self.stream is not None:
            strategy = strategy.with_seed_for(f"epoch {self.epoch}, logical stream {self.stream}")
        if self.packing.fewest_shared is not None:
            plan, splits = replace(self.packing, strategy=strategy.with_seed_for(f"window {number}")).plan(columns)
            return WindowPlan(plan, packs_with_room(plan), splits=sum(splits.values()))
        return strategy.plan_window(lengths, number)

    def order(self, plan: PackingPlan, packs: IntArray, turns: int) -> IntArray:
        """Return the order in which packs of a window come out.

        Args:
            plan: the plan of the window.
            packs: int64 [packs]: indices of the packs that come out.
            turns: number of packs that came out of the windows before.
        """
        if self.linear_cost is None or not len(packs):
            return packs
        squares = plan.segment_length.astype(np.int64) ** 2
        if plan.segment_shared is not None:
            squares -= plan.segment_shared.astype(np.int64) ** 2
        cost = (self.linear_cost * plan.pack_tokens() + sums_of(squares, plan.pack_offsets))[packs]
        seed = getattr(self.strategy, "seed", None) or 0
        key = derive_key(seed, f"turns of group {(self.stream or 0) // _LEVEL_TOGETHER}")
        return packs[order_by_cost(cost, turns + int(key % np.uint64(1 << 20)))]

    def for_epoch(self, generator: np.random.Generator) -> "StreamPacking":
        """Return the packing of an epoch, given the random generator that `datasets` makes for the epoch."""
        return replace(self, epoch=int(deepcopy(generator).integers(2**63)))

    def __str__(self) -> str:
        names = ", ".join(self.schema.names)
        by_cost = "" if self.linear_cost is None else f", in turns of equal cost with linear_cost={self.linear_cost:g}"
        fewest = self.packing.fewest_shared
        shared = "" if fewest is None else f", with share_prefixes={fewest}"
        windows = f"in windows of {self.window_packs} packs{by_cost}{shared}"
        return f"{self.strategy!r} {windows}, from the columns {names}"


class PackedExamples(StatefulExamples):
    """The packed rows of a stream, for an IterableDataset.

    Args:
        examples: the object that reads the documents.
        packing: how rows are made.
        share: the parts of the source's shards to read; None to read the source as it is.
    """

    def __init__(self, examples: upstream.Examples, packing: StreamPacking, share: Share | None = None) -> None:
        super().__init__()
        self.ex_iterable, self.packing, self._share = examples, packing, share
        self.counts = Counts()
        """What was read and packed, once all rows are out."""

    @property
    def features(self) -> datasets.Features:
        return self.packing.features

    def shuffle_data_sources(self, generator: np.random.Generator) -> Self:
        return self.changed(
            ex_iterable=upstream.shuffled(self.ex_iterable, generator), packing=self.packing.for_epoch(generator)
        )

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Self:
        return self.changed(ex_iterable=upstream.sharded(self.ex_iterable, num_shards, index, contiguous))

    def reshard_data_sources(self) -> Self:
        return self.changed(ex_iterable=self.ex_iterable.reshard_data_sources())

    @property
    def num_shards(self) -> int:
        return upstream.num_shards(self.ex_iterable)

    def tables(self, one_row: bool = False) -> Iterator[pa.Table]:
        state, made_from = self.state, MadeFrom(str(self.packing))
        if self.packing.stream is None:
            made_from = MadeFrom(made_by(self.packing, self.ex_iterable), fingerprint_of_files(self.ex_iterable))
        start, rows_out = WindowStart.first(self.packing.schema), 0
        if (saved := load(state, made_from)) is not None:
            window, rows_out = saved
            start = WindowStart.load(window)
        reader = DocumentReader(self.ex_iterable, self.packing.schema, start.place, self._share)
        while not start.ended:
            columns, plan, following = self._plan(reader, start)
            here = start.saved()
            save(state, made_from, (here, rows_out))
            left = plan.pack_tokens()[rows_out:]
            for first, end in [(rows_out + a, rows_out + b) for a, b in blocks_of_rows(left, _TOKENS_AT_ONCE)]:
                table = self.packing.packing.rows(columns, plan, np.arange(first, end)).table
                rows = 1 if one_row else table.num_rows
                for begin in range(0, table.num_rows, rows):
                    save(state, made_from, (here, first + begin + rows))
                    yield table.slice(begin, rows)
            start, rows_out = following, 0
        save(state, made_from, (start.saved(), 0))
        self.counts = start.counts
        if self.packing.stream is None:
            warn_of_losses(self.counts, self.packing.strategy)

    def _plan(self, reader: DocumentReader, start: WindowStart) -> tuple[Any, PackingPlan, WindowStart]:
        """Read a window and plan it.

        Returns:
            The token columns of its documents, the plan of the packs to make, and the start of the next window.
        """
        schema = self.packing.schema
        size = WindowSize.of_packs(self.packing.window_packs, self.packing.strategy.largest_capacity)
        tokens, documents = int(lengths_of(start.waiting).sum()), start.waiting.num_rows
        new = reader.read(max(size.tokens - tokens, 1), size.documents - documents, size.most_tokens - tokens)
        try:
            columns = find_token_columns(pa.concat_tables([start.waiting, new]))
            lengths = check_lengths(columns[INPUT_IDS].length)
            window = self.packing.plan(columns, lengths, start.number)
        except PackingError as error:
            raise PackingError(
                f"{error}. Numbers count the documents of a window of the stream: {documents} that have waited, then "
                f"those from document {start.counts.documents} on"
            ) from error
        age = np.concatenate([start.age, np.zeros(new.num_rows, np.int8)])
        plan, waits = window.plan, np.zeros(window.plan.num_packs, dtype=bool)
        labels = labels_left(columns, plan)
        if labels is not None and not start.number:
            labels.check_some_left("strategy", self.packing.strategy)
        if not reader.ended:
            plan, waits = choose_waiting(window, age, size)
        waiting, document = _waiting_documents(columns, plan, waits, schema)
        new_lengths = lengths[start.waiting.num_rows :]
        packed = int(plan.segment_length.sum(dtype=np.int64))
        counts = Counts(
            documents=new.num_rows,
            tokens=int(new_lengths.sum(dtype=np.int64)),
            empty_documents=int((new_lengths == 0).sum()),
            dropped_tokens=int(lengths.sum(dtype=np.int64)) - packed,
            packs=int((~waits).sum()),
            splits=window.splits,
            lost_labels=0 if labels is None else labels.documents - labels.left,
        )
        following = WindowStart(
            place=reader.place,
            waiting=waiting,
            age=age[document] + np.int8(1),
            number=start.number + 1,
            counts=start.counts.plus(counts),
            ended=reader.ended,
        )
        order = self.packing.order(plan, np.flatnonzero(~waits), start.counts.packs)
        return columns, plan.take_packs(order), following


def warn_of_losses(counts: Counts, strategy: Strategy) -> None:
    """Warn of what packing did to the documents of a stream that has ended."""
    facts = {
        "strategy": repr(strategy),
        "tokens": counts.tokens,
        "packed_tokens": counts.tokens - counts.dropped_tokens,
        "lost_labels": counts.lost_labels,
        "empty_documents": counts.empty_documents,
        "splits": {"other columns": counts.splits} if counts.splits else {},
    }
    for change in describe_changes(facts, of=" of a stream"):
        warnings.warn(f"pack {change}", stacklevel=2)


def _waiting_documents(
    columns: TokenColumns, plan: PackingPlan, packs: npt.NDArray[np.bool_], schema: pa.Schema
) -> tuple[pa.Table, npt.NDArray[Any]]:
    """Return the segments of the packs that wait for the next window, as documents, in the order of the stream.

    Args:
        columns: token columns of the window's documents.
        plan: the plan of the window.
        packs: bool [packs]: True for packs that wait.
        schema: names and types of the documents' columns.

    Returns:
        A table with a row for each segment, and the index of each segment's document in the window.
    """
    kept = np.flatnonzero(packs[plan.pack_of_segment()])
    kept = kept[np.lexsort((plan.segment_start[kept], plan.segment_document[kept]))]
    document, start, length = (each[kept] for each in (plan.segment_document, plan.segment_start, plan.segment_length))
    arrays = {
        name: list_array(columns[name].gather(document, start, length), length, pa.types.is_large_list(kind))
        for name, kind in zip(schema.names, schema.types, strict=True)
    }
    return pa.table(arrays).cast(schema), document


def made_by(packing: StreamPacking, examples: upstream.Examples) -> str:
    """Return a text that says what the rows are made of: the packing, and the mixtures that the source reads."""
    return ", from ".join(map(str, [packing, *mixtures_in(examples)]))
