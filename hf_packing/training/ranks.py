"""Check that all ranks plan from the same data and settings.

Batches are a pure function of the data, the settings and the number of ranks, so every rank computes the batches of all
ranks by itself. Ranks with different data would train on some rows twice and on other rows never, or would wait for
each other forever. To detect different data, all ranks plan at the same time and then exchange facts about the data and
settings that they used, even if planning failed on a rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from accelerate import Accelerator, PartialState
from accelerate.state import is_initialized
from accelerate.utils import gather_object

from hf_packing.errors import PackingError
from hf_packing.sampling.sizes import RowSizes, data_facts

Result = TypeVar("Result")

Facts = dict[str, tuple[str, ...]]
"""Facts about data and settings by name, in the order of importance; an empty fact is not known."""


class DataRank(NamedTuple):
    """The rank of a process among the ranks that train on different rows, and the number of such ranks."""

    rank: int
    world_size: int


def data_rank(accelerator: Accelerator, ranks_per_row: int = 1) -> DataRank:
    """Return the data rank of this process; processes that share a model by tensor parallelism share one data rank, and
    so do those that run rows together."""
    together = getattr(accelerator.parallelism_config, "tp_size", 1) * ranks_per_row
    return DataRank(accelerator.process_index // together, accelerator.num_processes // together)


@dataclass
class PlannedFrom:
    """The data and settings that a rank has used for planning so far, to compare with the other ranks."""

    compared: bool = False
    """True if there are other ranks to compare with; if False, no facts about the data are collected."""
    facts: Facts = field(default_factory=dict)

    def note_data(self, name: str, dataset: Any, sizes: RowSizes) -> None:
        if self.compared:
            self.facts[name] = data_facts(dataset, sizes)

    def note_settings(self, **settings: Any) -> None:
        self.facts.update({name: (str(value),) for name, value in settings.items()})


def on_all_ranks(act: Callable[[PlannedFrom], Result]) -> Result:
    """Call `act` on this rank, and return the result if `act` used the same data and settings on all ranks.

    All ranks must call this function at the same time. If `act` raises an error on a rank, that rank raises the error.

    Args:
        act: a function that plans batches, and notes the data and settings in its argument, a PlannedFrom. The function
            must not wait for other ranks after code that may fail on some of them.

    Raises:
        PackingError: data or settings differ between ranks (raised on every rank), or `act` failed on another rank.
    """
    processes = PartialState().num_processes if is_initialized() else 1
    planned_from = PlannedFrom(compared=processes > 1)
    if processes == 1:
        return act(planned_from)
    failure = None
    try:
        result = act(planned_from)
    except Exception as error:  # the other ranks must learn of any error
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    facts, errors = zip(*gather_object([(planned_from.facts, said)]), strict=True)
    try:
        _refuse_differences(facts, complete=not any(errors))
    except PackingError as different:
        raise different from failure
    if failure is not None:
        raise failure
    for rank, told in enumerate(errors):
        if told is not None:
            raise PackingError(f"rank {rank} of {processes} raised {told}")
    return result


def _refuse_differences(of_ranks: Sequence[Facts], complete: bool) -> None:
    """Raise PackingError if facts differ between ranks.

    If planning failed on a rank (not `complete`), facts that only some ranks have noted are not compared.
    """
    first = of_ranks[0]
    for rank, facts in enumerate(of_ranks[1:], start=1):
        for name in {**first, **facts}:
            if not complete and (name not in first or name not in facts):
                continue
            for own, other in zip(first.get(name, ("none",)), facts.get(name, ("none",)), strict=False):
                if own and other and own != other:
                    raise PackingError(
                        f"{name}: expected the same on all ranks; rank 0 has {own}, but rank {rank} has {other}. Every "
                        "rank plans the batches of all ranks: give all of them the same settings, NumPy and whole "
                        "dataset, without .shard(), split_dataset_by_node() or shuffle(seed=rank)"
                    )
