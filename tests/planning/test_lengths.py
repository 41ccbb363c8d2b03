"""Lengths that are checked, sorted and cut, and the lengths of segments in each step of a training."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.lengths import check_lengths, sort_by_length

MASKED, LARGE = np.ma.array([1, 2], mask=[0, 1]), np.array([2**63], dtype=np.uint64)


@pytest.mark.parametrize(
    "integers",
    [[3, -1, 2], [1.0, 2.0], np.ones((2, 2), dtype=int), 7, [True], ["a"], [[1], [2, 3]], MASKED, [2**62] * 4, LARGE],
)
def test_bad_lengths_and_counts(integers):
    for name, call in (
        ("lengths", hfp.plan_packing),
        ("lengths", lambda given, strategy: hfp.compare(given, [strategy])),
        ("counts", hfp.plan_counts),
    ):
        with pytest.raises(hfp.PackingError, match=f"^{name}: expected .*, got "):
            call(integers, hfp.BestFit(8))


@pytest.mark.parametrize("strategy", ["bfd", hfp.BestFit, hfp.Bucket, int, None])
def test_not_a_strategy(strategy):
    with pytest.raises(hfp.PackingError, match=f"^strategy: expected .*, got {re.escape(repr(strategy))}"):
        hfp.plan_packing([1], strategy)


def test_integers_of_any_size_and_type_are_taken(rng):
    for strategy in (hfp.BestFit(1), hfp.Bucket((1,)), hfp.FirstCome(1)):
        with pytest.raises((MemoryError, ValueError)):
            hfp.plan_packing([2**62], strategy)
    assert hfp.plan_packing([5, 3], hfp.FirstCome(2**31 - 1)).metrics().lower_bound == 1
    plans = [
        hfp.plan_packing(np.array([5, 0, 3], dtype=kind), hfp.BestFit(8)) for kind in ("u1", "i2", "u4", "i8", "u8")
    ]
    assert len({plan.fingerprint for plan in plans}) == 1
    assert check_lengths([2**40]).dtype == np.int64
    lengths = rng.integers(0, 2**40, 1000)
    lengths[::7] = lengths[0]
    assert sort_by_length(lengths).tolist() == np.argsort(lengths, kind="stable").tolist()


@pytest.mark.parametrize("strategy", [hfp.BestFit, hfp.FirstCome, hfp.Multipack])
def test_error_names_the_document(strategy):
    strict = strategy(10, overflow="error")
    for call in (hfp.plan_packing, lambda lengths, _: strict({"input_ids": [[1] * length for length in lengths]})):
        with pytest.raises(hfp.PackingError, match="document 1 has 25 tokens, more than max_length=10"):
            call([3, 25], strict)
    assert hfp.plan_packing([3, 10], strict).num_packs == 2


schedules = st.builds(
    lambda start, more, steps: hfp.LengthSchedule(start, steps, end=start + more),
    st.integers(1, 50),
    st.integers(0, 200),
    st.integers(1, 30),
)


@given(schedules, st.integers(1, 300))
def test_the_length_grows_from_the_start_to_whole_documents(schedule, longest):
    lengths = [schedule.length_at(step, longest) or longest for step in range(schedule.steps + 2)]
    assert lengths[0] == min(schedule.start, longest)
    assert lengths == sorted(lengths)
    assert lengths[-2:] == [longest, longest]
    assert schedule.length_at(schedule.steps, longest) is None
    assert all(1 <= length <= longest for length in lengths)


def test_growth():
    linear = hfp.LengthSchedule(100, 4)
    assert [linear.length_at(step, 500) for step in range(5)] == [100, 200, 300, 400, None]
    assert hfp.LengthSchedule(9, 4).length_at(0, 9) is None
