"""Strategies under `map`, in every format: what it hands over, what it keeps, and what it was not asked for."""

import functools

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from tiers import fast_only

import hf_packing as hfp
from hf_packing.sampling.sizes import sizes_of

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # of datasets

STRATEGY = hfp.BestFit(4, seed=None)
DOCUMENTS = {"input_ids": [[1, 2, 3], [4, 5], [6]], "labels": [[-100, 2, 3], [4, -100], [6]]}
PACKED = {"input_ids": [[1, 2, 3, 6], [4, 5]], "labels": [[-100, 2, 3, -100], [-100, -100]]}
FORMATS = [None, "numpy", "torch", "arrow", "pandas"]


@pytest.fixture
def documents():
    return Dataset.from_dict({**DOCUMENTS, "attention_mask": [[1] * 3, [1] * 2, [1]], "text": list("abc")})


def rows_of(packed):
    rows = list(packed.with_format(None))
    return {name: [np.asarray(row[name]).tolist() for row in rows] for name in ("input_ids", "labels")}


class TestFormats:
    @pytest.mark.parametrize("form", [None, "numpy", "torch"])
    def test_a_map_that_is_not_batched(self, documents, form):
        source = documents.with_format(form)
        for mapped in (source, source.to_iterable_dataset().with_format(form), DatasetDict(train=source)):
            with pytest.raises(hfp.PackingError, match="expected several rows, got a single row; .*batched=True"):
                list(mapped.map(STRATEGY))
        with pytest.raises(hfp.PackingError, match="got a single row; .*batched=True"):
            source.map(functools.partial(STRATEGY), remove_columns=source.column_names)

    @pytest.mark.parametrize("form", FORMATS)
    def test_columns_that_are_not_packed_are_left_out(self, documents, form):
        source, stream = documents.with_format(form), documents.to_iterable_dataset().with_format(form)
        ways = [source.column_names] if form in ("numpy", "torch") else [None, source.column_names]
        for removed in ways:
            packed = source.map(STRATEGY, batched=True, remove_columns=removed)
            assert packed.column_names == ["input_ids", "labels", "position_ids", "seq_lengths"]
            if form not in ("numpy", "torch"):  # of which map gets columns of arrays, whose types it keeps
                assert {feature.feature.dtype for feature in packed.features.values()} == {"int32"}
            assert rows_of(packed) == PACKED
        removed = None if form in ("arrow", "pandas") else ["attention_mask", "text"]
        assert rows_of(stream.map(STRATEGY, batched=True, remove_columns=removed)) == PACKED
        for batch_size in (1, 2):
            packed = source.map(STRATEGY, batched=True, batch_size=batch_size, remove_columns=ways[0])
            assert rows_of(packed) == DOCUMENTS | {"labels": [[-100, 2, 3], [-100, -100], [-100]]}


def test_first_batches_without_tokens():
    # Its lists have no type; weights of the next batch are no integers.
    document = {"input_ids": [5, 6], "weights": [0.5, 1.0]}
    documents = Dataset.from_list([{name: [] for name in document}] * 2 + [document])
    for source in (documents, documents.to_iterable_dataset()):
        packed = source.map(STRATEGY, batched=True, batch_size=2, remove_columns=list(document))
        assert [row["weights"] for row in packed] == [[0.5, 1.0]]


@pytest.mark.parametrize("form", fast_only([None, "arrow"], None))
def test_processes(documents, form):
    joined = datasets.concatenate_datasets([documents] * 2).with_format(form)
    assert rows_of(joined.map(STRATEGY, batched=True, num_proc=2)) == {name: PACKED[name] * 2 for name in PACKED}
    with pytest.raises(hfp.PackingError, match="batched=True"):
        joined.with_format(None).map(STRATEGY, num_proc=2)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"with_indices": True}, "takes 2 positional arguments"),
        ({"input_columns": ["input_ids", "labels"]}, "takes 2 positional arguments"),
        ({"fn_kwargs": {"max_length": 8}}, "unexpected keyword argument 'max_length'"),
        ({"input_columns": "input_ids"}, "expected a mapping of .* without input_columns, got list"),
    ],
)
def test_arguments_of_map_that_a_strategy_does_not_take(documents, options, given):
    with pytest.raises((TypeError, hfp.PackingError), match=given):
        documents.map(STRATEGY, batched=True, **options)


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_single_rows_through_a_function_of_ones_own(documents, form):
    with pytest.raises(hfp.PackingError, match="got a single row"):
        documents.with_format(form).map(lambda row: STRATEGY(row))


def test_batches_by_hand_and_changed_ones(documents):
    def without_labels(batch):
        batch["labels"] = [[-100] * len(row) for row in batch["input_ids"]]
        return STRATEGY(batch)

    packed = documents.map(without_labels, batched=True, remove_columns=documents.column_names)
    assert packed["labels"][:] == [[-100] * 4, [-100] * 2]
    table = pa.table({"input_ids": [[1, 2, 3]]})
    assert STRATEGY(table).num_rows == 1
    assert STRATEGY(table.to_pandas()).to_pydict() == STRATEGY(table).to_pydict()


class TestTransforms:
    def test_a_strategy_as_the_transform(self, documents):
        transformed = documents.select_columns("input_ids").with_transform(STRATEGY)
        assert transformed[:]["input_ids"] == PACKED["input_ids"]

    def test_of_the_documents_are_kept(self, documents):
        def nothing_to_train_on(batch):
            return {"input_ids": batch["input_ids"], "labels": [[-100] * len(row) for row in batch["input_ids"]]}

        transformed = documents.with_transform(nothing_to_train_on)
        packed = transformed.map(STRATEGY, batched=True, remove_columns=documents.column_names)
        assert packed.with_format(None)["labels"][:] == [[-100] * 4, [-100] * 2]
        with pytest.raises(hfp.PackingError, match="dataset: expected the column seq_lengths .*with_format"):
            sizes_of(packed)
        assert sizes_of(packed.with_format(None)).packed
