"""PackingPlan, also with segments that share tokens: checked, read-only, saved, loaded, compared; and lower bounds."""

import copy
import itertools
import mmap
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from any_strategy import many_examples
from hypothesis import given
from hypothesis import strategies as st
from plans import fewest_packs

import hf_packing as hfp
from hf_packing import files
from hf_packing.planning.metrics import pack_lower_bound


def make(**changes):
    arrays = {
        "document_length": np.array([5, 3]),
        "segment_document": np.array([0, 1, 0]),
        "segment_start": np.array([0, 0, 4]),
        "segment_length": np.array([4, 3, 1]),
        "pack_offsets": np.array([0, 2, 3]),
        "pack_capacity": np.array([7, 7]),
    }
    return hfp.PackingPlan(**(arrays | {name: np.array(value) for name, value in changes.items()}))


def test_a_plan_is_a_read_only_value():
    assert repr(make()) == "PackingPlan(2 documents, 3 segments, 2 packs, efficiency 0.5714)"
    assert make().pack_of_segment().tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="read-only"):
        make().segment_length[0] = 1
    lengths = np.array([5, 3, 6, 2], dtype=np.int32)
    plan = hfp.plan_packing(lengths, hfp.BestFit(8))
    lengths[:] = 1
    assert plan.document_length.tolist() == [5, 3, 6, 2]
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make(pack_capacity=[7, 8])
    assert make() != "a plan"


REFUSED = [
    ("segment_length", {"segment_length": [4, 4, 1]}),
    ("segment_length", {"segment_length": [4, 3, 0]}),
    ("segment_length", {"segment_length": [4.0, 3.0, 1.0]}),
    ("segment_length", {"segment_length": [2**31] * 3}),
    ("segment_start", {"segment_length": [4, 3, 2]}),
    ("segment_start", {"segment_length": [4, 4, 1], "pack_capacity": [9, 9]}),
    ("segment_start", {"segment_start": [0, 0, -1]}),
    ("segment_start", {"segment_start": [0, 0, 3]}),
    ("segment_start", {"segment_start": [0, 0]}),
    ("segment_document", {"segment_document": [0, 2, 0]}),
    ("segment_document", {"segment_document": [0, -1, 0]}),
    ("pack_offsets", {"pack_offsets": [0, 2, 2]}),
    ("pack_offsets", {"pack_offsets": [0, 3]}),
    ("pack_offsets", {"pack_offsets": [0, 3, 2, 3], "pack_capacity": [9, 9, 9]}),
    ("document_length", {"document_length": [5, -3]}),
    ("document_length", {"document_length": [[5, 3]]}),
    ("pack_capacity", {"pack_capacity": [2**31] * 2}),
]


@pytest.mark.parametrize(("array", "changes"), REFUSED)
def test_a_plan_that_breaks_a_law(array, changes):
    with pytest.raises(hfp.PackingError, match=f"^{array}: expected "):
        make(**changes)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "uint64"])
def test_laws_hold_for_integers_of_any_type(dtype):
    in_type = {name: array.astype(dtype) for name, array in make().arrays().items()}
    assert make(**in_type).shuffle(1).metrics() == make().metrics()
    refused = 0
    for array, changes in REFUSED:
        given = {name: np.array(value) for name, value in changes.items()}
        if all(value.dtype.kind == "i" and (value == value.astype(dtype)).all() for value in given.values()):
            with pytest.raises(hfp.PackingError, match=f"^{array}: expected "):
                make(**in_type | {name: value.astype(dtype) for name, value in given.items()})
            refused += 1
    assert refused >= 7


@pytest.mark.parametrize("kind", [np.int16, np.uint8, np.int64, ">i4", list])
def test_stored_in_the_same_types_whatever_the_strategy_returns(kind):
    arrays = {name: array.tolist() if kind is list else array.astype(kind) for name, array in make().arrays().items()}
    plan = hfp.PackingPlan(**arrays)
    assert plan == make()
    types = {name: array.dtype for name, array in plan.arrays().items()}
    assert types.pop("pack_offsets") == np.int64
    assert set(types.values()) == {np.dtype(np.int32)}


def is_mapped(array):
    """Whether the memory that an array views is that of a file."""
    return isinstance(array, np.memmap | mmap.mmap) or (array is not None and is_mapped(getattr(array, "base", None)))


