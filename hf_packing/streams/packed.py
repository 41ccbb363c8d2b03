"""Pack a stream window by window: read documents, plan them, and yield rows with the place at which to go on.

A window has `window_packs` packs, or more if these have few documents. The emptiest packs of a window are not made:
their documents wait for the next window, at most 32 times. The rows depend only on the documents in their order, the
strategy and `window_packs`. The place in the stream is the start of the window and the number of rows that are out: a
resumed stream reads and plans its window again, and passes over the rows that are out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from hf_packing.columns import INPUT_IDS, LABEL_COLUMNS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Array, BoolArray, IntArray, check_lengths, sums_of, total_of
from hf_packing.planning.permutation import derive_seed
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.windows import (
    WindowPlan,
    WindowSize,
    choose_waiting,
    order_by_cost,
    packs_with_room,
)
from hf_packing.rows.changes import labels_left
from hf_packing.rows.packed_rows import list_array
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import TokenColumns, find_token_columns
from hf_packing.strategies.base import Strategy
from hf_packing.streams.reader import START, DocumentReader, Place, Share, lengths_of
from hf_packing.trees.segments import attention_costs
from hf_packing.upstream import datasets as upstream

_TOKENS_AT_ONCE = 1 << 17
"""Rows are made in blocks of about so many tokens, so that the blocks of many logical streams fit in memory."""

_LEVEL_TOGETHER = 8
"""So many logical streams in a row yield packs of about the same cost in each turn, if packs are ordered by cost."""

Window = dict[str, Any]
"""The start of a window, as plain values and bytes from which its rows can be made again; see `_start_of_window`."""


PlacedRows = Iterator[tuple[pa.Table | None, Window, int]]
"""Rows as tables of one, each with the start of its window, and the number of the window's rows that are out with it;
None in place of a row at the end."""


@dataclass(frozen=True)
class StreamPacking:
    """The way in which the rows of a packed stream are made."""

    packing: Packing
    """How documents become rows."""
    window_packs: int
    schema: pa.Schema
    """Names and types of the documents' token columns, without attention_mask."""
    linear_cost: float | None = None
    """The cost of a token, in units of the cost of a pair of tokens that attend to each other. Neighboring logical
    streams then yield packs of about the same cost in each turn. None to yield packs in the order of the plan."""
    epoch: int | None = None
    """A number that changes the seed of the strategy, so that epochs differ; None for the first epoch."""
    stream: int | None = None
    """The number of the logical stream, which changes the seed of the strategy too; None without logical streams."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that plans windows."""
        return self.packing.strategy

    @cached_property
    def features(self) -> datasets.Features:
        """Names and types of the columns of packed rows."""
        return datasets.Features.from_arrow_schema(self.packing.schema(self.schema))

    def rows(
        self, examples: upstream.Examples, share: Share | None, window: Window | None, rows_out: int
    ) -> PlacedRows:
        """Yield the rows of a stream, or of a share of its shards, from a place on.

        Args:
            examples: the object that reads the documents.
            share: the parts of the shards to read; None to read the stream as it is.
            window: the start of the window to begin with; None for the first.
            rows_out: the number of rows of this window that are out.
        """
        if window is None:
            window = _start_of_window(self.schema.empty_table(), np.zeros(0, np.int8), START, 0, Counter())
        reader = DocumentReader(examples, self.schema, window["place"], share)
        while not reader.ended:
            columns, plan, following = self._plan(reader, window)
            blocks = (rows.table for rows in self.packing.blocks(columns, plan, _TOKENS_AT_ONCE))
            made = (block.slice(number, 1) for block in blocks for number in range(block.num_rows))
            for number, row in enumerate(islice(made, rows_out, None), start=rows_out + 1):
                yield row, window, number
            window, rows_out = following, 0
        yield None, window, 0

    def _plan(self, reader: DocumentReader, window: Window) -> tuple[TokenColumns, PackingPlan, Window]:
        """Read a window and plan it.

        Returns:
            The token columns of its documents, the plan of the packs to make, and the start of the next window.
        """
        waiting = pa.ipc.open_stream(window["waiting"]).read_all()
        counts: Counter[str] = Counter(window["counts"])
        size = WindowSize.of_packs(self.window_packs, self.strategy.largest_capacity)
        tokens, documents = total_of(lengths_of(waiting)), waiting.num_rows
        new = reader.read(max(size.tokens - tokens, 1), size.documents - documents, size.most_tokens - tokens)
        try:
            table = pa.concat_tables([waiting, new])
            columns = find_token_columns(table)
            lengths = check_lengths(columns[INPUT_IDS].length)
            planned = self.plan(columns, lengths, window["number"])
        except PackingError as error:
            raise PackingError(
                f"{error}. Numbers count the documents of a window of the stream: {documents} that have waited, then "
                f"those from document {counts['documents']} on"
            ) from error
        plan = planned.plan
        has_labels = not columns.keys().isdisjoint(LABEL_COLUMNS)
        if has_labels and (labels := labels_left(columns, plan, self.packing.keep_first_labels)) is not None:
            counts["lost_labels"] += labels.documents - labels.left
            if not window["number"]:
                labels.check_some_left("strategy", self.strategy)
        age = np.concatenate([np.frombuffer(window["age"], np.int8), np.zeros(new.num_rows, np.int8)])
        waits = np.zeros(plan.num_packs, dtype=bool) if reader.ended else choose_waiting(planned, age, size)
        made = plan.take_packs(self.order(plan, np.flatnonzero(~waits), counts["packs"]))
        counts.update(
            documents=new.num_rows,
            tokens=total_of(lengths[documents:]),
            packed_tokens=total_of(made.segment_length),
            empty_documents=total_of(lengths[documents:] == 0),
            packs=made.num_packs,
        )
        left, document = _waiting_documents(table, columns, plan, waits)
        return columns, made, _start_of_window(left, age[document] + 1, reader.place, window["number"] + 1, counts)

    def plan(self, columns: TokenColumns, lengths: IntArray, number: int) -> WindowPlan:
        """Return the plan of a window, given the token columns and the lengths of its documents, and its number."""
        strategy = self.strategy
        if self.epoch is not None or self.stream is not None:
            strategy = strategy.with_seed_for(f"epoch {self.epoch}, logical stream {self.stream}")
        if self.packing.fewest_shared is not None:
            plan = replace(self.packing, strategy=strategy.with_seed_for(f"window {number}")).plan(columns)
            return WindowPlan(plan, packs_with_room(plan))
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
        own = plan.segment_own().astype(np.int64)
        work = sums_of(attention_costs(own, plan.segment_length - own), plan.pack_offsets)
        cost = (self.linear_cost * plan.pack_tokens() + work)[packs]
        strategy: Any = self.strategy  # BestFit, since only streams that TokenBudget packs have a linear_cost
        first = derive_seed(strategy.seed, f"turns of group {(self.stream or 0) // _LEVEL_TOGETHER}") % (1 << 20)
        return packs[order_by_cost(cost, turns + first)]

    def __str__(self) -> str:
        names = ", ".join(self.schema.names)
        by_cost = "" if self.linear_cost is None else f", in turns of equal cost with linear_cost={self.linear_cost:g}"
        fewest = self.packing.fewest_shared
        shared = "" if fewest is None else f", with share_prefixes={fewest}"
        windows = f"in windows of {self.window_packs} packs{by_cost}{shared}"
        return f"{self.strategy!r} {windows}, from the columns {names}"


