"""FixedLength and FirstCome against literal loops."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.first_come import arrival

lengths_lists = st.lists(st.integers(0, 30), max_size=50)

Segment = tuple[int, int, int]


def packs_of(plan: hfp.PackingPlan) -> list[list[Segment]]:
    segments = list(
        zip(plan.segment_document.tolist(), plan.segment_start.tolist(), plan.segment_length.tolist(), strict=True)
    )
    return [segments[a:b] for a, b in pairwise(plan.pack_offsets.tolist())]


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


@settings(max_examples=2000)
@given(lengths_lists, st.integers(1, 20))
def test_fixed_length(lengths, capacity):
    assert packs_of(hfp.plan_packing(lengths, hfp.FixedLength(capacity, seed=None))) == concatenate_and_cut(
        lengths, capacity
    )


@settings(max_examples=2000)
@given(lengths_lists, st.integers(1, 20), st.one_of(st.none(), st.integers(1, 4)))
def test_first_come_in_the_order_of_the_dataset(lengths, capacity, limit):
    strategy = hfp.FirstCome(capacity, order="dataset", max_documents=limit, seed=None)
    assert packs_of(hfp.plan_packing(lengths, strategy)) == next_fit(split(lengths, capacity), capacity, limit)


@settings(max_examples=1000)
@given(lengths_lists, st.integers(1, 20), st.integers(0, 99), st.sampled_from(["random", "longest_first"]))
def test_first_come_in_other_orders(lengths, capacity, seed, order):
    """Next fit over the segments as they arrive; then the packs are shuffled."""
    segments = split(lengths, capacity)
    coming = [segments[i] for i in arrival(np.array([s[2] for s in segments], dtype=np.int32), order, seed)]
    assert sorted(coming) == segments
    if order == "longest_first":
        assert [s[2] for s in coming] == sorted((s[2] for s in coming), reverse=True)
    plan = hfp.plan_packing(lengths, hfp.FirstCome(capacity, order=order, seed=seed))
    assert as_sets(packs_of(plan)) == as_sets(next_fit(coming, capacity, None))


def test_random_order_and_shuffled_packs(rng):
    lengths = rng.integers(1, 100, 5000)
    plan = hfp.plan_packing(lengths, hfp.FirstCome(500))
    steps = np.diff(plan.segment_document.astype(int))
    assert 0.45 < (steps > 0).mean() < 0.55
    longest = hfp.plan_packing(lengths, hfp.FirstCome(500, order="longest_first"))
    first = longest.segment_length[longest.pack_offsets[:-1]]
    assert 0.4 < (np.diff(first) > 0).sum() / max((np.diff(first) != 0).sum(), 1) < 0.6


def test_first_come_has_more_packs_than_best_fit(rng):
    lengths = rng.integers(1, 100, 5000)
    assert (
        hfp.plan_packing(lengths, hfp.FirstCome(128)).num_packs > hfp.plan_packing(lengths, hfp.BestFit(128)).num_packs
    )


def test_unknown_order():
    with pytest.raises(hfp.PackingError, match="order: expected one of random, longest_first, dataset, got 'shortest'"):
        hfp.FirstCome(8, order="shortest")


def test_random_order_needs_a_seed():
    with pytest.raises(hfp.PackingError, match="seed: expected an integer with order='random', got None"):
        hfp.FirstCome(8, seed=None)
