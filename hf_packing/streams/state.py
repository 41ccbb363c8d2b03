"""What a stream that this package makes needs to go on: saved with what its rows were made from.

`datasets` merges a saved state into the state of a stream key by key, also if the keys differ. So our state has one
key, whose value is a tuple, which is replaced as a whole: the version of the layout, a text that says what the rows
were made of, a fingerprint of the files, and how far the stream has come. It holds plain values and bytes.
"""

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, Self

import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.planning.permutation import shuffles_of_numpy
from hf_packing.streams.reader import fingerprint_of_files
from hf_packing.upstream import datasets as upstream

STATE = "packed"
"""The key of the tuple in the state of a stream."""

_FORMAT = 7
"""The version of the layout of saved states. A state of another version is refused."""


def _version() -> str:
    """Return the version of the layout, and how NumPy shuffles the documents of a window."""
    return f"{_FORMAT}, with shuffles {shuffles_of_numpy()} of NumPy"


class StatefulExamples(upstream.BaseExamples):  # type: ignore[misc]
    """The base class of objects from which `datasets` reads tables of known types.

    A subclass defines `tables`, and `__str__`, which says what the rows are made of, besides the documents.
    """

    is_typed = True
    divides_itself = True
    """True since each object decides by itself what `shard_data_sources` divides."""

    tables: Callable[..., Iterator[pa.Table]]
    """Yields tables of rows from the place of the state on; with one_row=True, of one row each. Before each table, the
    state says that its rows are out."""

    def iter_arrow(self) -> Iterator[tuple[int, pa.Table]]:
        yield from enumerate(self.tables())

    def _iter_arrow(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield tables of one row: `datasets` makes rows of these, and may save a state between any two."""
        yield from enumerate(self.tables(one_row=True))

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, table in enumerate(self.tables(one_row=True)):
            yield number, table.to_pylist()[0]

    def _init_state_dict(self) -> dict[str, Any]:
        # Without the files, which are not looked at before they are read; `map` reads its first batch again from here.
        self._state_dict: dict[str, Any] = {STATE: (_version(), str(self), None, None), "type": type(self).__name__}
        return self._state_dict

    def changed(self, **attributes: Any) -> Self:
        """Return a new object with other values of some attributes, and with a state of its own."""
        new = copy(self)
        new.__dict__.update(attributes)
        new._init_state_dict()
        return new

    def made_from(self) -> tuple[str, str, str]:
        """Return the facts that the rows depend on, besides the documents; a saved state begins with them."""
        return _version(), str(self), fingerprint_of_files(self)

    def progress(self, state: dict[str, Any], made_from: tuple[str, str, str]) -> Any:
        """Return how far the stream has come, according to a state; None if it has not begun.

        Args:
            state: the state.
            made_from: what `made_from()` has returned.

        Raises:
            PackingError: the state has another format, or its rows were made from something else.
        """
        if state[STATE] is None:
            return None
        version_now, made_of_now, files_now = made_from
        version, *saved = state[STATE]
        if version != version_now:
            raise PackingError(
                f"state_dict: expected the state of a stream in format {version_now}, got format {version}; go on with "
                "the versions of hf_packing and NumPy that saved the state, or start the epoch again without the state"
            )
        made_of, files, progress = saved
        if made_of != made_of_now:
            raise PackingError(
                f"state_dict: expected the state of a stream that is made as now, by {made_of_now}, got the state of "
                f"a stream that was made by {made_of}; make the stream as before, or start the epoch again without the "
                "state (with ignore_data_skip=True in a trainer)"
            )
        if files not in (None, files_now):
            raise PackingError(
                "dataset: expected the files with which the state was saved, but their names or sizes have changed, or "
                "the state is of the files of another rank or worker, so that the same documents cannot be read again; "
                "restore the files, load the state of this rank or worker, or start the epoch again without the state"
            )
        return progress
