"""Rows as a sampler asks for them, from the Arrow table or the dataset, and the micro-batches of one rank."""

import pickle
import re

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from any_strategy import few_examples
from hypothesis import given
from hypothesis import strategies as st
from trainers import Plain

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.rows.token_columns import columns_of
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import SLOTS, RankBatchSampler
from hf_packing.sampling.sizes import sizes_of, sizes_of_documents, sizes_of_packs


def sampled(dataset, budget, **ranks):
    return SampledRows(dataset, RankBatchSampler(budget, sizes_of(dataset), **ranks))


@pytest.mark.parametrize("max_tokens", [8, 2])
@pytest.mark.parametrize("kind", [Plain, list])
@pytest.mark.parametrize("labels", [[1, 2, 3, 4], 5, 0.5, None, "a", [[1], [2, 3]], torch.tensor(5)], ids=str)
def test_labels_that_are_not_about_tokens(max_tokens, labels, kind):
    budget = hfp.TokenBudget(max_tokens, overflow="truncate")
    dataset = sampled(kind([{"input_ids": [1, 2, 3], "labels": labels}]), budget)
    with pytest.raises(PackingError, match="column 'labels': expected 3 values in row 0, as many as input_ids"):
        dataset[0]


def test_rows_from_a_generator_and_rows_that_change():
    class Several(Plain):
        def __getitems__(self, numbers):
            return (self.rows[number] for number in numbers)

    rows = sampled(Several([{"input_ids": [1, 2]}, {"input_ids": [3]}]), hfp.TokenBudget(8))
    assert [row["input_ids"] for row in rows.__getitems__([(1, False), (0, False)])] == [[3], [1, 2]]
    rows = [{"input_ids": [1, 2, 3]}]
    dataset = sampled(Plain(rows), hfp.TokenBudget(8))
    rows[0] = {"input_ids": [1, 2]}
    with pytest.raises(PackingError, match="expected 3 tokens in row 0, as when batches were planned, got 2"):
        dataset[0]
    rows.append({"input_ids": [4]})
    for read in (lambda: dataset[0], lambda: dataset.set_epoch(1)):
        with pytest.raises(PackingError, match="expected 1 rows, as when batches were planned, got 2"):
            read()


def test_loss_masks_beside_labels_or_not_to_be_applied_are_for_the_collator(documents):
    masked = documents.map(lambda row: {"completion_mask": [1] * len(row["input_ids"])})
    labelled = masked.map(lambda row: {"labels": row["input_ids"]})
    assert "completion_mask" in sampled(labelled, hfp.TokenBudget(8))[0]
    sampler = RankBatchSampler(hfp.TokenBudget(8), sizes_of(masked))
    row = SampledRows(masked, sampler, apply_masks=False)[0]
    assert "labels" not in row
    assert "completion_mask" in row
    assert "completion_mask" not in SampledRows(masked, sampler, unread=["completion_mask"])[0]


@pytest.mark.parametrize("times", [0, 2])
def test_a_transform_that_returns_other_rows_than_it_is_given(documents, times):
    transformed = documents.with_transform(
        lambda rows: {"input_ids": rows["input_ids"] * (times if len(rows["input_ids"]) > 1 else 1)}
    )
    rows = sampled(transformed, hfp.TokenBudget(8))
    assert rows[0]["input_ids"] == [5, 6, 7]
    with pytest.raises(PackingError, match=f"expected one row for each of 2 row numbers, got {2 * times} rows"):
        rows.__getitems__([(0, False), (1, False)])


@pytest.mark.parametrize("workers", [0, 2])
def test_copies_through_a_data_loader(workers):
    rows = Plain([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 3]}, {"input_ids": [4, 4, 4]}])
    labels = []
    for rank in range(2):
        chosen = sampled(rows, hfp.TokenBudget(3), world_size=2, rank=rank)
        options = {"batch_sampler": chosen.sampler, "collate_fn": hfp.PackingCollator(), "num_workers": workers}
        labels += [batch["labels"][0].tolist() for batch in torch.utils.data.DataLoader(chosen, **options)]
    assert sorted(labels) == [[-100, -100, -100], [-100, 4, 4], [-100, 6, 7], [-100, 9, 3]]


def test_tokens_are_in_the_memory_of_the_table_and_not_in_a_pickled_copy(tmp_path):
    dataset = datasets.Dataset.from_dict({"a": [[1, 2, 3], [4]]})
    values, _ = columns_of(dataset, ["a"])["a"].read(np.array([-2, 1]))
    assert values.tolist() == [1, 2, 3]
    assert np.shares_memory(values, dataset.data.table.column("a").chunk(0).values.to_numpy())
    assert not values.flags.writeable
    datasets.Dataset.from_dict({"input_ids": [[1] * 9] * 9999 + [[3]]}).save_to_disk(tmp_path / "rows")
    rows = sampled(datasets.load_from_disk(tmp_path / "rows"), hfp.TokenBudget(9))
    assert rows[9999]["input_ids"].tolist() == [3]
    assert len(pickle.dumps(rows)) - len(pickle.dumps(rows.sampler)) < 9999
    assert pickle.loads(pickle.dumps(rows))[9999]["input_ids"].tolist() == [3]


