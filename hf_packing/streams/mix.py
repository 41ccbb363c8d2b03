"""Define `mix`, which mixes streams and datasets so that each has its share of the tokens."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import datasets

from hf_packing.checks import check_choice, check_seed, is_real
from hf_packing.columns import SOURCE, SOURCE_EPOCH
from hf_packing.errors import PackingError
from hf_packing.streams import upstream
from hf_packing.streams.mixture import Count, MixedExamples, Mixture, StoppingStrategy
from hf_packing.streams.reader import Source, open_source

_MOST_SHARDS = 64


def mix(
    streams: Mapping[str, datasets.IterableDataset | datasets.Dataset],
    tokens: Mapping[str, float],
    *,
    stopping_strategy: StoppingStrategy = "first_exhausted",
    count: Count = "tokens",
    seed: int = 0,
) -> datasets.IterableDataset:
    """Mix tokenized streams and datasets so that each has its share of the tokens.

    After every document, the tokens of a source differ from its share by about half a document.
    `datasets.interleave_datasets` draws by documents instead, so that sources with long documents get more tokens than
    their share. The state of the mixture is exact. Other shares count from the next epoch on. Logical streams, ranks
    and workers have mixtures of their own, of equal pieces of all sources.

    Args:
        streams: IterableDatasets or Datasets with `input_ids`, by name. All have the same token columns; other columns
            are left out.
        tokens: share of the tokens of each source, by name; positive numbers, which are divided by their sum.
        stopping_strategy: as in `datasets.interleave_datasets`. "first_exhausted" ends the mixture when a source is due
            but has no more documents; "all_exhausted" reads such a source again, its shards in another order, until
            every source was read once; "all_exhausted_without_replacement" goes on with the other sources.
        count: "tokens" to count all tokens, "trainable" to count tokens with a label. After a document of which nothing
            counts, another source is next.
        seed: seed for the order of the shards of sources that are read again.

    Returns:
        IterableDataset with the token columns, and a column `source`: the number of the document's source, for every
        token, so that packed rows have it too. With "all_exhausted", the column `source_epoch` has the number of times
        that the source was read before the document.

    Raises:
        PackingError: the names differ, a share is not positive, a source has no documents or other token columns, or
            a stream has a shuffle buffer. While the mixture is read: nothing counts of all documents of a source, or a
            loaded state is of other shares.

    Example:
        >>> import datasets, hf_packing as hfp
        >>> short = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3], [4]]})
        >>> long = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10]]})
        >>> mixed = hfp.mix({"short": short, "long": long}, tokens={"short": 0.5, "long": 0.5})
        >>> [document["input_ids"] for document in mixed]
        [[1], [2], [5, 6, 7], [3], [4]]
    """
    shares = _check_shares(streams, tokens)
    check_choice("stopping_strategy", stopping_strategy, StoppingStrategy)
    check_choice("count", count, Count)
    opened = {name: _open(name, stream) for name, stream in streams.items()}
    first = next(iter(opened.values()))
    for name, source in opened.items():
        if source.schema.names != first.schema.names:
            raise PackingError(
                f"streams[{name!r}]: expected the token columns {', '.join(first.schema.names)}, as in "
                f"{next(iter(opened))!r}, got {', '.join(source.schema.names)}"
            )
    if left_out := [each for source in opened.values() for each in source.left_out]:
        shown = ", ".join(dict.fromkeys(left_out))
        warnings.warn(f"mix leaves out columns without one number for each token: {shown}", stacklevel=2)
    mixture = Mixture(shares, first.schema, count, stopping_strategy, check_seed(seed))
    examples = MixedExamples([source.examples for source in opened.values()], mixture)
    mixed: datasets.IterableDataset = upstream.stream_of(examples, mixture.features)
    return mixed


def _check_shares(streams: Any, tokens: Any) -> dict[str, float]:
    """Return the shares of the sources, in the order of the sources, with the sum 1."""
    if not isinstance(streams, Mapping) or not streams:
        raise PackingError(f"streams: expected a dict of streams, at least one, got {type(streams).__name__}")
    if not isinstance(tokens, Mapping) or set(tokens) != set(streams):
        raise PackingError(f"tokens: expected a share for each of {', '.join(map(str, streams))}, got {tokens!r}")
    for name, share in tokens.items():
        if not is_real(share) or not 0 < share < math.inf:
            raise PackingError(f"tokens[{name!r}]: expected a positive number, got {share!r}")
    whole = sum(tokens.values())
    return {name: float(tokens[name]) / whole for name in streams}


def _open(name: str, stream: Any) -> Source:
    if isinstance(stream, datasets.Dataset):
        if not len(stream):
            raise PackingError(f"streams[{name!r}]: expected documents, got an empty dataset")
        stream = stream.to_iterable_dataset(num_shards=min(len(stream), _MOST_SHARDS))
    if not isinstance(stream, datasets.IterableDataset):
        raise PackingError(f"streams[{name!r}]: expected an IterableDataset or a Dataset, got {type(stream).__name__}")
    source = open_source(f"streams[{name!r}]", stream)
    for column in (SOURCE, SOURCE_EPOCH):
        if column in source.schema.names:
            raise PackingError(
                f"streams[{name!r}]: expected no column {column!r} with a number for each token, since the mixture "
                "makes a column of this name; rename the column"
            )
    return source
