"""Objects around the one that reads a stream, which make sure that nothing is lost in silence.

`datasets` divides a stream by dividing its source: two halves of `take(100)` are the first 50 documents of either half
of the files, which are other documents than the first 100. And it finds the columns of a stream without features by
reading the first examples, so that it leaves out labels which only later examples have.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.errors import PackingError
from hf_packing.streams import upstream


class Wrapped(upstream.ExamplesAround):
    """The examples of another object, with its shards and its state.

    Args:
        examples: the object that reads the stream.
        names: names of the columns of the first examples.
    """

    def __init__(self, examples: upstream.Examples, names: tuple[str, ...] = ()) -> None:
        super().__init__(examples)
        self.names = names

    @property
    def num_shards(self) -> int:
        return int(self.ex_iterable.num_shards)

    def shuffle_data_sources(self, generator: np.random.Generator) -> "Wrapped":
        return type(self)(upstream.shuffled(self.ex_iterable, generator), self.names)

    def shard_data_sources(self, *of: Any, **how: Any) -> "Wrapped":
        return type(self)(self.ex_iterable.shard_data_sources(*of, **how), self.names)

    def reshard_data_sources(self) -> "Wrapped":
        return type(self)(self.ex_iterable.reshard_data_sources(), self.names)

    def _init_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ex_iterable._init_state_dict()
        self._state_dict = state
        return state

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        yield from self.ex_iterable

    def _iter_arrow(self) -> Iterator[tuple[Any, pa.Table]]:
        yield from self.ex_iterable.iter_arrow()


class OneShard(Wrapped):
    """The documents of a stream as one shard, for documents that depend on their places in the whole stream."""

    is_one_shard = True

    @property
    def num_shards(self) -> int:
        return 1

    def shard_data_sources(self, *_: Any, **__: Any) -> "OneShard":
        """Return a new object, with a state of its own."""
        return OneShard(upstream.copied(self.ex_iterable), self.names)

    def reshard_data_sources(self) -> "OneShard":
        return self


class KnownColumns(Wrapped):
    """The documents of a stream without features, none of which may have a list that the first ones do not have."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        known = set(self.names)
        for key, example in self.ex_iterable:
            if not known.issuperset(example):
                self._check(name for name, value in example.items() if _is_list(value))
            yield key, example

    def _iter_arrow(self) -> Iterator[tuple[Any, pa.Table]]:
        for key, table in self.ex_iterable.iter_arrow():
            self._check(field.name for field in table.schema if pa.types.is_nested(field.type))
            yield key, table

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                raise PackingError(
                    f"column {name!r}: expected the columns of the first documents, {', '.join(self.names)}, got a "
                    f"document that also has {name!r}; give all documents the same columns, or pass features=, with "
                    "all columns, to map or from_generator"
                )


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes, dict))


def checked(stream: Any, names: Iterable[str]) -> upstream.Examples:
    """Return an object that reads the documents of a stream, and can be divided into shards.

    Args:
        stream: the stream as the user has passed it.
        names: names of the columns of the stream, or of its first examples.
    """
    examples = upstream.examples_of(stream)
    if stream.features is None:
        examples = KnownColumns(examples, tuple(names))
    if int(examples.num_shards) > 1 and upstream.depends_on_places(examples):
        return OneShard(examples)
    return examples
