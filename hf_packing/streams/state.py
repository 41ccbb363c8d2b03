"""What a packed stream needs to go on: saved with what its rows were made from, so that a state of others is refused.

`datasets` merges a saved state into the state of a stream key by key, also if the keys differ. So the state of a packed
stream has a single key, whose value is a tuple, which is replaced as a whole. It holds plain values and bytes.
"""

from collections.abc import Iterator
from copy import copy
from operator import add
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.streams import upstream
from hf_packing.streams.reader import START, Place

STATE = "packed"
"""The key of the tuple in the state of a packed stream."""

_FORMAT = 4
"""The version of the layout of saved states. A state of another version is refused."""


class MadeFrom(NamedTuple):
    """The facts that the rows of a stream depend on, besides the documents."""

    packing: str
    """The strategy, the size of a window, the columns, and the logical streams; of a mixture, its sources."""
    files: str | None = None
    """A fingerprint of the files of the stream; None before they are read."""


class StatefulExamples(upstream.BaseExamples):  # type: ignore[misc]
    """The base class of objects from which `datasets` reads tables of known types.

    A subclass defines `tables(one_row=False)`, which yields tables, of one row each if asked for, from the place of the
    state on, and notes in the state before each table that its rows are out.
    """

    is_typed = True
    divides_itself = True
    """True since each object decides by itself what `shard_data_sources` divides."""

    @property
    def iter_arrow(self) -> Any:
        return self._iter_arrow

    def _iter_arrow(self) -> Iterator[tuple[int, pa.Table]]:
        yield from enumerate(self.tables())

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, table in enumerate(self.tables(one_row=True)):
            yield number, table.to_pylist()[0]

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict: dict[str, Any] = {STATE: None, "type": type(self).__name__}
        return self._state_dict

    def changed(self, **attributes: Any) -> Self:
        """Return a new object with other values of some attributes, and with a state of its own."""
        new = copy(self)
        new.__dict__.update(attributes, _state_dict=None)
        return new

    @property
    def state(self) -> dict[str, Any]:
        """The state, which changes as tables are read; a new one if `datasets` has not made one."""
        return self._init_state_dict() if self._state_dict is None else self._state_dict


def save(state: dict[str, Any], made_from: MadeFrom, progress: Any) -> None:
    """Write into a state how far a stream has come."""
    state[STATE] = (_FORMAT, tuple(made_from), progress)


def load(state: dict[str, Any], made_from: MadeFrom) -> Any:
    """Return how far the stream has come, according to a state; None if it has not begun.

    Raises:
        PackingError: the state has another format, or its rows were made from something else.
    """
    if state[STATE] is None:
        return None
    version, saved, progress = state[STATE]
    if version != _FORMAT:
        raise PackingError(
            f"state_dict: expected the state of a stream in format {_FORMAT}, got format {version!r}; go on "
            "with the version of hf_packing that saved the state, or start the epoch again without the state"
        )
    packing, files = saved
    if packing != made_from.packing:
        raise PackingError(
            f"state_dict: expected the state of a stream that is made as now, by {made_from.packing}, got the state of "
            f"a stream that was made by {packing}; make the stream as before, or start the epoch again without the "
            "state"
        )
    if files not in (None, made_from.files):
        raise PackingError(
            "dataset: expected the files with which the state was saved, but their names or sizes have changed, or the "
            "state is of the files of another rank or worker, so that the same documents cannot be read again; restore "
            "the files, load the state of this rank or worker, or start the epoch again without the state"
        )
    return progress


class Counts(NamedTuple):
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
        return Counts(*map(add, self, other))


class WindowStart(NamedTuple):
    """Everything that is needed at the start of a window to make its rows again."""

    waiting: pa.Table
    """The documents, and parts of documents, that wait for the window, in the order of the stream."""
    age: npt.NDArray[np.int8]
    """int8 [waiting documents]: the number of windows for which each document has waited."""
    place: Place = START
    """Where the window's new documents begin in the stream."""
    number: int = 0
    """The number of the window, from 0."""
    counts: Counts = Counts()
    """What was read and packed before the window."""
    ended: bool = False
    """True if there is no such window, since the stream has ended."""

    @classmethod
    def first(cls, schema: pa.Schema) -> "WindowStart":
        """Return the start of the first window of documents with these columns."""
        return cls(schema.empty_table(), np.zeros(0, np.int8))

    def saved(self) -> tuple[Any, ...]:
        """Return plain values and bytes, in the order of the fields."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.waiting.schema) as writer:
            writer.write_table(self.waiting)
        waiting, age = sink.getvalue().to_pybytes(), self.age.tobytes()
        return waiting, age, tuple(self.place), self.number, tuple(self.counts), self.ended

    @classmethod
    def load(cls, saved: tuple[Any, ...]) -> "WindowStart":
        """Return the start of the window that `saved` has returned."""
        waiting, age, place, number, counts, ended = saved
        table = pa.ipc.open_stream(waiting).read_all()
        return cls(table, np.frombuffer(age, np.int8), Place(*place), number, Counts(*counts), ended)
