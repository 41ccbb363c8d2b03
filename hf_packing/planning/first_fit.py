"""First-fit decreasing on length counts: a pack takes the longest that fits, again and again, then the next opens."""

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import lengths_descending
from hf_packing.planning.patterns import Pattern, Patterns, patterns_from_list
from hf_packing.planning.remaining import Remaining


def first_fit_patterns(counts: IntArray, capacity: int) -> Patterns:
    """The packs of first-fit decreasing; filling packs one by one is the same as placing documents one by one.

    Args:
        counts: int64 [longest + 1]: how many segments there are of each length; none is empty.
        capacity: tokens a pack holds.

    Returns:
        Patterns with exactly the counted segments.
    """
    remaining = Remaining(dict(lengths_descending(counts)))
    patterns = []
    while remaining.lengths:
        copies, _ = remaining.fill(capacity)
        packs = remaining.packs_alike(copies)
        for length, number in copies:
            remaining.take(length, packs * number)
        patterns.append(Pattern(packs, capacity, copies))
    return patterns_from_list(patterns)
