"""What optimizers build on: the knapsack, and packs made after columns, each against a slow version."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from any_strategy import many_examples
from hypothesis import given
from hypothesis import strategies as st

from hf_packing.strategies.column_generation import fill_columns, most_valuable_packs


def all_packs(slots, capacity, limit):
    for size in range(1, limit + 1):
        for pack in combinations_with_replacement(range(len(slots)), size):
            if sum(slots[i] for i in pack) <= capacity:
                yield pack


@many_examples
@given(
    st.integers(3, 14).flatmap(
        lambda c: st.tuples(st.sets(st.integers(2, c), min_size=1, max_size=4).map(sorted), st.just(c))
    ),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_most_valuable_packs(case, worth, limit):
    slots, capacity = case
    value = np.array(worth[: len(slots)])
    packs = list(all_packs(slots, capacity, limit or capacity // slots[0]))
    most, columns = most_valuable_packs(value, np.array(slots), capacity, limit)
    assert most == pytest.approx(max(sum(value[i] for i in pack) for pack in packs), abs=1e-9)
    for slot in range(len(slots)):
        best = max(sum(value[i] for i in pack) for pack in packs if slot in pack)
        column = columns[:, slot]
        assert column[slot] >= 1
        assert column @ np.array(slots) <= capacity
        assert column.sum() <= (limit or capacity)
        assert column @ value == pytest.approx(best, abs=1e-9)


def fill_slot_by_slot(packs, columns, slots, lengths, capacity):
    """Fills: documents go into slots one at a time, then into the pack with the least room, then into new ones."""
    contents, free = [], {slot: [] for slot in range(len(slots))}
    for column in range(columns.shape[1]):
        first = len(contents)
        contents += [[] for _ in range(packs[column])]
        for slot in range(len(slots)):
            free[slot].insert(0, [first + n for n in range(packs[column]) for _ in range(columns[slot, column])])
    free = {slot: [pack for column in of_columns for pack in column] for slot, of_columns in free.items()}
    waiting = sorted(lengths, reverse=True)
    for slot, longest in enumerate(slots):
        shorter = slots[slot - 1] if slot else 0
        for length in [n for n in waiting if shorter < n <= longest][: len(free[slot])]:
            contents[free[slot].pop(0)].append(length)
            waiting.remove(length)
    for slot in reversed(range(len(slots))):
        for length in [n for n in waiting if n <= slots[slot]][: len(free[slot])]:
            contents[free[slot].pop(0)].append(length)
            waiting.remove(length)
    contents = [pack for pack in contents if pack]
    for length in waiting:
        fitting = [pack for pack in contents if sum(pack) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            contents.append([length])
    return sorted(map(sum, contents))


@st.composite
def columns_and_documents(draw):
    capacity = draw(st.integers(2, 20))
    slots = sorted(draw(st.sets(st.integers(1, capacity), min_size=1, max_size=5)))
    ways = list(all_packs(slots, capacity, 4))
    chosen = draw(st.lists(st.sampled_from(ways), min_size=1, max_size=5))
    columns = np.array([[way.count(slot) for way in chosen] for slot in range(len(slots))])
    packs = np.array(draw(st.lists(st.integers(0, 4), min_size=len(chosen), max_size=len(chosen))))
    lengths = draw(st.lists(st.integers(1, slots[-1]), min_size=1, max_size=40))
    return packs, columns, slots, lengths, capacity


@many_examples
@given(columns_and_documents())
def test_columns_are_filled_as_slot_by_slot(case):
    packs, columns, slots, lengths, capacity = case
    made = fill_columns(packs, columns, np.array(slots), np.bincount(lengths), capacity, None)
    assert made.counts().tolist() == np.bincount(lengths).tolist()
    fills = np.repeat(made.tokens_per_pack(), made.packs)
    assert fills.max() <= capacity
    assert sorted(fills.tolist()) == fill_slot_by_slot(packs, columns, slots, lengths, capacity)
