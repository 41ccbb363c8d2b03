"""Plans from a histogram: the packs and metrics of the plan over the lengths, for any number of documents."""

import numpy as np
import pytest
from any_strategy import any_strategy, made_for, many_examples, strategy_classes
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.lengths import check_lengths
from hf_packing.strategies.base import CountingStrategy

counting_strategies = any_strategy(CountingStrategy)


cases = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@many_examples
@given(cases, counting_strategies)
def test_a_table_makes_the_plan_of_its_lengths(lengths, strategy):
    table = hfp.plan_counts(np.bincount(lengths), strategy)
    assert table.plan(check_lengths(lengths)) == hfp.plan_packing(lengths, strategy)


@given(cases, counting_strategies)
def test_a_table_has_the_metrics_of_its_plan(lengths, strategy):
    table, plan = hfp.plan_counts(np.bincount(lengths), strategy), hfp.plan_packing(lengths, strategy)
    assert table.num_packs == plan.num_packs
    assert table.num_documents == plan.num_documents
    ours, theirs = table.metrics(), plan.metrics()
    assert vars(ours) == pytest.approx(vars(theirs))


def test_tables_of_many_and_of_no_documents():
    table = hfp.plan_counts([0] * 30 + [10**15], hfp.BestFit(100))
    assert table.num_packs == -(-(10**15) // 3)
    lonely = hfp.plan_counts([0, 10**11], hfp.BestFit(2**31 - 1, max_documents=1))
    assert lonely.metrics().num_padding_slots == 10**11 * (2**31 - 2)
    for counts in ([], [0, 0], [3]):
        table = hfp.plan_counts(counts, hfp.BestFit(8))
        assert table.num_packs == 0
        assert table.num_documents == sum(counts)


@pytest.mark.parametrize("strategy", [hfp.BestFit, hfp.FixedLength])
def test_documents_of_billions_of_tokens_in_a_plan(strategy):
    plan = hfp.plan_packing([2**31 + 5, 3], strategy(2**20))
    assert sorted(plan.segment_length.tolist()) == [3, 5] + [2**20] * 2**11
    assert plan.segment_start.max() == 2**31


def test_counts_that_a_strategy_cannot_plan():
    in_order = set(strategy_classes()) - set(strategy_classes(CountingStrategy))
    assert len(in_order) >= 4
    for strategy in in_order:
        with pytest.raises(hfp.PackingError, match=r"that needs only counts of lengths, .* got "):
            hfp.plan_counts([0, 1], made_for(8, strategy))
    with pytest.raises(hfp.PackingError, match="strategy: expected a strategy such as"):
        hfp.plan_counts([0, 1], "best fit")
    with pytest.raises(hfp.PackingError, match="counts: 3 documents have more than max_length=4 tokens, .* has 9"):
        hfp.plan_counts(np.bincount([1, 9, 5, 9]), hfp.BestFit(4, overflow="error"))


@pytest.mark.parametrize("lengths", [[7, 4, 8, 3], [5, 3], [5, 3, 6, 2, 0], [5, 3, 6, 6]], ids=str)
def test_a_table_of_other_lengths_is_refused(lengths):
    table = hfp.plan_counts(np.bincount([5, 3, 6, 2]), hfp.BestFit(8))
    assert table.plan([2, 6, 3, 5]).num_packs == 2
    with pytest.raises(hfp.PackingError, match="lengths: expected as many documents of each length .*, 4 in all, got"):
        table.plan(lengths)
