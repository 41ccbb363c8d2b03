"""Strategies that take documents in an order: as they come, or shuffled."""

from dataclasses import dataclass, field
from typing import get_args

from hf_packing.errors import PackingError
from hf_packing.planning.first_come import Order, first_come_plan
from hf_packing.planning.fixed_length import fixed_length_plan
from hf_packing.planning.lengths import IntArray, check_whole_number
from hf_packing.planning.multipack import multipack_plan
from hf_packing.planning.overflow import Overflow, check_fitting, check_overflow, cut_to_pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.shuffle import check_seed
from hf_packing.strategies.base import Strategy, check_max_documents, check_optional_seed


@dataclass(frozen=True)
class FixedLength(Strategy):
    """Concatenate all documents and cut every `max_length` tokens: the baseline, TRL's "wrapped".

    Nothing is padded but the last pack, and documents are cut wherever a pack ends.

    Args:
        max_length: tokens of every pack, at least 1.
        seed: of the random order of packs and of the segments in them; None keeps the order of the dataset.

    Raises:
        PackingError: an argument that is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.FixedLength(4, seed=None)({"input_ids": [[1, 2, 3], [4, 5], [6]]})["input_ids"]
        [[1, 2, 3, 4], [5, 6]]
    """

    max_length: int
    seed: int | None = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self.settle(max_length=check_whole_number("max_length", self.max_length), seed=check_optional_seed(self.seed))

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        return fixed_length_plan(lengths, self.max_length, self.seed)


@dataclass(frozen=True)
class FirstCome(Strategy):
    """Documents enter the open pack in turn; one that does not fit closes it and opens the next.

    Random order is RandomPacking, longest first is SortedPacking of arXiv 2407.09105.

    Args:
        max_length: tokens a pack holds, at least 1.
        order: in which documents come: "random", "longest_first" or "dataset".
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        max_documents: most segments in a pack; None for no limit.
        seed: of the random order in which documents come, of packs, and of the documents in them; None leaves packs as
            they were filled, and is not allowed with order="random".

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
            seed=check_optional_seed(self.seed),
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        pieces = cut_to_pieces(lengths, self.max_length, self.overflow)
        return first_come_plan(pieces, lengths, self.max_length, self.order, self.max_documents, self.seed)


@dataclass(frozen=True)
class Multipack(Strategy):
    """Documents are shuffled and packed window by window, first-fit or best-fit decreasing, whichever has fewer packs.

    The plan of the multipack sampler (see arXiv 2407.09105), but the tail is kept: no document is dropped. Which
    documents can meet in a pack changes with the seed, unlike in a plan over the whole dataset.

    Args:
        max_length: tokens a pack holds, at least 1.
        window: documents packed together, at least 1.
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        seed: of the random order of documents, of packs, and of the documents in them.

    Raises:
        PackingError: an argument that is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([3, 2, 1, 4, 2], hfp.Multipack(4, window=5))
        PackingPlan(5 documents, 5 segments, 3 packs, efficiency 1.0000)
        >>> hfp.plan_packing([3, 2, 1, 4, 2], hfp.Multipack(4, window=1))
        PackingPlan(5 documents, 5 segments, 5 packs, efficiency 0.6000)
    """

    max_length: int
    window: int = field(default=100_000, kw_only=True)
    overflow: Overflow = field(default="split", kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_overflow(self.overflow)
        self.settle(
            max_length=check_whole_number("max_length", self.max_length),
            window=check_whole_number("window", self.window),
            seed=check_seed(self.seed),
        )

    def plan_lengths(self, lengths: IntArray) -> PackingPlan:
        check_fitting(lengths, self.max_length, self.overflow)
        return multipack_plan(lengths, self.max_length, self.overflow, self.window, self.seed)
