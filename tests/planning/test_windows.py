"""Windows of a stream: which packs wait, and what happens to documents that have waited long enough."""

import numpy as np
from any_strategy import any_strategy
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.windows import MOST_WINDOWS, WindowSize, choose_waiting

lengths_and_ages = st.lists(st.tuples(st.integers(0, 24), st.integers(0, MOST_WINDOWS)), max_size=60)


@given(lengths_and_ages, any_strategy(), st.integers(1, 8))
def test_at_most_a_quarter_waits_and_nobody_who_is_old(documents, strategy, packs):
    lengths, age = np.array(documents, np.int32).reshape(-1, 2).T
    window, size = strategy.plan_window(lengths, 3), WindowSize.of_packs(packs, strategy.largest_capacity)
    plan, waits = window.plan, choose_waiting(window, age, size)
    if window.all_wait:
        assert np.array_equal(waits, window.open)
        assert waits.sum() <= (len(strategy.bucket_lengths) if strategy.has_buckets else 1)
        return
    assert 4 * waits.sum() <= plan.num_packs
    assert 4 * plan.pack_capacity[waits].sum() <= size.tokens
    waiting = plan.take_packs(np.flatnonzero(waits))
    assert (age[waiting.segment_document] < MOST_WINDOWS).all()


def test_old_documents_go_out_and_windows_have_seeds():
    strategy = hfp.BestFit(10, seed=None)
    lengths = np.array([7, 3, 6, 4, 8, 2, 6, 4, 5], np.int32)
    window = strategy.plan_window(lengths, 0)
    assert window.plan.pack_tokens().tolist() == [10, 10, 10, 10, 5]
    young, size = np.zeros(9, np.int8), WindowSize.of_packs(8, 10)
    assert choose_waiting(window, young, size).tolist() == [False, False, False, False, True]
    assert not choose_waiting(window, np.where(lengths == 5, MOST_WINDOWS, young), size).any()
    lengths = np.full(64, 3, np.int32)
    plans = [hfp.BestFit(6, seed=seed).plan_window(lengths, number).plan for seed in (0, 1) for number in (0, 1)]
    assert len({plan.fingerprint for plan in plans}) == 4
    assert hfp.BestFit(6).plan_window(lengths, 1).plan == plans[1]
    same = [hfp.BestFit(6, seed=None).plan_window(lengths, number).plan for number in (0, 1)]
    assert same[0] == same[1]
