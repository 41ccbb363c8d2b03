"""What the collator refuses, and the argument or column that the error names."""

import pytest
from tree_rows import tree_row

import hf_packing as hfp

TWO, SIX = {"input_ids": [5, 6]}, {"input_ids": [5, 6, 7, 8, 9, 10]}

OF_ROWS = [
    (None, "rows: expected a list of mappings", TWO),
    (None, "rows: expected a list of mappings", [[1, 2]]),
    (None, "rows: expected at least one token, got 0 rows", []),
    (None, "rows: expected at least one token, got 1 rows", [{"input_ids": []}]),
    ("input_ids", "columns of row 1: ids", [TWO, {"ids": [1]}]),
    ("input_ids", r"row 0: .*shape \(1, 2\)", [{"input_ids": [[1, 2]]}]),
    ("input_ids", "got float64", [{"input_ids": [1.5]}]),
    ("input_ids", "row 0: .* NumPy", [{"input_ids": [[1], [1, 2]]}]),
    ("labels", "columns of row 1: input_ids", [TWO | {"labels": [1, 2]}, TWO]),
    ("labels", "expected 2 values in row 0, one for each token, got 1", [TWO | {"labels": [1]}]),
    ("labels", "row 0: .* 1-d array of integers, got int64 values of shape \\(\\): 1", [TWO | {"labels": 1}]),
    ("completion_mask", "but row 0 has no labels", [TWO | {"completion_mask": [0, 1]}]),
    (
        "assistant_masks",
        "token 1 of row 1",
        [TWO | {"labels": [1, 2]}, TWO | {"labels": [1, 2], "assistant_masks": [1, 0]}],
    ),
    ("assistant_masks", "expected 2 values in row 0", [TWO | {"labels": [1, 2], "assistant_masks": [1]}]),
    ("completion_mask", "expected 2 values in row 0", [TWO | {"labels": [1, 2], "completion_mask": 1}]),
]

OF_SEGMENTS = [
    ("seq_lengths", r"6 tokens of row 1, got \[1\]", {"seq_lengths": [1]}),
    ("seq_lengths", r"positive lengths .* got \[6, 0\]", {"seq_lengths": [6, 0]}),
    ("seq_lengths", "got float64", {"seq_lengths": [5.5, 0.5]}),
    ("seq_lengths", "got object .*None", {"seq_lengths": None}),
    ("cu_seq_lens_q", r"got \[0, 3, 5\]", {"cu_seq_lens_q": [0, 3, 5]}),
    ("position_ids", "expected 6 values", {"position_ids": [0]}),
    ("position_ids", "0 at token 0 of row 1, got 2", {"position_ids": [2, 3, 4, 5, 2, 3]}),
    ("position_ids", "at token 0 of row 1, got 2", {"seq_lengths": [4, 2], "position_ids": [2, 3, 4, 5, 2, 3]}),
    ("position_ids", "expected 6 values in row 1", {"seq_lengths": [4, 2], "position_ids": [0, 1, 2, 3, 0]}),
    (
        "position_ids",
        "as in .*got lengths .2, 4.",
        {"seq_lengths": [4, 2], "position_ids": [0, 1, 0, 1, 2, 3]},
    ),
    (
        "position_ids",
        "as in .*got lengths .6.",
        {"seq_lengths": [4, 2], "position_ids": [*range(6)]},
    ),
    (
        "position_ids",
        "as in .*got lengths .3, 3.",
        {"seq_lengths": [6], "position_ids": [0, 1, 2, 0, 1, 2]},
    ),
    ("position_ids", r"shape \(3, 6\)", {"seq_lengths": [6], "position_ids": [[*range(6)]] * 3}),
    ("position_ids", "got float64", {"seq_lengths": [6], "position_ids": [*map(float, range(6))]}),
    ("seq_idx", r"as in column 'seq_lengths', .*\[3, 3\]", {"seq_lengths": [6], "seq_idx": [0, 0, 0, 1, 1, 1]}),
    (
        "position_ids",
        "as in .*got lengths .6.",
        {"position_ids": [*range(6)], "cu_seq_lens_k": [0, 3, 6]},
    ),
    ("attention_mask", "got a 2 in row 1", {"seq_lengths": [6], "attention_mask": [1, 1, 1, 2, 2, 2]}),
    ("attention_mask", "got a 0 in row 1", {"attention_mask": [1, 1, 1, 1, 0, 0]}),
    ("attention_mask", "expected 6 values in row 1", {"seq_lengths": [6], "attention_mask": [[1] * 6]}),
    ("attention_mask", "expected 6 values in row 1", {"attention_mask": 6}),
]

