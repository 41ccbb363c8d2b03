"""Every registered strategy, with arguments that hypothesis makes up, so that a new one is tested like the others."""

from dataclasses import fields
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.strategies.base import Strategy, registered_strategies

many_examples = settings(max_examples=2 * settings.default.max_examples)
"""For what is compared with a slow and plain version of itself."""
few_examples = settings(max_examples=settings.default.max_examples // 2)
"""For what makes a data set, a stream or a report of each example."""

seeds = st.one_of(st.none(), st.integers(0, 2**63 - 1))
capacities = st.integers(1, 24)
ARGUMENTS = {
    "max_length": capacities,
    "bucket_lengths": st.sets(capacities, min_size=1, max_size=4).map(sorted),
    "overflow": st.sampled_from(["split", "truncate", "drop"]),
    "max_documents": st.one_of(st.none(), st.integers(1, 5)),
    "seed": seeds,
    "order": st.sampled_from(["random", "longest_first", "dataset"]),
    "window": st.integers(1, 70),
    "padding_threshold": st.sampled_from([0, 0.1, 1]),
}
"""What is drawn for arguments of these names; others keep their default."""


def strategy_classes(kind: type = Strategy, having: str = "") -> list[type[Strategy]]:
    classes = [each for each in registered_strategies().values() if issubclass(each, kind)]
    return [each for each in classes if not having or having in names_of_arguments(each)]


def names_of_arguments(strategy: type[Strategy]) -> list[str]:
    return [field.name for field in fields(strategy) if field.init]


@st.composite
def any_strategy(draw: Any, kind: type = Strategy, **fixed: Any) -> Strategy:
    strategy = draw(st.sampled_from(strategy_classes(kind)))
    drawn = {name: draw(ARGUMENTS[name]) for name in names_of_arguments(strategy) if name in ARGUMENTS}
    drawn |= {name: value for name, value in fixed.items() if name in drawn}
    try:
        return strategy(**drawn)
    except hfp.PackingError:  # not all take None
        return strategy(**{name: value for name, value in drawn.items() if value is not None})


def made_for(max_length: int, strategy: type[Strategy], **options: Any) -> Strategy:
    if strategy.has_buckets:
        return strategy((max_length // 4, max_length // 2, max_length), **options)
    return strategy(max_length, **options)
