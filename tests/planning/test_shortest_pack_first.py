"""Worst fit on counts against worst fit move by move, and the published pack counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.shortest_pack_first import shortest_pack_first_patterns


def shortest_pack_first(counts: list[int], capacity: int, limit: int) -> list[int]:
    """Fill of every pack, as the paper says it: one copy a move, into the classes of packs with the most room."""
    waiting: dict[int, list[tuple[int, int]]] = {}  # room -> (packs, documents in each), the newest last
    fills: list[int] = []
    for length in range(capacity, 0, -1):
        left = counts[length]
        while left:
            room = next((r for r in range(capacity, length - 1, -1) if waiting.get(r)), capacity)
            there, documents = waiting[room].pop() if waiting.get(room) else (left, 0)
            moved = min(left, there)
            if there > moved:
                waiting[room].append((there - moved, documents))
            left -= moved
            if room > length and documents + 1 < limit:
                waiting.setdefault(room - length, []).append((moved, documents + 1))
            else:
                fills += [capacity - room + length] * moved
    for room, classes in waiting.items():
        fills += [capacity - room] * sum(packs for packs, _ in classes)
    return sorted(fills)


def fills(patterns) -> list[int]:
    filled = np.zeros(len(patterns.packs), dtype=int)
    np.add.at(filled, patterns.entry_pattern, patterns.entry_length * patterns.entry_copies)
    return sorted(np.repeat(filled, patterns.packs).tolist())


@settings(max_examples=3000)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=24), st.one_of(st.none(), st.integers(1, 6)))
def test_same_fills_as_move_by_move(counts, limit):
    capacity = len(counts)
    patterns = shortest_pack_first_patterns(np.array([0, *counts]), capacity, limit)
    assert fills(patterns) == shortest_pack_first([0, *counts], capacity, limit or capacity)
    assert patterns.segments_per_pack().max(initial=0) <= (limit or capacity)


@pytest.mark.parametrize(
    ("limit", "packs"),
    [(2, 10_101_683), (3, 9_094_695), (4, 8_658_996), (8, 8_224_673), (16, 8_166_708), (None, 8_166_708)],
)
def test_published_pack_counts_of_bert_wikipedia(bert_wikipedia, limit, packs):
    assert hfp.plan_counts(bert_wikipedia, hfp.ShortestPackFirst(512, max_documents=limit)).num_packs == packs


def test_documents_go_where_the_most_room_is():
    assert fills(hfp.plan_counts(np.bincount([5, 4, 1, 1]), hfp.ShortestPackFirst(8)).patterns) == [5, 6]
    assert fills(hfp.plan_counts(np.bincount([5, 4, 1, 1]), hfp.BestFit(8)).patterns) == [4, 7]
