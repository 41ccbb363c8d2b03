"""Lengths and arguments that cannot be planned."""

import numpy as np
import pytest

import hf_packing as hfp
from hf_packing.planning.lengths import check_lengths, sort_by_length


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, -1, 2], "lengths: expected no negative length, got -1 at index 1"),
        ([1.0, 2.0], "lengths: expected integers, got float64"),
        (np.ones((2, 2), dtype=int), r"lengths: expected one dimension, got shape \(2, 2\)"),
        (7, r"lengths: expected one dimension, got shape \(\)"),
        ([True, False], "lengths: expected integers, got bool"),
        (["a"], "lengths: expected integers, got <U1"),
        ([[1], [2, 3]], "lengths: expected 1-d integers, got list"),
        (np.ma.array([1, 2], mask=[0, 1]), "lengths: expected an array without a mask"),
        ([2**62] * 4, r"lengths: expected fewer than 2\*\*63 tokens in all"),
        (np.array([2**63], dtype=np.uint64), r"lengths: expected fewer than 2\*\*63 tokens in all"),
    ],
)
def test_bad_lengths(lengths, message):
    with pytest.raises(hfp.PackingError, match=message):
        hfp.plan_packing(lengths, hfp.BestFit(8))


LIMITED = [hfp.BestFit, hfp.ShortestPackFirst, hfp.NonNegativeLeastSquares, hfp.Optimal, hfp.FirstCome]


@pytest.mark.parametrize("strategy", [*LIMITED, hfp.FixedLength, hfp.Multipack])
@pytest.mark.parametrize("value", [0, -3, 2.5, "8", True, None, 2**31])
def test_bad_max_length(strategy, value):
    with pytest.raises(hfp.PackingError, match=f"max_length: expected an integer from 1 to 2147483647, got {value!r}"):
        strategy(value)


@pytest.mark.parametrize("strategy", LIMITED)
def test_bad_max_documents_and_seed(strategy):
    with pytest.raises(hfp.PackingError, match="max_documents: expected an integer from 1 .* got 0"):
        strategy(8, max_documents=0)
    with pytest.raises(hfp.PackingError, match="seed: expected an integer from 0 .* got -1"):
        strategy(8, seed=-1)


def test_not_a_strategy():
    with pytest.raises(hfp.PackingError, match="strategy: expected a strategy such as BestFit\\(2048\\), got 'bfd'"):
        hfp.plan_packing([1], "bfd")
    with pytest.raises(hfp.PackingError, match=r"did you forget its arguments, as in BestFit\(2048\)"):
        hfp.plan_packing([1], hfp.BestFit)


def test_a_plan_of_too_many_pieces():
    for strategy in (hfp.BestFit(1), hfp.Bucket((1,)), hfp.FirstCome(1)):
        with pytest.raises(
            hfp.PackingError, match=r"max_length: expected one that cuts documents into at most 2\*\*40 pieces"
        ):
            hfp.plan_packing([2**62], strategy)


def test_huge_packs_have_metrics():
    assert hfp.plan_packing([5, 3], hfp.FirstCome(2**31 - 1)).metrics().lower_bound == 1


def test_any_integer_type_is_taken():
    plans = [
        hfp.plan_packing(np.array([5, 0, 3], dtype=kind), hfp.BestFit(8)) for kind in ("u1", "i2", "u4", "i8", "u8")
    ]
    assert len({plan.fingerprint for plan in plans}) == 1
    assert check_lengths([2**40]).dtype == np.int64


def test_numpy_arguments_are_the_same_strategy():
    assert hfp.BestFit(np.int64(8), seed=np.int32(1)) == hfp.BestFit(8, seed=1)


def test_sorting_of_wide_lengths(rng):
    lengths = rng.integers(0, 2**40, 1000)
    lengths[::7] = lengths[0]
    assert sort_by_length(lengths).tolist() == np.argsort(lengths, kind="stable").tolist()


def test_a_document_of_billions_of_tokens_is_cut():
    plan = hfp.plan_packing([2**31 + 5, 3], hfp.FixedLength(2**30))
    assert plan.num_segments == 4
    assert plan.segment_start.max() == 2**31
