"""Batches that workers of a DataLoader send: equal to those of the main process, and not in shared memory."""

import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

import hf_packing as hfp
from hf_packing.batch.collate import WorkerBatch

ROWS = [
    {"input_ids": np.arange(300, dtype=np.int32), "seq_lengths": [299, 1], "token_type_ids": [0] * 299 + [1]},
    {"input_ids": [128_000, 5], "labels": [-100, 5], "token_type_ids": [0, 1]},
]

LIMITS = [sign * 2**bits + offset for sign in (1, -1) for bits in (7, 8, 15, 16, 31, 32) for offset in (-1, 0, 1)]
"""About these, a dtype that is too small would wrap around."""


class Edited:
    """A user's collator that changes the batch of PackingCollator."""

    def __call__(self, rows):
        batch = hfp.PackingCollator()(rows)
        batch["position_ids"] += 7
        batch["labels"].numpy()[0, 1] = -5
        batch["worker"] = None if (info := get_worker_info()) is None else info.id
        return batch


def received(batch):
    return pickle.loads(pickle.dumps(batch))


def assert_equal(batch, expected):
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (batch[name].dtype, batch[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(batch[name], value), name
        else:
            assert batch[name] == value, name


@given(st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_any_integers(data, dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    near = st.sampled_from([limit for limit in LIMITS if least <= limit <= most])
    tensor = torch.tensor([data.draw(st.lists(st.integers(least, most) | near, max_size=6))], dtype=dtype)
    assert_equal(received(WorkerBatch(a=tensor, b=tensor[0])), {"a": tensor, "b": tensor[0]})


def test_a_batch_is_sent_in_few_bytes_and_is_a_plain_dict():
    ids = torch.arange(60_000)
    assert len(pickle.dumps(WorkerBatch(ids=ids))) < 2.1 * len(ids) < len(pickle.dumps({"ids": ids})) / 3
    sent = WorkerBatch(a=torch.tensor([1, 2]))
    batch = received(sent)
    assert type(batch) is type(hfp.PackingCollator()([{"input_ids": [1]}])) is dict
    batch["a"] += 1
    assert (batch["a"].tolist(), sent["a"].tolist()) == ([2, 3], [1, 2])


def test_everything_else_is_sent_as_it_is():
    batch = {
        "weights": torch.tensor([0.5]),
        "mask": torch.tensor([[True, False]]),
        "bytes": torch.tensor([3], dtype=torch.uint8),
        "name": "a",
        "count": 3,
        "none": None,
    }
    assert_equal(received(WorkerBatch(batch)), batch)
    empty = received(WorkerBatch(empty=torch.zeros(1, 0, dtype=torch.int64), steps=torch.arange(6)[::2]))
    assert_equal(empty, {"empty": torch.zeros(1, 0, dtype=torch.int64), "steps": torch.tensor([0, 2, 4])})


def test_workers_send_the_same_batches():
    rows = [{**row, "labels": row.get("labels", row["input_ids"])} for row in ROWS] * 3
    collator = hfp.PackingCollator()
    alone, sent = (list(DataLoader(rows, batch_size=2, collate_fn=collator, num_workers=workers)) for workers in (0, 2))
    assert len(sent) == len(alone) == 3
    for batch, expected in zip(sent, alone, strict=True):
        assert_equal(batch, expected)
        assert not any(value.is_shared() for value in batch.values() if isinstance(value, torch.Tensor))


def test_changes_of_a_users_collator_are_sent():
    rows = [{"input_ids": [5, 6, 7]}]
    (expected,) = DataLoader(rows, collate_fn=Edited())
    (batch,) = DataLoader(rows, collate_fn=Edited(), num_workers=1)
    assert batch["position_ids"].tolist() == [[7, 8, 9]]
    assert_equal(batch, expected | {"worker": 0})


def test_that_the_tests_would_see_shared_memory():
    """A plain dict is sent through shared memory."""
    (batch,) = DataLoader([{"a": torch.tensor([1])}], collate_fn=dict_of_first, num_workers=1)
    assert batch["a"].is_shared()


def dict_of_first(rows):
    return dict(rows[0])
