"""Strategies by the names that the command accepts."""

from collections.abc import Sequence
from typing import Any

from hf_packing.errors import PackingError
from hf_packing.strategies.base import Strategy, registered_strategies

STRATEGIES = tuple(registered_strategies())


def strategies_named(names: Sequence[str], max_lengths: Sequence[int]) -> list[Strategy]:
    """Return each strategy with each length; those with buckets once, with all lengths."""
    strategies: list[Strategy] = []
    for name in dict.fromkeys(names):
        strategy: Any = _strategy_class(name)
        lengths = sorted(set(max_lengths))
        strategies += [strategy(lengths)] if strategy.has_buckets else [strategy(length) for length in lengths]
    return strategies


def strategy_named(name: str, max_lengths: Sequence[int]) -> Strategy:
    """Return the one strategy of that name.

    Raises:
        PackingError: no such name, or several lengths for a strategy that takes one.
    """
    if not _strategy_class(name).has_buckets and len(set(max_lengths)) > 1:
        raise PackingError(f"--max-length: expected one with {name}, got {', '.join(map(str, max_lengths))}")
    return strategies_named([name], max_lengths)[0]


def _strategy_class(name: str) -> type[Any]:
    if name not in STRATEGIES:
        raise PackingError(f"--strategy: expected one of {', '.join(STRATEGIES)}, got {name!r}")
    return registered_strategies()[name]
