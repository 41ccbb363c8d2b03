"""Reading slices of list columns: chunks, slices of arrays, 64-bit offsets, nulls."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.arrow import token_column
from hf_packing.arrow.token_column import TokenColumn, blocks_of_packs, list_array

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
    gathered = read.gather(*(np.array(values, dtype=np.int64) for values in (wanted, starts, lengths)))
    assert gathered.tolist() == expected
    assert gathered.dtype == column.type.value_type.to_pandas_dtype()


def test_fixed_size_lists_and_booleans():
    column = TokenColumn(
        "mask", pa.chunked_array([pa.array([[True, False], [True, True]], type=pa.list_(pa.bool_(), 2))])
    )
    assert column.gather(np.array([1, 0]), np.array([0, 1]), np.array([2, 1])).tolist() == [True, True, False]


def test_a_null_row():
    with pytest.raises(hfp.PackingError, match="column 'labels': expected a list in every row, row 2 has none"):
        TokenColumn("labels", pa.chunked_array([pa.array([[1]]), pa.array([[1], None])]))


def test_a_null_token():
    column = pa.chunked_array([pa.array([[1]]), pa.array([[1, 2], [3, None]])])
    with pytest.raises(hfp.PackingError, match="column 'labels': expected a number for every token, row 2 has a null"):
        TokenColumn("labels", column)
    assert TokenColumn("labels", pa.chunked_array([column.chunk(1).slice(0, 1)])).length.tolist() == [2]


def test_large_list_where_32_bit_offsets_end(monkeypatch):
    values, lengths = np.arange(10, dtype=np.int32), np.array([4, 6])
    assert list_array(values, lengths).type == pa.list_(pa.int32())
    assert list_array(values, lengths, large=True).type == pa.large_list(pa.int32())
    monkeypatch.setattr(token_column, "MAX_LIST_VALUES", 9)
    assert list_array(values, lengths).type == pa.large_list(pa.int32())
    assert list_array(values, lengths).to_pylist() == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_blocks_cover_all_packs_within_their_budget(pack_tokens, tokens):
    blocks = list(blocks_of_packs(np.array(pack_tokens, dtype=np.int64), tokens))
    assert [pack for first, end in blocks for pack in range(first, end)] == list(range(len(pack_tokens)))
    assert all(end - first == 1 or sum(pack_tokens[first:end]) <= tokens for first, end in blocks)
