"""Read a shard once for all logical streams of a process that want documents of it.

Logical streams take turns, so they go through a shard at about the same pace. What is read for one of them is dealt to
the others too, who later find it in their queues. Documents are dealt with the state of the shard after them. So the
state of a logical stream says the same as if the logical stream had read the shard alone.

Queues are bounded: a logical stream with a full queue is left behind. When it has used up its queue, a second reader
begins at its place, for all that are there. A reader that comes to the place of another one replaces it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hf_packing.planning.windows import WindowSize
from hf_packing.streams import upstream
from hf_packing.streams.document_reader import lengths_of, select_columns, tables_of, token_columns
from hf_packing.streams.shares import Part

_WINDOWS_IN_QUEUE = 4
"""A queue is full when it has the documents of so many windows.

One window is in every queue after the first logical stream has read its own. The others are for logical streams that
lag behind, since the parts of a shard differ by a few percent, and so do the tokens of as many documents.
"""

_DOCUMENTS_AT_ONCE = 64
"""Small tables are joined until about so many documents can be dealt to each, since every table takes time."""


Name = tuple[int, int]
"""The number of a logical stream in its process, and the first document of a part."""


class Dealt(NamedTuple):
    """Documents that were dealt to one logical stream, and the place in the shard after them."""

    documents: pa.Table
    tokens: int
    number: int
    """The number of documents of the shard before the place."""
    state: dict[str, Any]
    """The state of the shard at the place. Nobody changes it."""


@dataclass(eq=False)
class Receiver:
    """A logical stream that wants a part of a shard, with the queue of what was dealt to it."""

    part: Part
    number: int
    """The documents of the shard before this number are not for the logical stream, or were dealt to it."""
    state: dict[str, Any] | None
    """The state of the shard at this number; None for the start of the shard."""
    is_here: bool
    """False if the logical stream still reads another shard."""
    queue: deque[Dealt] = field(default_factory=deque)
    tokens: int = 0
    documents: int = 0
    ended: bool = False
    """True if the shard has no more documents for the logical stream than those in the queue."""

    def is_full(self, size: WindowSize) -> bool:
        """Return whether the queue has the documents of _WINDOWS_IN_QUEUE windows of this size."""
        tokens, documents = self.tokens / _WINDOWS_IN_QUEUE, self.documents / _WINDOWS_IN_QUEUE
        return (tokens >= size.tokens and documents >= size.documents) or tokens >= size.most_tokens

    def deal(self, block: "_Block", state: dict[str, Any]) -> None:
        """Put the documents of a block that are for the logical stream into its queue.

        Args:
            block: the block.
            state: the state of the shard after the block.
        """
        place = block.number % self.part.of
        is_mine = (block.number >= self.number) & (self.part.first <= place) & (place < self.part.end)
        mine = np.flatnonzero(is_mine)
        self.number, self.state = block.end, state
        if len(mine):
            documents = block.documents if is_mine.all() else block.documents.take(mine)
            tokens = int(block.length[mine].sum())
            self.queue.append(Dealt(documents, tokens, block.end, state))
            self.tokens, self.documents = self.tokens + tokens, self.documents + len(mine)

    def take(self) -> Dealt:
        """Return the next documents of the queue, and remove them from it."""
        dealt = self.queue.popleft()
        self.tokens, self.documents = self.tokens - dealt.tokens, self.documents - dealt.documents.num_rows
        return dealt


class _Block(NamedTuple):
    """Documents that were read together."""

    documents: pa.Table
    """The token columns of those documents that somebody wants."""
    number: npt.NDArray[np.int64]
    """int64 [documents]: the number of each in the shard."""
    length: npt.NDArray[np.int64]
    """int64 [documents]: the tokens of each."""
    end: int
    """The number of documents of the shard up to the end of the block."""


class _Reader:
    """Reads a shard from a place on.

    Args:
        shard: the object that reads the shard, with its state loaded.
        schema: names and types of the token columns.
        number: the number of documents of the shard before the place.
    """

    def __init__(self, shard: upstream.Examples, schema: pa.Schema, number: int) -> None:
        self.number = number
        self._shard, self._schema = shard, schema
        self._tables = tables_of(shard, schema)

    def read(self, wanted: npt.NDArray[np.bool_], documents: int, tokens: int) -> _Block | None:
        """Return the next documents; None at the end of the shard.

        Args:
            wanted: bool [of]: whether somebody wants the documents with this number, modulo `of`.
            documents: the documents to read at least, unless they have `tokens` tokens.
            tokens: reading ends when the documents have so many tokens.
        """
        begin, read = self.number, []
        while documents > 0 and tokens > 0 and (table := next(self._tables, None)) is not None:
            number = np.arange(self.number, self.number + table.num_rows)
            self.number += table.num_rows
            table = select_columns(table, self._schema)
            if not (is_wanted := wanted[number % len(wanted)]).all():
                number, table = number[is_wanted], table.take(np.flatnonzero(is_wanted))
            table = token_columns(table, self._schema)
            length = lengths_of(table)
            read.append((table, number, length))
            documents, tokens = documents - table.num_rows, tokens - int(length.sum())
        if self.number == begin:
            return None
        tables, numbers, lengths = zip(*read, strict=True)
        together = pa.concat_tables(tables).combine_chunks()  # since each receiver takes rows of all chunks
        return _Block(together, np.concatenate(numbers), np.concatenate(lengths), self.number)

    def state(self) -> dict[str, Any]:
        """Return the state of the shard at the place of the reader."""
        state: dict[str, Any] = self._shard.state_dict()
        return state


class SharedShard:
    """Deals the documents of a shard to those that want them.

    Args:
        open_shard: function that returns a new object that reads the shard.
        receivers: those that want documents, by a name.
        schema: names and types of the token columns.
        size: the size of a window.
    """

    def __init__(
        self,
        open_shard: Callable[[], upstream.Examples],
        receivers: dict[Name, Receiver],
        schema: pa.Schema,
        size: WindowSize,
    ) -> None:
        self.receivers = receivers
        """Those that have not come to the end of the shard."""
        self._open_shard, self._schema, self._size = open_shard, schema, size
        self._readers: dict[int, _Reader] = {}
        """The readers, by their place in the shard."""

    def next(self, name: Name) -> Dealt | None:
        """Return the next documents for a receiver; None at the end of the shard."""
        receiver = self.receivers[name]
        receiver.is_here = True
        while not receiver.queue and not receiver.ended:
            self._read(self._reader_for(receiver), receiver)
        if receiver.queue:
            return receiver.take()
        del self.receivers[name]
        return None

    def _reader_for(self, receiver: Receiver) -> _Reader:
        """Return the reader at the place of a receiver, or one before it that reads for others too."""
        if receiver.number in self._readers:
            return self._readers[receiver.number]
        others = [
            each
            for each in self.receivers.values()
            if each.is_here and not each.ended and each.number < receiver.number and not each.is_full(self._size)
        ]
        first = min([*others, receiver], key=lambda each: each.number)
        if first.number not in self._readers:
            shard = self._open_shard()
            shard._init_state_dict()
            if first.state is not None:
                shard.load_state_dict(first.state)
            self._readers[first.number] = _Reader(shard, self._schema, first.number)
        return self._readers[first.number]

    def _read(self, reader: _Reader, receiver: Receiver) -> None:
        """Read on, and deal what was read to the receiver and to all others that are there and whose queue has room."""
        begin = reader.number
        del self._readers[begin]
        wanting = [each for each in self.receivers.values() if not each.ended]
        block = reader.read(_wanted(wanting), _DOCUMENTS_AT_ONCE * len(wanting), self._size.tokens)
        if block is None:
            for each in wanting:
                each.ended = each.number >= begin
            return
        state = reader.state()
        for each in wanting:
            if begin <= each.number < block.end and (each is receiver or not each.is_full(self._size)):
                each.deal(block, state)
        self._readers[block.end] = reader
        places = {each.number for each in wanting}
        self._readers = {number: each for number, each in self._readers.items() if number in places}


def _wanted(receivers: list[Receiver]) -> npt.NDArray[np.bool_]:
    """Return whether some of the receivers want the documents with a number, modulo `of`: bool [of]."""
    wanted = np.zeros(receivers[0].part.of, dtype=bool)
    for each in receivers:
        wanted[each.part.first : each.part.end] = True
    return wanted
