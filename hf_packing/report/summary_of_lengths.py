"""How long documents are, in a few numbers."""

from dataclasses import dataclass, field

import numpy as np

from hf_packing.planning.lengths import IntArray


@dataclass(frozen=True, eq=False)
class LengthSummary:
    """Lengths in tokens, those of empty documents left out but counted."""

    documents: int
    """With tokens."""
    empty: int
    tokens: int
    mean: float
    median: float
    p90: float
    p99: float
    longest: int
    counts: IntArray = field(repr=False)
    """int64 [longest + 1]: how many documents have each length."""

    def share_longer_than(self, tokens: int) -> float:
        """The share of all tokens that is in documents with more tokens than so many."""
        longer = np.arange(tokens + 1, len(self.counts)) @ self.counts[tokens + 1 :]
        return float(longer / self.tokens)

    def longer_than(self, tokens: int) -> int:
        """Documents with more tokens."""
        return int(self.counts[tokens + 1 :].sum())


def summary_of_lengths(lengths: IntArray) -> LengthSummary:
    """The summary.

    Args:
        lengths: integers [documents], at least one above zero.
    """
    real = lengths[lengths > 0]
    median, p90, p99 = np.percentile(real, [50, 90, 99]).tolist()
    return LengthSummary(
        documents=len(real),
        empty=len(lengths) - len(real),
        tokens=int(real.sum(dtype=np.int64)),
        mean=float(real.mean()),
        median=median,
        p90=p90,
        p99=p99,
        longest=int(real.max()),
        counts=np.bincount(real),
    )
