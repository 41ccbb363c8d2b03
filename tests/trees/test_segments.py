"""TreeSegments beside a literal walk from each segment up to its root."""

import pytest
from forests import forests
from hypothesis import given

from hf_packing.errors import PackingError
from hf_packing.trees.segments import TreeSegments


@given(forests())
def test_every_path_is_the_literal_one(forest):
    lengths, parents = forest
    trees = TreeSegments(lengths, parents)
    begins = [sum(lengths[:segment]) for segment in range(len(lengths))]
    for segment in range(len(lengths)):
        above, walk = segment, []
        while above >= 0:
            walk = [*range(begins[above], begins[above] + lengths[above]), *walk]
            above = parents[above]
        assert trees.path_of(segment).tolist() == walk
        assert trees.position_ids[walk].tolist() == [*range(len(walk))]
        assert trees.predecessors[walk].tolist() == [-1, *walk[:-1]]
        below = [other for other in range(len(lengths)) if segment in trees.segments_of(other)]
        assert below == [*range(segment, trees.ends_below[segment])]
        assert (segment in trees.leaves) == (below == [segment])
    assert trees.tokens == sum(lengths)
    assert trees.has_branches == any(parent >= 0 for parent in parents)


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((2, 2), (-1,), "expected one parent for each of the 2 segments in segment_lengths, got 1"),
        ((2, 0), (-1, 0), "expected at least 1 token in each segment, got 0 in segment 1"),
        ((2, 2), (1, -1), "depth-first order.*got parent 1 for segment 0"),
        ((2, 2), (-1, 1), "got parent 1 for segment 1"),
        ((2, 2), (-1, -2), "got parent -2 for segment 1"),
        ((1, 1, 1, 1), (-1, 0, 0, 1), "got parent 1 for segment 3"),
    ],
)
def test_what_is_no_forest_is_refused(lengths, parents, message):
    with pytest.raises(PackingError, match=message):
        TreeSegments.from_arrays(lengths, parents)
