"""Sizes of rows, without reading their tokens where that is possible."""

import datasets
import pytest
import torch
from plain_dataset import Plain

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.sizes import sizes_of


def test_sizes_of_documents(documents):
    sizes = sizes_of(documents)
    assert sizes.tokens.tolist() == [3, 1, 0, 5]
    assert sizes.squared_lengths.tolist() == [9, 1, 0, 25]
    assert sizes.segments.tolist() == [1, 1, 0, 1]
    assert not sizes.packed


@pytest.mark.parametrize("change", [lambda d: d, lambda d: d.select([1, 0]), lambda d: d.shuffle(seed=1)])
@pytest.mark.parametrize("strategy", [hfp.BestFit(4, seed=None), hfp.Bucket((4, 8), seed=1)])
def test_sizes_of_packed_rows(documents, strategy, change):
    with pytest.warns(UserWarning, match="skips 1 document without a token"):
        packed = change(hfp.pack(documents.remove_columns("name"), strategy))
    sizes = sizes_of(packed)
    rows = packed.with_format(None)["seq_lengths"][:]
    assert sizes.tokens.tolist() == [sum(row) for row in rows]
    assert sizes.squared_lengths.tolist() == [sum(length**2 for length in row) for row in rows]
    assert sizes.segments.tolist() == [len(row) for row in rows]
    assert sizes.packed
    assert (sizes.bucket is None) == (strategy == hfp.BestFit(4, seed=None))
    if sizes.bucket is not None:
        assert sizes.bucket.tolist() == packed["bucket"][:]


def test_other_map_style_datasets_are_read_once(documents):
    plain = Plain([{"input_ids": row} for row in documents["input_ids"]])
    assert sizes_of(plain).tokens.tolist() == sizes_of(documents).tokens.tolist()
    transformed = documents.with_transform(lambda rows: {"input_ids": [row * 2 for row in rows["input_ids"]]})
    assert sizes_of(transformed).tokens.tolist() == [6, 2, 0, 10]
    packed = Plain([{"input_ids": [1, 2, 3], "seq_lengths": [2, 1], "bucket": 4}])
    assert sizes_of(packed).squared_lengths.tolist() == [5]
    assert sizes_of(packed).bucket.tolist() == [4]


TABLES = [
    ({"text": ["a"]}, "column 'input_ids'"),
    ({"seq_lengths": [[3]]}, "column 'input_ids'"),
    ({"input_ids": [[1]], "position_ids": [[0]]}, "column 'seq_lengths', since rows with a column 'position_ids'"),
    ({"input_ids": [[1]], "seq_idx": [[0]]}, "column 'seq_lengths', since rows with a column 'seq_idx'"),
    ({"input_ids": [[1]], "cu_seq_lens_q": [[0, 1]]}, "column 'seq_lengths', since rows with a column 'cu_seq_lens_q'"),
    ({"input_ids": ["text"]}, "column 'input_ids': expected lists of integers, got string"),
    ({"input_ids": [[1]], "seq_lengths": [3]}, "column 'seq_lengths'"),
    ({"input_ids": [[1]], "seq_lengths": [[1.5]]}, "column 'seq_lengths'"),
    ({"input_ids": [[1] * 3] * 2, "seq_lengths": [[3], [-2]]}, "column 'seq_lengths': .* of row 1, got \\[-2"),
    ({"input_ids": [[1] * 3] * 2, "seq_lengths": [[3], [2, 2]]}, "column 'seq_lengths': .* of row 1, got \\[2, 2"),
    ({"input_ids": [[1]], "seq_lengths": [[1]], "bucket": [4.0]}, "column 'bucket'"),
    ({"input_ids": [[1]] * 2, "seq_lengths": [[1]] * 2, "bucket": [4, None]}, "column 'bucket'"),
]

