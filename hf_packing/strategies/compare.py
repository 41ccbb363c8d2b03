"""`compare`: plan the same lengths with several strategies, and print the results as a table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from typing import Any, NamedTuple, overload

import numpy as np
from tqdm import tqdm

from hf_packing.errors import PackingError
from hf_packing.planning.metrics import PackingMetrics
from hf_packing.planning.plan import PackingPlan
from hf_packing.strategies.base import Strategy, check_strategy, plan_packing, read_lengths


@dataclass(frozen=True)
class ComparedStrategy:
    """The metrics of one strategy's plan."""

    strategy: Strategy
    metrics: PackingMetrics
    """`lower_bound` is the best that any of the compared strategies has proven for the same segments."""
    seconds: float
    """The time that planning took."""
    note: str
    """How planning went, if the strategy reports it."""

    @property
    def name(self) -> str:
        """The strategy as it is written in code."""
        return name_of(self.strategy)

    @property
    def gap(self) -> float | None:
        """(Packs - lower bound) / lower bound: no plan for the same segments saves more. None with buckets.

        The purpose of buckets is small packs, so fewer packs is not the goal there.
        """
        bound = self.metrics.lower_bound
        if self.strategy.has_buckets:
            return None
        return self.metrics.num_packs / bound - 1 if bound else 0.0


def name_of(strategy: Strategy) -> str:
    """Return a strategy as it is written in code, without arguments that have their default."""
    changed = []
    for number, field in enumerate(field for field in fields(strategy) if field.init):
        value = getattr(strategy, field.name)
        if number == 0:
            changed.append(repr(value))
        elif value != field.default:
            changed.append(f"{field.name}={value!r}")
    return f"{type(strategy).__name__}({', '.join(changed)})"


class Comparison(Sequence[ComparedStrategy]):
    """One row for each strategy, in the given order; printed as a table."""

    def __init__(self, rows: Sequence[ComparedStrategy]) -> None:
        self.rows = tuple(rows)

    @overload
    def __getitem__(self, number: int) -> ComparedStrategy: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ComparedStrategy]: ...
    def __getitem__(self, number: int | slice) -> ComparedStrategy | Sequence[ComparedStrategy]:
        return self.rows[number]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return aligned([_HEADER, *(_table_row(row) for row in self.rows)])

    def _repr_html_(self) -> str:
        head, *body = [_HEADER, *(_table_row(row) for row in self.rows)]
        lines = ["".join(f"<td style=text-align:right>{escape(cell)}</td>" for cell in cells) for cells in body]
        header = "".join(f"<th>{escape(name)}</th>" for name in head)
        return f"<table><tr>{header}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def compare(lengths: Any, strategies: Iterable[Strategy]) -> Comparison:
    """Plan the same lengths with several strategies.

    Args:
        lengths: 1-d integers [documents], tokens; a list or an array.
        strategies: such as [BestFit(2048), Bucket()].

    Returns:
        Comparison: a sequence of ComparedStrategy with `strategy`, `metrics`, `seconds`, `gap` and `note`.

    Raises:
        PackingError: bad lengths, no strategies, or something that is not a strategy.
        MissingDependencyError: a strategy needs scipy, and it is not installed.

    Example:
        >>> import hf_packing as hfp
        >>> lengths = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2]
        >>> [row.gap for row in hfp.compare(lengths, [hfp.BestFit(30), hfp.Optimal(30)])]
        [0.33333333333333326, 0.0]
    """
    if isinstance(strategies, Strategy) or not isinstance(strategies, Iterable) or isinstance(strategies, str):
        raise PackingError(f"strategies: expected several, such as [BestFit(2048), Bucket()], got {strategies!r}")
    chosen = [check_strategy(strategy) for strategy in strategies]
    if not chosen:
        raise PackingError("strategies: expected at least one, got none")
    found = [(measured, workload_of(plan, measured.strategy)) for measured, plan in each_planned(lengths, chosen)]
    return Comparison(with_best_bounds(found))


def each_planned(lengths: Any, strategies: Sequence[Strategy]) -> Iterator[tuple[ComparedStrategy, PackingPlan]]:
    """Yield one plan after the other, so that two are never in memory at once."""
    lengths = read_lengths(lengths)
    with tqdm(strategies, desc="Comparing strategies", delay=1, leave=False, disable=None) as progress:
        for strategy in progress:
            progress.set_postfix_str(type(strategy).__name__)
            began = time.perf_counter()
            plan = plan_packing(lengths, strategy)
            seconds = time.perf_counter() - began
            yield ComparedStrategy(strategy, plan.metrics(), seconds, plan.note), plan


def with_best_bounds(found: Sequence[tuple[ComparedStrategy, _Workload]]) -> list[ComparedStrategy]:
    """Return the rows, each with the best bound that any of them has proven for its workload."""
    rows = []
    for row, workload in found:
        bound = max(row.metrics.lower_bound for row, other in found if workload.is_as_hard_as(other))
        rows.append(replace(row, metrics=replace(row.metrics, lower_bound=bound)))
    return rows


class _Workload(NamedTuple):
    """What a strategy had to pack."""

    capacity: int
    segments: bytes
    """The counts of the segment lengths, as bytes."""
    limit: float
    """Most documents in a pack."""

    def is_as_hard_as(self, other: _Workload) -> bool:
        """Return whether it needs at least as many packs as the other: same segments, no higher limit per pack."""
        return self[:2] == other[:2] and self.limit <= other.limit


def workload_of(plan: PackingPlan, strategy: Strategy) -> _Workload:
    """Return what a strategy had to pack."""
    limit = getattr(strategy, "max_documents", None)
    counts = np.bincount(plan.segment_length, minlength=1)
    return _Workload(int(plan.pack_capacity.max(initial=0)), counts.tobytes(), float("inf") if limit is None else limit)


_HEADER = ("", "padding", "truncation", "dropped", "concatenation", "packs", "above bound", "seconds")


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Format a table as text: the first column aligned left, the others right."""
    name, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    lines = [
        [first.ljust(name), *(cell.rjust(width) for cell, width in zip(rest, others, strict=True))]
        for first, *rest in cells
    ]
    return "\n".join("  ".join(line) for line in lines)


def _table_row(row: ComparedStrategy) -> tuple[str, ...]:
    m = row.metrics
    return (
        row.name,
        f"{m.padding_ratio:.3%}",
        f"{m.truncation_ratio:.3%}",
        f"{m.dropped_token_ratio:.3%}",
        f"{m.concatenation_ratio:.2f}",
        f"{m.num_packs:,}",
        "" if row.gap is None else f"{row.gap:.4%}",
        f"{row.seconds:.2f}",
    )
