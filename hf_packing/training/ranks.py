"""Which processes train on which rows, and that all of them plan from the same data and settings, or none goes on.

Batches are a pure function of the data, the batching and the number of ranks, and every rank computes them by itself.
Ranks that were given different rows would train on some of them twice and on others never, or wait for each other
forever. So planning runs on all ranks at the same time, and they exchange what they planned from, even if one failed.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from accelerate import Accelerator, PartialState
from accelerate.state import is_initialized
from accelerate.utils import gather_object

from hf_packing.errors import PackingError
from hf_packing.sampling.data_facts import DataFacts, data_facts, difference
from hf_packing.sampling.row_sizes import RowSizes

Result = TypeVar("Result")


class DataRank(NamedTuple):
    """One of the ranks that train on different rows."""

    rank: int
    world_size: int


def data_rank(accelerator: Accelerator) -> DataRank:
    """Return the data rank of this process; processes that share a model by tensor parallelism share one data rank."""
    config = parallelism_of(accelerator)
    together = getattr(config, "tp_size", 1) if config else 1
    return DataRank(accelerator.process_index // together, accelerator.num_processes // together)


def parallelism_of(accelerator: Accelerator) -> Any:
    """Return accelerate's parallelism_config, or None."""
    return getattr(accelerator, "parallelism_config", None)


@dataclass
class PlannedFrom:
    """The data and settings that a rank has planned from so far."""

    compared: bool = False
    """Whether there are other ranks to compare with."""
    data: dict[str, DataFacts] = field(default_factory=dict)
    """By the name under which the user knows the dataset."""
    settings: dict[str, str] = field(default_factory=dict)

    def note_data(self, name: str, dataset: Any, sizes: RowSizes) -> None:
        if self.compared:
            self.data[name] = data_facts(dataset, sizes)

    def note_settings(self, **settings: Any) -> None:
        self.settings.update({name: str(value) for name, value in settings.items()})


def on_all_ranks(act: Callable[[PlannedFrom], Result]) -> Result:
    """Call a function on every rank, and return its result if all ranks succeed from the same data and settings.

    All ranks must call this at the same time.

    Args:
        act: plans, and notes what it plans from. Nothing in it may wait for other ranks.

    Raises:
        PackingError: on every rank, if data or settings differ, or if act failed on another rank.
    """
    processes = PartialState().num_processes if is_initialized() else 1
    planned_from = PlannedFrom(compared=processes > 1)
    if processes == 1:
        return act(planned_from)
    failure = None
    try:
        result = act(planned_from)
    except Exception as error:  # whatever it is, the other ranks must hear of it
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


class CollectiveCall:
    """Whether a method is running that all ranks call together, such as train(), and has not planned yet.

    Such a method makes its loader somewhere inside, and ranks compare what they plan it from. A loader that is made
    outside of such a method may be made on one rank only, so nothing is compared.
    """

    def __init__(self) -> None:
        self._is_to_plan = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Mark the time in which all ranks plan once."""
        self._is_to_plan = True
        try:
            yield
        finally:
            self._is_to_plan = False

    def runner(self) -> Callable[[Callable[[PlannedFrom], Result]], Result]:
        """Return `on_all_ranks` at the first call while active, else a function that acts on this rank alone."""
        is_to_plan, self._is_to_plan = self._is_to_plan, False
        return on_all_ranks if is_to_plan else lambda act: act(PlannedFrom())


@dataclass(frozen=True)
class _Report:
    """What one rank tells all others."""

    planned_from: PlannedFrom
    error: str | None


def _refuse_differences(reports: list[_Report]) -> None:
    complete = all(report.error is None for report in reports)
    first = reports[0].planned_from
    for rank, report in enumerate(reports[1:], start=1):
        other = report.planned_from
        for name in _names_to_compare(first.data, other.data, complete):
            if name not in first.data or name not in other.data:
                has, lacks = (0, rank) if name in first.data else (rank, 0)
                raise PackingError(f"{name}: expected one on all ranks, rank {has} has one, rank {lacks} has none")
            if differ := difference(first.data[name], other.data[name], "rank 0", f"rank {rank}"):
                raise PackingError(
                    f"{name}: expected the same rows on all ranks; {differ}. Give every rank the whole dataset, "
                    "without .shard(), split_dataset_by_node() or shuffle(seed=rank): its rows are divided among the "
                    "ranks here"
                )
    for rank, report in enumerate(reports[1:], start=1):
        other = report.planned_from
        for name in _names_to_compare(first.settings, other.settings, complete):
            here, there = first.settings.get(name), other.settings.get(name)
            if here != there:
                raise PackingError(
                    f"{name}: expected the same on all ranks; rank 0 has {here}, rank {rank} has {there}. Every rank "
                    "plans the batches of all ranks and takes its own"
                )


def _names_to_compare(first: Mapping[str, Any], other: Mapping[str, Any], complete: bool) -> list[str]:
    """Return the names that both have, and all others, too, unless a rank has failed before it came to them."""
    return [name for name in {**first, **other} if complete or (name in first and name in other)]
