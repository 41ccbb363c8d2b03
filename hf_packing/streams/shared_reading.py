"""Read the shares of several logical streams of one process together, so that no shard is read for each of them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from hf_packing.planning.windows import WindowSize
from hf_packing.streams import upstream
from hf_packing.streams.shared_shard import Dealt, Receiver, SharedShard
from hf_packing.streams.shares import Part, Share, ShareOfShards


class SharedReading:
    """The shards of a stream, read for several shares.

    All shares have to be made, and their states loaded, before the first document is read.

    Args:
        examples: the object that reads all shards.
        schema: names and types of the columns to read.
        size: the size of a window of each share.
    """

    def __init__(self, examples: upstream.Examples, schema: pa.Schema, size: WindowSize) -> None:
        self._examples, self._schema, self._size = examples, schema, size
        self._shares: list[Share] = []
        self._states: dict[int, dict[str, Any]] = {}
        self._shards: dict[int, SharedShard] = {}
        """The shards that somebody reads."""

    def share(self, share: Share) -> "SharedShare":
        """Return an object that reads a share."""
        self._shares.append(share)
        return SharedShare(self._examples, share, self, len(self._shares) - 1)

    def set_state(self, number: int, state: dict[str, Any]) -> None:
        """Note the state of a share, which changes as the share is read."""
        self._states[number] = state

    def documents(self, share: int, part: Part) -> Iterator[Dealt]:
        """Yield the documents of a part that the share has not read yet."""
        if part.shard not in self._shards:
            self._shards[part.shard] = self._open(part.shard)
        shard = self._shards[part.shard]
        while (dealt := shard.next((share, part.first))) is not None:
            yield dealt
        if not shard.receivers:
            del self._shards[part.shard]

    def _open(self, number: int) -> SharedShard:
        """Return a shard, for all parts of it that are not read yet."""
        receivers = {
            (share, part.first): self._receiver(share, place)
            for share, parts in enumerate(self._shares)
            for place, part in enumerate(parts)
            if part.shard == number and place >= self._states[share]["part"]
        }
        open_shard = partial(self._examples.shard_data_sources, self._examples.num_shards, number)
        return SharedShard(open_shard, receivers, self._schema, self._size)

    def _receiver(self, share: int, place: int) -> Receiver:
        state = self._states[share]
        if place > state["part"]:
            return Receiver(self._shares[share][place], 0, None, is_here=False)
        return Receiver(self._shares[share][place], state["document"], state["shard"], is_here=True)


class SharedShare(ShareOfShards):
    """A share that is read together with other shares.

    The state is that of ShareOfShards: where the share stands in its shard, not where the shard is read.
    """

    def __init__(self, examples: upstream.Examples, share: Share, reading: SharedReading, number: int) -> None:
        super().__init__(examples, share)
        self._reading, self._number = reading, number

    @property
    def iter_arrow(self) -> Any:
        return self._iter_arrow

    def _init_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super()._init_state_dict()
        self._reading.set_state(self._number, state)
        return state

    def _iter_arrow(self) -> Iterator[tuple[int, pa.Table]]:
        state: dict[str, Any] = self._init_state_dict() if self._state_dict is None else self._state_dict
        for number in range(state["part"], len(self.share)):
            for dealt in self._reading.documents(self._number, self.share[number]):
                state.update(shard=dealt.state, document=dealt.number)
                yield dealt.number, dealt.documents
            state.update(part=number + 1, shard=None, document=0)
