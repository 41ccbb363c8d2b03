"""Shuffled windows, each packed on its own, none dropped."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.shuffle import random_order


def first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        pack = next((pack for pack in packs if sum(pack) + length <= capacity), None)
        if pack is None:
            packs.append([length])
        else:
            pack.append(length)
    return packs


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        pack = max((pack for pack in packs if sum(pack) + length <= capacity), key=sum, default=None)
        if pack is None:
            packs.append([length])
        else:
            pack.append(length)
    return packs


@settings(max_examples=2000)
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


def test_a_pack_holds_documents_of_one_window_and_the_tail_is_kept(rng):
    lengths = rng.integers(1, 40, 1050)
    plan = hfp.plan_packing(lengths, hfp.Multipack(64, window=100, seed=3))
    window = np.empty(1050, dtype=int)
    window[random_order(1050, 3, "documents")] = np.arange(1050) // 100
    windows = [np.unique(window[pack]) for pack in np.split(plan.segment_document, plan.pack_offsets[1:-1])]
    assert all(len(pack) == 1 for pack in windows)
    assert len(np.unique(plan.segment_document)) == 1050
    assert (np.diff(np.concatenate(windows)) != 0).mean() > 0.5


def test_another_seed_brings_other_documents_together(rng):
    lengths = rng.integers(1, 40, 1000)
    pairs = []
    for seed in (0, 1):
        plan = hfp.plan_packing(lengths, hfp.Multipack(64, window=100, seed=seed))
        pairs.append({frozenset(pack.tolist()) for pack in np.split(plan.segment_document, plan.pack_offsets[1:-1])})
    assert len(pairs[0] & pairs[1]) < 0.02 * len(pairs[0])


def test_bad_arguments():
    with pytest.raises(hfp.PackingError, match="window: expected an integer from 1 .* got 0"):
        hfp.Multipack(8, window=0)
    with pytest.raises(hfp.PackingError, match="seed: expected an integer from 0 .* got None"):
        hfp.Multipack(8, seed=None)
    with pytest.raises(hfp.PackingError, match="overflow: expected one of"):
        hfp.Multipack(8, overflow="cut")
    with pytest.raises(hfp.PackingError, match="lengths: document 1 has 9 tokens, more than max_length=8"):
        hfp.plan_packing([3, 9], hfp.Multipack(8, overflow="error"))
