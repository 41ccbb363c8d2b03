"""Strategies as objects and as transforms of `datasets.map`, and compared with each other."""

import pickle
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from any_strategy import made_for, strategy_classes
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import find_packed_sequence_indices

import hf_packing as hfp
from hf_packing.strategies import base

BATCH = {
    "input_ids": [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10, 11]],
    "labels": [[-100, 2, 3], [], [4, 5], [6], [7, 8, -100, 10, 11]],
    "attention_mask": [[1, 1, 1], [], [1, 1], [1], [1] * 5],
    "weights": [[0.5, 0.5, 1.0], [], [1.0, 1.0], [1.0], [2.0] * 5],
    "text": ["a", "b", "c", "d", "e"],
}
COLUMNS = ["input_ids", "labels", "weights", "position_ids", "seq_lengths"]
STRATEGIES = [made_for(4, each) for each in strategy_classes()] + [hfp.BestFit(4, overflow="truncate")]
BUCKETS = [strategy for strategy in STRATEGIES if strategy.has_buckets]


pytestmark = pytest.mark.filterwarnings("ignore:packing drops 1 of 11 tokens of a batch")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_comparable_picklable(strategy):
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert hash(strategy) == hash(pickle.loads(pickle.dumps(strategy)))
    with pytest.raises(AttributeError):
        strategy.seed = 5
    assert strategy != hfp.BestFit(5)


def test_arguments_of_any_type_and_batches_of_arrays():
    square = hfp.BestFit(4)({"input_ids": np.arange(6).reshape(3, 2)})
    assert sorted(np.concatenate(square["input_ids"]).tolist()) == list(range(6))
    assert hfp.BestFit(4)({"input_ids": []}) == {"input_ids": [], "labels": [], "position_ids": [], "seq_lengths": []}
    assert hfp.BestFit(4)({"input_ids": [[], []]})["input_ids"] == []
    assert all(strategy({"input_ids": []})["bucket"] == [] for strategy in BUCKETS)
    with pytest.warns(UserWarning, match="packing drops 1 of 11 tokens of a batch, as configured by overflow"):
        hfp.BestFit(4, overflow="truncate")(BATCH)
    with pytest.warns(UserWarning, match="drops 5 of 11 tokens of a batch"):
        hfp.BestFit(4, overflow="drop")(BATCH)
    packed = hfp.BestFit(4, seed=None)(BATCH)
    assert sorted(packed) == sorted(COLUMNS)
    assert packed == {
        "input_ids": [[7, 8, 9, 10], [1, 2, 3, 6], [4, 5, 11]],
        "labels": [[-100, 8, -100, 10], [-100, 2, 3, -100], [-100, 5, -100]],
        "weights": [[2.0] * 4, [0.5, 0.5, 1.0, 1.0], [1.0, 1.0, 2.0]],
        "position_ids": [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 0]],
        "seq_lengths": [[4], [3, 1], [2, 1]],
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_rows_in_every_form(strategy):
    lists = strategy(BATCH)
    table = strategy(pa.table(BATCH))
    assert isinstance(table, pa.Table)
    assert table.to_pydict() == lists
    assert all(table.schema.field(name).type == pa.list_(pa.int32()) for name in COLUMNS if name != "weights")
    if strategy in BUCKETS:
        assert table.schema.field("bucket").type == pa.int32()
    documents = Dataset.from_dict(BATCH)
    packed = documents.map(strategy, batched=True, remove_columns=documents.column_names)
    assert sorted(packed.column_names) == sorted(COLUMNS + ["bucket"] * (strategy in BUCKETS))
    assert packed[:] == lists
    arrays = strategy({name: [np.array(row) for row in BATCH[name]] for name in ("input_ids", "labels")})
    assert arrays == {name: lists[name] for name in lists if name != "weights"}


def test_map_is_cached_by_version(tmp_path, monkeypatch):
    Dataset.from_dict(BATCH).save_to_disk(tmp_path / "documents")
    documents = Dataset.load_from_disk(tmp_path / "documents")

    def cache_file():
        return documents.map(hfp.BestFit(4), batched=True, remove_columns=documents.column_names).cache_files

    first = cache_file()
    assert cache_file() == first
    monkeypatch.setattr(hfp, "__version__", "999")
    assert cache_file() != first


