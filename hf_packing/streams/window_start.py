"""What has to be known at the start of a window to make its rows again: saved in the state of a packed stream."""

from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import list_array
from hf_packing.rows.token_columns import TokenColumns
from hf_packing.streams.document_reader import Place

SavedWindow = tuple[Any, ...]
"""The start of a window as plain values and bytes, in the order of the fields."""


@dataclass(frozen=True)
class Counts:
    """Counts of what a stream has read and packed so far."""

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    dropped_tokens: int = 0
    packs: int = 0
    splits: int = 0
    """How many shared prefixes ended early, since values of tokens other than input_ids differ; counted in each window
    anew, so documents that wait for the next window may count again."""
    lost_labels: int = 0
    """The labels other than -100 among the dropped tokens."""

    def plus(self, other: "Counts") -> "Counts":
        """Return the sums of the counts."""
        return Counts(*(a + b for a, b in zip(self.as_tuple(), other.as_tuple(), strict=True)))

    def as_tuple(self) -> tuple[int, ...]:
        """Return the counts in the order of the fields."""
        return astuple(self)


@dataclass(frozen=True)
class WindowStart:
    """The start of a window of a stream."""

    place: Place
    """Where the window's new documents begin in the stream."""
    waiting: pa.Table
    """The documents, and parts of documents, that wait for the window, in the order of the stream."""
    age: npt.NDArray[np.int8]
    """int8 [waiting documents]: the number of windows for which each document has waited."""
    number: int = 0
    """The number of the window, from 0."""
    counts: Counts = field(default_factory=Counts)
    """What was read and packed before the window."""
    ended: bool = False
    """True if there is no such window, since the stream has ended."""
    given: tuple[tuple[Any, ...], ...] = ()
    """What mixtures had given when the window was read; see `mixtures_in.py`."""

    def save(self) -> SavedWindow:
        """Return the start of the window as plain values and bytes."""
        sink = pa.BufferOutputStream()
        if self.waiting.num_rows:
            with pa.ipc.new_stream(sink, self.waiting.schema) as writer:
                writer.write_table(self.waiting)
        waiting = sink.getvalue().to_pybytes()
        return (*self.place, waiting, self.age.tobytes(), self.number, self.counts.as_tuple(), self.ended, self.given)

    @classmethod
    def load(cls, saved: SavedWindow | None, schema: pa.Schema) -> "WindowStart":
        """Return the start of the window that `save` has saved; the start of the stream if `saved` is None.

        Args:
            saved: the result of `save`.
            schema: names and types of the documents' columns.
        """
        if saved is None:
            return cls(Place(None, 0), schema.empty_table(), np.zeros(0, np.int8))
        source, passed, waiting, age, number, counts, ended, given = saved
        table = pa.ipc.open_stream(waiting).read_all() if waiting else schema.empty_table()
        known = Place(source, passed), table, np.frombuffer(age, np.int8), number
        return cls(*known, Counts(*counts), ended, given)


def waiting_documents(
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
