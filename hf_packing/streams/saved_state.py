"""Save what a packed stream needs to go on, with what its rows were made from, and refuse a state of other rows.

`datasets` merges a saved state into the state of a stream key by key, also if the keys differ. So the state of a packed
stream has a single key, whose value is a tuple, which is replaced as a whole.
"""

from typing import Any, NamedTuple

from hf_packing.errors import PackingError

STATE = "packed"
"""The key of the tuple in the state of a packed stream."""

_FORMAT = 2
"""The version of the layout of saved states. A state of another version is refused."""


class MadeFrom(NamedTuple):
    """The facts that the rows of a stream depend on, besides the documents."""

    packing: str
    """The strategy, the size of a window, and the columns; of a mixture, its sources."""
    streams: int | None
    """The number of logical streams; None if the stream is not divided."""
    files: str
    """A fingerprint of the files of the stream; empty if it is not read from files."""


def new_state(kind: type) -> dict[str, Any]:
    """Return the state of a stream that has not begun."""
    return {STATE: None, "type": kind.__name__}


def save(state: dict[str, Any], made_from: MadeFrom, progress: Any) -> None:
    """Write into a state how far a stream has come.

    Args:
        state: the state of the stream.
        made_from: what the rows depend on.
        progress: how far the stream has come.
    """
    state[STATE] = (_FORMAT, tuple(made_from), progress)


def load(state: dict[str, Any], made_from: MadeFrom) -> Any:
    """Return how far the stream has come, according to a state; None if it has not begun.

    Args:
        state: the state of the stream.
        made_from: what the rows depend on now.

    Raises:
        PackingError: the state has another format, or its rows were made from something else.
    """
    if state[STATE] is None:
        return None
    version, *rest = state[STATE]
    if version != _FORMAT or len(rest) != 2:
        raise PackingError(
            f"state_dict: expected the state of a stream in format {_FORMAT}, got format {version!r}; go on "
            "with the version of hf_packing that saved the state, or start the epoch again without the state"
        )
    saved, progress = MadeFrom(*rest[0]), rest[1]
    if saved.streams != made_from.streams:
        raise PackingError(
            f"streams: expected {saved.streams}, as when the state was saved, got {made_from.streams}; pass "
            f"streams={saved.streams} to pack, or start the epoch again without the state"
        )
    if saved.packing != made_from.packing:
        raise PackingError(
            f"state_dict: expected the state of a stream that is made as now, by {made_from.packing}, got the state of "
            f"a stream that was made by {saved.packing}; make the stream as before, or start the epoch again without "
            "the state"
        )
    if saved.files != made_from.files:
        raise PackingError(
            "dataset: expected the files with which the state was saved, but they have changed, or the state is of the "
            "files of another rank or worker, so that the same documents cannot be read again; restore the files, load "
            "the state of this rank or worker, or start the epoch again without the state"
        )
    return progress
