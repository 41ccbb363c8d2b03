"""pack and unpack over whole datasets, and which columns are packed, whatever the types of their lists."""

from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, load_from_disk
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
import hf_packing.rows.pack as pack_module
import hf_packing.rows.token_columns
from hf_packing.planning.lengths import Pieces
from hf_packing.rows.token_columns import ALL_ROWS, TokenColumn

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops):UserWarning")

ROWS = [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10, 11]]
LABELS = [[-100, 2, 3], [], [4, 5], [6], [7, -100, 9, 10, 11]]


def documents(**more):
    return Dataset.from_dict({"input_ids": ROWS, "labels": LABELS, **more})


def test_columns_types_values_and_format_and_what_is_left_of_documents():
    packed = hfp.pack(documents(), hfp.BestFit(4, seed=None))
    assert packed.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
    assert {str(feature.feature.dtype) for feature in packed.features.values()} == {"int32"}
    assert packed[:] == hfp.BestFit(4, seed=None)({"input_ids": ROWS, "labels": LABELS})
    packed = hfp.pack(documents().with_format("numpy"), hfp.BestFit(4))
    assert isinstance(packed[0]["input_ids"], np.ndarray)
    truncated = hfp.pack(documents(), hfp.BestFit(4, overflow="truncate"))
    assert hfp.unpack(truncated)["input_ids"][:] == [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10]]
    dropped = hfp.pack(documents(), hfp.BestFit(4, overflow="drop"))
    assert hfp.unpack(dropped)["labels"][:] == [[-100, 2, 3], [], [4, 5], [6], []]
    with pytest.raises(hfp.PackingError, match="0 of 5 labels are left, so there would be nothing to train on"):
        hfp.pack(documents().select([0, 4]), hfp.BestFit(2, overflow="drop"))


def test_progress_says_how_many_documents_are_cut(capfd):
    datasets.enable_progress_bars()  # another test may have disabled them
    for longest, said in ((4, "Packing 5 documents, 1 of them cut"), (8, "Packing 5 documents:")):
        hfp.pack(documents(), hfp.BestFit(longest), load_from_cache_file=False)
        assert said in capfd.readouterr().err


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


def test_blocks_and_large_lists_have_the_same_rows(monkeypatch, rng):
    rows = [list(range(n)) for n in rng.integers(0, 60, 300)]
    whole = hfp.pack(Dataset.from_dict({"input_ids": rows}), hfp.BestFit(64))
    monkeypatch.setattr(pack_module, "TOKENS_AT_ONCE", 500)
    blocks = hfp.pack(Dataset.from_dict({"input_ids": rows}), hfp.BestFit(64), load_from_cache_file=False)
    written = [len(chunk.flatten()) for chunk in blocks.data.column("input_ids").chunks]
    assert len(written) > 5
    assert max(written) <= 500
    assert whole[:] == blocks[:]
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


STRATEGY = hfp.BestFit(8)

rows_strategy = st.lists(st.lists(st.integers(-100, 100), max_size=6), min_size=1, max_size=20)
KINDS = [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.float32())]


@st.composite
def chunked(draw):
    """Rows, and a chunked column of them that may be a slice of a longer one."""
    rows, kind = draw(rows_strategy), draw(st.sampled_from(KINDS))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    array = pa.array([[7, 7]] * before + rows + [[8]] * after, type=kind).slice(before, len(rows))
    cut = draw(st.integers(0, len(rows)))
    return rows, pa.chunked_array([array.slice(0, cut), array.slice(cut)])


@given(chunked(), st.data())
def test_gather_is_slicing(case, data):
    rows, column = case
    row_numbers = data.draw(st.one_of(st.none(), st.permutations(range(len(rows)))))
    read = TokenColumn("input_ids", column, ALL_ROWS if row_numbers is None else np.array(row_numbers))
    rows = rows if row_numbers is None else [rows[i] for i in row_numbers]
    assert read.length.tolist() == [len(row) for row in rows]
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    starts = [data.draw(st.integers(0, len(rows[i]))) for i in wanted]
    lengths = [data.draw(st.integers(0, len(rows[i]) - start)) for i, start in zip(wanted, starts, strict=True)]
    expected = [value for i, a, n in zip(wanted, starts, lengths, strict=True) for value in rows[i][a : a + n]]
    gathered = read.gather(Pieces(*(np.array(values, dtype=np.int64) for values in (wanted, starts, lengths))))
    assert gathered.tolist() == expected
    assert gathered.dtype == column.type.value_type.to_pandas_dtype()


def test_empty_lists_and_hidden_columns_are_not_packed():
    with pytest.warns(UserWarning, match="leaves out columns without one number for each token: 'tools'"):
        packed = hfp.pack(Dataset.from_dict({"input_ids": [[5, 6], [7]], "tools": [[], []]}), STRATEGY)
    assert "tools" not in packed.column_names
    documents = Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [5] * 8], "bucket": [1, 2]})
    hidden = documents.with_format(columns=["input_ids"])
    assert sorted(hfp.pack(hidden, hfp.Bucket((4, 8)))["bucket"]) == [4, 8]


@pytest.mark.parametrize("padded", [0, 1, 3])
def test_padding_is_found_block_by_block(monkeypatch, padded):
    monkeypatch.setattr(hf_packing.rows.token_columns, "TOKENS_AT_ONCE", 3)
    masks = [[1, 1], [1], [], [1, 1, 1, 1]]
    masks[padded][-1] = 0
    documents = Dataset.from_dict({"input_ids": masks, "attention_mask": masks})
    with pytest.raises(hfp.PackingError, match=f"expected documents without padding, got a 0 in row {padded}"):
        hfp.pack(documents, STRATEGY)


LISTS = {
    "list": datasets.List(datasets.ClassLabel(names=["a", "b"])),
    "large_list": datasets.LargeList(datasets.ClassLabel(names=["a", "b"])),
    "fixed_size_list": datasets.List(datasets.ClassLabel(names=["a", "b"]), length=3),
}


@pytest.mark.parametrize("ids", LISTS)
@pytest.mark.parametrize("others", LISTS)
@pytest.mark.parametrize("share_prefixes", [False, 2])
def test_lists_of_several_kinds(ids, others, share_prefixes):
    tokens = datasets.Value("int64")
    input_ids = datasets.LargeList(tokens) if ids == "large_list" else datasets.List(tokens, LISTS[ids].length)
    features = datasets.Features({"input_ids": input_ids, "labels": LISTS[others], "tags": LISTS[others]})
    columns = {"input_ids": [[1, 2, 3], [1, 2, 6]], "labels": [[1, 0, 1]] * 2, "tags": [[0, 1, 1], [0, 1, 0]]}
    packed = hfp.pack(Dataset.from_dict(columns, features=features), hfp.BestFit(8), share_prefixes=share_prefixes)
    assert len(packed) == 1
    assert packed.features["tags"].feature == LISTS[others].feature
    assert all(isinstance(kind, datasets.List) for kind in packed.features.values())
    assert hfp.unpack(packed)[:] == columns
