"""Batches of rows read from the Arrow table equal those of rows that the dataset gives, for any dataset."""

import datasets
import pyarrow as pa
import torch
from any_strategy import few_examples
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of

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
    assert (rows._stored is not None) is direct
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
