"""Which columns are packed or refused, and slices of their lists: chunks, slices of arrays, 64-bit offsets, nulls."""

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
import hf_packing.rows.token_columns
from hf_packing.planning.lengths import Pieces
from hf_packing.rows.token_columns import TokenColumn

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
    read = TokenColumn("input_ids", column, None if row_numbers is None else np.array(row_numbers))
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
    tokens, segments = ("tree_input_ids", "ends") if share_prefixes else ("input_ids", "seq_lengths")
    assert isinstance(packed.features[tokens], datasets.LargeList) == (ids == "large_list")
    assert isinstance(packed.features[segments], datasets.List)
    assert hfp.unpack(packed)[:] == columns
