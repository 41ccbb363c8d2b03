"""What is private in `datasets`, or differs between its versions: the tables of a Dataset, and how streams are read."""

import os
from contextlib import suppress
from copy import copy
from glob import escape
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.iterable_dataset import (
    BufferShuffledExamplesIterable,
    CyclingMultiSourcesExamplesIterable,
    FormattedExamplesIterable,
    HorizontallyConcatenatedMultiSourcesExamplesIterable,
    MappedExamplesIterable,
    RebatchedArrowExamplesIterable,
    RepeatExamplesIterable,
    SelectColumnsIterable,
    SkipExamplesIterable,
    TakeExamplesIterable,
    VerticallyConcatenatedMultiSourcesExamplesIterable,
    _BaseExamplesIterable,
)
from packaging.version import Version

from hf_packing.errors import PackingError


def content_of(dataset: datasets.Dataset) -> str:
    """Return what stands for the content of a Dataset. Without it, `pack` would take the rows of other documents."""
    return str(dataset._fingerprint)


def indices_of(dataset: datasets.Dataset) -> pa.ChunkedArray | None:
    """Return each row's index in the table of a Dataset; None for all rows in the table's order.

    Without it, shuffled documents would be packed in the order of the table.
    """
    return None if dataset._indices is None else dataset._indices.column(0)


def name_of_file(file: str) -> str:
    """Return a name for `data_files` that is that file and no pattern.

    `datasets` replaces :: and $ in names: of such a file, the name of a link to it in the cache of `datasets`.
    """
    if "::" in file or "$" in file:
        key = sha256(f"{file}{os.stat(file).st_mtime_ns}".encode()).hexdigest()
        link = Path(datasets.config.HF_DATASETS_CACHE, key)
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            link.symlink_to(file)
        file = str(link)
    return escape(file)


Examples = Any
"""An object that reads examples, as `datasets` has one inside every IterableDataset."""

BaseExamples: Any = _BaseExamplesIterable
"""The base class of such objects."""


def examples_of(stream: datasets.IterableDataset) -> Examples:
    """Return the object that reads the examples of a stream, with the columns and types that the stream shows."""
    examples = stream._ex_iterable
    if stream.features is None or examples.features == stream.features:
        return examples
    return FormattedExamplesIterable(
        examples, formatting=None, features=stream.features, token_per_repo_id=stream._token_per_repo_id
    )


def with_known_features(name: str, stream: datasets.IterableDataset) -> datasets.IterableDataset:
    """Return the stream with its column names and types. If they are unknown, the first examples are read.

    Args:
        name: the name of the stream in error messages.
        stream: the stream.

    Raises:
        PackingError: `datasets` finds no types for the values of the first examples, such as tensors.
    """
    if stream.features is not None:
        return stream
    try:
        return stream._resolve_features()
    except StopIteration:  # there is no example
        return stream
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise PackingError(
            f"{name}: expected documents whose columns are lists or NumPy arrays of one type, or features=, with the "
            f"types, as an argument of map or from_generator, but datasets finds no types: {error}"
        ) from error


def is_share_of_node(stream: datasets.IterableDataset) -> bool:
    """Return whether split_dataset_by_node made a stream."""
    return stream._distributed is not None


def position(stream: datasets.IterableDataset) -> str:
    """Return where a stream goes on that has a loaded state, or was set to an epoch; an empty text for the start."""
    if stream._starting_state_dict is not None:
        return "at a loaded state"
    return f"in epoch {stream.epoch}" if stream.epoch else ""


def stream_of(
    examples: Examples, like: datasets.IterableDataset, info: datasets.DatasetInfo
) -> datasets.IterableDataset:
    """Return an IterableDataset of what an object reads, with the split, format and share of a node of another one."""
    info.features = examples.features
    return datasets.IterableDataset(
        examples,
        info=info,
        split=like.split,
        formatting=like._formatting,
        distributed=like._distributed,
        token_per_repo_id=like._token_per_repo_id,
    )


def has_exact_states() -> bool:
    """Return whether a shard that is read from a saved state goes on where it was, as since datasets 5.0.1.

    Without it, a resumed stream would lose documents. Where it is False, shards are read from their beginning.
    """
    return Version(datasets.__version__) >= Version("5.0.1")


