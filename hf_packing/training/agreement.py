"""All ranks plan from the same data and settings, or none of them goes on.

Batches are a pure function of the data, the batching and the number of ranks, which every rank computes for itself. So
ranks that were given different rows would train on some of them twice and on others never, or wait for each other for
ever. Everything that plans runs on all ranks, which then exchange what they planned from, also where one has failed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.state import is_initialized
from accelerate.utils import gather_object

from hf_packing.errors import PackingError
from hf_packing.sampling.data_facts import DataFacts, data_facts, difference
from hf_packing.sampling.row_sizes import RowSizes

Result = TypeVar("Result")


@dataclass
class PlannedFrom:
    """What a rank plans from, as far as it came."""

    compared: bool = False
    """Whether there are other ranks."""
    data: dict[str, DataFacts] = field(default_factory=dict)
    """By the name that the user knows the dataset by."""
    settings: dict[str, str] = field(default_factory=dict)

    def note_data(self, name: str, dataset: Any, sizes: RowSizes) -> None:
        if self.compared:
            self.data[name] = data_facts(dataset, sizes)

    def note_settings(self, **settings: Any) -> None:
        self.settings.update({name: str(value) for name, value in settings.items()})


@dataclass(frozen=True)
class _Report:
    """Of one rank, to all."""

    planned_from: PlannedFrom
    error: str | None


def on_all_ranks(act: Callable[[PlannedFrom], Result]) -> Result:
    """What act returns, where it succeeds on all ranks and from the same data and settings; all ranks must call this.

    Args:
        act: plans, and notes what from. Nothing in it may wait for other ranks.

    Raises:
        PackingError: on every rank, where data or settings differ, or act failed on another rank.
    """
    processes = PartialState().num_processes if is_initialized() else 1
    planned_from = PlannedFrom(compared=processes > 1)
    if processes == 1:
        return act(planned_from)
    failure = None
    try:
        result = act(planned_from)
    except Exception as error:  # the others have to learn of any
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    reports = gather_object([_Report(planned_from, said)])
    try:
        _refuse_differences(reports)
    except PackingError as different:
        raise different from failure
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise PackingError(f"rank {rank} of {processes}: {report.error}")
    return result


class Appointment:
    """Whether other ranks wait for this one, in a method that all ranks call and that plans somewhere inside."""

    def __init__(self) -> None:
        self._awaited = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within it, all ranks plan once."""
        self._awaited = True
        try:
            yield
        finally:
            self._awaited = False

    def keep(self) -> Callable[[Callable[[PlannedFrom], Result]], Result]:
        """`on_all_ranks`, where others wait; else this rank looks at batches of its own accord, and acts alone."""
        awaited, self._awaited = self._awaited, False
        return on_all_ranks if awaited else lambda act: act(PlannedFrom())


def _refuse_differences(reports: list[_Report]) -> None:
    complete = all(report.error is None for report in reports)
    first = reports[0].planned_from
    for rank, report in enumerate(reports[1:], start=1):
        other = report.planned_from
        for name in _names(first.data, other.data, complete):
            if name not in first.data or name not in other.data:
                has, lacks = (0, rank) if name in first.data else (rank, 0)
                raise PackingError(f"{name}: expected one on all ranks, rank {has} has one, rank {lacks} has none")
            if differ := difference(first.data[name], other.data[name], "rank 0", f"rank {rank}"):
                raise PackingError(
                    f"{name}: expected the same rows on all ranks; {differ}. Give every rank the whole dataset, "
                    "without .shard(), split_dataset_by_node() or shuffle(seed=rank): its rows are dealt to the ranks "
                    "here"
                )
    for rank, report in enumerate(reports[1:], start=1):
        other = report.planned_from
        for name in _names(first.settings, other.settings, complete):
            here, there = first.settings.get(name), other.settings.get(name)
            if here != there:
                raise PackingError(
                    f"{name}: expected the same on all ranks; rank 0 has {here}, rank {rank} has {there}. Every rank "
                    "plans the batches of all ranks, and takes its own"
                )


def _names(first: Mapping[str, Any], other: Mapping[str, Any], complete: bool) -> list[str]:
    """Those to compare: where a rank has failed, what it did not come to says nothing."""
    return [name for name in {**first, **other} if complete or (name in first and name in other)]