READ = [
    ([[1, 2]], "dataset: expected rows that are mappings, but row 0"),
    ([{"seq_lengths": [1]}], "column 'input_ids'"),
    ([{"input_ids": None}], "column 'input_ids', row 0"),
    ([{"input_ids": torch.ones(1, 3)}], "column 'input_ids', row 0"),
    ([{"input_ids": [[1, 2, 3]]}], "column 'input_ids', row 0"),
    ([{"input_ids": "text"}], "column 'input_ids', row 0"),
    ([{"input_ids": [1], "seq_lengths": [1]}, {"input_ids": [1]}], "column 'seq_lengths'.* row 1"),
    ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "column 'labels'.* row 1"),
    ([{"input_ids": [1], "completion_mask": [0]}, {"input_ids": [1]}], "column 'completion_mask'.* row 1"),
    ([{"input_ids": [1]}, {"input_ids": [1], "assistant_masks": [0]}], "column 'assistant_masks'.* row 1"),
    ([{"input_ids": [1, 2, 3], "seq_lengths": 3}], "column 'seq_lengths', row 0"),
    ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}], "column 'seq_lengths': .* of row 0, got \\[2, 2"),
    ([{"input_ids": [1, 2, 3], "seq_lengths": [1.5, 1.5]}], "column 'seq_lengths', row 0"),
    ([{"input_ids": [1], "seq_lengths": [1], "bucket": None}], "column 'bucket', row 0"),
]


@pytest.mark.parametrize(
    ("dataset", "named"),
    [(datasets.Dataset.from_dict(columns), named) for columns, named in TABLES]
    + [(Plain(rows), named) for rows, named in READ],
)
def test_refusals(dataset, named):
    with pytest.raises(PackingError, match=named):
        sizes_of(dataset)


def test_documents_may_have_a_bucket_that_is_none_of_ours():
    rows = [{"input_ids": [1, 2], "bucket": "news"}, {"input_ids": [3]}]
    assert sizes_of(rows).tokens.tolist() == [2, 1]
    assert sizes_of(rows).bucket is None


def test_rows_that_are_made_as_they_are_read_may_differ_in_their_tokens():
    rows = [{"input_ids": [1, 2, 3]}]
    before = sizes_of(Plain(rows)).fingerprint
    assert sizes_of(Plain([{"input_ids": [1, 9, 3]}])).fingerprint == before


def test_an_iterable_dataset(documents):
    with pytest.raises(PackingError, match="map-style dataset, with a length and numbered rows, got IterableDataset"):
        sizes_of(documents.to_iterable_dataset())


def test_an_iterable_dataset_with_a_length():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

        def __len__(self):
            return 3

    with pytest.raises(PackingError, match="expected a map-style dataset, with a length and numbered rows, got Stream"):
        sizes_of(Stream())


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, list])
def test_datasets_are_told_apart_by_their_labels(make):
    prints = {
        sizes_of(make([{"input_ids": [1, 2], "labels": [first, 2]}] * 1000)).fingerprint for first in (1, -100, -100)
    }
    assert len(prints) == 2


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, list])
@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
@pytest.mark.parametrize("values", [(1, 0), (True, False)])
def test_datasets_are_told_apart_by_their_loss_masks(make, name, values):
    prints = {sizes_of(make([{"input_ids": [1, 2], name: [value, value]}])).fingerprint for value in values}
    assert len(prints) == 2


def test_datasets_are_told_apart_by_their_tokens():
    one, other = ({"input_ids": [[first, 2, 3], [4, 5, 6]]} for first in (1, 9))
    prints = [sizes_of(datasets.Dataset.from_dict(rows)).fingerprint for rows in (one, other, one)]
    assert prints[0] == prints[2] != prints[1]
    packed = [hfp.pack(datasets.Dataset.from_dict(rows), hfp.BestFit(6)) for rows in (one, other)]
    assert sizes_of(packed[0]).fingerprint != sizes_of(packed[1]).fingerprint
