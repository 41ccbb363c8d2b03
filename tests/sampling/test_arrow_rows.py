"""Rows read from the Arrow table: as the dataset gives them, for every way in which a dataset stores lists."""

import pickle

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_packing.sampling.rows import ArrowRows

TYPES = pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint8()), pa.list_(pa.int16(), 3)

changes = st.sampled_from(
    [
        lambda dataset: dataset,
        lambda dataset: dataset.shuffle(seed=1),
        lambda dataset: dataset.select(range(len(dataset) // 2, len(dataset))),
        lambda dataset: dataset.select(range(len(dataset) - 1, -1, -1)),
        lambda dataset: dataset.select([0, 0]).shuffle(seed=2),
        lambda dataset: datasets.concatenate_datasets([dataset, dataset.select(range(1))]),
    ]
)


def dataset_of(rows, kind, chunk):
    table = pa.table({"a": pa.array(rows, kind), "b": pa.array([row[::-1] for row in rows], kind)})
    chunks = [table.slice(begin, chunk) for begin in range(0, len(rows), chunk)]
    return datasets.Dataset(pa.concat_tables(chunks))


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    kind=st.sampled_from(TYPES),
    chunk=st.integers(1, 4),
    change=changes,
    data=st.data(),
)
def test_equal_to_the_rows_of_the_dataset(lengths, kind, chunk, change, data):
    fixed = pa.types.is_fixed_size_list(kind)
    values = iter(range(200))
    rows = [[next(values) for _ in range(3 if fixed else length)] for length in lengths]
    dataset = change(dataset_of(rows, kind, chunk))
    numbers = data.draw(st.lists(st.integers(-len(dataset), len(dataset) - 1), max_size=5))
    found = ArrowRows.open(dataset, ["b", "a"]).read(numbers)
    assert len(found) == len(numbers)
    for number, row in zip(numbers, found, strict=True):
        assert {name: values.tolist() for name, values in row.items()} == dataset[number]
        assert {values.dtype for values in row.values()} == {np.dtype(kind.value_type.to_pandas_dtype())}


def test_rows_share_memory_with_the_table_and_are_read_only():
    dataset = dataset_of([[1, 2, 3]], TYPES[0], 1)
    (row,) = ArrowRows.open(dataset, ["a"]).read([0])
    assert np.shares_memory(row["a"], dataset.data.table.column("a").chunk(0).values.to_numpy())
    assert not row["a"].flags.writeable


def test_a_pickled_copy_reads_the_same_rows(tmp_path):
    dataset_of([[1, 2], [3]], TYPES[0], 1).save_to_disk(tmp_path / "rows")
    rows = ArrowRows.open(datasets.load_from_disk(tmp_path / "rows"), ["a"])
    (row,) = pickle.loads(pickle.dumps(rows)).read([1])
    assert row["a"].tolist() == [3]


@pytest.mark.parametrize("number", [2, -3])
def test_rows_that_do_not_exist(number):
    rows = ArrowRows.open(dataset_of([[1, 2], [3]], TYPES[0], 1), ["a"])
    with pytest.raises(IndexError, match=f"row {number} of a dataset with 2 rows"):
        rows.read([0, number])


def test_a_subclass_may_change_its_rows():
    class Doubled(datasets.Dataset):
        def __getitems__(self, numbers):
            return [{"a": self.data.table["a"][number].as_py() * 2} for number in numbers]

    plain = dataset_of([[1, 2], [3]], TYPES[0], 1)
    assert ArrowRows.open(plain, ["a"]) is not None
    assert ArrowRows.open(Doubled(plain.data), ["a"]) is None


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[1], None]),
        pa.array([[1], [None]]),
        pa.array([[1.0], [None]]),
        pa.array([[True], [False]]),
        pa.array([["a"], ["b"]]),
        pa.array([[[1.0]], [[2.0]]]),
        pa.array([[[1], None], [[2]]]),
        pa.array([[[1, None]], [[2]]]),
        pa.array([1, 2]),
    ],
    ids=str,
)
def test_other_columns_are_left_to_the_dataset(column):
    dataset = datasets.Dataset(pa.table({"a": [[1], [2]], "b": column}))
    assert ArrowRows.open(dataset, ["a"]) is not None
    assert ArrowRows.open(dataset, ["a", "b"]) is None


def test_weights_are_read_as_they_are():
    weights = [[0.5, 1.0], [], [0.25]]
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        halves = [np.array(row, kind.to_pandas_dtype()) for row in weights]
        dataset = datasets.Dataset(pa.table({"weights": pa.array(halves, pa.list_(kind))}))
        rows = ArrowRows.open(dataset.select([2, 0, 1]), ["weights"]).read(range(3))
        assert [row["weights"].tolist() for row in rows] == [weights[2], weights[0], weights[1]]
        assert {row["weights"].dtype for row in rows} == {np.dtype(kind.to_pandas_dtype())}


@pytest.mark.parametrize("kind", [pa.list_(pa.list_(pa.int64())), pa.list_(pa.list_(pa.int32(), 2))], ids=str)
def test_lists_of_pairs(kind):
    pairs = [[[1, 2], [3, 4], [5, 6]], [], [[7, 8]]]
    dataset = datasets.Dataset(pa.table({"offsets": pa.array(pairs, kind)}))
    for rows_of in (dataset, dataset.select([2, 0, 1]), dataset.select(range(1, 3))):
        rows = ArrowRows.open(rows_of, ["offsets"]).read(range(len(rows_of)))
        assert [row["offsets"].tolist() for row in rows] == rows_of["offsets"][:]
        assert {row["offsets"].shape[1] for row in rows} == {2}
