"""Plans from a histogram."""

import numpy as np
import pytest
from any_strategy import any_strategy, made_for, many_examples, strategy_classes
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.lengths import LengthCounts, count_lengths, cut_to_pieces
from hf_packing.planning.patterns import cut_by_overflow
from hf_packing.strategies.base import CountingStrategy


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), any_strategy(CountingStrategy))
def test_a_table_has_the_metrics_of_its_plan(lengths, strategy):
    table, plan = hfp.plan_counts(np.bincount(lengths), strategy), hfp.plan_packing(lengths, strategy)
    assert table.num_packs == plan.num_packs
    assert table.num_documents == plan.num_documents
    ours, theirs = table.metrics(), plan.metrics()
    assert vars(ours) == pytest.approx(vars(theirs))


@many_examples
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 20), st.sampled_from(["split", "truncate", "drop"]))
def test_cuts_are_the_pieces_of_each_document(lengths, capacity, overflow):
    pieces = cut_to_pieces(np.array(lengths, dtype=np.int32), capacity, overflow)
    cuts = cut_by_overflow(count_lengths(np.array(lengths, dtype=np.int32)), capacity, overflow)
    assert cuts.counts().tolist() == np.bincount(pieces.length, minlength=len(cuts.counts())).tolist()
    assert cuts.num_documents == len(lengths)
    assert cuts.documents @ cuts.tokens_kept == pieces.length.sum()


def test_ranks_count_through_pieces_of_equal_length():
    cuts = cut_by_overflow(LengthCounts(np.array([3, 10, 23]), np.array([2, 3, 2])), 10, "split")
    assert cuts.piece_length.tolist() == [3, 10, 10, 10, 3]
    first, stride = cuts.ranks
    assert first.tolist() == [0, 4, 7, 8, 2]
    assert stride.tolist() == [1, 1, 2, 2, 1]


def test_more_documents_than_fit_anywhere():
    table = hfp.plan_counts([0] * 30 + [10**15], hfp.BestFit(100))
    assert table.num_packs == -(-(10**15) // 3)
    lonely = hfp.plan_counts([0, 10**11], hfp.BestFit(2**31 - 1, max_documents=1))
    assert lonely.metrics().num_padding_slots == 10**11 * (2**31 - 2)


def test_a_histogram_with_no_documents():
    for counts in ([], [0, 0], [3]):
        table = hfp.plan_counts(counts, hfp.BestFit(8))
        assert table.num_packs == 0
        assert table.num_documents == sum(counts)


def test_documents_of_billions_of_tokens_in_a_plan():
    plan = hfp.plan_packing([2**31 + 5, 3], hfp.BestFit(2**20))
    assert sorted(plan.segment_length.tolist()) == [3, 5] + [2**20] * 2**11
    assert plan.segment_start.max() == 2**31


@pytest.mark.parametrize(
    "counts",
    [[0, 2, -1], [0.0, 2.0], [[1, 2]], [True], [[1], [2, 3]], np.ma.array([1, 2], mask=[0, 1]), [0, 2**62, 2**62]],
)
def test_bad_counts(counts):
    with pytest.raises(hfp.PackingError, match="^counts: expected .*, got "):
        hfp.plan_counts(counts, hfp.BestFit(8))


def test_a_strategy_that_needs_the_order_of_documents():
    in_order = set(strategy_classes()) - set(strategy_classes(CountingStrategy))
    assert len(in_order) >= 4
    for strategy in in_order:
        with pytest.raises(hfp.PackingError, match=r"that needs only counts of lengths \(BestFit, .* got "):
            hfp.plan_counts([0, 1], made_for(8, strategy))
    with pytest.raises(hfp.PackingError, match="strategy: expected a strategy such as"):
        hfp.plan_counts([0, 1], "best fit")


def test_overflow_error_from_counts():
    with pytest.raises(
        hfp.PackingError, match="counts: 3 documents have more than max_length=4 tokens, .* longest document has 9"
    ):
        hfp.plan_counts(np.bincount([1, 9, 5, 9]), hfp.BestFit(4, overflow="error"))
