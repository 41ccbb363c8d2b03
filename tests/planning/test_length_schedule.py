"""The length of segments grows with the steps."""

from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp

schedules = st.builds(
    lambda start, more, steps, growth: hfp.LengthSchedule(start, steps, end=start + more, growth=growth),
    st.integers(1, 50),
    st.integers(0, 200),
    st.integers(1, 30),
    st.sampled_from(["linear", "exponential"]),
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
    exponential = hfp.LengthSchedule(100, 4, end=1600, growth="exponential")
    assert [exponential.length_at(step, 2000) for step in range(5)] == [100, 200, 400, 800, None]
    assert hfp.LengthSchedule(9, 4).length_at(0, 9) is None
