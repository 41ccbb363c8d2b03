"""The progress of a mixture: its place in every source, what it has taken of each, and the shares it was given.

Other shares may be given when a saved state is loaded. A packed stream then reads its window again from the start, so
the documents that it had read before have to come as before. So the progress has the history of the shares: up to
which document each counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_packing.streams.document_reader import Place
from hf_packing.streams.mixture_balance import Balance

_START = Place(None, 0)

Shares = tuple[float, ...]
History = tuple[tuple[Shares, int | None], ...]
"""The shares of a mixture, and the number of documents of the mixture up to which they count; None for no end."""

Piece = tuple[int, tuple[int, ...]] | None
"""The number of equal pieces of all sources, and the numbers of those that a mixture reads; None if it reads all."""


class Given(NamedTuple):
    """The documents that a mixture has given so far, and by which shares, as plain values."""

    history: History
    documents: int
    piece: Piece

    @classmethod
    def load(cls, saved: Sequence[Any]) -> "Given":
        """Return what was saved as a tuple or a list."""
        history, documents, piece = saved
        return cls(_history(history), documents, _piece(piece))

    def history_with(self, shares: Shares) -> History:
        """Return the history if shares are given now. They count after the documents that were given."""
        if self.history and self.history[-1][0] == shares:
            return self.history
        kept: list[tuple[Shares, int | None]] = []
        begin = 0
        for old, until in self.history:
            end = self.documents if until is None else min(until, self.documents)
            if end > begin:
                kept.append((old, end))
            begin = max(begin, end)
        return (*kept, (shares, None))


@dataclass
class SourceProgress:
    """The progress of one source."""

    place: Place = _START
    passes: int = 0
    """The number of times that its documents ended."""
    empty_passes: int = 0
    """The number of these times without a document."""
    documents: int = 0
    """The documents that it has given."""
    before: int = 0
    """The documents that it had given when this pass began."""
    counted: int = 0
    """What was counted of its documents in this pass."""

    @property
    def epoch(self) -> int:
        """The number of times that it was read."""
        return self.passes - self.empty_passes

    def begin_pass(self) -> None:
        """Begin to read the source again."""
        self.empty_passes += self.documents == self.before
        self.place, self.before, self.counted = _START, self.documents, 0


@dataclass
class MixtureProgress:
    """The progress of a mixture in its epoch."""

    sources: list[SourceProgress]
    history: History
    era: int = 0
    """The number of the entry in the history whose shares count."""
    balance: Balance = field(default_factory=Balance)

    @property
    def documents(self) -> int:
        """The documents that all sources have given."""
        return sum(source.documents for source in self.sources)

    def begin_table(self) -> tuple[Shares, int | None]:
        """Return the shares of the next documents, and how many documents they are for; None for no end."""
        done = self.documents
        era = next(number for number, (_, until) in enumerate(self.history) if until is None or until > done)
        if era != self.era:
            self.era, self.balance = era, Balance()
        shares, until = self.history[era]
        return shares, None if until is None else until - done

    def saved(self) -> tuple[Any, ...]:
        """Return plain values."""
        sources = tuple(
            (tuple(each.place), each.passes, each.empty_passes, each.documents, each.before, each.counted)
            for each in self.sources
        )
        total = None if self.balance.total is None else tuple(self.balance.total)
        return sources, self.history, self.era, total, self.balance.paused

    @classmethod
    def load(cls, saved: tuple[Any, ...]) -> "MixtureProgress":
        """Return the progress that `saved` has returned."""
        sources, history, era, total, paused = saved
        return cls(
            [SourceProgress(Place(*place), *others) for place, *others in sources],
            _history(history),
            era,
            Balance(None if total is None else list(total), paused),
        )


def _history(saved: Sequence[Any]) -> History:
    return tuple((tuple(shares), until) for shares, until in saved)


def _piece(saved: Sequence[Any] | None) -> Piece:
    return None if saved is None else (saved[0], tuple(saved[1]))


def describe(piece: Piece) -> str:
    """Return the name of a piece of a mixture, for error messages."""
    if piece is None:
        return "a whole mixture"
    of, numbers = piece
    shown = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
    return f"piece {shown} of {of} of a mixture"
