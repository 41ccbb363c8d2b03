"""Batches of rows of trees, beside rows that are built and read token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_rows import documents_of, labeled_documents, runs_of, tree_row

import hf_packing as hfp
from hf_packing.planning.lengths import indices_in_ranges
from hf_packing.trees.segments import TreeSegments

KEYS = ["input_ids", "position_ids", "segment_lengths", "parents", "ends", "trained", "tree_labels"]

DOCUMENTS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [7, 8], [1, 2, 3, 4]]
ROW, ORDER = tree_row(DOCUMENTS, [[-100, -100, 3, 4], [-100, 2, -100, 5, 6], [-100, -100], [7, 8], [-100, 2, 3, -100]])


def test_a_row_token_by_token():
    assert ROW == {
        "tree_input_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "tree_labels": [-100, 2, 3, 4, 5, 6, -100, 8],
        "segment_lengths": [2, 1, 1, 2, 2],
        "parents": [-1, 0, 1, 1, -1],
        "ends": [0, 2, 2, 3, 4],
        "trained": [1, 2, 2, 2, 1, 2, 3, 1, 1, 3, 3, 2, 4, 1, 1],
    }
    assert ORDER == [2, 0, 4, 1, 3]


def test_a_batch_of_two_rows():
    batch = hfp.PackingCollator()([ROW, tree_row([[9, 9], [9, 8]])[0]])
    assert list(batch) == KEYS
    assert {value.dtype for value in batch.values()} == {torch.int64}
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 8]],
        "position_ids": [[0, 1, 2, 3, 3, 4, 0, 1, 0, 1, 1]],
        "segment_lengths": [2, 1, 1, 2, 2, 1, 1, 1],
        "parents": [-1, 0, 1, 1, -1, -1, 5, 5],
        "ends": [0, 2, 2, 3, 4, 6, 7],
        "trained": [[1, 2, 2], [2, 1, 2], [3, 1, 1], [3, 3, 2], [4, 1, 1], [5, 1, 1], [6, 1, 1]],
        "tree_labels": [[-100, 2, 3, 4, 5, 6, -100, 8, -100, 9, 8]],
    }


@given(st.lists(labeled_documents(), min_size=1, max_size=3), st.sampled_from([list, np.array, torch.tensor]))
def test_documents_and_labels_come_back_from_a_batch(sets, kind):
    rows, expected = [], []
    for documents, labels in sets:
        row, order = tree_row(documents, labels)
        rows.append({name: kind(values) for name, values in row.items()})
        expected += [(documents[number], [-100, *labels[number][1:]]) for number in order]
    batch = hfp.PackingCollator()(rows)
    whole = {name: batch[name].flatten().tolist() for name in KEYS[2:]}
    found = documents_of(whole | {"tree_input_ids": batch["input_ids"][0].tolist()})
    assert [(tokens, labels) for tokens, labels, _ in found] == expected
    positions = batch["position_ids"][0].tolist()
    for tokens, _, path in found:
        assert [positions[place] for place in path] == [*range(len(tokens))]


def find_runs(row):
    """The runs that documents train on, and where they stand."""
    runs = np.array(row["trained"], np.int64).reshape(-1, 3)
    trees = TreeSegments.from_arrays(row["segment_lengths"], row["parents"])
    return runs, trees.find_runs(np.array(row["ends"]), runs)


@given(labeled_documents())
def test_trained_tokens_one_by_one(case):
    row, _ = tree_row(*case)
    runs, ranges = find_runs(row)
    expected = [
        (document, place)
        for document, (_, labels, path) in enumerate(documents_of(row))
        for place, label in zip(path, labels, strict=True)
        if label != -100
    ]
    documents = np.repeat(runs[ranges.part, 0], ranges.length).tolist()
    tokens = indices_in_ranges(ranges.begin, ranges.length).tolist()
    assert sorted(zip(documents, tokens, strict=True)) == sorted(expected)


def test_the_rows_of_the_tests_have_runs_across_segments():
    assert runs_of([5, 6, -100, 7, 8]) == [[1, 1], [3, 2]]
    runs, ranges = find_runs(ROW)
    assert len(ranges.part) == 7 > len(runs)


def test_token_types_and_workers():
    types = [*range(8)]
    rows = [{**ROW, "token_type_ids": types}] * 2
    assert hfp.PackingCollator()(rows)["token_type_ids"].tolist() == [types * 2]
    loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=hfp.PackingCollator(), num_workers=1)
    (batch,) = loader
    expected = hfp.PackingCollator()(rows)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)
    with pytest.raises(hfp.PackingError, match="column 'token_type_ids': expected 8 values in row 0, .*, got 7"):
        hfp.PackingCollator()([{**ROW, "token_type_ids": types[1:]}])
    with pytest.raises(hfp.PackingError, match="column 'token_type_ids': expected this column in every row"):
        hfp.PackingCollator()([*rows, ROW])


def test_a_row_without_tokens_counts_nothing():
    empty = {name: [] for name in ROW}
    batch, alone = hfp.PackingCollator()([empty, ROW, empty]), hfp.PackingCollator()([ROW])
    assert all(torch.equal(batch[name], alone[name]) for name in KEYS)
    with pytest.raises(hfp.PackingError, match="rows: expected at least one token, got 2 rows without tokens"):
        hfp.PackingCollator()([empty, empty])


def without(name):
    return {other: values for other, values in ROW.items() if other != name}


@pytest.mark.parametrize("name", list(ROW))
def test_a_missing_column(name):
    expected = f"column '{name}': expected this column in row 1, a row of trees, got .*remove_unused_columns"
    with pytest.raises(hfp.PackingError, match=expected):
        hfp.PackingCollator()([ROW, without(name)])


@pytest.mark.parametrize("left", [["segment_lengths", "parents"], ["parents"], ["ends"], ["tree_labels"]], ids=str)
def test_what_trainer_leaves_of_a_row_of_trees(left):
    with pytest.raises(hfp.PackingError, match="column 'tree_input_ids': expected this column in row 0, a row"):
        hfp.PackingCollator()([{name: ROW[name] for name in left}])


@pytest.mark.parametrize("kept", [["tree_labels"], ["segment_lengths", "parents"]], ids=str)
def test_a_renamed_column_is_refused(kept):
    row = {"input_ids": ROW["tree_input_ids"], **{name: ROW[name] for name in kept}}
    with pytest.raises(hfp.PackingError, match="column 'input_ids': expected no such column in row 0, .*trees"):
        hfp.PackingCollator()([row])


def test_a_document_may_have_such_a_column_of_its_own():
    assert "ends" not in hfp.PackingCollator()([{"input_ids": [1, 2], "ends": [3], "trained": "yes"}])


@pytest.mark.parametrize(
    "name", ["input_ids", "labels", "position_ids", "seq_lengths", "seq_idx", "attention_mask", "completion_mask"]
)
def test_columns_of_other_rows(name):
    with pytest.raises(hfp.PackingError, match=f"column '{name}': expected no such column in row 1, "):
        hfp.PackingCollator()([ROW, {**ROW, name: [1] * 8}])


@pytest.mark.parametrize("other", [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "seq_lengths": [1, 1]}], ids=str)
def test_rows_of_two_kinds(other):
    for rows in ([ROW, other], [other, ROW]):
        expected = rf"rows: expected rows of trees only, or none, but row {rows.index(other)} has the columns input_ids"
        with pytest.raises(hfp.PackingError, match=expected):
            hfp.PackingCollator()(rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"tree_labels": [1]},
        {"segment_lengths": [2, 1, 1, 2, 1]},
        {"segment_lengths": [2, 2, 0, 2, 2]},
        {"parents": [-1, 0]},
        {"parents": [-1, 0, 1, 1, 9]},
        {"parents": [-1, 2, 1, 1, -1]},
        {"parents": [-1, 0, 1, 1, -2]},
        {"ends": [0, 2, 2, 3, 5]},
        {"ends": [-1, 2, 2, 3, 4]},
        {"trained": [1, 2]},
        {"trained": [5, 1, 1]},
        {"trained": [-1, 1, 1]},
        {"trained": [1, 0, 2]},
        {"trained": [1, 3, 2]},
        {"trained": [1, 1, 0]},
        {"trained": [1, 2, 2, 1, 1, 2]},
        {"tree_labels": [-100, -100, *ROW["tree_labels"][2:]]},
        {"tree_labels": [1, *ROW["tree_labels"][1:]]},
        {"tree_input_ids": [0.5] * 8},
    ],
    ids=str,
)
def test_columns_that_contradict_each_other(changes):
    (name,) = changes
    with pytest.raises(hfp.PackingError, match=f"^column '{name}': expected .* row 1"):
        hfp.PackingCollator()([ROW, {**ROW, **changes}, ROW])


def test_labels_need_a_run():
    with pytest.raises(hfp.PackingError, match="^column 'tree_labels': expected .* got 2 in row 1"):
        hfp.PackingCollator()([ROW, {**ROW, "trained": []}, ROW])


def test_sizes_that_only_add_up_over_rows_are_refused():
    longer, shorter = ROW["segment_lengths"][:-1] + [3], ROW["segment_lengths"][:-1] + [1]
    with pytest.raises(
        hfp.PackingError, match="'segment_lengths': expected 8 the number of tokens, .* in row 0, got 9"
    ):
        hfp.PackingCollator()([{**ROW, "segment_lengths": longer}, {**ROW, "segment_lengths": shorter}])


def test_arguments_that_trees_do_not_take():
    with pytest.raises(hfp.PackingError, match="keep_first_labels: expected False for rows of trees, got True"):
        hfp.PackingCollator(keep_first_labels=True)([ROW])
    with pytest.raises(hfp.PackingError, match="tokens: expected None for rows of trees, .* got 99"):
        hfp.PackingCollator(tokens=99, max_segments=9)([ROW])


def test_depths_are_no_positions_of_a_packed_row():
    depths = hfp.PackingCollator()([ROW])["position_ids"][0].tolist()
    row = {"input_ids": ROW["tree_input_ids"], "seq_lengths": ROW["segment_lengths"], "position_ids": depths}
    with pytest.raises(hfp.PackingError, match="column 'position_ids': expected positions that restart at 0"):
        hfp.PackingCollator()([row])
    del row["seq_lengths"]
    with pytest.raises(hfp.PackingError, match="column 'position_ids': expected positions that restart at 0"):
        hfp.PackingCollator()([row])
