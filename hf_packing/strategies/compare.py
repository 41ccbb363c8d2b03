"""The function `compare`, which plans the same document lengths with several strategies and compares the plans."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from hf_packing.checks import check_type
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.metrics import PackingMetrics
from hf_packing.planning.plan import PackingPlan
from hf_packing.strategies.base import Strategy, check_strategy, read_lengths

_Measured = TypeVar("_Measured")


@dataclass(frozen=True)
class ComparedStrategy:
    """One row of a comparison: a strategy, the metrics of the strategy's plan, and the time for planning."""

    strategy: Strategy
    metrics: PackingMetrics
    """The metrics of the plan.

    Each compared strategy may prove a lower bound on packs. `metrics.lower_bound` is the highest of these bounds that
    is valid for this strategy.
    """
    seconds: float
    """The time for planning, in seconds."""
    note: str
    """A remark of the strategy on how the plan was found; empty if there is nothing to report."""

    @property
    def name(self) -> str:
        """The strategy as Python code, such as BestFit(2048)."""
        return name_of(self.strategy)

    @property
    def gap(self) -> float | None:
        """The relative gap between the number of packs and the lower bound, or None for a strategy with buckets.

        The gap is (packs - lower bound) / lower bound. No plan for the same segments has fewer packs than the lower
        bound, so fewer packs are impossible if the gap is 0. A strategy with buckets makes many small packs on purpose,
        so a gap would not be meaningful.
        """
        bound = self.metrics.lower_bound
        if self.strategy.has_buckets:
            return None
        return self.metrics.num_packs / bound - 1 if bound else 0.0


def name_of(strategy: Strategy) -> str:
    """Return a strategy as Python code, such as BestFit(2048).

    The first argument is always included. Other arguments are included if their value is not the default.
    """
    first, *others = ((each.name, getattr(strategy, each.name), each.default) for each in fields(strategy) if each.init)
    changed = [f"{name}={value!r}" for name, value, default in others if value != default]
    return f"{type(strategy).__name__}({', '.join([repr(first[1]), *changed])})"


class Comparison(tuple[ComparedStrategy, ...]):
    """The result of `compare`: a tuple of ComparedStrategy, in the order of the strategies passed to `compare`.

    `print` and notebooks show the rows as a table.
    """

    def __repr__(self) -> str:
        return aligned([_HEADER, *((*cells_of(row), f"{row.seconds:.2f}") for row in self)])


def compare(lengths: Any, strategies: Iterable[Strategy]) -> Comparison:
    """Plan the same document lengths with several strategies, and return the metrics of all plans.

    Args:
        lengths: 1-d integers [documents]: document lengths in tokens, as a list or an array; or a Dataset of documents
            with `input_ids`.
        strategies: strategies to compare, such as [BestFit(2048), Bucket()].

    Returns:
        Comparison: a sequence with one ComparedStrategy for each strategy. A ComparedStrategy has the attributes
        `strategy`, `name`, `metrics`, `seconds`, `gap` and `note`.

    Raises:
        PackingError: `lengths` are negative, not integers or not 1-d, `strategies` is empty or has an element that is
            not a strategy, or a strategy cannot plan the lengths.
        MissingDependencyError: a strategy needs scipy, but scipy is not installed.

    Example:
        >>> import hf_packing as hfp
        >>> lengths = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2]
        >>> [row.gap for row in hfp.compare(lengths, [hfp.BestFit(30), hfp.Optimal(30)])]
        [0.33333333333333326, 0.0]
    """
    return Comparison(row for row, _ in compare_plans(read_lengths(lengths), strategies, lambda _: None))


def compare_plans(
    lengths: IntArray, strategies: Iterable[Strategy], measure: Callable[[PackingPlan], _Measured]
) -> list[tuple[ComparedStrategy, _Measured]]:
    """Plan the lengths with one strategy after the other, and return each with what `measure` returns for its plan.

    The lower bound of one strategy is also valid for every strategy that packs the same segments into packs of the same
    capacity, with the same limit on segments in a pack or a lower one. Each strategy gets the highest bound that is
    valid for it. At most two plans are in memory at the same time.

    Raises:
        PackingError: `strategies` is no list, is empty, or has an element that is not a strategy.
    """
    check_type("strategies", strategies, Iterable, "a list of strategies such as [BestFit(2048)]")
    chosen = [check_strategy(strategy) for strategy in strategies]
    if not chosen:
        raise PackingError("strategies: expected at least one strategy, got none")
    found = []
    for strategy in tqdm(chosen, desc="Comparing strategies", delay=1, leave=False, disable=None):
        began = time.perf_counter()
        plan = strategy.plan_lengths(lengths)
        seconds = time.perf_counter() - began
        problem = plan.pack_capacity.max(initial=0), np.bincount(plan.segment_length).tobytes()
        found.append((ComparedStrategy(strategy, plan.metrics(), seconds, plan.note), measure(plan), problem))
    bounded = []
    for row, measured, problem in found:
        valid = [
            other.metrics.lower_bound
            for other, _, same in found
            if same == problem and (row.strategy.max_documents or np.inf) <= (other.strategy.max_documents or np.inf)
        ]
        bounded.append((replace(row, metrics=replace(row.metrics, lower_bound=max(valid))), measured))
    return bounded


_HEADER = ("", "padding", "truncation", "dropped", "concatenation", "packs", "above bound", "seconds")


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as a text table, with the first column aligned left and the other columns aligned right."""
    name, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = [
        [first.ljust(name), *(cell.rjust(width) for cell, width in zip(rest, others, strict=True))]
        for first, *rest in cells
    ]
    return "\n".join("  ".join(line) for line in lines)


def cells_of(row: ComparedStrategy) -> tuple[str, ...]:
    """Return the name of a strategy, and the metrics that a table shows."""
    m = row.metrics
    return (
        row.name,
        f"{m.padding_ratio:.3%}",
        f"{m.truncation_ratio:.3%}",
        f"{m.dropped_token_ratio:.3%}",
        f"{m.concatenation_ratio:.2f}",
        f"{m.num_packs:,}",
        "" if row.gap is None else f"{row.gap:.4%}",
    )
