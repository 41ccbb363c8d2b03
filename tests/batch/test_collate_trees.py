"""Batches of rows of trees, beside rows that are built and read token by token."""

import numpy as np
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
    assert runs_of([5, 6, -100, 7, 8]) == [[1, 1], [3, 2]]
    runs, ranges = find_runs(ROW)
    assert len(ranges.part) == 7 > len(runs)


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


def test_token_types_and_workers():
    types = [*range(8)]
    rows = [{**ROW, "token_type_ids": types}] * 2
    assert hfp.PackingCollator()(rows)["token_type_ids"].tolist() == [types * 2]
    loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=hfp.PackingCollator(), num_workers=1)
    (batch,) = loader
    expected = hfp.PackingCollator()(rows)
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_rows_without_tokens_and_columns_of_the_documents():
    empty = {name: [] for name in ROW}
    batch, alone = hfp.PackingCollator()([empty, ROW, empty]), hfp.PackingCollator()([ROW])
    assert all(torch.equal(batch[name], alone[name]) for name in KEYS)
    assert "ends" not in hfp.PackingCollator()([{"input_ids": [1, 2], "ends": [3], "trained": "yes"}])