@given(st.lists(st.lists(st.integers(0, 9), max_size=12), max_size=15), st.integers(1, 9), st.integers(0, 5))
def test_transformers_finds_exactly_our_segments(rows, max_length, seed):
    import torch

    packed = hfp.BestFit(max_length, seed=seed)({"input_ids": rows})
    for positions, lengths in zip(packed["position_ids"], packed["seq_lengths"], strict=True):
        found = find_packed_sequence_indices(torch.tensor([positions]))
        expected = [segment for segment, length in enumerate(lengths) for _ in range(length)]
        assert (found[0].tolist() if found is not None else [0] * len(positions)) == expected


def test_lengths_are_those_of_a_dataset_or_of_a_column(monkeypatch):
    lengths = [5, 3, 0, 7]
    documents = Dataset.from_dict({"input_ids": [[1] * length for length in lengths], "id": list(range(4))})
    for dataset, expected in (
        (documents, lengths),
        (documents.select([3, 0]), [7, 5]),
        (documents.select([]), []),
        (documents.to_iterable_dataset(), lengths),
        (documents.with_format("torch"), lengths),
    ):
        assert hfp.plan_packing(dataset, hfp.BestFit(8)).document_length.tolist() == expected
    kinds = (documents, documents.to_iterable_dataset(), lengths)
    assert len({str(hfp.packing_report(each, 8).recommendation) for each in kinds}) == 1
    for read, limit in ((hfp.plan_packing, hfp.BestFit(8)), (hfp.packing_report, 8)):
        with pytest.raises(hfp.PackingError, match="column 'seq_lengths': expected documents that are not packed yet"):
            read(Dataset.from_dict({"input_ids": [[1, 2]], "seq_lengths": [[1, 1]]}), limit)
    column = Dataset.from_dict({"length": [5, 3, 6, 2]})["length"]
    monkeypatch.setattr(type(column), "__iter__", lambda _: pytest.fail("read row by row"))
    assert hfp.plan_packing(column, hfp.BestFit(8)) == hfp.plan_packing([5, 3, 6, 2], hfp.BestFit(8))


@pytest.mark.parametrize("columns", [{"messages": [[]]}, {"prompt": ["a"], "completion": ["b"]}, {"text": ["a"]}])
def test_texts_are_told_how_to_become_tokens(columns):
    documents = Dataset.from_dict(columns)
    for call in (hfp.pack, hfp.plan_packing, lambda rows, _: hfp.packing_report(rows)):
        with pytest.raises(hfp.PackingError, match="column 'input_ids': .*; hf_packing.tokenize makes it from texts"):
            call(documents, hfp.BestFit(4))


