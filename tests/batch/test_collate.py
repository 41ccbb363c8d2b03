"""PackingCollator against a literal loop and against transformers' own collator."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

import hf_packing as hfp

KEYS = [
    *("input_ids", "labels", "position_ids"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
]
documents_lists = st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=9), min_size=1, max_size=8)


def one_by_one(documents):
    """Token by token."""
    batch = {"input_ids": [], "labels": [], "position_ids": [], "seq_idx": [], "cu_seq_lens_q": [0]}
    for number, document in enumerate(documents):
        for position, token in enumerate(document):
            batch["input_ids"].append(token)
            batch["labels"].append(token if position else -100)
            batch["position_ids"].append(position)
            batch["seq_idx"].append(number)
        batch["cu_seq_lens_q"].append(batch["cu_seq_lens_q"][-1] + len(document))
    return batch


def plain(batch):
    return {
        name: value[0].tolist() if value.ndim == 2 else value.tolist()
        for name, value in batch.items()
        if isinstance(value, torch.Tensor)
    }


@given(documents_lists, st.sampled_from([list, np.array, torch.tensor]))
def test_plain_documents(documents, kind):
    batch = hfp.PackingCollator()([{"input_ids": kind(document)} for document in documents])
    assert list(batch) == KEYS
    expected = one_by_one(documents)
    assert plain(batch) == expected | {"cu_seq_lens_k": expected["cu_seq_lens_q"]}
    assert batch["max_length_q"] == batch["max_length_k"] == max(map(len, documents))
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    assert {batch[name].dtype for name in ("cu_seq_lens_q", "seq_idx")} == {torch.int32}


@given(documents_lists, st.integers(9, 30), st.booleans())
def test_packed_rows_are_the_same_as_their_segments(documents, max_length, by_positions):
    packed = hfp.BestFit(max_length)({"input_ids": documents})
    rows = [dict(zip(packed, values, strict=True)) for values in zip(*packed.values(), strict=True)]
    left_out = "seq_lengths" if by_positions else "position_ids"
    segments = []
    for row in rows:
        ends = np.cumsum(row["seq_lengths"])[:-1]
        segments += [segment.tolist() for segment in np.split(np.array(row["input_ids"]), ends)]
    batch = hfp.PackingCollator()([{name: value for name, value in row.items() if name != left_out} for row in rows])
    expected = one_by_one(segments)
    assert plain(batch) == expected | {"cu_seq_lens_k": expected["cu_seq_lens_q"]}


SEGMENTS_TOLD_BY = {
    "nothing": lambda _: {},
    "lengths": lambda lengths: {"seq_lengths": lengths},
    "positions": lambda lengths: {"position_ids": [n for length in lengths for n in range(length)]},
    "numbers": lambda lengths: {"seq_idx": np.repeat(np.arange(len(lengths)), lengths)},
    "all": lambda lengths: {
        "cu_seq_lens_q": [0, *np.cumsum(lengths).tolist()],
        "position_ids": np.array([n for length in lengths for n in range(length)], dtype=np.int32),
        "attention_mask": [1] * sum(lengths),
        "seq_lengths": np.array(lengths, dtype=np.uint8),
    },
}


@st.composite
def rows_of_any_kind(draw):
    """Draw rows with their segments; some rows have one segment and no column for it."""
    labels_from = draw(st.sampled_from(["nowhere", "the tokens", "a column", "either"]))
    has_types = draw(st.booleans())
    rows, segments = [], []
    for _ in range(draw(st.integers(1, 4))):
        told = draw(st.sampled_from(sorted(SEGMENTS_TOLD_BY)))
        lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=1 if told == "nothing" else 3))
        dtype = draw(st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, None]))
        values = draw(st.lists(st.integers(0, 99), min_size=sum(lengths), max_size=sum(lengths)))
        ids = values if dtype is None else np.array(values, dtype=dtype)
        row = {"input_ids": ids, **SEGMENTS_TOLD_BY[told](lengths)}
        if labels_from == "the tokens" or (labels_from == "either" and draw(st.booleans())):
            row["labels"] = ids
        elif labels_from != "nowhere":
            row["labels"] = np.array([value - 50 for value in values], dtype=draw(st.sampled_from([np.int8, np.int64])))
        if has_types:
            row["token_type_ids"] = [value % 2 for value in values]
        ends = np.cumsum(lengths)[:-1]
        columns = (ids, row.get("labels", ids), row.get("token_type_ids", ids))
        segments += zip(*([part.tolist() for part in np.split(column, ends)] for column in columns), strict=True)
        rows.append(row)
    return rows, segments


@given(rows_of_any_kind(), st.booleans())
def test_rows_of_any_kind(drawn, keep_first_labels):
    rows, segments = drawn
    before = [{name: np.array(value).tolist() for name, value in row.items()} for row in rows]
    batch = hfp.PackingCollator(keep_first_labels=keep_first_labels)(rows)
    expected = one_by_one([ids for ids, _, _ in segments])
    expected["labels"] = [
        -100 if position == 0 and not keep_first_labels else label
        for _, labels, _ in segments
        for position, label in enumerate(labels)
    ]
    if "token_type_ids" in rows[0]:
        expected["token_type_ids"] = [kind for _, _, kinds in segments for kind in kinds]
    assert plain(batch) == expected | {"cu_seq_lens_k": expected["cu_seq_lens_q"]}
    assert [{name: np.array(value).tolist() for name, value in row.items()} for row in rows] == before


@pytest.mark.parametrize("bad", [{"labels": [1, 2]}, {"completion_mask": [0, 1]}, {"position_ids": [0, 2]}], ids=str)
def test_a_column_that_only_the_last_row_has_is_checked(bad):
    rows = [{"input_ids": [5, 6]}] * 3
    hfp.PackingCollator()(rows)
    with pytest.raises(hfp.PackingError, match=f"column '{min(bad)}'"):
        hfp.PackingCollator()([*rows, {"input_ids": [5, 6], **bad}])


AS = {
    "list": list,
    "torch.int32": lambda values: torch.tensor(values, dtype=torch.int32),
    "uint8": lambda values: np.array(values).astype(np.uint8),
    "int64": np.array,
}


@pytest.mark.parametrize("kind", AS)
def test_columns_that_tell_the_same_segments(kind):
    """256 tokens end where an unsigned byte does."""
    lengths = [256, 1, 3]
    told = {
        "seq_lengths": lengths,
        "position_ids": AS[kind]([position for length in lengths for position in range(length)]),
        "seq_idx": AS[kind](np.repeat([0, 1, 2], lengths)),
        "cu_seq_lens_q": [0, 256, 257, 260],
        "attention_mask": AS[kind]([1] * 260),
    }
    tokens = {"input_ids": list(range(260))}
    for names in ([*told], *([name] for name in told if name != "attention_mask"), [*reversed(told)]):
        batch = hfp.PackingCollator()([tokens | {name: told[name] for name in names}])
        assert batch["cu_seq_lens_q"].tolist() == [0, 256, 257, 260], names


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"seq_lengths": [4, 2], "position_ids": [0, 1, 0, 1, 2, 3]},
            r"column 'position_ids': expected segments of lengths \[4, 2\] in row 1, as in column 'seq_lengths', "
            r"got lengths \[2, 4\]; remove",
        ),
        ({"seq_lengths": [4, 2], "position_ids": [0, 1, 2, 3, 4, 5]}, r"lengths \[4, 2\] in row 1, .* got .* \[6\]"),
        ({"seq_lengths": [6], "position_ids": [0, 1, 2, 0, 1, 2]}, r"lengths \[6\] in row 1, .* got .* \[3, 3\]"),
        (
            {"seq_lengths": [4, 2], "position_ids": [2, 3, 4, 5, 2, 3]},
            "restart at 0 .* got 2 at token 0 of row 1. Remove",
        ),
        ({"position_ids": [2, 3, 4, 5, 2, 3]}, "restart at 0 .* got 2 at token 0 of row 1. Remove"),
        ({"seq_lengths": [4, 2], "position_ids": [0, 1, 2, 3, 0]}, "'position_ids': expected 6 values in row 1"),
        ({"seq_lengths": [6], "position_ids": [[*range(6)]] * 3}, r"'position_ids': expected a list .* shape \(3, 6\)"),
        ({"seq_lengths": [6], "position_ids": [*map(float, range(6))]}, "'position_ids': expected a list of integers"),
        (
            {"seq_lengths": [6], "seq_idx": [0, 0, 0, 1, 1, 1]},
            r"column 'seq_idx': .* lengths \[6\] in row 1, .* got .* \[3, 3\]",
        ),
        (
            {"position_ids": [*range(6)], "cu_seq_lens_k": [0, 3, 6]},
            r"lengths \[3, 3\] in row 1, as in column 'cu_seq_lens_k', .* \[6\]",
        ),
        ({"cu_seq_lens_q": [0, 3, 5]}, r"'cu_seq_lens_q': .* rise from 0 to the 6 tokens of row 1, got \[0, 3, 5\]"),
        ({"seq_lengths": [6], "attention_mask": [1, 1, 1, 2, 2, 2]}, "got a 2 in row 1"),
        (
            {"seq_lengths": [6], "attention_mask": [[1] * 6]},
            r"'attention_mask': expected shape \(6,\) in row 1.* got shape \(1, 6\)",
        ),
    ],
)
def test_columns_that_tell_of_other_segments_are_refused(row, message):
    tokens = {"input_ids": [5, 6, 7, 8, 9, 10]}
    with pytest.raises(hfp.PackingError, match=message):
        hfp.PackingCollator()([tokens, tokens | row])


@given(documents_lists)
def test_rows_flattened_by_transformers(documents):
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    flat = flatten([{"input_ids": document} for document in documents])
    row = {name: value[0] if getattr(value, "ndim", 0) == 2 else value for name, value in flat.items()}
    expected = hfp.PackingCollator()([{"input_ids": document} for document in documents])
    for left_out in ((), ("position_ids",), ("seq_idx",), ("position_ids", "seq_idx")):
        batch = hfp.PackingCollator()([{name: value for name, value in row.items() if name not in left_out}])
        assert plain(batch) == plain(expected)


@given(documents_lists)
def test_agrees_with_transformers(documents):
    rows = [{"input_ids": document, "labels": [-100, *document[1:]]} for document in documents]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)([dict(row) for row in rows])
    ours = hfp.PackingCollator()(rows)
    for name in KEYS:
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name


def test_labels_are_kept_but_for_the_first_of_each_segment():
    row = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, 3, 4, 5], "seq_lengths": [3, 2]}
    assert hfp.PackingCollator()([row])["labels"].tolist() == [[-100, -100, 3, -100, 5]]
    assert row["labels"] == [1, -100, 3, 4, 5]


def test_numpy_rows_are_not_changed():
    ids = np.array([1, 2, 3])
    hfp.PackingCollator()([{"input_ids": ids, "labels": ids}])
    assert ids.tolist() == [1, 2, 3]


def test_empty_rows_have_no_segment():
    batch = hfp.PackingCollator()([{"input_ids": []}, {"input_ids": [1, 2]}, {"input_ids": [], "seq_lengths": []}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows: expected at least one token, got 0 rows without tokens"),
        ([{"input_ids": []}], "rows: expected at least one token, got 1 rows without tokens"),
        ([{"input_ids": [1]}, {"ids": [1]}], "'input_ids': expected this column in every row; columns of row 1: ids"),
        (
            [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}],
            "column 'labels': expected this column in every row; columns of row 1: input_ids",
        ),
        (
            [{"input_ids": [1, 2], "labels": [1]}],
            "column 'labels': expected 2 values in row 0, one for each token, got 1",
        ),
        (
            [{"input_ids": [1, 2], "seq_lengths": [1]}],
            r"column 'seq_lengths': expected positive lengths that add up to the 2 tokens of row 0, got \[1\]",
        ),
        (
            [{"input_ids": [1, 2], "seq_lengths": [2, 0]}],
            r"column 'seq_lengths': expected positive lengths .* got \[2, 0\]",
        ),
        ([{"input_ids": [1, 2], "position_ids": [0]}], "column 'position_ids': expected 2 values in row 0"),
        (
            [{"input_ids": [[1, 2]]}],
            r"column 'input_ids': expected a list of integers, got int64 of shape \(1, 2\) in row 0",
        ),
        ([{"input_ids": [1.5]}], "column 'input_ids': expected a list of integers, got float64"),
        (
            [{"input_ids": [1, 2], "seq_lengths": [1.5, 0.5]}],
            "column 'seq_lengths': expected a list of integers, got float64",
        ),
        (
            [{"input_ids": [1, 2], "seq_lengths": None}],
            "column 'seq_lengths': expected a list of integers, got object",
        ),
        ([{"input_ids": [1, 2], "labels": 1}], "column 'labels': expected a list of integers, got int64"),
        ([{"input_ids": [[1], [1, 2]]}], "column 'input_ids': expected a list of integers, but NumPy"),
        (
            [{"input_ids": [1, 0], "attention_mask": [1, 0]}],
            "column 'attention_mask': expected documents without padding, got a 0 in row 0",
        ),
        (
            [{"input_ids": [1, 2], "completion_mask": [0, 1]}],
            "column 'completion_mask': expected labels that are -100 where the mask is 0, but row 0 has no labels",
        ),
        (
            [
                {"input_ids": [3, 4], "labels": [-100, 4]},
                {"input_ids": [1, 2], "labels": [1, 2], "assistant_masks": [1, 0]},
            ],
            "column 'assistant_masks': expected labels that are -100 where the mask is 0, but token 1 of row 1 has",
        ),
        (
            [{"input_ids": [1, 2], "labels": [1, 2], "assistant_masks": [1]}],
            "column 'assistant_masks': expected 2 values in row 0, one for each token, got 1",
        ),
        ({"input_ids": [1]}, "rows: expected a list of mappings with input_ids, got dict"),
        ([[1, 2]], "rows: expected a list of mappings with input_ids, got list"),
    ],
)
def test_bad_rows(rows, message):
    with pytest.raises(hfp.PackingError, match=message):
        hfp.PackingCollator()(rows)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_a_loss_mask_that_labels_agree_with(make):
    row = {
        "input_ids": [1, 2, 3],
        "labels": [-100, -100, 3],
        "completion_mask": [0, 1, 1],
        "assistant_masks": [0, 0, 1],
    }
    batch = hfp.PackingCollator()([{name: make(values) for name, values in row.items()}])
    assert batch["labels"].tolist() == [[-100, -100, 3]]
    assert "completion_mask" not in batch
