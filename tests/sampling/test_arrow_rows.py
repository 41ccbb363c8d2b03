"""Rows read from the Arrow table: as the dataset gives them, for every way in which a dataset stores lists."""

import pickle

import datasets
import numpy as np
import pyarrow as pa
import pytest

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.rows.token_columns import columns_of
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of


def test_rows_share_memory_with_the_table_and_are_read_only():
    dataset = datasets.Dataset.from_dict({"a": [[1, 2, 3], [4]]})
    values, _ = columns_of(dataset, ["a"])["a"].read(np.array([-2, 1]))
    assert values.tolist() == [1, 2, 3]
    assert np.shares_memory(values, dataset.data.table.column("a").chunk(0).values.to_numpy())
    assert not values.flags.writeable


def sampled(dataset, **options):
    return SampledRows(dataset, RankBatchSampler(hfp.TokenBudget(9), sizes_of(dataset)), **options)


def test_a_pickled_copy_reads_the_same_rows_and_has_no_copy_of_their_tokens(tmp_path):
    datasets.Dataset.from_dict({"input_ids": [[1] * 9] * 9999 + [[3]]}).save_to_disk(tmp_path / "rows")
    stored = sampled(datasets.load_from_disk(tmp_path / "rows"))._stored
    pickled = pickle.dumps(stored)
    assert len(pickled) < 9999
    assert pickle.loads(pickled).read([9999])[0]["input_ids"].tolist() == [3]


@pytest.mark.parametrize("column", [[["a"], ["b"]], [[[[1]]], [[[2]]]], [1, 2]], ids=str)
def test_columns_without_lists_of_numbers_are_left_to_the_dataset(column):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "b": column})
    assert sampled(dataset)._stored is not None
    assert sampled(dataset, more=["b"])._stored is None


@pytest.mark.parametrize("kind", [pa.list_(pa.list_(pa.int64())), pa.list_(pa.list_(pa.int32(), 2))], ids=str)
def test_lists_of_pairs(kind):
    pairs = [[[1, 2], [3, 4], [5, 6]], [], [[7, 8]]]
    dataset = datasets.Dataset(pa.table({"offsets": pa.array(pairs, kind)}))
    for rows_of in (dataset, dataset.select([2, 0, 1]), dataset.select(range(1, 3))):
        found = columns_of(rows_of, ["offsets"])["offsets"].read(np.arange(len(rows_of)))
        assert [values.tolist() for values in found] == rows_of["offsets"][:]
        assert {values.shape[1] for values in found} == {2}


@pytest.mark.parametrize("other", [[[1, 2, 3], [4]], [[1, 2], None], [[1, None]]], ids=str)
def test_lists_of_other_lists_than_pairs(other):
    with pytest.raises(PackingError, match="column 'offsets': expected pairs of integers"):
        columns_of(datasets.Dataset.from_dict({"offsets": [[[1, 2]], other]}), ["offsets"])


def test_weights_are_read_as_they_are():
    weights = [[0.5, 1.0], [], [0.25]]
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        halves = [np.array(row, kind.to_pandas_dtype()) for row in weights]
        dataset = datasets.Dataset(pa.table({"weights": pa.array(halves, pa.list_(kind))}))
        rows = columns_of(dataset.select([2, 0, 1]), ["weights"])["weights"].read(np.arange(3))
        assert [row.tolist() for row in rows] == [weights[2], weights[0], weights[1]]
        assert {row.dtype for row in rows} == {np.dtype(kind.to_pandas_dtype())}
