"""Turn the solution of an optimizer (how many packs to make of each column) into packs of documents.

A column is one way to fill a pack: a combination of slots. A slot is a place for one document in a pack, and may be
longer than the document. Documents that get no slot are packed best-fit.
"""

import numpy as np

from hf_packing.planning.best_fit import OpenPacks, fill_best_fit
from hf_packing.planning.lengths import IntArray, offsets_of
from hf_packing.planning.patterns import Patterns, Run, patterns_from_runs


def fill_columns(
    packs: IntArray, columns: IntArray, slots: IntArray, counts: IntArray, capacity: int, max_documents: int | None
) -> Patterns:
    """Build packs from columns, fill the slots with as many counted segments as possible, and pack the rest best-fit.

    First, slots of each length take documents that fit in such a slot but not in the next shorter slot. Then, slots
    that are still free take any documents that fit. In both steps, longer documents come first. The remaining documents
    are packed best-fit, into the free room of these packs or into new packs. Packs without any document are left out.

    Args:
        packs: int64 [columns]: number of packs to build from each column.
        columns: integers [slots, columns]: number of slots of each length in each column.
        slots: int64 [slots]: the distinct slot lengths in tokens, ascending.
        counts: int64 [longest + 1]: counts[n] is the number of segments of n tokens; counts[0] is 0.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of segments in a pack; None for no limit.

    Returns:
        Patterns whose packs hold exactly the counted segments.
    """
    used = np.flatnonzero(packs)
    first = np.cumsum(packs[used]) - packs[used]
    num_packs = int(packs[used].sum())
    left = counts.copy()
    runs: list[Run] = []

    def give(intervals: list[tuple[int, int, int]], lengths: IntArray) -> None:
        """Put documents into free slots, the longest first. Intervals are (first pack, packs, free slots in each)."""
        for length in lengths[::-1].tolist():
            documents = int(left[length])
            while documents and intervals:
                pack, number, copies = intervals.pop()
                put = min(copies, documents)
                filled = min(number, documents // put)
                runs.append((length, pack, filled, put))
                documents -= filled * put
                if filled < number:
                    intervals.append((pack + filled, number - filled, copies))
                if put < copies:  # one pack has more free slots than there are documents
                    intervals.append((pack, filled, copies - put))
            left[length] = documents
            if not intervals:
                break

    free = []
    lengths = np.flatnonzero(counts)
    slot_of_length = np.searchsorted(slots, lengths)
    for number in range(len(slots)):
        having = np.flatnonzero(columns[number, used])
        of_columns = (first[having], packs[used[having]], columns[number, used[having]])
        free.append(list(zip(*(array.tolist() for array in of_columns), strict=True)))
        give(free[number], lengths[slot_of_length == number])
    for number in range(len(slots) - 1, -1, -1):
        if free[number]:
            give(free[number], np.flatnonzero(left[: slots[number] + 1]))
    made = patterns_from_runs(runs, num_packs, capacity)
    # the rest goes best-fit into packs with free room, and into new packs
    open_packs = OpenPacks(capacity, max_documents)
    open_packs.runs, open_packs.num_packs = runs, num_packs
    room = made.capacity - made.tokens_per_pack()
    documents, first = made.segments_per_pack(), offsets_of(made.packs)
    useful = (documents > 0) & (documents < open_packs.limit) & (room > 0)
    intervals = np.column_stack([room, first[:-1], made.packs, documents])[useful]
    for tokens, first_pack, number, segments in intervals.tolist():
        open_packs.add(tokens, (first_pack, number, segments))
    fill_best_fit(open_packs, left)
    return open_packs.patterns().without_empty()
