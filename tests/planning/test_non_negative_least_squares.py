"""NNLSHP on the columns that matter against all columns, and the published pack count."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

import hf_packing as hfp
from hf_packing.planning import non_negative_least_squares
from hf_packing.planning.columns import fill_columns
from hf_packing.planning.full_packs import full_packs
from hf_packing.planning.non_negative_least_squares import least_squares, number_of_each_length


def all_columns(capacity, limit):
    ways = sorted(
        {
            tuple(sorted(n for n in way if n))
            for way in combinations_with_replacement(range(capacity + 1), limit)
            if sum(way) == capacity
        }
    )
    return np.array([[way.count(length) for way in ways] for length in range(1, capacity + 1)])


@settings(max_examples=1000)
@given(st.lists(st.integers(0, 50), min_size=10, max_size=24), st.integers(1, 3))
def test_as_close_to_the_counts_as_with_all_columns(counts, limit):
    capacity = len(counts)
    weight = np.where(np.arange(1, capacity + 1) <= 8, 0.09, 1.0)
    columns = all_columns(capacity, limit)
    expected, _ = nnls(columns * weight[:, None], np.array(counts) * weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(non_negative_least_squares, "FEWEST_TRIED", 2)  # so that columns are added in many rounds
        patch.setattr(non_negative_least_squares, "SHARE_TRIED", 0)
        ways, packs = least_squares(np.array([0.0, *counts]), full_packs(capacity, limit))
    assert (packs >= 0).all()
    used = number_of_each_length(ways, capacity)[1:]
    ours, theirs = used @ packs, columns @ expected
    assert ours == pytest.approx(theirs, abs=1e-5)


@settings(max_examples=1000)
@given(st.lists(st.integers(0, 50), min_size=4, max_size=20), st.integers(1, 3))
def test_rounded_and_the_rest_best_fit(counts, limit):
    capacity = len(counts)
    counts = np.array([0, *counts])
    table = hfp.plan_counts(counts, hfp.NonNegativeLeastSquares(capacity, max_documents=limit))
    ways, packs = least_squares(counts.astype(float), full_packs(capacity, limit))
    columns = number_of_each_length(ways, capacity)[1:]
    number = np.array([round(x) for x in packs], dtype=int)
    made = fill_columns(number, columns, np.arange(1, capacity + 1), counts, capacity, limit)
    assert table.num_packs == made.num_packs
    assert made.segments_per_pack().max(initial=0) <= limit
    short_of = np.maximum(counts[1:] - columns @ number, 0).sum()
    assert table.num_packs <= number.sum() + short_of  # the paper gives each document that is left a pack of its own


def test_published_pack_count_of_bert_wikipedia(bert_wikipedia):
    assert hfp.plan_counts(bert_wikipedia, hfp.NonNegativeLeastSquares(512)).num_packs <= 8_155_059


def test_few_documents_are_packed_well_too(rng):
    lengths = rng.integers(20, 200, 60)
    plan = hfp.plan_packing(lengths, hfp.NonNegativeLeastSquares(256))
    assert plan.num_packs <= 1.2 * hfp.plan_packing(lengths, hfp.BestFit(256, max_documents=3)).num_packs


def test_too_many_ways_to_fill_a_pack():
    with pytest.raises(hfp.PackingError, match=r"max_documents: expected at most 2\*\*23 ways to fill a pack, 6 docu"):
        hfp.plan_packing([5, 3], hfp.NonNegativeLeastSquares(512, max_documents=6))


def test_a_limit_beyond_the_capacity():
    assert hfp.plan_packing([5, 3], hfp.NonNegativeLeastSquares(8, max_documents=10**6)).num_packs == 1
    with pytest.raises(hfp.PackingError, match="max_documents: expected at most"):
        hfp.plan_packing([5], hfp.NonNegativeLeastSquares(2**31 - 1))


@pytest.mark.parametrize("value", [0, None, 2.5])
def test_bad_max_documents(value):
    with pytest.raises(hfp.PackingError, match=f"max_documents: expected an integer from 1 to 2147483647, got {value}"):
        hfp.NonNegativeLeastSquares(512, max_documents=value)
