"""The strategies a user names: how documents become packs. Each one is also a transform for `datasets.map`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

import hf_packing
from hf_packing.arrow.batch import pack_batch
from hf_packing.errors import PackingError
from hf_packing.planning.best_fit import best_fit_table
from hf_packing.planning.deal import deal
from hf_packing.planning.first_come import Order, first_come_plan
from hf_packing.planning.fixed_length import fixed_length_plan
from hf_packing.planning.lengths import IntArray, check_lengths, check_whole_number
from hf_packing.planning.overflow import Overflow, check_overflow, cut_to_pieces
from hf_packing.planning.plan import PackingPlan

SEED_MAX = 2**63 - 1


def package_version() -> str:
    return hf_packing.__version__


@dataclass(frozen=True)
class Strategy(ABC):
    """How documents become packs; call it on a batch of rows to pack them.

    As a transform it takes what `datasets.map(..., batched=True)` hands out: a dict of lists, a dict of numpy arrays or
    a pyarrow Table. It returns the same kind, one row for each pack, with `input_ids`, `labels`, `position_ids` and
    `seq_lengths`, as int32; where the dataset is in numpy or torch format, `Dataset.map` itself turns `labels` back
    into the type they had. Each batch is planned by itself, so large batches pack better; `pack` plans over the whole
    dataset.
    """

    package_version: str = field(default_factory=package_version, init=False, repr=False)
    """In the hash that `datasets` caches by, which knows a class by its name alone: a new version packs anew."""

    @abstractmethod
    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        """The plan for checked lengths."""

    def __call__(self, batch: Any) -> Any:
        return pack_batch(batch, self.plan_lengths)

    def settle(self, **values: Any) -> None:
        """Set fields of the frozen instance to their checked values."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def check_seed(seed: int | None) -> int | None:
    return None if seed is None else check_whole_number("seed", seed, minimum=0, maximum=SEED_MAX)


def check_max_documents(max_documents: int | None) -> int | None:
    return None if max_documents is None else check_whole_number("max_documents", max_documents)


@dataclass(frozen=True)
class BestFit(Strategy):
    """Best-fit decreasing: longest documents first, each into the pack with the least room that holds it.

    No document that fits in a pack is cut ("Fewer truncations improve language modeling", arXiv 2404.10830). With
    `max_documents` it is longest-pack-first histogram packing (arXiv 2107.02027).

    Args:
        max_length: tokens a pack holds, at least 1.
        overflow: what happens to a longer document: "split" into chunks of max_length and a remainder, "truncate",
            "drop", or "error".
        max_documents: most segments in a pack; None for no limit.
        seed: of the random order of packs, of the documents in them, and of documents of equal length; None leaves
            them sorted.

    Raises:
        PackingError: an argument that is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> batch = {"input_ids": [[1, 2, 3], [4, 5], [6]]}
        >>> hfp.BestFit(4, seed=None)(batch)["input_ids"]
        [[1, 2, 3, 6], [4, 5]]
    """

    max_length: int
    overflow: Overflow = field(default="split", kw_only=True)
    max_documents: int | None = field(default=None, kw_only=True)
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_overflow(self.overflow)
        self.settle(
            max_length=check_whole_number("max_length", self.max_length),
            max_documents=check_max_documents(self.max_documents),
            seed=check_seed(self.seed),
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        pieces = cut_to_pieces(lengths, self.max_length, self.overflow)
        counts = np.bincount(pieces.length, minlength=1)
        table = best_fit_table(counts, self.max_length, self.max_documents)
        bound = -(-len(pieces.length) // self.max_documents) if self.max_documents else 0
        return deal(table, pieces, lengths, self.seed, lower_bound=bound)


@dataclass(frozen=True)
class FixedLength(Strategy):
    """Concatenate all documents and cut every `max_length` tokens: the baseline, TRL's "wrapped".

    Nothing is padded but the last pack, and documents are cut wherever a pack ends. Rows keep the order of the dataset.

    Args:
        max_length: tokens of every pack, at least 1.

    Raises:
        PackingError: max_length is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.FixedLength(4)({"input_ids": [[1, 2, 3], [4, 5], [6]]})["input_ids"]
        [[1, 2, 3, 4], [5, 6]]
    """

    max_length: int

    def __post_init__(self) -> None:
        self.settle(max_length=check_whole_number("max_length", self.max_length))

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return fixed_length_plan(lengths, self.max_length)


@dataclass(frozen=True)
class FirstCome(Strategy):
    """Documents enter the open pack in turn; one that does not fit closes it and opens the next.

    Random order is RandomPacking, longest first is SortedPacking of arXiv 2407.09105.

    Args:
        max_length: tokens a pack holds, at least 1.
        order: in which documents come: "random", "longest_first" or "dataset".
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        max_documents: most segments in a pack; None for no limit.
        seed: of the random order of documents and of packs; None leaves packs in the order they were filled, and is
            not allowed with order="random".

    Raises:
        PackingError: an argument that is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> first_come = hfp.FirstCome(4, order="dataset", seed=None)
        >>> first_come({"input_ids": [[1, 2, 3], [4, 5], [6]]})["input_ids"]
        [[1, 2, 3], [4, 5, 6]]
    """

    max_length: int
    order: Order = field(default="random", kw_only=True)
    overflow: Overflow = field(default="split", kw_only=True)
    max_documents: int | None = field(default=None, kw_only=True)
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_overflow(self.overflow)
        if self.order not in get_args(Order):
            raise PackingError(f"order: expected one of {', '.join(get_args(Order))}, got {self.order!r}")
        if self.seed is None and self.order == "random":
            raise PackingError("seed: expected an integer with order='random', got None")
        self.settle(
            max_length=check_whole_number("max_length", self.max_length),
            max_documents=check_max_documents(self.max_documents),
            seed=check_seed(self.seed),
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        pieces = cut_to_pieces(lengths, self.max_length, self.overflow)
        return first_come_plan(pieces, lengths, self.max_length, self.order, self.max_documents, self.seed)


def check_strategy(strategy: Any) -> Strategy:
    if not isinstance(strategy, Strategy):
        hint = f"; did you forget its arguments, as in {strategy.__name__}(2048)?" if isinstance(strategy, type) else ""
        raise PackingError(f"strategy: expected a strategy such as BestFit(2048), got {strategy!r}{hint}")
    return strategy


def plan_packing(lengths: Any, strategy: Strategy) -> PackingPlan:
    """Plan packs from lengths alone.

    Args:
        lengths: 1-d integers [documents], tokens; a list or an array. Empty documents are skipped and counted.
        strategy: BestFit, FixedLength or FirstCome.

    Returns:
        PackingPlan.

    Raises:
        PackingError: lengths that are negative, not integers or not 1-d; something that is not a strategy.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([14, 7, 5, 2, 3], hfp.BestFit(8)).metrics().num_cut_documents
        1
    """
    if type(lengths).__module__.partition(".")[0] == "datasets":  # a lazy column, which numpy would read row by row
        lengths = lengths[:]
    return check_strategy(strategy).plan_lengths(check_lengths(lengths))