def has_shuffle_buffer(examples: Examples) -> bool:
    """Return whether examples go through a shuffle buffer, whose content a saved state does not hold."""
    return isinstance(examples, BufferShuffledExamplesIterable) or any(map(has_shuffle_buffer, inner(examples)))


def picks_by_place(examples: Examples) -> bool:
    """Return whether which documents are read depends on the order of the shards: so it is after `take` and `skip`, for
    functions that get indices, and for last batches that are dropped, also in a part of the stream."""
    return not getattr(examples, "divides_itself", False) and (
        isinstance(examples, (TakeExamplesIterable, SkipExamplesIterable))
        or bool(getattr(examples, "with_indices", False) or getattr(examples, "drop_last_batch", False))
        or any(map(picks_by_place, inner(examples)))
    )


def depends_on_places(examples: Examples) -> bool:
    """Return whether the examples depend on their places in the whole stream, and not only on the shards one by one.

    So it is where they are picked by place, after an endless `repeat`, and for streams that are interleaved until one
    of them ends. `datasets` would divide such a stream by dividing its source: two halves of take(100) would be the
    first 50 documents of either half of the files.
    """
    return not getattr(examples, "divides_itself", False) and (
        picks_by_place(examples)
        or isinstance(examples, HorizontallyConcatenatedMultiSourcesExamplesIterable)
        or (isinstance(examples, RepeatExamplesIterable) and examples.num_times is None)
        or (
            isinstance(examples, CyclingMultiSourcesExamplesIterable)
            and examples.stopping_strategy != "all_exhausted_without_replacement"
        )
        or any(map(depends_on_places, inner(examples)))
    )


def num_shards(examples: Examples) -> int:
    """Return the number of shards that can be read one by one: 1 if the examples depend on their places."""
    return 1 if depends_on_places(examples) else int(examples.num_shards)


def sharded(examples: Examples, of: int, number: int, contiguous: bool = True) -> Examples:
    """Return a new object that reads one of so many parts of the shards; everything if examples depend on places."""
    return copied(examples) if depends_on_places(examples) else examples.shard_data_sources(of, number, contiguous)


def inner(examples: Examples) -> list[Examples]:
    """Return the objects from which an object reads its examples."""
    found = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", ())]
    return [each for each in found if each is not None]


def copied(examples: Examples) -> Examples:
    """Return a new object that reads the same examples, with a state of its own."""
    new = copy(examples)
    if getattr(examples, "ex_iterable", None) is not None:
        new.ex_iterable = copied(examples.ex_iterable)
    if getattr(examples, "ex_iterables", None) is not None:
        new.ex_iterables = [copied(each) for each in examples.ex_iterables]
    return new


def shuffled(examples: Examples, generator: np.random.Generator) -> Examples:
    """Return the object with its shards in another order; unchanged if its documents are picked by place.

    `datasets` keeps the order after `take` and `skip` too, but not if they are in a stream that is concatenated.
    """
    return examples if picks_by_place(examples) else examples.shuffle_data_sources(generator)


def shard_files(examples: Examples) -> list[tuple[str, tuple[int, ...] | None]] | None:
    """Return the file of each shard, and the row groups of the file that are in the shard (None for all).

    The result is None if the stream is not read from files, or mixes several streams.
    """
    if within := inner(examples):
        return _one_after_another(examples, [shard_files(each) for each in within])
    arguments = getattr(examples, "kwargs", {})
    files = arguments.get("base_files") or arguments.get("files")
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        return None
    return list(zip(files, arguments.get("row_groups_list") or [None] * len(files), strict=True))


def _one_after_another(examples: Examples, found: list[Any]) -> list[Any] | None:
    """Return what was found of the shards of the streams that an object reads one after another; None for others."""
    in_order = (
        FormattedExamplesIterable,
        MappedExamplesIterable,
        RebatchedArrowExamplesIterable,
        RepeatExamplesIterable,
        SelectColumnsIterable,
        VerticallyConcatenatedMultiSourcesExamplesIterable,
    )
    if None in found or not isinstance(examples, in_order) or depends_on_places(examples):
        return None
    return [*chain.from_iterable(found)]