@pytest.mark.parametrize("column", [[["a"], ["b"]], [[[[1]]], [[[2]]]], [1, 2]], ids=str)
def test_columns_without_lists_of_numbers_are_left_to_the_dataset(column):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1], [2]], "b": column})
    sampler = RankBatchSampler(hfp.TokenBudget(9), sizes_of(dataset))
    assert SampledRows(dataset, sampler)._in_table
    assert not SampledRows(dataset, sampler, more=["b"])._in_table


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


def test_a_rank_has_its_micro_batches_of_every_epoch_from_any_one_on():
    sizes = sizes_of(Plain([{"input_ids": [1, 2]}] * 1000))
    sampler = RankBatchSampler(hfp.TokenBudget(4), sizes)
    everything = list(sampler)
    sampler.first_micro_batch = 400
    assert list(sampler) == everything[400:]
    sampler.set_epoch(1)
    sampler.first_micro_batch = 0
    assert list(sampler) != everything
    sizes = sizes_of_documents(np.arange(1, 60))
    samplers = [RankBatchSampler(hfp.TokenBudget(100), sizes, 3, rank, accumulation=2) for rank in range(3)]
    for number in (0, 4, 1):
        plan = hfp.TokenBudget(100).plan(sizes, Epoch(number, 3, 2))
        for rank, sampler in enumerate(samplers):
            sampler.set_epoch(number)
            assert len(sampler) == plan.num_micro_batches
            assert list(sampler) == [plan.micro_batch(number, rank) for number in range(len(sampler))]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_the_summary_in_words(ranks, packed):
    """Documents are not called rows, and a rank that is alone has no utilization."""
    rows = [{"input_ids": [1, 2, 3, 4], **({"seq_lengths": [1, 3]} if packed else {})}] * 10
    said = str(RankBatchSampler(hfp.TokenBudget(8), sizes_of(Plain(rows)), world_size=ranks).summary()).splitlines()
    assert said[0] == ("20 documents in 10 packed rows" if packed else "10 documents, packed while training")
    assert sum("utilization of the ranks: " in line for line in said) == (ranks > 1)


def test_split_documents_are_counted_in_the_summary():
    rows = [{"input_ids": [1] * length} for length in (20, 8, 9, 3)]
    summary = RankBatchSampler(hfp.TokenBudget(8, overflow="split"), sizes_of(Plain(rows))).summary()
    assert (summary.split, summary.documents, summary.lost_tokens) == (2, 7, 0)
    split = "7 documents, packed while training; 2 longer ones are split, and each piece counts"
    assert str(summary).splitlines()[0] == split
    assert RankBatchSampler(hfp.TokenBudget(8, overflow="truncate"), sizes_of(Plain(rows))).summary().split == 0


def test_what_decides_the_micro_batches_is_compared():
    sizes = sizes_of(Plain([{"input_ids": [1, 2]}] * 10))
    sampler = RankBatchSampler(hfp.TokenBudget(4), sizes, world_size=2)
    sampler.check_can_resume(sampler.plan_inputs())
    RankBatchSampler(hfp.TokenBudget(4), sizes, accumulation=2).check_can_resume(sampler.plan_inputs())
    for name, value in {"plans": 0, "shuffles_of_numpy": "others", SLOTS: 3}.items():
        with pytest.raises(PackingError, match=f"{name}: expected {value}, as when the checkpoint was saved"):
            sampler.check_can_resume(sampler.plan_inputs() | {name: value})
    fewer = RankBatchSampler(hfp.TokenBudget(4), sizes_of(Plain([{"input_ids": [1, 2]}] * 9)), world_size=2)
    with pytest.raises(PackingError, match=r"dataset: expected 9 rows and 18 tokens .*, got 10 rows and 20 tokens"):
        sampler.check_can_resume(fewer.plan_inputs())


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (hfp.TokenBudget(8), "max_tokens: expected 8, as when the checkpoint was saved, got 4"),
        (
            hfp.TokenBudget(4, overflow="split"),
            "overflow: expected 'split', as when the checkpoint was saved, got 'error'",
        ),
        (
            hfp.TokenBudget(4, length_schedule=hfp.LengthSchedule(2, steps=9)),
            "length_schedule: expected LengthSchedule(start=2, steps=9, end=None), as when the "
            "checkpoint was saved, got None",
        ),
        (hfp.BucketBatches(4), "batching: expected BucketBatches, as when the checkpoint was saved, got TokenBudget"),
    ],
)
def test_a_resume_with_another_batching_names_the_argument_that_differs(saved, said):
    sizes = sizes_of_packs(np.array([2] * 10), np.arange(11), np.array([4] * 10))
    sampler = RankBatchSampler(hfp.TokenBudget(4), sizes)
    with pytest.raises(PackingError, match=re.escape(said)):
        sampler.check_can_resume(RankBatchSampler(saved, sizes).plan_inputs())


INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]

CHANGES = {
    "as it is": lambda dataset: dataset,
    "shuffled": lambda dataset: dataset.shuffle(seed=1),
    "sliced": lambda dataset: dataset.select(range(len(dataset) // 3, len(dataset))),
    "selected": lambda dataset: dataset.select([*range(len(dataset) - 1, -1, -1), 0]),
    "joined": lambda dataset: datasets.concatenate_datasets([dataset, dataset.select([0])]),
}


class Formatted(datasets.Dataset):
    """Rows of a subclass are read through its format."""


OTHER_WAYS = {
    "a subclass": lambda dataset: Formatted(dataset.data, indices_table=dataset._indices),
    "a transform": lambda dataset: dataset.with_transform(lambda rows: rows),
}


@st.composite
def tables(draw, columns, fixed=False):
    """Draw documents in chunks, with columns of any integer type."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=2, max_size=7))
    if fixed:
        lengths = [lengths[0]] * len(lengths)
    arrays = {}
    for number, name in enumerate(("input_ids", *columns)):
        kind = draw(st.sampled_from(INTEGERS))
        rows = [[(row * 10 + token * (number + 3)) % 97 for token in range(n)] for row, n in enumerate(lengths)]
        if name == "completion_mask":
            rows = [[value % 2 for value in row] for row in rows]
        if name == "attention_mask":
            rows = [[1] * len(row) for row in rows]
        if name == "seq_lengths":
            rows = [[1, n - 1] if n > 1 else [n] for n in lengths]
        list_type = draw(st.sampled_from([pa.list_, pa.large_list]))(kind)
        if fixed:
            list_type = pa.list_(kind, len(rows[0]))
        arrays[name] = pa.array(rows, list_type)
    table = pa.table(arrays)
    chunk = draw(st.integers(1, 4))
    return pa.concat_tables([table.slice(begin, chunk) for begin in range(0, len(table), chunk)])


def batches(dataset, batching, world_size, rank, direct):
    rows = SampledRows(dataset, RankBatchSampler(batching, sizes_of(dataset), world_size, rank))
    assert rows._in_table is direct
    return list(torch.utils.data.DataLoader(rows, batch_sampler=rows.sampler, collate_fn=hfp.PackingCollator()))


def assert_same(dataset, batching, world_size, way="a subclass"):
    for rank in range(world_size):
        read = batches(dataset, batching, world_size, rank, direct=True)
        expected = batches(OTHER_WAYS[way](dataset), batching, world_size, rank, direct=False)
        assert len(read) == len(expected) > 0
        for batch, other in zip(read, expected, strict=True):
            assert batch.keys() == other.keys()
            for name, value in batch.items():
                value, wanted = torch.as_tensor(value), torch.as_tensor(other[name])
                assert value.dtype == wanted.dtype, name
                assert torch.equal(value, wanted), name


@few_examples
@given(
    columns=st.sampled_from(
        [(), ("labels",), ("completion_mask",), ("token_type_ids", "attention_mask"), ("seq_lengths", "labels")]
    ),
    overflow=st.sampled_from(["split", "truncate", "drop", "error"]),
    data=st.data(),
)
def test_documents(columns, overflow, data):
    """Whole, in pieces or truncated, with labels from the data, from masks or from the tokens; copies on some rank."""
    dataset = datasets.Dataset(data.draw(tables(columns, fixed=data.draw(st.booleans()))))
    dataset = CHANGES[data.draw(st.sampled_from(sorted(CHANGES)))](dataset)
    shortest = 6 if overflow in ("drop", "error") or "seq_lengths" in columns else 1
    batching = hfp.TokenBudget(data.draw(st.integers(shortest, 9)), overflow=overflow)
    assert_same(dataset, batching, data.draw(st.integers(1, 2)), data.draw(st.sampled_from(sorted(OTHER_WAYS))))


def test_that_such_datasets_have_copies_and_pieces():
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6], [7, 8, 9]]})
    copies = RankBatchSampler(hfp.TokenBudget(3), sizes_of(dataset), world_size=2)
    pieces = RankBatchSampler(hfp.TokenBudget(2, overflow="split"), sizes_of(dataset), world_size=2)
    assert copies.plan.num_copies == 1
    assert len(pieces.rows.sizes) == 6
    for sampler in copies, pieces:
        assert_same(dataset, sampler.batching, world_size=2)
