"""Turn the columns that an optimizer has chosen into packs of documents.

A column is a pattern of slots, and a slot is a place for one document in a pack. A document may go into a slot that is
longer than the document. Documents that get no slot are packed best-fit.
"""

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.open_packs import Interval, OpenPacks, fill_best_fit
from hf_packing.planning.patterns import Patterns, Run, patterns_from_runs


class _FreeSlots:
    """The free slots of one length. A free slot is a slot that has no document yet.

    Each interval stands for consecutive packs with the same number of free slots.
    """

    def __init__(self, packs: IntArray, first_pack: IntArray, copies: IntArray) -> None:
        self.intervals = list(zip(first_pack.tolist(), packs.tolist(), copies.tolist(), strict=True))

    def give(self, length: int, documents: int) -> tuple[list[Run], int]:
        """Put documents of one length into free slots; return the runs, and the number of documents without a slot."""
        runs = []
        while documents and self.intervals:
            first, packs, copies = self.intervals.pop()
            full = min(packs, documents // copies)
            if full:
                runs.append(Run(length, first, full, copies))
                documents -= full * copies
                if full < packs:
                    self.intervals.append((first + full, packs - full, copies))
            else:  # one pack has more free slots than there are documents
                runs.append(Run(length, first, 1, documents))
                if packs > 1:
                    self.intervals.append((first + 1, packs - 1, copies))
                self.intervals.append((first, 1, copies - documents))
                documents = 0
        return runs, documents


def fill_columns(
    packs: IntArray, columns: IntArray, slots: IntArray, counts: IntArray, capacity: int, max_documents: int | None
) -> Patterns:
    """Pack all counted segments, as many as possible in packs that are built from the columns.

    First, each slot takes a document that fits in the slot but not in the next shorter slot, longer documents first.
    Then, slots that are still free take any documents that fit, longer documents first. The remaining documents are
    packed best-fit, into the room that is left in the packs or into new packs. Packs without any document are left out.

    Args:
        packs: int64 [columns]: number of packs to build from each column.
        columns: integers [slots, columns]: number of slots of each length in each column.
        slots: int64 [slots]: slot lengths in tokens, ascending.
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

    def give(free: _FreeSlots, lengths: IntArray) -> None:
        for length in lengths.tolist():
            if not free.intervals:
                break
            given, left[length] = free.give(length, int(left[length]))
            runs.extend(given)

    free_slots = []
    lengths = np.flatnonzero(counts)
    slot_of_length = np.searchsorted(slots, lengths)
    for number in range(len(slots)):
        having = np.flatnonzero(columns[number, used])
        free = _FreeSlots(packs[used[having]], first[having], columns[number, used[having]])
        give(free, lengths[slot_of_length == number][::-1])
        free_slots.append(free)
    for number in range(len(slots) - 1, -1, -1):
        if free_slots[number].intervals:
            give(free_slots[number], np.flatnonzero(left[: slots[number] + 1])[::-1])
    return _fill_rest(runs, num_packs, left, capacity, max_documents)


def _fill_rest(runs: list[Run], num_packs: int, left: IntArray, capacity: int, max_documents: int | None) -> Patterns:
    """Pack the remaining segments best-fit, into the room that the runs leave free and into new packs."""
    made = patterns_from_runs(runs, num_packs, capacity)
    open_packs = OpenPacks(capacity, max_documents)
    open_packs.runs, open_packs.num_packs = runs, num_packs
    room = made.capacity - made.tokens_per_pack()
    documents, first = made.segments_per_pack(), np.cumsum(made.packs) - made.packs
    useful = (documents > 0) & (documents < open_packs.limit) & (room > 0)
    for number in np.flatnonzero(useful).tolist():
        interval = Interval(int(first[number]), int(made.packs[number]), int(documents[number]))
        open_packs.add(int(room[number]), interval)
    fill_best_fit(open_packs, left)
    return open_packs.patterns().without_empty()
