"""FixedLength, FirstCome and Multipack against literal loops."""

import numpy as np
from any_strategy import many_examples
from hypothesis import given
from hypothesis import strategies as st
from plans import best_fit, first_fit, packs_of

import hf_packing as hfp
from hf_packing.planning.permutation import random_order

lengths_lists = st.lists(st.integers(0, 30), max_size=50)

Segment = tuple[int, int, int]


def concatenate_and_cut(lengths: list[int], capacity: int) -> list[list[Segment]]:
    """Token by token."""
    packs: list[list[list[int]]] = []
    tokens = 0
    for document, length in enumerate(lengths):
        for token in range(length):
            if tokens % capacity == 0:
                packs.append([])
            if packs[-1] and packs[-1][-1][0] == document:
                packs[-1][-1][2] += 1
            else:
                packs[-1].append([document, token, 1])
            tokens += 1
    return [[tuple(segment) for segment in pack] for pack in packs]


def next_fit(segments: list[Segment], capacity: int, limit: int | None) -> list[list[Segment]]:
    packs: list[list[Segment]] = []
    for segment in segments:
        fits = packs and sum(s[2] for s in packs[-1]) + segment[2] <= capacity
        if not fits or (limit and len(packs[-1]) == limit):
            packs.append([])
        packs[-1].append(segment)
    return packs


def split(lengths: list[int], capacity: int) -> list[Segment]:
    return [(d, a, min(capacity, n - a)) for d, n in enumerate(lengths) for a in range(0, n, capacity)]


def as_sets(packs: list[list[Segment]]) -> list[list[Segment]]:
    return sorted(sorted(pack) for pack in packs)


@many_examples
@given(lengths_lists, st.integers(1, 20))
def test_fixed_length(lengths, capacity):
    plan = hfp.plan_packing(lengths, hfp.FixedLength(capacity, seed=None))
    assert packs_of(plan) == concatenate_and_cut(lengths, capacity)


@many_examples
@given(lengths_lists, st.integers(1, 20), st.one_of(st.none(), st.integers(1, 4)))
def test_first_come_in_the_order_of_the_dataset(lengths, capacity, limit):
    strategy = hfp.FirstCome(capacity, order="dataset", max_documents=limit, seed=None)
    assert packs_of(hfp.plan_packing(lengths, strategy)) == next_fit(split(lengths, capacity), capacity, limit)


@many_examples
@given(lengths_lists, st.integers(1, 20), st.integers(0, 99), st.sampled_from(["random", "longest_first"]))
def test_first_come_in_other_orders(lengths, capacity, seed, order):
    """Next fit over the segments as they arrive; then the packs are shuffled."""
    segments = split(lengths, capacity)
    coming = [segments[i] for i in random_order(len(segments), seed, "documents")]
    if order == "longest_first":
        coming = sorted(coming, key=lambda segment: segment[2])[::-1]
    plan = hfp.plan_packing(lengths, hfp.FirstCome(capacity, order=order, seed=seed))
    assert as_sets(packs_of(plan)) == as_sets(next_fit(coming, capacity, None))


@many_examples
@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 20), st.integers(1, 70), st.integers(0, 99))
def test_same_fills_as_window_by_window(lengths, capacity, window, seed):
    plan = hfp.plan_packing(lengths, hfp.Multipack(capacity, window=window, seed=seed))
    coming = [lengths[i] for i in random_order(len(lengths), seed, "documents")]
    expected = []
    for begin in range(0, len(coming), window):
        pieces = [min(capacity, n - a) for n in coming[begin : begin + window] for a in range(0, n, capacity)]
        expected += min(best_fit(pieces, capacity), first_fit(pieces, capacity), key=len)
    made = np.split(plan.segment_length, plan.pack_offsets[1:-1]) if plan.num_packs else []
    assert sorted(sum(pack.tolist()) for pack in made) == sorted(map(sum, expected))


def test_first_fit_is_taken_where_it_has_fewer_packs():
    lengths = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2]
    assert (len(first_fit(lengths, 30)), len(best_fit(lengths, 30))) == (3, 4)
    assert hfp.plan_packing(lengths, hfp.BestFit(30)).num_packs == 4
    assert hfp.plan_packing(lengths, hfp.Multipack(30)).num_packs == 3


def test_packs_of_one_window_and_another_seed(rng):
    lengths = rng.integers(1, 40, 1050)
    plan = hfp.plan_packing(lengths, hfp.Multipack(64, window=100, seed=3))
    window = np.empty(1050, dtype=int)
    window[random_order(1050, 3, "documents")] = np.arange(1050) // 100
    windows = [np.unique(window[pack]) for pack in np.split(plan.segment_document, plan.pack_offsets[1:-1])]
    assert all(len(pack) == 1 for pack in windows)
    assert len(np.unique(plan.segment_document)) == 1050
    assert (np.diff(np.concatenate(windows)) != 0).mean() > 0.5
    lengths = rng.integers(1, 40, 1000)
    pairs = []
    for seed in (0, 1):
        plan = hfp.plan_packing(lengths, hfp.Multipack(64, window=100, seed=seed))
        pairs.append({frozenset(pack.tolist()) for pack in np.split(plan.segment_document, plan.pack_offsets[1:-1])})
    assert len(pairs[0] & pairs[1]) < 0.02 * len(pairs[0])
