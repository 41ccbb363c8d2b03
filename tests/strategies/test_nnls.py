"""NNLSHP on the columns that matter against all columns, and the published pack count."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from any_strategy import many_examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

import hf_packing as hfp
from hf_packing.strategies import nnls
from hf_packing.strategies.column_generation import fill_columns


def all_columns(capacity, limit):
    ways = sorted(
        {
            tuple(sorted(n for n in way if n))
            for way in combinations_with_replacement(range(capacity + 1), limit)
            if sum(way) == capacity
        }
    )
    return np.array([[way.count(length) for way in ways] for length in range(1, capacity + 1)])


@many_examples
@given(st.lists(st.integers(0, 50), min_size=10, max_size=24), st.integers(1, 3))
def test_as_close_to_the_counts_as_with_all_columns(counts, limit):
    capacity = len(counts)
    weight = np.where(np.arange(1, capacity + 1) <= 8, 0.09, 1.0)
    columns = all_columns(capacity, limit)
    expected, _ = optimize.nnls(columns * weight[:, None], np.array(counts) * weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnls, "_FEWEST_TRIED", 2)  # so that columns are added in many rounds
        patch.setattr(nnls, "_SHARE_TRIED", 0)
        ways, packs = nnls._least_squares(np.array([0.0, *counts]), nnls._full_packs(capacity, limit))
    assert (packs >= 0).all()
    used = nnls._number_of_each_length(ways, capacity)[1:]
    ours, theirs = used @ packs, columns @ expected
    far, as_far = (np.linalg.norm((each - counts) * weight) for each in (ours, theirs))
    if far < as_far - 1e-5:  # with all columns at once, scipy sometimes ends before the closest point
        return
    assert ours == pytest.approx(theirs, abs=1e-5)


@many_examples
@given(st.lists(st.integers(0, 50), min_size=4, max_size=20), st.integers(1, 3))
def test_rounded_and_the_rest_best_fit(counts, limit):
    capacity = len(counts)
    counts = np.array([0, *counts])
    table = hfp.plan_counts(counts, hfp.NonNegativeLeastSquares(capacity, max_documents=limit))
    ways, packs = nnls._least_squares(counts.astype(float), nnls._full_packs(capacity, limit))
    columns = nnls._number_of_each_length(ways, capacity)[1:]
    number = np.array([round(x) for x in packs], dtype=int)
    made = fill_columns(number, columns, np.arange(1, capacity + 1), counts, capacity, limit)
    assert table.num_packs == made.num_packs
    assert made.segments_per_pack().max(initial=0) <= limit
    short_of = np.maximum(counts[1:] - columns @ number, 0).sum()
    assert table.num_packs <= number.sum() + short_of  # the paper gives each document that is left a pack of its own


@pytest.mark.slow
def test_published_pack_count_of_bert_wikipedia(bert_wikipedia):
    assert hfp.plan_counts(bert_wikipedia, hfp.NonNegativeLeastSquares(512)).num_packs <= 8_155_059


def test_too_many_ways_to_fill_a_pack():
    with pytest.raises(
        hfp.PackingError,
        match=r"at most 2\*\*23 ways to fill a pack exactly, got max_length=512 and max_documents=6; ",
    ):
        hfp.plan_packing([5, 3], hfp.NonNegativeLeastSquares(512, max_documents=6))


def test_a_limit_beyond_the_capacity():
    assert hfp.plan_packing([5, 3], hfp.NonNegativeLeastSquares(8, max_documents=10**6)).num_packs == 1
    with pytest.raises(hfp.PackingError, match="max_length and max_documents: expected at most"):
        hfp.plan_packing([5], hfp.NonNegativeLeastSquares(2**31 - 1))


@given(st.integers(1, 20), st.integers(1, 4))
def test_all_ways_to_fill_a_pack(capacity, limit):
    expected = {
        tuple(sorted(way, reverse=True))[:capacity]
        for way in combinations_with_replacement(range(capacity + 1), limit)
        if sum(way) == capacity
    }
    found = [tuple(way) for way in nnls._full_packs(capacity, limit).tolist()]
    assert len(found) == len(set(found))
    assert set(found) == expected
