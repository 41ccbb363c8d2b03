"""The length of segments grows with the steps, and segments are cut to it by extra borders."""

import numpy as np
import pytest
from any_strategy import any_strategy
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.planning.length_schedule import ScheduledRows, cut_segments

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


@given(st.lists(st.integers(0, 40), max_size=30), any_strategy(), schedules, st.integers(1, 4))
def test_segments_are_cut_and_nothing_else_changes(lengths, strategy, schedule, rows_per_step):
    plan = hfp.plan_packing(lengths, strategy)
    longest = int(plan.pack_capacity.max(initial=1))
    cut = ScheduledRows(schedule, rows_per_step).cut(plan, longest)
    assert cut.num_packs == plan.num_packs
    assert (cut.pack_capacity == plan.pack_capacity).all()
    for pack in range(plan.num_packs):
        limit = schedule.length_at(pack // rows_per_step, longest) or longest
        expected = []
        for segment in range(plan.pack_offsets[pack], plan.pack_offsets[pack + 1]):
            document, start = int(plan.segment_document[segment]), int(plan.segment_start[segment])
            end = start + int(plan.segment_length[segment])
            expected += [(document, begin, min(limit, end - begin)) for begin in range(start, end, limit)]
        segments = slice(cut.pack_offsets[pack], cut.pack_offsets[pack + 1])
        found = np.stack([cut.segment_document[segments], cut.segment_start[segments], cut.segment_length[segments]], 1)
        assert [*map(tuple, found.tolist())] == expected


def test_rows_of_several_streams_are_numbered_in_turn():
    plan = hfp.plan_packing([8] * 6, hfp.BestFit(8, seed=None))
    rows = ScheduledRows(hfp.LengthSchedule(2, 4), rows_per_step=2)
    whole = rows.cut(plan, 8)
    for stream in range(2):
        part = rows.cut(hfp.plan_packing([8] * 3, hfp.BestFit(8, seed=None)), 8, first_row=stream, turns=2)
        for row in range(3):
            of_part = slice(*part.pack_offsets[row : row + 2])
            of_whole = slice(*whole.pack_offsets[2 * row + stream :][:2])
            assert part.segment_length[of_part].tolist() == whole.segment_length[of_whole].tolist()
    assert len(set(np.diff(whole.pack_offsets).tolist())) > 1


def test_a_plan_without_long_segments_stays_as_it_is():
    plan = hfp.plan_packing([3, 2], hfp.BestFit(8))
    assert cut_segments(plan, np.array([3])) is plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0, "steps": 1}, "start: expected .* got 0"),
        ({"start": 1.5, "steps": 1}, "start: expected .* got 1.5"),
        ({"start": 1, "steps": 0}, "steps: expected .* got 0"),
        ({"start": 8, "steps": 1, "end": 4}, "end: expected at least start=8, got 4"),
        ({"start": 8, "steps": 1, "growth": "sudden"}, "growth: expected one of linear, exponential, got 'sudden'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(hfp.PackingError, match=message):
        hfp.LengthSchedule(**arguments)