def test_saved_and_memory_mapped(tmp_path, rng):
    plan = hfp.plan_packing(rng.integers(1, 30, 40), hfp.Optimal(64))
    plan.save(tmp_path / "deep" / "plan")
    loaded = hfp.PackingPlan.load(tmp_path / "deep" / "plan")
    assert loaded == plan
    assert loaded.metrics() == plan.metrics()
    assert loaded.note == plan.note != ""
    assert all(is_mapped(array) for array in loaded.arrays().values())
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["plan"]


def test_a_plan_that_an_earlier_version_saved(tmp_path):
    """The files of BestFit(8) on lengths of 5, 11, 3, 6 and 2 by version 0.2.0, which shuffled otherwise."""
    arrays = {
        "document_length": np.array([5, 11, 3, 6, 2], np.int32),
        "segment_document": np.array([2, 1, 0, 1, 3, 4], np.int32),
        "segment_start": np.array([0, 0, 0, 8, 0, 0], np.int32),
        "segment_length": np.array([3, 8, 5, 3, 6, 2], np.int32),
        "pack_offsets": np.array([0, 1, 2, 4, 6], np.int64),
        "pack_capacity": np.array([8, 8, 8, 8], np.int32),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    facts = '{"format": 1, "fingerprint": "6b24afe453d75301178eb5188e9755cc", "proven_lower_bound": 0, "note": ""}'
    (tmp_path / "plan.json").write_text(facts)
    plan = hfp.PackingPlan.load(tmp_path)
    assert {name: array.tolist() for name, array in plan.arrays().items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert plan.metrics() == hfp.plan_packing([5, 11, 3, 6, 2], hfp.BestFit(8)).metrics()


def test_saving_replaces_a_plan_and_nothing_else(tmp_path, monkeypatch):
    make().save(tmp_path / "plan")
    other = hfp.plan_packing([1, 2], hfp.BestFit(3))
    other.save(tmp_path / "plan")
    assert hfp.PackingPlan.load(tmp_path / "plan") == other
    (tmp_path / "plan" / "thesis.tex").write_text("x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "plan.json").write_text("{}")
    for path in (tmp_path / "plan", tmp_path / "mine", tmp_path / "mine" / "plan.json"):
        with pytest.raises(hfp.PackingError, match="^path: expected a new folder or a saved plan to replace"):
            make().save(path)
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail(f"umask({mask:o}) while other threads make files"))
    for _ in range(2):
        make().save(tmp_path / "other")
    assert (tmp_path / "other").stat().st_mode == (tmp_path / "mine").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other", "plan"]


@pytest.mark.parametrize("target_is_there", [False, True])
def test_saving_where_a_link_points(tmp_path, target_is_there):
    if target_is_there:
        make(pack_capacity=[9, 9]).save(tmp_path / "large disk" / "plan")
    (tmp_path / "plan").symlink_to(tmp_path / "large disk" / "plan", target_is_directory=True)
    make().save(tmp_path / "plan")
    assert (tmp_path / "plan").is_symlink()
    assert hfp.PackingPlan.load(tmp_path / "large disk" / "plan") == make()


def test_saving_while_others_save_and_read(tmp_path, monkeypatch):
    looks, list_files = [], Path.iterdir

    def look(folder):
        looks.append(folder)
        folder.rename(tmp_path / "replaced")  # as the other rank does before it puts its own there
        return list_files(folder)

    make().save(tmp_path / "plan")
    monkeypatch.setattr(Path, "iterdir", look)
    make().save(tmp_path / "plan")
    assert looks == [tmp_path / "plan"]
    assert hfp.PackingPlan.load(tmp_path / "plan") == make()
    monkeypatch.undo()
    other = make(pack_capacity=[9, 9])
    make().save(tmp_path / "plan")
    remove, removed = shutil.rmtree, []

    def remove_and_look(folder, **options):
        if Path(folder).is_dir():
            removed.append(hfp.PackingPlan.load(folder))
        assert hfp.PackingPlan.load(tmp_path / "plan") == other
        remove(folder, **options)

    monkeypatch.setattr(files.shutil, "rmtree", remove_and_look)
    other.save(tmp_path / "plan")
    assert removed == [make()]
    assert {file.name for file in tmp_path.iterdir()} == {"plan", "replaced"}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("plan.json", None, "path: .* has no plan.json"),
        ("plan.json", "not json", "path: expected a valid plan.json"),
        ("plan.json", "[]", "path: expected a valid plan.json"),
        ("plan.json", '{"format": 1, "fingerprint": ""}', "path: expected a valid plan.json"),
        ("plan.json", '{"format": 99, "fingerprint": "", "proven_lower_bound": 0, "note": ""}', "path: .* format 99,"),
        ("document_length.npy", [9, 9], "path: expected a plan with fingerprint"),
        ("segment_length.npy", [4, 4, 1], "segment_length: expected .* got 8"),
        ("segment_length.npy", "no array", "path: .*segment_length.npy"),
    ],
)
def test_loading_what_is_no_plan_or_damaged(tmp_path, file, content, message):
    make().save(tmp_path / "plan")
    path = tmp_path / "plan" / file
    path.unlink()
    if isinstance(content, list):
        np.save(path, np.array(content))
    elif content is not None:
        path.write_text(content)
    with pytest.raises(hfp.PackingError, match=f"^{message}"):
        hfp.PackingPlan.load(tmp_path / "plan")


