"""Plans whose segments share tokens: laws, metrics, shuffled, saved, loaded, copied."""

import copy
import itertools
import pickle

import numpy as np
import pytest

import hf_packing as hfp

# two trees in the first pack: 5 tokens, of which the next two share 3 and 3; then 2 tokens, and the same again
SHARED = {
    "document_length": [5, 4, 3, 2, 2, 6],
    "segment_document": [0, 1, 2, 3, 4, 5],
    "segment_start": [0, 0, 0, 0, 0, 0],
    "segment_length": [5, 4, 3, 2, 2, 6],
    "pack_offsets": [0, 5, 6],
    "pack_capacity": [8, 8],
    "segment_shared": [0, 3, 3, 0, 2, 0],
}


def make(**changes):
    return hfp.PackingPlan(**{name: np.array(value) for name, value in (SHARED | changes).items() if value is not None})


def test_tokens_are_counted_once():
    plan = make()
    assert plan.segment_own().tolist() == [5, 1, 0, 2, 0, 6]
    assert plan.pack_tokens().tolist() == [8, 6]
    assert plan.tree_offsets().tolist() == [0, 3, 5, 6]
    metrics = plan.metrics()
    assert (metrics.num_tokens, metrics.num_dropped_tokens, metrics.num_padding_slots) == (22, 0, 2)
    assert metrics.shared_ratio == 22 / 14
    assert metrics.packing_efficiency == 14 / 16
    assert metrics.lower_bound == 2  # of trees of 6, 2 and 6 tokens
    assert metrics.attention_cost == (25 + 16 - 9 + 9 - 9 + 4 + 4 - 4 + 36) / 128
    assert "prefixes shared: 1.57 times fewer tokens in packs, in 3 trees" in str(plan)
    assert "no plan for the same trees has fewer than 2 packs" in str(plan)


LONGER_FOURTH = {"segment_length": [5, 4, 3, 5, 2, 6], "document_length": [5, 4, 3, 5, 2, 6]}


@pytest.mark.parametrize(
    ("shared", "changes", "message"),
    [
        ([1, 3, 3, 0, 2, 0], {}, "segment_shared: expected .* 0 to 0 at index 0, got 1"),
        ([0, 3, 3, 0, 2, 2], {}, "segment_shared: expected .* 0 to 0 at index 5, got 2"),
        ([0, 3, 3, 0, -1, 0], {}, "segment_shared: expected .* at index 4, got -1"),
        ([0, 3, 4, 0, 2, 0], {}, "segment_shared: expected .* 0 to 3 at index 2, got 4"),
        ([0, 3, 3, 4, 2, 0], LONGER_FOURTH, "segment_shared: expected .* 0 to 3 at index 3, got 4"),
        ([0, 3, 3, 0, 3, 0], {}, "segment_shared: expected .* 0 to 2 at index 4, got 3"),
        ([0, 3, 3, 0, 1, 0], {}, "segment_length: expected .* 0 to 8 .* pack 0, got 9"),
        ([0, 3, 3, 0, 2], {}, "segment_shared: expected .* 6 segments .* got 5 values"),
        ([0.0, 3, 3, 0, 2, 0], {}, "segment_shared: expected 1-d integers, got an array of float64"),
        (None, {}, "segment_length: expected .* 0 to 8 .* pack 0, got 16"),
    ],
)
def test_a_plan_that_breaks_a_law(shared, changes, message):
    with pytest.raises(hfp.PackingError, match=f"^{message}"):
        make(segment_shared=shared, **changes)


def test_what_is_shared_counts_in_fingerprints_and_shuffles():
    assert make(pack_capacity=[9, 9], segment_shared=[0, 3, 3, 0, 1, 0]) != make(pack_capacity=[9, 9])
    plan = hfp.plan_packing(list(range(1, 30)), hfp.BestFit(40))
    roots = hfp.PackingPlan(**plan.arrays(), segment_shared=np.zeros(plan.num_segments, dtype=int))
    assert roots.shuffle(3).segment_document.tolist() == plan.shuffle(3).segment_document.tolist()


def trees_of(plan):
    """For each pack, its trees: the documents with what they share, in order."""
    begins, segments = plan.tree_offsets(), list(zip(plan.segment_document, plan.segment_shared, strict=True))
    pack = plan.pack_of_segment()
    packs = [[] for _ in range(plan.num_packs)]
    for first, end in itertools.pairwise(begins):
        assert len({*pack[first:end]}) == 1
        packs[pack[first]].append(tuple(segments[first:end]))
    return packs


def test_shuffling_keeps_trees_together_and_in_order():
    plan = make()
    orders = set()
    for seed in range(20):
        shuffled = plan.shuffle(seed)
        assert sorted(sorted(trees) for trees in trees_of(shuffled)) == sorted(
            sorted(trees) for trees in trees_of(plan)
        )
        assert shuffled.metrics() == plan.metrics()
        orders.add(tuple(shuffled.segment_document.tolist()))
    assert len(orders) == 4  # two packs, one with two trees


def test_saved_loaded_copied_and_replaced(tmp_path):
    plan = make()
    plan.save(tmp_path / "plan")
    loaded = hfp.PackingPlan.load(tmp_path / "plan")
    for twin in (loaded, copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert twin == plan
        assert twin.segment_shared.tolist() == SHARED["segment_shared"]
        assert not any(array.flags.writeable for array in twin.arrays().values())
    (tmp_path / "plan" / "segment_shared.npy").unlink()
    with pytest.raises(hfp.PackingError, match="^segment_length: expected .* got 16"):
        hfp.PackingPlan.load(tmp_path / "plan")
    plain = hfp.plan_packing([5, 3], hfp.BestFit(8))
    for plan in (make(), plain, make()):
        plan.save(tmp_path / "plan")
        assert hfp.PackingPlan.load(tmp_path / "plan") == plan
