"""The laws of a plan, for every registered strategy, on lengths that hypothesis makes up."""

import numpy as np
import pytest
from any_strategy import any_strategy
from hypothesis import example, given
from hypothesis import strategies as st
from plans import segments_of

import hf_packing as hfp

lengths_lists = st.lists(st.integers(0, 40), max_size=60)


@given(lengths_lists, any_strategy())
@example([14, 7, 5, 2, 3], hfp.BestFit(8))
def test_every_token_is_in_one_segment_or_counted_as_dropped(lengths, strategy):
    plan = hfp.plan_packing(lengths, strategy)
    tokens = [(document, token) for document, start, n in segments_of(plan) for token in range(start, start + n)]
    assert len(tokens) == len(set(tokens))
    everything = {(document, token) for document, length in enumerate(lengths) for token in range(length)}
    assert set(tokens) <= everything
    assert plan.metrics().num_dropped_tokens == len(everything) - len(tokens)
    if getattr(strategy, "overflow", "split") == "split":
        assert set(tokens) == everything


@given(lengths_lists, any_strategy())
def test_the_laws_of_a_plan(lengths, strategy):
    plan = hfp.plan_packing(lengths, strategy)
    fills = [plan.segment_length[a:b].sum() for a, b in zip(plan.pack_offsets, plan.pack_offsets[1:], strict=False)]
    assert all(0 < fill <= capacity for fill, capacity in zip(fills, plan.pack_capacity, strict=True))
    allowed = getattr(strategy, "bucket_lengths", None) or [strategy.max_length]
    assert set(plan.pack_capacity.tolist()) <= set(allowed)
    assert all(length > 0 for length in plan.segment_length)
    limit = getattr(strategy, "max_documents", None)
    assert limit is None or np.diff(plan.pack_offsets).max(initial=0) <= limit
    assert hfp.plan_packing(lengths, strategy) == hfp.plan_packing(np.array(lengths, dtype=np.int64), strategy)
    plan = hfp.plan_packing(lengths, strategy)
    m, slots = plan.metrics(), int(plan.pack_capacity.sum())
    packed = int(plan.segment_length.sum())
    segments = np.bincount(plan.segment_document, minlength=len(lengths))
    kept = np.bincount(plan.segment_document, plan.segment_length, minlength=len(lengths))
    cut = sum(count > 1 or 0 < k < n for n, k, count in zip(lengths, kept, segments, strict=True))
    assert (m.num_documents, m.num_segments, m.num_packs) == (len(lengths), plan.num_segments, plan.num_packs)
    assert m.num_tokens == sum(lengths) == packed + m.num_dropped_tokens
    assert m.num_empty_documents == lengths.count(0)
    assert m.num_dropped_documents == sum(1 for n, k in zip(lengths, kept, strict=True) if n and not k)
    assert m.num_cut_documents == cut
    assert m.num_padding_slots == slots - packed
    assert m.num_packs >= m.lower_bound
    if getattr(strategy, "max_documents", None) == 1:
        assert m.num_packs == m.num_segments == m.lower_bound
    if not slots:
        assert m.padding_ratio == m.packing_efficiency == m.concatenation_ratio == m.attention_cost == 0
        return
    assert m.padding_ratio == pytest.approx(1 - packed / slots, abs=1e-12)
    assert m.packing_efficiency == pytest.approx(packed / slots)
    assert m.truncation_ratio == cut / len(lengths)
    assert m.concatenation_ratio == len(lengths) / plan.num_packs
    assert m.packing_factor == plan.num_segments / plan.num_packs
    assert m.dropped_token_ratio == m.num_dropped_tokens / sum(lengths)
    assert m.attention_cost == pytest.approx(
        (plan.segment_length.astype(float) ** 2).sum() / (plan.pack_capacity.astype(float) ** 2).sum()
    )


def test_the_laws_were_tried_on_packs_of_several_segments():
    plan = hfp.plan_packing([14, 7, 5, 2, 3], hfp.BestFit(8))
    assert np.diff(plan.pack_offsets).max() > 1
    assert plan.metrics().num_cut_documents == 1
