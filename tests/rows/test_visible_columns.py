"""Columns that a format hides are not there, and datasets keep the trace of packing in their description."""

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from torch.utils.data import ConcatDataset, Subset

import hf_packing as hfp
from hf_packing.rows.packing_trace import is_packed, stored_datasets
from hf_packing.sampling.sizes import sizes_of

IDS, LABELS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[-100, -100, 3], [-100, 5], [-100, -100, -100, 9]]
HIDING = [{"columns": ["input_ids"]}, {"type": "numpy", "columns": ["input_ids", "attention_mask"]}]
SHOWING = [{}, {"type": "torch", "columns": ["labels", "input_ids"]}]
SHOWING += [{"type": "numpy", "columns": ["input_ids"], "output_all_columns": True}]


@pytest.fixture
def documents():
    mask = [[1] * len(row) for row in IDS]
    return Dataset.from_dict({"input_ids": IDS, "labels": LABELS, "attention_mask": mask, "text": list("abc")})


def packed_labels(documents, how):
    strategy = hfp.BestFit(8, seed=None)
    if how == "pack":
        packed = hfp.pack(documents.remove_columns("text"), strategy)
    elif how == "pack a DatasetDict":
        packed = hfp.pack(DatasetDict(train=documents.remove_columns("text")), strategy)["train"]
    elif how == "map":
        packed = documents.map(strategy, batched=True, remove_columns=documents.column_names)
    else:
        packed = hfp.prepare_dataloader(Accelerator(cpu=True), documents, hfp.TokenBudget(16))
        return sorted(np.concatenate([batch["labels"][0].numpy() for batch in packed]).tolist())
    rows = torch.utils.data.DataLoader(packed, collate_fn=hfp.PackingCollator())
    return sorted(np.concatenate([batch["labels"][0].numpy() for batch in rows]).tolist())


FUNCTIONS = ["pack", "pack a DatasetDict", "prepare_dataloader"]


@pytest.mark.parametrize(
    ("how", "form"),
    [*((how, form) for how in FUNCTIONS for form in HIDING + SHOWING), *(("map", form) for form in SHOWING)],
    ids=str,
)
def test_labels_are_those_of_a_stock_loader(documents, how, form):
    formatted = documents.with_format(**form)
    stock = torch.utils.data.DataLoader(formatted, collate_fn=hfp.PackingCollator())
    expected = sorted(label for batch in stock for label in batch["labels"][0].tolist())
    assert (expected.count(-100) == 3) == (form in HIDING)
    assert packed_labels(formatted, how) == expected


def test_hidden_loss_masks_are_not_there_and_the_cache_knows(documents):
    masked = documents.remove_columns("labels").add_column("completion_mask", [[0] * len(row) for row in IDS])
    hidden = masked.with_format(columns=["input_ids"])
    packed = hfp.pack(hidden, hfp.BestFit(8, seed=None))
    assert packed.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
    assert sum(row.count(-100) for row in packed["labels"]) == 3
    (batch,) = hfp.prepare_dataloader(Accelerator(cpu=True), hidden, hfp.TokenBudget(16))
    assert int((batch["labels"] == -100).sum()) == 3
    source = documents.remove_columns("text")
    all_columns, hidden = (hfp.pack(each, hfp.BestFit(8)) for each in (source, source.with_format(**HIDING[0])))
    assert all_columns.cache_files != hidden.cache_files
    again = hfp.pack(source.with_format(**HIDING[0]), hfp.BestFit(8))
    assert again.cache_files == hidden.cache_files
    changed_in_place = source.with_format(None)
    changed_in_place._format_columns = ["input_ids"]  # as datasets itself sets it after map, without a new fingerprint
    assert changed_in_place._fingerprint == source.with_format(None)._fingerprint
    assert "-100, -100" not in str(hfp.pack(changed_in_place, hfp.BestFit(8))["labels"][:])


@pytest.mark.parametrize(
    ("columns", "shown", "message"),
    [
        ({"input_ids": IDS, "labels": LABELS}, "labels", "'input_ids'"),
        ({"input_ids": [[1, 2, 0]], "attention_mask": [[1, 1, 0]]}, "input_ids", "without padding, got a 0 in row 0"),
    ],
)
def test_hidden_input_ids_are_missing_and_padding_is_found_under_a_hidden_mask(columns, shown, message):
    hidden = Dataset.from_dict(columns).with_format(columns=[shown])
    for call in (
        lambda: hfp.pack(hidden, hfp.BestFit(8)),
        lambda: list(hfp.prepare_dataloader(Accelerator(cpu=True), hidden, hfp.TokenBudget(8))),
    ):
        with pytest.raises(hfp.PackingError, match=message):
            call()


