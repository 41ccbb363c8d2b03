"""Best fit by counts against best fit one by one, shortest pack first against the paper, and random order."""

import numpy as np
import pytest
from any_strategy import many_examples
from hypothesis import given
from hypothesis import strategies as st
from lengths import refinedweb_like
from plans import best_fit

import hf_packing as hfp
from hf_packing.planning.best_fit import best_fit_patterns


def longest_pack_first(counts: list[int], capacity: int, limit: int) -> int:
    """Packs of LPFHP (arXiv 2107.02027) as its authors wrote it down: move after move, on lists of packs."""
    waiting: dict[int, list[tuple[int, int]]] = {}  # room -> (packs, documents in each), the newest last
    packs = 0
    for length in range(capacity, 0, -1):
        left = counts[length]
        while left:
            room = next((r for r in range(length, capacity + 1) if waiting.get(r)), None)
            if room is None:
                repeat = min(capacity // length, limit)
                while left // repeat == 0:
                    repeat -= 1
                made, documents, room = left // repeat, repeat, capacity
                packs += made
            else:
                there, documents = waiting[room].pop()
                repeat = min(1 + (room - length) // length, limit - documents)
                while left // repeat == 0:
                    repeat -= 1
                made = min(there, left // repeat)
                if there > made:
                    waiting[room].append((there - made, documents))
                documents += repeat
            left -= made * repeat
            room -= repeat * length
            if room and documents < limit:
                waiting.setdefault(room, []).append((made, documents))
    return packs


def fills(plan: hfp.PackingPlan) -> list[int]:
    return sorted(np.add.reduceat(plan.segment_length, plan.pack_offsets[:-1]).tolist()) if plan.num_packs else []


@many_examples
@given(
    st.integers(1, 30).flatmap(
        lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=80), st.just(capacity))
    )
)
def test_same_fills_as_one_by_one(case):
    lengths, capacity = case
    assert fills(hfp.plan_packing(lengths, hfp.BestFit(capacity))) == sorted(map(sum, best_fit(lengths, capacity)))


@many_examples
@given(st.lists(st.integers(0, 9), min_size=1, max_size=24), st.integers(1, 6))
def test_same_packs_as_longest_pack_first(counts, limit):
    capacity = len(counts)
    table = best_fit_patterns(np.array([0, *counts]), capacity, limit)
    assert table.num_packs == longest_pack_first([0, *counts], capacity, limit)
    assert table.counts()[1:].tolist() == counts[: len(table.counts()) - 1]


@pytest.mark.parametrize(
    ("limit", "longest_first", "shortest_first"),
    [
        (2, 10_099_081, 10_101_683),
        (3, 9_090_154, 9_094_695),
        (4, 8_657_119, 8_658_996),
        (8, 8_207_569, 8_224_673),
        (16, 8_140_006, 8_166_708),
        (None, 8_138_483, 8_166_708),
    ],
)
def test_published_pack_counts_of_bert_wikipedia(bert_wikipedia, limit, longest_first, shortest_first):
    for strategy, packs in ((hfp.BestFit, longest_first), (hfp.ShortestPackFirst, shortest_first)):
        assert hfp.plan_counts(bert_wikipedia, strategy(512, max_documents=limit)).num_packs == packs


@pytest.mark.parametrize("max_length", [2048, 8192])
def test_hardly_more_rows_than_concatenation(max_length):
    """And no document is cut that fits in a row."""
    lengths = refinedweb_like(1_000_000)
    metrics = hfp.plan_counts(np.bincount(lengths), hfp.BestFit(max_length)).metrics()
    assert metrics.num_packs <= 1.00003 * -(-int(lengths.sum()) // max_length)
    assert metrics.num_cut_documents == (lengths > max_length).sum()


def test_documents_of_equal_length_are_dealt_at_random():
    """Neighbours in the dataset do not become neighbours in packs."""
    plan = hfp.plan_packing([10] * 4000, hfp.BestFit(20))
    pairs = plan.segment_document.reshape(-1, 2).astype(int)
    assert (abs(pairs[:, 0] - pairs[:, 1]) == 1).mean() < 0.01
    assert len(np.unique(pairs)) == 4000
    other = hfp.plan_packing([10] * 4000, hfp.BestFit(20, seed=1))
    assert (other.segment_document != plan.segment_document).mean() > 0.99


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


@many_examples
@given(st.lists(st.integers(0, 9), min_size=1, max_size=24), st.one_of(st.none(), st.integers(1, 6)))
def test_same_fills_as_move_by_move(counts, limit):
    capacity = len(counts)
    patterns = hfp.plan_counts([0, *counts], hfp.ShortestPackFirst(capacity, max_documents=limit)).patterns
    made = np.repeat(patterns.tokens_per_pack(), patterns.packs).tolist()
    assert sorted(made) == shortest_pack_first([0, *counts], capacity, limit or capacity)
    assert patterns.segments_per_pack().max(initial=0) <= (limit or capacity)
