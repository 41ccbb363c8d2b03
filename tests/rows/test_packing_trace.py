"""The trace of packing in the description of a dataset."""

import datasets
import pytest
from torch.utils.data import ConcatDataset, Subset

import hf_packing as hfp
from hf_packing.rows.packing_trace import has_packs, is_packed, stored_datasets

DOCUMENTS = [[1, 2, 3], [4, 5], [6], [7, 8]]


def packed(**changes):
    return hfp.pack(datasets.Dataset.from_dict({"input_ids": DOCUMENTS}), hfp.BestFit(4, seed=None), **changes)


def test_a_dataset_says_that_it_is_packed_beside_its_own_description():
    info = datasets.DatasetInfo(description="Mine")
    documents = datasets.Dataset.from_dict({"input_ids": DOCUMENTS}, info=info)
    for rows in (hfp.pack(documents, hfp.BestFit(4)), hfp.pack(documents, hfp.BestFit(4))):  # the second from the cache
        assert rows.info.description == "Mine\n\nPacked by hf_packing: 8 tokens in 4 segments."
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


def test_rows_packed_again():
    rows, names = packed(), ["input_ids", "seq_lengths"]
    assert has_packs(rows, names)
    assert has_packs(rows.shuffle().select([0]), names)
    assert not has_packs(datasets.Dataset.from_dict({"input_ids": DOCUMENTS}), names)
    again = rows.remove_columns("seq_lengths").add_column("seq_lengths", [[sum(each)] for each in rows["seq_lengths"]])
    with pytest.raises(hfp.PackingError, match="expected the 4 segments in which pack\\(\\) packed 8 tokens, got 2"):
        has_packs(again, names)
