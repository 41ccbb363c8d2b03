"""Strategies that look at nothing but the counts of lengths, with packs of one capacity."""

import warnings
from dataclasses import dataclass, field

from tqdm import tqdm

from hf_packing.planning.best_fit import best_fit_patterns
from hf_packing.planning.lengths import IntArray, check_seconds, check_whole_number
from hf_packing.planning.non_negative_least_squares import non_negative_least_squares_patterns
from hf_packing.planning.optimal import optimal_packs
from hf_packing.planning.patterns import Solution
from hf_packing.planning.shortest_pack_first import shortest_pack_first_patterns
from hf_packing.strategies.base import OneCapacity


@dataclass(frozen=True)
class BestFit(OneCapacity):
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

    def solve(self, counts: IntArray) -> Solution:
        return Solution(best_fit_patterns(counts, self.max_length, self.max_documents))


@dataclass(frozen=True)
class ShortestPackFirst(OneCapacity):
    """Shortest-pack-first histogram packing (SPFHP): longest documents first, into the packs with the most room.

    Length by length: documents go into the packs that are open, one each, and those left get packs of their own. It
    usually needs more packs than BestFit, most of all where there are few distinct lengths ("Efficient sequence packing
    without cross-contamination", arXiv 2107.02027).

    Args:
        max_length: tokens a pack holds, at least 1.
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        max_documents: most segments in a pack, the paper's depth; None for no limit.
        seed: of the random order of packs, of the documents in them, and of documents of equal length; None leaves
            them sorted.

    Raises:
        PackingError: an argument that is not as above.

    Example:
        >>> import hf_packing as hfp
        >>> batch = {"input_ids": [[1, 2, 3], [4, 5], [6]]}
        >>> hfp.ShortestPackFirst(4, seed=None)(batch)["input_ids"]
        [[1, 2, 3], [4, 5, 6]]
    """

    def solve(self, counts: IntArray) -> Solution:
        return Solution(shortest_pack_first_patterns(counts, self.max_length, self.max_documents))


@dataclass(frozen=True)
class NonNegativeLeastSquares(OneCapacity):
    """Non-negative least squares over all ways to fill a pack exactly with few documents (NNLSHP, arXiv 2107.02027).

    Good for large corpora with documents of every length and 2 or 3 of them in a pack. Where few lengths occur, few
    packs can be filled exactly and BestFit is better; `Optimal` is better and quicker everywhere. Takes seconds at
    max_length=512, minutes at 2048. Needs scipy: `pip install "hf-packing[optimal]"`.

    Args:
        max_length: tokens a pack holds, at least 1.
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        max_documents: most segments in a pack, the paper's depth.
        seed: of the random order of packs, of the documents in them, and of documents of equal length; None leaves
            them sorted.

    Raises:
        PackingError: an argument that is not as above; when planning, more than 2**23 ways to fill a pack.
        MissingDependencyError: when planning, scipy is not installed.

    Example:
        >>> import hf_packing as hfp
        >>> hfp.plan_packing([5, 3, 6, 2, 4, 4], hfp.NonNegativeLeastSquares(8))
        PackingPlan(6 documents, 6 segments, 3 packs, efficiency 1.0000)
    """

    max_documents: int = field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settle(max_documents=check_whole_number("max_documents", self.max_documents))

    def solve(self, counts: IntArray) -> Solution:
        return Solution(non_negative_least_squares_patterns(counts, self.max_length, self.max_documents))


@dataclass(frozen=True)
class Optimal(OneCapacity):
    """The fewest packs that column generation finds, with a bound that proves how few are possible.

    Never more packs than BestFit, and worth its time where best fit is not close to the bound: lengths in a narrow
    range, as in most fine-tuning data. More than 1,000 distinct lengths are rounded up to 1,000 while planning, or to
    fewer with `max_documents` and long packs; packs of more than 131,072 tokens are measured in several tokens. The
    plan's `note` says what was done, its `metrics().lower_bound` is the bound. The same input gives the same plan
    unless the time runs out; where several processes need it, let one of them plan. Needs scipy:
    `pip install "hf-packing[optimal]"`.

    Args:
        max_length: tokens a pack holds, at least 1.
        overflow: what happens to a longer document: "split", "truncate", "drop" or "error".
        max_documents: most segments in a pack; None for no limit.
        time_limit: seconds to plan in, 0 or more; where they do not suffice for column generation, or it is too much
            work with max_documents, the plan is that of BestFit, and a warning says so.
        seed: of the random order of packs, of the documents in them, and of documents of equal length; None leaves
            them sorted.

    Raises:
        PackingError: an argument that is not as above.
        MissingDependencyError: when planning, scipy is not installed.

    Example:
        >>> import hf_packing as hfp
        >>> lengths = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2]
        >>> hfp.plan_packing(lengths, hfp.BestFit(30)).num_packs, hfp.plan_packing(lengths, hfp.Optimal(30)).num_packs
        (4, 3)
    """

    time_limit: float = field(default=60.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settle(time_limit=check_seconds("time_limit", self.time_limit))

    def solve(self, counts: IntArray) -> Solution:
        with tqdm(
            desc="Optimal", bar_format="{desc}: {postfix} [{elapsed}]", delay=1, leave=False, disable=None
        ) as bar:
            found = optimal_packs(counts, self.max_length, self.max_documents, self.time_limit, bar.set_postfix_str)
        if found.gave_up:
            warnings.warn(f"{self!r} returns {found.note}", stacklevel=2)
        return found