OF_SHAPES = [
    ("max_segments: expected an integer from 2 .* got None", {"tokens": 8}),
    ("tokens: expected an integer from 1 .* got None", {"max_segments": 8}),
    ("tokens: expected an integer from 1 .* got 0", {"tokens": 0, "max_segments": 8}),
    ("max_segments: expected an integer from 2 .* got 1", {"tokens": 8, "max_segments": 1}),
    ("max_segments: expected an integer from 2 .* got 2.5", {"tokens": 8, "max_segments": 2.5}),
    ("tokens: expected at most 4 tokens .* got 5", {"tokens": 4, "max_segments": 8}),
    ("max_segments: expected at most 2 .* got 3 segments", {"tokens": 5, "max_segments": 2}),
    ("max_segments: expected at most 3 .* got 4 segments", {"tokens": 6, "max_segments": 3}),
    ("align_tokens: expected an integer from 1 to", {"align_tokens": 0}),
    ("align_tokens: expected an integer from 1 to", {"align_tokens": 1.5}),
    (
        "tokens: expected a multiple of align_tokens=6, got 8",
        {"align_tokens": 6, "tokens": 8, "max_segments": 8},
    ),
]

DOCUMENTS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [7, 8], [1, 2, 3, 4]]
TREE, _ = tree_row(DOCUMENTS, [[-100, -100, 3, 4], [-100, 2, -100, 5, 6], [-100, -100], [7, 8], [-100, 2, 3, -100]])

OF_TREES = [
    ("tree_labels", {"tree_labels": [1]}),
    ("tree_labels", {"tree_labels": [-100, -100, *TREE["tree_labels"][2:]]}),
    ("tree_labels", {"tree_labels": [1, *TREE["tree_labels"][1:]]}),
    ("tree_labels", {"trained": []}),
    ("tree_input_ids", {"tree_input_ids": [0.5] * 8}),
    ("segment_lengths", {"segment_lengths": [2, 1, 1, 2, 1]}),
    ("segment_lengths", {"segment_lengths": [2, 2, 0, 2, 2]}),
    ("parents", {"parents": [-1, 0]}),
    ("parents", {"parents": [-1, 0, 1, 1, 9]}),
    ("parents", {"parents": [-1, 2, 1, 1, -1]}),
    ("parents", {"parents": [-1, 0, 1, 1, -2]}),
    ("ends", {"ends": [0, 2, 2, 3, 5]}),
    ("ends", {"ends": [-1, 2, 2, 3, 4]}),
    ("trained", {"trained": [1, 2]}),
    ("trained", {"trained": [5, 1, 1]}),
    ("trained", {"trained": [-1, 1, 1]}),
    ("trained", {"trained": [1, 0, 2]}),
    ("trained", {"trained": [1, 3, 2]}),
    ("trained", {"trained": [1, 1, 0]}),
    ("trained", {"trained": [1, 2, 2, 1, 1, 2]}),
    ("trained", {"trained": [1, 1, 2, 1, 2, 2]}),
    ("token_type_ids", {"token_type_ids": [0] * 7}),
    *((name, {name: [1] * 8}) for name in ("input_ids", "labels", "position_ids", "seq_lengths", "seq_idx")),
    *((name, {name: [1] * 8}) for name in ("attention_mask", "completion_mask")),
]


