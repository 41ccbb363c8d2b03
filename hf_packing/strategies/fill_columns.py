"""Turn the solution of an optimizer (how many packs to make of each column) into packs of documents.

A column is one way to fill a pack: a combination of slots. A slot is a place for one document in a pack, and may be
longer than the document. Documents that get no slot are packed best-fit.
"""

import numpy as np

from hf_packing.planning.best_fit import Interval, OpenPacks, fill_best_fit
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.patterns import Patterns, patterns_from_runs

_Run = tuple[int, int, int, int]
"""(length, first pack, packs, copies), as for `patterns_from_runs`."""


class _FreeSlots:
    """The free slots of one length. A free slot is a slot that has no document yet.

    `intervals` is a list of (first pack, number of packs, number of free slots in each pack). Each interval stands for
    consecutive packs that have the same number of free slots.
    """

    def __init__(self, packs: IntArray, first_pack: IntArray, copies: IntArray) -> None:
        self.intervals = list(zip(first_pack.tolist(), packs.tolist(), copies.tolist(), strict=True))

    def give(self, length: int, documents: int) -> tuple[list[_Run], int]:
        """Put documents of one length into free slots.

        Args:
            length: length of each document, in tokens.
            documents: number of documents.

        Returns:
            Filling steps that put documents into packs; and the number of documents that found no free slot.
        """
        runs: list[_Run] = []
        while documents and self.intervals:
            first, packs, copies = self.intervals.pop()
            full = min(packs, documents // copies)
            if full:
                runs.append((length, first, full, copies))
                documents -= full * copies
                if full < packs:
                    self.intervals.append((first + full, packs - full, copies))
            else:  # one pack has more free slots than there are documents
                runs.append((length, first, 1, documents))
                if packs > 1:
                    self.intervals.append((first + 1, packs - 1, copies))
                self.intervals.append((first, 1, copies - documents))
                documents = 0
        return runs, documents


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
    runs: list[_Run] = []

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


def _fill_rest(runs: list[_Run], num_packs: int, left: IntArray, capacity: int, max_documents: int | None) -> Patterns:
    """Pack the remaining segments best-fit, into packs that have free room and into new packs.

    Args:
        runs: filling steps of the existing packs.
        num_packs: number of existing packs.
        left: int64 [longest + 1]: left[n] is the number of remaining segments of n tokens.
        capacity: capacity of each pack, in tokens.
        max_documents: maximum number of segments in a pack; None for no limit.

    Returns:
        Patterns of all packs that hold at least one segment.
    """
    made = patterns_from_runs(runs, num_packs, capacity)
    open_packs = OpenPacks(capacity, max_documents)
    open_packs.runs, open_packs.num_packs = [*runs], num_packs
    room = made.capacity - made.tokens_per_pack()
    documents, first = made.segments_per_pack(), np.cumsum(made.packs) - made.packs
    useful = (documents > 0) & (documents < open_packs.limit) & (room > 0)
    for number in np.flatnonzero(useful).tolist():
        interval = Interval(int(first[number]), int(made.packs[number]), int(documents[number]))
        open_packs.add(int(room[number]), interval)
    fill_best_fit(open_packs, left)
    return open_packs.patterns().without_empty()
