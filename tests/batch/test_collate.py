"""PackingCollator beside a literal loop, transformers' own collator, rows of trees token by token; and in workers."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info
from transformers import DataCollatorWithFlattening
from tree_rows import documents_of, labeled_documents, runs_of, tree_row

import hf_packing as hfp
from hf_packing.batch.collate import WorkerBatch
from hf_packing.planning.lengths import indices_in_ranges
from hf_packing.trees.segments import TreeSegments

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


@given(documents_lists, st.sampled_from([list, np.array, torch.tensor]))
def test_agrees_with_transformers_and_reads_what_it_has_flattened(documents, kind):
    rows = [{"input_ids": document, "labels": [-100, *document[1:]]} for document in documents]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)([dict(row) for row in rows])
    ours = hfp.PackingCollator()([{"input_ids": kind(document)} for document in documents])
    assert list(ours) == KEYS
    assert {ours[name].dtype for name in KEYS[:3]} == {torch.int64}
    assert {ours[name].dtype for name in ("cu_seq_lens_q", "seq_idx")} == {torch.int32}
    for name in KEYS:
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name])), name
    row = {name: value[0] if getattr(value, "ndim", 0) == 2 else value for name, value in theirs.items()}
    for left_out in ((), ("position_ids",), ("seq_idx",), ("position_ids", "seq_idx")):
        batch = hfp.PackingCollator()([{name: value for name, value in row.items() if name not in left_out}])
        assert plain(batch) == plain(ours)


def test_rows_without_tokens_have_no_segment():
    batch = hfp.PackingCollator()([{"input_ids": []}, {"input_ids": [1, 2]}, {"input_ids": [], "seq_lengths": []}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2]
    empty = {name: [] for name in ROW}
    batch, alone = hfp.PackingCollator()([empty, ROW, empty]), hfp.PackingCollator()([ROW])
    assert all(torch.equal(batch[name], alone[name]) for name in TREE_KEYS)
    assert "ends" not in hfp.PackingCollator()([{"input_ids": [1, 2], "ends": [3], "trained": "yes"}])


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


TREE_KEYS = ["input_ids", "position_ids", "segment_lengths", "parents", "ends", "trained", "tree_labels"]

DOCUMENTS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [7, 8], [1, 2, 3, 4]]
ROW, ORDER = tree_row(DOCUMENTS, [[-100, -100, 3, 4], [-100, 2, -100, 5, 6], [-100, -100], [7, 8], [-100, 2, 3, -100]])


def test_rows_and_batches_token_by_token():
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
    batch = hfp.PackingCollator()([ROW, tree_row([[9, 9], [9, 8]])[0]])
    assert list(batch) == TREE_KEYS
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
    whole = {name: batch[name].flatten().tolist() for name in TREE_KEYS[2:]}
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


ROWS = [
    {"input_ids": np.arange(300, dtype=np.int32), "seq_lengths": [299, 1], "token_type_ids": [0] * 299 + [1]},
    {"input_ids": [128_000, 5], "labels": [-100, 5], "token_type_ids": [0, 1]},
]

LIMITS = [sign * 2**bits + offset for sign in (1, -1) for bits in (7, 8, 15, 16, 31, 32) for offset in (-1, 0, 1)]
"""About these, a dtype that is too small would wrap around."""


class Edited:
    """A user's collator that changes the batch of PackingCollator."""

    def __call__(self, rows):
        batch = hfp.PackingCollator()(rows)
        batch["position_ids"] += 7
        batch["labels"].numpy()[0, 1] = -5
        batch["worker"] = None if (info := get_worker_info()) is None else info.id
        return batch


def received(batch):
    return pickle.loads(pickle.dumps(batch))


def assert_equal(batch, expected):
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (batch[name].dtype, batch[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(batch[name], value), name
        else:
            assert batch[name] == value, name


@given(st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_any_integers(data, dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    near = st.sampled_from([limit for limit in LIMITS if least <= limit <= most])
    tensor = torch.tensor([data.draw(st.lists(st.integers(least, most) | near, max_size=6))], dtype=dtype)
    assert_equal(received(WorkerBatch(a=tensor, b=tensor[0])), {"a": tensor, "b": tensor[0]})


def test_all_tensors_are_sent_as_they_are():
    sent = WorkerBatch(a=torch.tensor([1, 2]))
    batch = received(sent)
    assert type(batch) is type(hfp.PackingCollator()([{"input_ids": [1]}])) is dict
    batch["a"] += 1
    assert (batch["a"].tolist(), sent["a"].tolist()) == ([2, 3], [1, 2])
    batch = {
        "weights": torch.tensor([0.5]),
        "mask": torch.tensor([[True, False]]),
        "bytes": torch.tensor([3], dtype=torch.uint8),
        "name": "a",
        "count": 3,
        "none": None,
    }
    assert_equal(received(WorkerBatch(batch)), batch)
    empty = received(WorkerBatch(empty=torch.zeros(1, 0, dtype=torch.int64), steps=torch.arange(6)[::2]))
    assert_equal(empty, {"empty": torch.zeros(1, 0, dtype=torch.int64), "steps": torch.tensor([0, 2, 4])})


def test_workers_send_the_same_batches_not_in_shared_memory():
    rows = [{**row, "labels": row.get("labels", row["input_ids"])} for row in ROWS] * 3
    collator = hfp.PackingCollator()
    alone, sent = (list(DataLoader(rows, batch_size=2, collate_fn=collator, num_workers=workers)) for workers in (0, 2))
    assert len(sent) == len(alone) == 3
    for batch, expected in zip(sent, alone, strict=True):
        assert_equal(batch, expected)
        assert not any(value.is_shared() for value in batch.values() if isinstance(value, torch.Tensor))
    rows = [{"input_ids": [5, 6, 7]}]
    (expected,) = DataLoader(rows, collate_fn=Edited())
    (batch,) = DataLoader(rows, collate_fn=Edited(), num_workers=1)
    assert batch["position_ids"].tolist() == [[7, 8, 9]]
    assert_equal(batch, expected | {"worker": 0})
    # A plain dict is sent through shared memory.
    (batch,) = DataLoader([{"a": torch.tensor([1])}], collate_fn=dict_of_first, num_workers=1)
    assert batch["a"].is_shared()


def dict_of_first(rows):
    return dict(rows[0])
