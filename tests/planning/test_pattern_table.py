"""Plans from a histogram: dealing shard by shard gives the packs of the plan over all documents at once."""

import pickle

import numpy as np
import pytest
from any_strategy import any_strategy, made_for, many_examples, strategy_classes
from hypothesis import given
from hypothesis import strategies as st
from plans import packs_of

import hf_packing as hfp
from hf_packing.strategies.base import CountingStrategy

counting_strategies = any_strategy(CountingStrategy, align_documents=1)


def deal_in_shards(table, lengths, borders):
    """Segments of all shards as (pack, place, document, start, length), with documents numbered through all shards."""
    segments, begin = [], 0
    for shard in np.split(np.array(lengths, dtype=int), sorted(borders)):
        dealt = table.deal(shard, np.bincount(lengths[:begin], minlength=1))
        assert (np.diff(dealt.document) >= 0).all()
        segments += zip(dealt.pack, dealt.place, dealt.document + begin, dealt.start, dealt.length, strict=True)
        begin += len(shard)
    return sorted(tuple(map(int, segment)) for segment in segments)


def places_in(plan):
    """(pack, place, document, start, length) of each segment."""
    return [(n, place, *segment) for n, pack in enumerate(packs_of(plan)) for place, segment in enumerate(pack)]


cases = st.lists(st.integers(0, 40), min_size=1, max_size=60).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.lists(st.integers(0, len(lengths)), max_size=4))
)


@many_examples
@given(cases, counting_strategies)
def test_shards_are_dealt_as_all_documents_at_once(case, strategy):
    lengths, borders = case
    table = hfp.plan_counts(np.bincount(lengths), strategy)
    assert deal_in_shards(table, lengths, borders) == places_in(hfp.plan_packing(lengths, strategy))


@given(cases, counting_strategies)
def test_a_table_has_the_metrics_of_its_plan(case, strategy):
    lengths, _ = case
    table, plan = hfp.plan_counts(np.bincount(lengths), strategy), hfp.plan_packing(lengths, strategy)
    assert table.num_packs == plan.num_packs
    assert table.num_documents == plan.num_documents
    ours, theirs = table.metrics(), plan.metrics()
    assert vars(ours) == pytest.approx(vars(theirs))


def test_tables_of_many_and_of_no_documents_travel_to_workers(rng):
    lengths = rng.integers(1, 90, 500)
    table = hfp.plan_counts(np.bincount(lengths), hfp.BestFit(64))
    table.deal(lengths[:10])
    copy = pickle.loads(pickle.dumps(table))
    assert deal_in_shards(copy, lengths, [100, 400]) == places_in(hfp.plan_packing(lengths, hfp.BestFit(64)))
    assert repr(copy) == repr(table)
    table = hfp.plan_counts([0] * 30 + [10**15], hfp.BestFit(100))
    assert table.num_packs == -(-(10**15) // 3)
    last = table.deal([30, 30], [0] * 30 + [10**15 - 2])
    assert last.pack.max() < table.num_packs
    lonely = hfp.plan_counts([0, 10**11], hfp.BestFit(2**31 - 1, max_documents=1))
    assert lonely.metrics().num_padding_slots == 10**11 * (2**31 - 2)
    for counts in ([], [0, 0], [3]):
        table = hfp.plan_counts(counts, hfp.BestFit(8))
        assert table.num_packs == len(table.deal([]).pack) == 0
        assert table.num_documents == sum(counts)
    assert len(hfp.plan_counts([3], hfp.BestFit(8)).deal([0, 0]).pack) == 0


@pytest.mark.parametrize("strategy", [hfp.BestFit, hfp.FixedLength])
def test_documents_of_billions_of_tokens_in_a_plan(strategy):
    plan = hfp.plan_packing([2**31 + 5, 3], strategy(2**20))
    assert sorted(plan.segment_length.tolist()) == [3, 5] + [2**20] * 2**11
    assert plan.segment_start.max() == 2**31


def test_counts_that_a_strategy_cannot_plan():
    in_order = set(strategy_classes()) - set(strategy_classes(CountingStrategy))
    assert len(in_order) >= 4
    for strategy in in_order:
        with pytest.raises(hfp.PackingError, match=r"that needs only counts of lengths \(BestFit, .* got "):
            hfp.plan_counts([0, 1], made_for(8, strategy))
    with pytest.raises(hfp.PackingError, match="strategy: expected a strategy such as"):
        hfp.plan_counts([0, 1], "best fit")
    with pytest.raises(hfp.PackingError, match="counts: 3 documents have more than max_length=4 tokens, .* has 9"):
        hfp.plan_counts(np.bincount([1, 9, 5, 9]), hfp.BestFit(4, overflow="error"))


@pytest.mark.parametrize(
    ("argument", "lengths", "already"),
    [
        ("shard_lengths", [3], None),
        ("shard_lengths", [5, 90], None),
        ("shard_lengths", [5, 5, 5], None),
        ("shard_lengths", [5], [0, 0, 0, 0, 0, 2]),
        ("shard_lengths", [-5], None),
        ("already_dealt", [5], [0, 0, 0, 0, 0, 3]),
        ("already_dealt", [5], np.array([0, 0, 0, 0, 0, 2**63 + 5], dtype=np.uint64)),
        ("already_dealt", [5], [0, 9]),
        ("already_dealt", [5], [0, -1]),
        ("already_dealt", [5], [0.5]),
    ],
)
def test_shards_that_were_not_counted(argument, lengths, already):
    table = hfp.plan_counts(np.bincount([5, 5, 2]), hfp.BestFit(8))
    with pytest.raises(hfp.PackingError, match=f"^{argument}: expected .*, got "):
        table.deal(lengths, already)
