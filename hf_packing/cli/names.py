"""Strategies by the names that the command has for them."""

from collections.abc import Callable, Sequence

from hf_packing.errors import PackingError
from hf_packing.strategies.base import Strategy
from hf_packing.strategies.buckets import Bucket, BucketByLength
from hf_packing.strategies.counting import BestFit, NonNegativeLeastSquares, Optimal, ShortestPackFirst
from hf_packing.strategies.in_order import FirstCome, FixedLength, Multipack

_OF_ONE_LENGTH: dict[str, Callable[[int], Strategy]] = {
    "best_fit": BestFit,
    "first_come": FirstCome,
    "fixed_length": FixedLength,
    "multipack": Multipack,
    "non_negative_least_squares": NonNegativeLeastSquares,
    "optimal": Optimal,
    "shortest_pack_first": ShortestPackFirst,
}
_OF_SEVERAL: dict[str, Callable[[Sequence[int]], Strategy]] = {"bucket": Bucket, "bucket_by_length": BucketByLength}

STRATEGIES = tuple(sorted([*_OF_ONE_LENGTH, *_OF_SEVERAL]))


def strategies_named(names: Sequence[str], max_lengths: Sequence[int]) -> list[Strategy]:
    """Return each strategy with each length; those with buckets once, with all lengths.

    Raises:
        PackingError: no such name.
    """
    strategies: list[Strategy] = []
    for name in dict.fromkeys(names):
        if _check_name(name) in _OF_SEVERAL:
            strategies.append(_OF_SEVERAL[name](sorted(set(max_lengths))))
        else:
            strategies += [_OF_ONE_LENGTH[name](length) for length in sorted(set(max_lengths))]
    return strategies


def strategy_named(name: str, max_lengths: Sequence[int]) -> Strategy:
    """Return the one strategy of that name.

    Raises:
        PackingError: no such name, or several lengths for a strategy with one.
    """
    if _check_name(name) in _OF_ONE_LENGTH and len(set(max_lengths)) > 1:
        raise PackingError(f"--max-length: expected one with {name}, got {', '.join(map(str, max_lengths))}")
    return strategies_named([name], max_lengths)[0]


def _check_name(name: str) -> str:
    if name not in STRATEGIES:
        raise PackingError(f"--strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return name
