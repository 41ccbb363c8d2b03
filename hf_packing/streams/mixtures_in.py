"""Find the mixture that a stream reads, divide it among logical streams, and tell it what it has given before."""

import warnings
from collections.abc import Sequence
from copy import copy
from typing import Any

from hf_packing.errors import PackingError
from hf_packing.streams import upstream
from hf_packing.streams.mixed_examples import MixedExamples
from hf_packing.streams.mixture_progress import Given


def mixtures_in(examples: upstream.Examples) -> list[MixedExamples]:
    """Return the mixtures that an object reads."""
    if isinstance(examples, MixedExamples):
        return [examples]
    return [mixture for each in upstream.inner(examples) for mixture in mixtures_in(each)]


def divided_mixture(examples: upstream.Examples, streams: int) -> upstream.Examples | None:
    """Return the object that reads a mixture, with a shard for each logical stream.

    So a logical stream is one mixture: its shares are right, and it ends when its sources end.

    Args:
        examples: the object that reads the documents.
        streams: the number of logical streams.

    Returns:
        The object; None if it reads no mixture, or documents that depend on their places in the whole mixture.

    Raises:
        PackingError: the mixture was joined with other streams, or has fewer shards since it was sharded.
    """
    if not mixtures_in(examples):
        return None
    around = []
    while not isinstance(examples, MixedExamples):
        if getattr(examples, "ex_iterable", None) is None:
            raise PackingError(
                "streams: expected a mixture that was not joined with other streams, got one that concatenate_datasets "
                "or interleave_datasets has joined; pass all streams to mix"
            )
        around.append(examples)
        examples = examples.ex_iterable
    divided: Any = examples.with_shards(streams)
    for each in reversed(around):
        outer = copy(each)
        outer.ex_iterable = None
        if upstream.depends_on_places(outer):
            return None
        outer.ex_iterable = divided
        divided = outer
    return divided if divided.num_shards == streams else None


def warn_of_reading(examples: upstream.Examples, streams: int) -> None:
    """Warn if a source has fewer shards than logical streams, since each of these reads its shards to their end."""
    read = [("the stream", examples)]
    if mixtures := mixtures_in(examples):
        named = [zip(each.mixture.shares, each.ex_iterables, strict=True) for each in mixtures]
        read = [(f"streams[{name!r}] of the mixture", source) for each in named for name, source in each]
    for name, source in read:
        if streams > (shards := int(source.num_shards)):
            warnings.warn(
                f"pack reads {name} about {streams / shards:.0f} times, since {streams} logical streams share {shards} "
                f"shards: each reads a shard to its end, and keeps its share of the documents. Call reshard() on a "
                "stream of parquet files, write more files, or pass a smaller number of streams",
                stacklevel=2,
            )


def fixed_shares(examples: upstream.Examples) -> str:
    """Return a text with the shares of all mixtures that an object reads; an empty text if it reads none."""
    shares = [each.mixture.shares for each in mixtures_in(examples)]
    return "".join(f", of a mixture with the shares {dict(each)}" for each in shares)


def given_by_mixtures(examples: upstream.Examples) -> tuple[tuple[Any, ...], ...]:
    """Return what each mixture has given so far, as plain values."""
    return tuple(tuple(each.given) for each in mixtures_in(examples))


def begin_with(examples: upstream.Examples, given: Sequence[Sequence[Any]]) -> None:
    """Make mixtures give again what they gave before, by the shares of that time.

    Args:
        examples: the object that reads the mixtures, at its start.
        given: what `given_by_mixtures` has returned.

    Raises:
        PackingError: a mixture that `repeat` reads several times has other shares than before.
    """
    for mixture, saved in zip(mixtures_in(examples), given, strict=False):
        before = Given.load(saved)
        shares, old = tuple(mixture.mixture.shares.values()), before.history[-1][0]
        if shares != old and _is_repeated(examples):
            raise PackingError(
                f"tokens: expected the shares {', '.join(map(str, old))}, as in the saved state, for a mixture that "
                f"repeat() reads again, got {', '.join(map(str, shares))}; leave repeat() out, and pass "
                "stopping_strategy='all_exhausted' to mix"
            )
        mixture.begin_with(before)


def _is_repeated(examples: upstream.Examples) -> bool:
    if isinstance(examples, MixedExamples):
        return False
    return upstream.is_repeat(examples) or any(map(_is_repeated, upstream.inner(examples)))
