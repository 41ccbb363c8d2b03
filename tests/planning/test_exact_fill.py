"""Filling packs exactly: every item once, no pack too full, and what a search of all subsets finds."""

from itertools import chain, combinations

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning import exact_fill
from hf_packing.planning.exact_fill import fill_exactly, save_packs

CAPACITY = 20
SIZES = st.lists(st.integers(1, CAPACITY), max_size=12)


def fullest_pack(sizes, capacity):
    """The fullest pack with the largest item, of all subsets of the others."""
    largest, *others = sorted(sizes, reverse=True)
    subsets = chain.from_iterable(combinations(others, number) for number in range(len(others) + 1))
    return largest + max(sum(each) for each in subsets if largest + sum(each) <= capacity)


@given(SIZES)
def test_every_item_is_in_one_pack_that_is_not_too_full(sizes):
    packs = fill_exactly(np.array(sizes, dtype=np.int64), CAPACITY)
    assert sorted(chain.from_iterable(packs)) == [*range(len(sizes))]
    assert all(0 < sum(sizes[item] for item in pack) <= CAPACITY for pack in packs)
    for pack in packs:
        assert sizes[pack[0]] == max(sizes[item] for item in pack)


@given(SIZES.filter(bool))
def test_the_first_pack_is_as_full_as_can_be_or_full_enough(sizes):
    packs = fill_exactly(np.array(sizes), CAPACITY)
    fewest = -(-sum(sizes) // CAPACITY)
    enough = (fewest * CAPACITY - sum(sizes)) // fewest
    found = sum(sizes[item] for item in packs[0])
    best = fullest_pack(sizes, CAPACITY)
    assert found <= best
    assert found == best or found >= CAPACITY - enough


@given(SIZES, st.sampled_from([None, 0, 5]))
def test_a_plan_keeps_its_documents(sizes, seed):
    plan = hfp.plan_packing(sizes, hfp.BestFit(CAPACITY, seed=seed))
    saved = save_packs(plan)
    assert saved.num_packs <= plan.num_packs
    assert sorted(saved.segment_document.tolist()) == sorted(plan.segment_document.tolist())
    assert (saved.segment_length == saved.document_length[saved.segment_document]).all()
    if saved.num_packs == plan.num_packs:
        assert saved is plan


@pytest.mark.parametrize("number", [400, 5000])
def test_packs_of_a_few_large_documents_are_saved(number):
    sizes = np.random.default_rng(0).integers(1500, 2500, number)
    plan = hfp.plan_packing(sizes, hfp.BestFit(8192))
    saved, bound = save_packs(plan), plan.metrics().lower_bound
    assert plan.num_packs > 1.05 * bound
    assert saved.num_packs <= 1.015 * bound
    assert save_packs(plan).fingerprint == saved.fingerprint


def test_packs_and_documents_keep_their_order():
    plan = hfp.plan_packing(np.random.default_rng(0).integers(15, 25, 200), hfp.BestFit(82, seed=3))
    saved = save_packs(plan)
    assert saved.num_packs < plan.num_packs
    place = np.argsort(plan.segment_document)
    longest = []
    for begin, end in zip(saved.pack_offsets[:-1], saved.pack_offsets[1:], strict=True):
        places, lengths = place[saved.segment_document[begin:end]], saved.segment_length[begin:end]
        assert (np.diff(places) > 0).all()
        longest.append(places[lengths == lengths.max()].min())
    assert np.corrcoef(longest, np.arange(len(longest)))[0, 1] > 0.9


def test_the_fewest_packs_stay_as_they_are(monkeypatch):
    plan = hfp.plan_packing([5, 5, 5, 5], hfp.BestFit(10))
    monkeypatch.setattr(exact_fill, "fill_exactly", None)
    assert save_packs(plan) is plan
    empty = hfp.plan_packing([], hfp.BestFit(10))
    assert save_packs(empty) is empty


def test_best_fit_packs_trees_exactly():
    sizes = [8, 8, 6, 6, 4, 4]
    assert hfp.plan_packing(sizes, hfp.BestFit(18)).num_packs == 3
    documents = [[tree] * (size - 2) + [end] for tree, size in enumerate(sizes) for end in (98, 99)]
    packed = hfp.pack(datasets.Dataset.from_dict({"input_ids": documents}), hfp.BestFit(18), share_prefixes=1)
    assert list(map(len, packed["tree_input_ids"])) == [18, 18]