def test_packs_that_are_taken_keep_what_is_known_and_long_documents_are_stored():
    plan = hfp.plan_packing([6, 6, 6, 5], hfp.Optimal(10))
    assert plan.num_packs == plan.proven_lower_bound == 4
    order = np.array([2, 0, 3, 1])
    taken = plan.take_packs(order)
    assert taken.proven_lower_bound == 4
    assert taken.note == plan.note
    assert taken.segment_document.tolist() == plan.segment_document[order].tolist()
    exchanged = plan.take(np.array([1, 0, 2, 3]), plan.pack_offsets, np.arange(4))
    assert exchanged.proven_lower_bound == exchanged.shuffle(1).proven_lower_bound == 4
    assert plan.take_packs(order[:3]).proven_lower_bound == 3
    assert plan.take_packs(order[:0]).metrics().lower_bound == 0
    plan = make(document_length=[2**31 + 4, 3], segment_start=[0, 0, 2**31])
    assert plan.document_length.dtype == plan.segment_start.dtype == np.int64
    assert plan.segment_length.dtype == np.int32


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


def make_shared(**changes):
    return hfp.PackingPlan(**{name: np.array(value) for name, value in (SHARED | changes).items() if value is not None})


def test_tokens_are_counted_once():
    plan = make_shared()
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
    assert make_shared(pack_capacity=[9, 9], segment_shared=[0, 3, 3, 0, 1, 0]) != make_shared(pack_capacity=[9, 9])
    plan = hfp.plan_packing(list(range(1, 30)), hfp.BestFit(40))
    roots = hfp.PackingPlan(**plan.arrays(), segment_shared=np.zeros(plan.num_segments, dtype=int))
    assert roots.shuffle(3).segment_document.tolist() == plan.shuffle(3).segment_document.tolist()


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
def test_a_plan_that_breaks_a_law_of_shared_tokens(shared, changes, message):
    with pytest.raises(hfp.PackingError, match=f"^{message}"):
        make_shared(segment_shared=shared, **changes)


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
    plan = make_shared()
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
    plan = make_shared()
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
    for plan in (make_shared(), plain, make_shared()):
        plan.save(tmp_path / "plan")
        assert hfp.PackingPlan.load(tmp_path / "plan") == plan


def l2_by_definition(lengths: list[int], capacity: int) -> int:
    bounds = [-(-sum(lengths) // capacity)]
    for a in range(1, capacity // 2 + 1):
        alone = [n for n in lengths if n > capacity - a]
        above_half = [n for n in lengths if capacity / 2 < n <= capacity - a]
        small = [n for n in lengths if a <= n <= capacity / 2]
        rest = sum(small) - (len(above_half) * capacity - sum(above_half))
        bounds.append(len(alone) + len(above_half) + max(0, -(-rest // capacity)))
    return max(bounds)


lengths_and_capacity = st.integers(1, 20).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), min_size=1, max_size=8), st.just(capacity))
)


@many_examples
@given(lengths_and_capacity)
def test_bound_is_l2_and_never_above_the_fewest_packs(case):
    lengths, capacity = case
    bound = pack_lower_bound(np.bincount(lengths), capacity)
    assert bound == l2_by_definition(lengths, capacity)
    assert bound <= fewest_packs(lengths, capacity)