@pytest.mark.parametrize(
    ("argument", "batch"),
    [
        ("column 'input_ids'", {"tokens": [[1]], "text": ["a"]}),
        ("column 'input_ids'", {"input_ids": ["ab", "c"]}),
        ("column 'input_ids'", {"input_ids": [[1.5, 2.0]]}),
        ("column 'input_ids'", {"input_ids": [[1, 2**40]]}),
        ("column 'input_ids'", {"input_ids": [[1, "a"]]}),
        ("column 'input_ids'", {"input_ids": [[1], None]}),
        ("column 'labels'", {"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]}),
        ("column 'seq_lengths'", {"input_ids": [[1, 2]], "seq_lengths": [[2]]}),
        ("column 'position_ids'", {"input_ids": [[1, 2]], "position_ids": [[0, 1]]}),
        ("column 'seq_idx'", {"input_ids": [[1, 2]], "seq_idx": [[0, 1]]}),
        ("column 'attention_mask'", {"input_ids": [[1, 2], [3, 0]], "attention_mask": [[1, 1], [1, 0]]}),
        ("column 'attention_mask'", {"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1], [1, 2]]}),
        ("batch", {"input_ids": [1, 2, 3]}),
        ("batch", [[1, 2]]),
    ],
)
def test_bad_batches(argument, batch):
    with pytest.raises(hfp.PackingError, match=f"^{argument}: expected "):
        hfp.BestFit(4)(batch)


@pytest.mark.parametrize("strategy", BUCKETS, ids=repr)
def test_rows_of_buckets_carry_their_capacity(strategy, monkeypatch):
    monkeypatch.setattr("hf_packing.rows.pack.TOKENS_AT_ONCE", 4)  # so that rows are written in several blocks
    lists = strategy(BATCH)
    assert set(lists["bucket"]) == set(strategy.bucket_lengths)
    assert all(len(row) <= bucket for row, bucket in zip(lists["input_ids"], lists["bucket"], strict=True))
    documents = Dataset.from_dict({"input_ids": BATCH["input_ids"]})
    with pytest.warns(UserWarning, match="skips 1 document "):
        packed = hfp.pack(documents, strategy)
    plan = hfp.plan_packing([len(row) for row in BATCH["input_ids"]], strategy)
    assert packed["bucket"][:] == plan.pack_capacity.tolist()
    assert packed.features["bucket"].dtype == "int32"
    assert hfp.unpack(packed)["input_ids"][:] == BATCH["input_ids"]
    batch = hfp.PackingCollator()([packed[row] for row in range(len(packed))])
    assert "bucket" not in batch
    assert batch["input_ids"].numel() == sum(map(len, BATCH["input_ids"]))


@pytest.mark.parametrize("strategy", BUCKETS, ids=repr)
@pytest.mark.parametrize("column", [[1, 2], ["a", "b"], [[1], [2, 3]]])
def test_documents_with_a_column_bucket_of_their_own(strategy, column):
    documents = Dataset.from_dict({"input_ids": [[1], [2, 3]], "bucket": column})
    for call in (lambda: hfp.pack(documents, strategy), lambda: strategy(documents[:])):
        with pytest.raises(hfp.PackingError, match="column 'bucket': expected no such column in the documents"):
            call()


def test_a_token_column_bucket_is_a_column_like_any_other():
    documents = Dataset.from_dict({"input_ids": [[1], [2, 3]], "bucket": [[7], [8, 9]]})
    arrays = {name: [np.array(row) for row in documents[name]] for name in documents.column_names}
    assert sorted(len(row) for row in hfp.BestFit(2)(arrays)["bucket"]) == [1, 2]
    assert hfp.unpack(hfp.pack(documents, hfp.BestFit(4)))["bucket"][:] == [[7], [8, 9]]


def test_registered_strategies_are_public_or_ones_own(monkeypatch):
    assert len(base.registered_strategies()) >= 9
    assert all(getattr(hfp, each.__name__) is each for each in base.registered_strategies().values())
    monkeypatch.setattr(base, "_REGISTERED", dict(base._REGISTERED))

    @base.register_strategy
    @dataclass(frozen=True)
    class OneEach(base.Strategy):
        max_length: int

        def plan_lengths(self, lengths):
            return hfp.plan_packing(lengths, hfp.BestFit(self.max_length, max_documents=1))

    assert base.registered_strategies()["one_each"] is OneEach
    assert hfp.plan_packing([3, 2], OneEach(8)).num_packs == len(OneEach(8)(BATCH)["input_ids"]) - 2 == 2


LENGTHS = [14, 14, 14, 9, 8, 8, 8, 4, 3, 3, 3, 2, 40]


def test_rows_and_tables_in_order():
    strategies = [hfp.BestFit(30), hfp.Optimal(30), hfp.Bucket((10, 30)), hfp.FixedLength(30)]
    rows = hfp.compare(LENGTHS, strategies)
    assert [row.strategy for row in rows] == strategies
    for row, strategy in zip(rows, strategies, strict=True):
        plan = hfp.plan_packing(LENGTHS, strategy)
        assert row.metrics.num_packs == plan.num_packs
        assert row.note == plan.note
        assert row.seconds > 0
    assert rows[2].gap is None
    assert len(rows[1:]) == 3
    text = repr(hfp.compare(LENGTHS, [hfp.BestFit(30, overflow="drop"), hfp.Bucket((10, 30), seed=1)]))
    header, best_fit, bucket = text.splitlines()
    assert header.split() == [
        "padding", "truncation", "dropped", "concatenation", "packs", "above", "bound", "seconds"
    ]  # fmt: skip
    assert best_fit.startswith("BestFit(30, overflow='drop')  25.000%      0.000%  30.769%")
    assert bucket.startswith("Bucket((10, 30), seed=1)")
    assert len({len(line) for line in (header, best_fit, bucket)}) == 1


def test_bounds_are_shared_where_they_hold(rng):
    lengths = rng.integers(60, 140, 3000)
    alone = hfp.compare(lengths, [hfp.BestFit(400)])[0]
    best_fit, optimal, limited, longer = hfp.compare(
        lengths, [hfp.BestFit(400), hfp.Optimal(400), hfp.BestFit(400, max_documents=3), hfp.BestFit(401)]
    )
    assert best_fit.metrics.lower_bound == optimal.metrics.lower_bound
    assert best_fit.gap == best_fit.metrics.num_packs / optimal.metrics.lower_bound - 1 > optimal.gap
    assert limited.metrics.lower_bound == 1000
    assert limited.gap < alone.gap + 1
    assert longer.metrics.lower_bound == hfp.plan_packing(lengths, hfp.BestFit(401)).metrics().lower_bound
    limited, free = hfp.compare([1] * 12, [hfp.BestFit(12, max_documents=2), hfp.BestFit(12)])
    assert limited.metrics.lower_bound == 6
    assert (free.metrics.lower_bound, free.metrics.num_packs, free.gap) == (1, 1, 0.0)
    assert hfp.compare([], [hfp.BestFit(8)])[0].gap == 0
    column = Dataset.from_dict({"length": [5, 3]})["length"]
    assert hfp.compare(column, (strategy for strategy in [hfp.BestFit(8)]))[0].metrics.num_packs == 1


@pytest.mark.parametrize("strategies", [[], hfp.BestFit(8), "best fit", None, [hfp.BestFit]])
def test_bad_strategies(strategies):
    with pytest.raises(hfp.PackingError, match="^strateg(y|ies): expected .*, got "):
        hfp.compare([1, 2], strategies)


WITH_BUCKETS = [each for each in strategy_classes() if each.has_buckets]
REFUSED_ARGUMENTS = [
    *((each, {"max_length": value}) for each in strategy_classes(having="max_length") for value in ("8", True, None)),
    *((each, {"max_length": value}) for each in strategy_classes(having="max_length") for value in (0, -3, 2.5, 2**31)),
    *((each, {"bucket_lengths": value}) for each in WITH_BUCKETS for value in ((), (4, 2), (2, 2), 2048, "2048")),
    *((each, {"bucket_lengths": [value, 16]}) for each in WITH_BUCKETS for value in (0, -1, 2.5, "8", True)),
    *((each, {"max_length": 8, "max_documents": 0}) for each in strategy_classes(having="max_documents")),
    *((each, {"max_length": 8, "overflow": "cut"}) for each in strategy_classes(having="overflow")),
    *((each, {"max_length": 8, "seed": -1}) for each in strategy_classes(having="max_length")),
    *((each, {"seed": -1}) for each in WITH_BUCKETS),
    *((hfp.NonNegativeLeastSquares, {"max_length": 8, "max_documents": value}) for value in (None, 2.5)),
    (hfp.FirstCome, {"max_length": 8, "order": "shortest"}),
    (hfp.FirstCome, {"max_length": 8, "seed": None}),
    (hfp.Multipack, {"max_length": 8, "window": 0}),
    (hfp.Multipack, {"max_length": 8, "seed": None}),
    *((hfp.Bucket, {"padding_threshold": value}) for value in (-0.1, 1.5, float("nan"), "0.1", True, None)),
    *((hfp.Optimal, {"max_length": 8, "time_limit": value}) for value in (-1, float("nan"), "60", None, True)),
    *((hfp.LengthSchedule, {"steps": 1, "start": value}) for value in (0, 1.5)),
    (hfp.LengthSchedule, {"start": 1, "steps": 0}),
    (hfp.LengthSchedule, {"start": 8, "steps": 1, "end": 4}),
]


@pytest.mark.parametrize(("strategy", "arguments"), REFUSED_ARGUMENTS)
def test_an_argument_that_is_refused_is_named(strategy, arguments):
    with pytest.raises(hfp.PackingError, match=f"^{[*arguments][-1]}: expected .* got "):
        strategy(**arguments)