def test_hidden_borders_of_packed_rows(documents):
    packed = hfp.pack(documents.remove_columns("text"), hfp.BestFit(8))
    assert sizes_of(packed.with_format(columns=["input_ids", "seq_lengths"])).packed
    with pytest.raises(hfp.PackingError, match="'seq_lengths', since rows with a column 'position_ids' count"):
        sizes_of(packed.with_format(columns=["input_ids", "position_ids"]))
    bare = packed.with_format(columns=["input_ids", "labels"])
    for hidden in (bare, bare.remove_columns("seq_lengths"), bare.remove_columns("position_ids")):
        for call in (
            lambda: sizes_of(hidden),  # noqa: B023
            lambda: hfp.pack(hidden, hfp.BestFit(8)),  # noqa: B023
        ):
            with pytest.raises(hfp.PackingError, match="dataset: expected the column seq_lengths or position_ids"):
                call()


@pytest.mark.filterwarnings("ignore:(pack|packing) applies completion_mask:UserWarning")
def test_loss_masks_where_labels_are_hidden_or_shown(documents):
    masked = documents.add_column("completion_mask", [[0] * len(row) for row in IDS]).remove_columns("text")
    hidden = masked.with_format("torch", columns=["input_ids", "completion_mask"])
    shown = masked.with_format("torch", columns=["input_ids", "completion_mask"], output_all_columns=True)
    removed = hidden.remove_columns("labels")
    strategy = hfp.BestFit(8)
    mapped = [each.map(strategy, batched=True, remove_columns=each.column_names) for each in (shown, removed)]
    for packed in (hfp.pack(hidden, strategy), *mapped):
        labels = np.concatenate([np.asarray(row["labels"]) for row in packed])
        assert len(labels) == 9
        assert (labels == -100).all()


DOCUMENTS = [[1, 2, 3], [4, 5], [6], [7, 8]]


def packed(**changes):
    return hfp.pack(datasets.Dataset.from_dict({"input_ids": DOCUMENTS}), hfp.BestFit(4, seed=None), **changes)


def test_a_dataset_says_that_it_is_packed_and_packed_again():
    info = datasets.DatasetInfo(description="Mine")
    documents = datasets.Dataset.from_dict({"input_ids": DOCUMENTS}, info=info)
    for rows in (hfp.pack(documents, hfp.BestFit(4)), hfp.pack(documents, hfp.BestFit(4))):  # the second from the cache
        assert rows.info.description == "Mine\n\nPacked by hf_packing: several documents in a row."
        assert hfp.unpack(rows)["input_ids"][:] == DOCUMENTS
    assert documents.info.description == "Mine"
    alone = hfp.pack(documents, hfp.BestFit(3, seed=None)).select([0])
    assert is_packed(alone)
    assert not is_packed(hfp.pack(documents.select([0]), hfp.BestFit(4)))  # no row has several documents
    assert not is_packed(hfp.pack(documents, hfp.BestFit(4), share_prefixes=True))  # has other columns, which say it
    assert is_packed(hfp.pack(documents.to_iterable_dataset(), hfp.BestFit(4)))


def test_datasets_and_wrappers_keep_the_trace(tmp_path):
    rows = packed()
    rows.save_to_disk(tmp_path)
    kept = [
        rows.select_columns("input_ids"),
        rows.remove_columns(["position_ids", "seq_lengths"]),
        rows.with_format("torch", columns=["input_ids"]),
        rows.map(lambda _: {"more": 1}).shuffle().flatten_indices().filter(lambda _: True),
        rows.train_test_split(0.5)["test"],
        datasets.concatenate_datasets([datasets.Dataset.from_dict({"input_ids": DOCUMENTS}), rows]),
        datasets.interleave_datasets([rows, rows]),
        datasets.load_from_disk(tmp_path),
        hfp.pack(datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).to_iterable_dataset(), hfp.BestFit(4))
        .map(lambda row: row)
        .shuffle()
        .select_columns("input_ids"),
    ]
    assert all(map(is_packed, kept))
    rows = packed()
    assert stored_datasets(ConcatDataset([Subset(rows, [0]), DOCUMENTS])) == [rows, DOCUMENTS]