def refused(message, rows, **arguments):
    with pytest.raises(hfp.PackingError, match=message):
        hfp.PackingCollator(**arguments)(rows)


@pytest.mark.parametrize(("column", "message", "rows"), OF_ROWS, ids=str)
def test_rows(column, message, rows):
    refused(f"^column '{column}'.*{message}" if column else f"^{message}", rows)


@pytest.mark.parametrize(("column", "message", "columns"), OF_SEGMENTS, ids=str)
def test_columns_of_segments(column, message, columns):
    refused(f"^column '{column}'.*{message}", [SIX, SIX | columns])


@pytest.mark.parametrize(("message", "arguments"), OF_SHAPES, ids=str)
def test_fixed_shapes(message, arguments):
    refused(f"^{message}", [{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, {"input_ids": [8, 9]}], **arguments)


@pytest.mark.parametrize("bad", [{"labels": [1, 2]}, {"completion_mask": [0, 1]}, {"position_ids": [0, 2]}], ids=str)
def test_a_column_that_only_the_last_row_has(bad):
    hfp.PackingCollator()([TWO] * 3)
    refused(f"^column '{min(bad)}'", [TWO, TWO, TWO, TWO | bad])


@pytest.mark.parametrize(("column", "changes"), OF_TREES, ids=str)
def test_columns_of_trees_that_contradict_each_other(column, changes):
    types = {"token_type_ids": [0] * 8} if "token_type_ids" in changes else {}
    refused(f"^column '{column}'.*row 1", [TREE | types, TREE | changes, TREE | types])


def test_other_rows_of_trees():
    for name in TREE:
        rest = {other: values for other, values in TREE.items() if other != name}
        refused(f"^column '{name}': expected this column in row 1, .*remove_unused_columns", [TREE, rest])
    for left in (["segment_lengths", "parents"], ["tree_labels"]):  # what Trainer leaves
        refused("^column 'tree_input_ids': expected this column in row 0, a row", [{name: TREE[name] for name in left}])
    for left in ("parents", "ends", "trained"):
        refused("^column 'input_ids': expected this column in every row", [{left: TREE[left]}])
    for kept in (["tree_labels"], ["segment_lengths", "parents"]):
        renamed = {"input_ids": TREE["tree_input_ids"], **{name: TREE[name] for name in kept}}
        refused("^column 'input_ids': expected no such column in row 0, .*trees", [renamed])
    for other in (TWO, TWO | {"seq_lengths": [1, 1]}):
        for rows in ([TREE, other], [other, TREE]):
            refused(f"^rows: expected rows of trees only, or none, but row {rows.index(other)} has", rows)
    refused("^rows: expected at least one token, got 2 rows without tokens", [{name: [] for name in TREE}] * 2)
    refused("^column 'token_type_ids': expected this column in every row", [TREE | {"token_type_ids": [0] * 8}, TREE])
    refused("^keep_first_labels: expected False for rows of trees, .*, got True", [TREE], keep_first_labels=True)
    refused("^tokens: expected None for rows of trees, .* got 99", [TREE], tokens=99, max_segments=9)
    longer, shorter = ({**TREE, "segment_lengths": TREE["segment_lengths"][:-1] + [last]} for last in (3, 1))
    refused("^column 'segment_lengths': .* got 9 in row 0", [longer, shorter])  # they add up over the rows
    depths = {"position_ids": hfp.PackingCollator()([TREE])["position_ids"][0].tolist()}
    for more in ({"seq_lengths": TREE["segment_lengths"]}, {}):  # which are no positions of a packed row
        row = {"input_ids": TREE["tree_input_ids"], **depths, **more}
        refused("^column 'position_ids': expected positions that restart at 0", [row])