def _start_of_window(waiting: pa.Table, age: IntArray, place: Place, number: int, counts: Counter[str]) -> Window:
    """Return the start of a window as plain values and bytes.

    Args:
        waiting: the documents, and parts of documents, that wait for the window, in the order of the stream.
        age: int8 [waiting documents]: the number of windows for which each document has waited.
        place: where the window's new documents begin in the stream.
        number: the number of the window, from 0.
        counts: what was read and packed before the window.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, waiting.schema) as writer:
        writer.write_table(waiting)
    return {
        "waiting": sink.getvalue().to_pybytes(),
        "age": age.tobytes(),
        "place": place,
        "number": number,
        "counts": dict(counts),
    }


def _waiting_documents(
    documents: pa.Table, columns: TokenColumns, plan: PackingPlan, packs: BoolArray
) -> tuple[pa.Table, Array]:
    """Return the segments of the packs that wait for the next window, as documents, in the order of the stream.

    Args:
        documents: the window's documents.
        columns: their token columns.
        plan: the plan of the window.
        packs: bool [packs]: True for packs that wait.

    Returns:
        A table with a row for each segment, and the index of each segment's document in the window.
    """
    waiting = plan.segments.take(np.flatnonzero(packs[plan.pack_of_segment()]))
    waiting = waiting.take(np.lexsort((waiting.start, waiting.document)))
    arrays = {
        name: list_array(columns[name].gather(waiting), waiting.length)
        if name in columns
        else documents.column(name).take(waiting.document)  # one number for each document
        for name in documents.column_names
    }
    return pa.table(arrays).cast(documents.schema), waiting.document
