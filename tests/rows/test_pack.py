"""pack and unpack over whole datasets."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, load_from_disk

import hf_packing as hfp
import hf_packing.rows.pack as pack_module

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops):UserWarning")

ROWS = [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10, 11]]
LABELS = [[-100, 2, 3], [], [4, 5], [6], [7, -100, 9, 10, 11]]


def documents(**more):
    return Dataset.from_dict({"input_ids": ROWS, "labels": LABELS, **more})


def test_columns_types_values_and_format():
    packed = hfp.pack(documents(), hfp.BestFit(4, seed=None))
    assert packed.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
    assert {str(feature.feature.dtype) for feature in packed.features.values()} == {"int32"}
    assert packed[:] == hfp.BestFit(4, seed=None)({"input_ids": ROWS, "labels": LABELS})
    packed = hfp.pack(documents().with_format("numpy"), hfp.BestFit(4))
    assert isinstance(packed[0]["input_ids"], np.ndarray)


def test_unpack_what_was_not_dropped():
    truncated = hfp.pack(documents(), hfp.BestFit(4, overflow="truncate"))
    assert hfp.unpack(truncated)["input_ids"][:] == [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10]]
    dropped = hfp.pack(documents(), hfp.BestFit(4, overflow="drop"))
    assert hfp.unpack(dropped)["labels"][:] == [[-100, 2, 3], [], [4, 5], [6], []]


def test_selected_and_joined_datasets_are_packed_as_they_stand():
    rows = [[1, 2], None, [3], [4, None]]
    source = Dataset.from_dict({"input_ids": rows})
    assert hfp.unpack(hfp.pack(source.select([2, 0]), hfp.BestFit(4)))["input_ids"][:] == [[3], [1, 2]]
    with pytest.raises(hfp.PackingError, match="row 1 is null or has a null"):
        hfp.pack(source.select([2, 1]), hfp.BestFit(4))
    with pytest.raises(hfp.PackingError, match="row 0 is null or has a null"):
        hfp.pack(source.select([3, 2]), hfp.BestFit(4))
    source = documents()
    joined = datasets.concatenate_datasets([source] * 3)
    assert joined.data.column("input_ids").num_chunks == 3
    filtered = source.filter(lambda row: len(row["input_ids"]) != 2)
    for view in (source.shuffle(seed=3), source.select([4, 0]), filtered, joined):
        assert hfp.unpack(hfp.pack(view, hfp.BestFit(4)))[:] == view[:]
    assert source.shuffle(seed=3)["input_ids"][:] != ROWS


def test_blocks_make_the_same_rows(monkeypatch, rng):
    rows = [list(range(n)) for n in rng.integers(0, 60, 300)]
    whole = hfp.pack(Dataset.from_dict({"input_ids": rows}), hfp.BestFit(64))
    monkeypatch.setattr(pack_module, "TOKENS_AT_ONCE", 500)
    blocks = hfp.pack(Dataset.from_dict({"input_ids": rows}), hfp.BestFit(64), load_from_cache_file=False)
    written = [len(chunk.flatten()) for chunk in blocks.data.column("input_ids").chunks]
    assert len(written) > 5
    assert max(written) <= 500
    assert whole[:] == blocks[:]


def test_lists_become_large_where_32_bit_offsets_end(monkeypatch):
    columns = {"input_ids": [[*range(9)], [9]], "labels": [[*range(9)], [9]]}
    packed = hfp.pack(Dataset.from_dict(columns), hfp.BestFit(16))
    assert isinstance(hfp.unpack(packed).features["input_ids"], datasets.List)
    monkeypatch.setattr("hf_packing.rows.packed_rows._MAX_LIST_VALUES", 9)
    unpacked, rows = hfp.unpack(packed), hfp.BestFit(16)(pa.table(columns))
    for table in (unpacked.data.table, rows):
        assert table.schema.field("input_ids").type == pa.large_list(pa.int32())
    assert unpacked[:] == columns
    assert rows.schema.field("seq_lengths").type == pa.list_(pa.int32())
    assert rows["input_ids"].to_pylist() == packed["input_ids"][:]


def test_what_is_masked_dropped_skipped_or_left_out_is_said_on_a_hit_too():
    with pytest.warns(UserWarning, match="packing applies assistant_masks to labels: tokens with a 0 are not"):
        assert hfp.BestFit(8)({"input_ids": [[5, 6]], "assistant_masks": [[0, 1]]})["labels"] == [[-100, 6]]
    columns = {"input_ids": [[5, 6, 7, 8], [9, 10]], "completion_mask": [[0, 0, 1, 1], [1, 1]]}
    for _ in range(2):
        with pytest.warns(UserWarning, match="pack applies completion_mask to labels: 3 of 6 tokens are trained on"):
            packed = hfp.pack(Dataset.from_dict(columns), hfp.BestFit(8))
    assert sorted(label for row in packed["labels"] for label in row) == [-100, -100, -100, 7, 8, 10]
    for _ in range(2):
        with pytest.warns(UserWarning, match="pack") as said:
            packed = hfp.pack(documents(text=list("abcde"), id=list(range(5))), hfp.BestFit(4, overflow="drop"))
        assert "text" not in packed.column_names
        words = [str(warning.message) for warning in said]
        dropped = "pack drops 5 of 11 tokens, as configured by BestFit(max_length=4, overflow='drop'"
        assert any(dropped in each for each in words)
        assert "pack skips 1 document without a token" in words
        assert any("without one number for each token: 'text' (string), 'id' (int64)" in each for each in words)


@pytest.mark.parametrize("share_prefixes", [False, 2])
def test_unpack_with_a_plan_after_saving_elsewhere(tmp_path, share_prefixes):
    packed = hfp.pack(documents(), hfp.BestFit(4), share_prefixes=share_prefixes)
    packed.save_to_disk(tmp_path / "packed")
    elsewhere = load_from_disk(tmp_path / "packed")
    plan = hfp.PackingPlan.load(Path(packed.cache_files[0]["filename"]).parent / "plan")
    assert hfp.unpack(packed, plan)[:] == documents()[:]
    assert hfp.unpack(elsewhere, plan)["input_ids"][:] == ROWS
    first_of_segments = [label[:1] for label in hfp.unpack(elsewhere, plan)["labels"]]
    assert first_of_segments == [[-100], [], [-100], [-100], [-100]]


OPTIONS = [{}, {"lazy": True}, {"share_prefixes": True}, {"lazy": True, "share_prefixes": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_splits_of_a_dict(options):
    packed = hfp.pack(DatasetDict(train=documents(), test=documents().select([0])), hfp.BestFit(4), **options)
    assert {name: len(split) for name, split in packed.items()} == {"train": 3, "test": 1}
    assert hfp.unpack(packed["test"])["input_ids"][:] == [[1, 2, 3]]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [[], [[], []]])
def test_documents_without_a_token(rows, options):
    names = hfp.pack(documents(), hfp.BestFit(4), **options).column_names
    for columns in ({"input_ids": rows}, {"input_ids": rows, "labels": rows}):
        features = datasets.Features(dict.fromkeys(columns, datasets.List(datasets.Value("int32"))))
        source = Dataset.from_dict(columns, features=features)
        for packed in (hfp.pack(source, hfp.BestFit(4), **options) for _ in range(2)):  # the second from the cache
            assert (len(packed), packed.column_names) == (0, names)
            assert hfp.unpack(packed)[:] == columns
    untyped = Dataset.from_dict({"input_ids": [], "labels": [], "attention_mask": []})
    assert hfp.pack(untyped, hfp.BestFit(4), **options).column_names == names
