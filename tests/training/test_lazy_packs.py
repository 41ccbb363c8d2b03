"""Lazy packs in training: the batches and losses of the rows of pack()."""

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from datasets import concatenate_datasets, load_from_disk
from patched_models import patched_tiny
from trainers import logged, trainer_of
from training_process import documents as labeled_documents
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.rows.lazy.lazy_columns import LazyColumn, copies_labels
from hf_packing.sampling.rows import ArrowRows, SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import data_facts, sizes_of
from hf_packing.training.loader import rows_loader

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning"),  # TRL uses names that transformers has renamed
    pytest.mark.filterwarnings("ignore:pack applies:UserWarning"),
]


def documents(rows):
    return labeled_documents(rows).select_columns("input_ids")


def with_labels(row):
    return {"labels": [-100, *row["input_ids"][1:]]}


def with_masks(row):
    return {"completion_mask": [number % 2 for number in range(len(row["input_ids"]))]}


def both(folder, strategy=None, source=None):
    """Documents packed as always, and lazily."""
    strategy = strategy or hfp.BestFit(64)
    (documents(45) if source is None else source).save_to_disk(folder)
    on_disk = load_from_disk(folder)
    return [hfp.pack(on_disk, strategy, lazy=lazy) for lazy in (False, True)]


@pytest.fixture
def pair(tmp_path):
    packed, lazy = both(tmp_path / "documents")
    assert max(map(len, packed["seq_lengths"])) > 1
    return packed, lazy


def same(one, other):
    return one.keys() == other.keys() and all(
        torch.as_tensor(one[name]).dtype == torch.as_tensor(other[name]).dtype
        and torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name]))
        for name in other
    )


VIEWS = {
    "all": lambda rows: rows,
    "shuffled": lambda rows: rows.shuffle(seed=1),
    "selected": lambda rows: rows.select([3, 1, 2, 1]),
    "concatenated": lambda rows: concatenate_datasets([rows.select([2, 1]), rows]),
    "mapped": lambda rows: rows.map(lambda row: {"labels": [-100] * 5 + row["labels"][5:]}),
    "numpy": lambda rows: rows.with_format("numpy"),
    "transformed": lambda rows: rows.with_transform(lambda rows: rows),
    "without position_ids": lambda rows: rows.remove_columns("position_ids"),
}
SOURCES = {"tokens": None, "labels": with_labels, "masks": with_masks}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("source", SOURCES)
def test_micro_batches(tmp_path, view, source):
    made = documents(45) if SOURCES[source] is None else documents(45).map(SOURCES[source])
    packed, lazy = map(VIEWS[view], both(tmp_path, source=made))
    sizes = [sizes_of(rows) for rows in (packed, lazy)]
    assert sizes[0].fingerprint == sizes[1].fingerprint
    assert data_facts(packed, sizes[0]) == data_facts(lazy, sizes[1])
    for model in (None, patched_tiny("bert", "masked")):
        batches = [
            list(rows_loader(rows, RankBatchSampler(hfp.TokenBudget(128), size), model))
            for rows, size in zip((packed, lazy), sizes, strict=True)
        ]
        assert len(batches[0]) == len(batches[1]) > 0
        assert all(map(same, *batches))


def test_micro_batches_of_buckets(tmp_path):
    packed, lazy = both(tmp_path, hfp.Bucket((16, 32, 64)))
    batching = hfp.BucketBatches(64)
    one, other = (list(rows_loader(rows, RankBatchSampler(batching, sizes_of(rows)))) for rows in (packed, lazy))
    assert len(one) == len(other) > 1
    assert all(map(same, one, other))


def test_rows_are_read_without_the_formatting_of_datasets(pair, monkeypatch):
    packed, lazy = pair
    monkeypatch.setattr(datasets.Dataset, "__getitems__", lambda *_: pytest.fail("formatted"))
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda *_: pytest.fail("formatted"))
    names = ["input_ids", "labels", "position_ids", "seq_lengths"]
    numbers = [2, 0, -1]
    for one, other in zip(*(ArrowRows.open(rows, names).read(numbers) for rows in (packed, lazy)), strict=True):
        for name in names:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])
    assert len(list(rows_loader(lazy, RankBatchSampler(hfp.TokenBudget(64), sizes_of(lazy))))) > 1
    with pytest.raises(pytest.fail.Exception, match="formatted"):
        lazy[0]


def test_labels_that_the_collator_makes_are_not_read(tmp_path):
    """Labels that are copies of input_ids, but for the first of each segment, are left to the collator."""
    packed, lazy = both(tmp_path / "tokens")
    _, labeled = both(tmp_path / "labels", source=documents(45).map(with_labels))
    assert [copies_labels(rows) for rows in (packed, lazy, lazy.shuffle(seed=1), labeled)] == [False, True, True, False]
    assert not copies_labels(concatenate_datasets([lazy, labeled]))
    assert not copies_labels(lazy.map(lambda row: {"labels": row["labels"]}))

    def columns(rows, **options):
        loader = rows_loader(rows, RankBatchSampler(hfp.TokenBudget(64), sizes_of(rows)), **options)
        assert isinstance(loader.dataset, SampledRows)
        return set(loader.dataset._arrow_rows._columns)

    assert columns(lazy) == {"input_ids", "seq_lengths"}
    assert columns(labeled) == {"input_ids", "labels", "seq_lengths"}
    assert columns(lazy, collate_fn=hfp.PackingCollator(keep_first_labels=True)) == {
        "input_ids",
        "labels",
        "seq_lengths",
    }
    assert columns(lazy, collate_fn=list) == {"input_ids", "labels", "seq_lengths"}
    assert columns(packed) == {"input_ids", "labels", "position_ids", "seq_lengths"}


def test_seq_lengths_that_are_not_those_of_the_packs(pair):
    _, lazy = pair
    wrong = lazy.map(lambda row: {"seq_lengths": [*row["seq_lengths"], 1]})
    with pytest.raises(
        PackingError, match="column 'seq_lengths': expected positive lengths that add up to the .* row 0"
    ):
        sizes_of(wrong)


def test_columns_with_nulls(pair):
    _, lazy = pair
    column = pa.chunked_array([pa.array([None], pa.int64()), *lazy.data.table.column("input_ids").chunks])
    with pytest.raises(PackingError, match="column 'input_ids': expected a pack in every row, got nulls in 1 rows"):
        LazyColumn("input_ids", column, lazy.features["input_ids"])


def losses_of(folder, rows, kind, attach, **options):
    more = {"padding_free": True} if kind is SFTTrainer and not attach else {}
    if kind is Trainer and not attach:
        more = {"data_collator": hfp.PackingCollator()}
    options = {"num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 2, **options, **more}
    collator = options.pop("data_collator", None)
    trainer = trainer_of(folder, kind, data=rows, **options)
    if collator is not None:
        trainer.data_collator = collator
    if attach:
        hfp.attach(trainer, hfp.TokenBudget(128))
    return logged(trainer)


@pytest.mark.parametrize("attach", [False, True], ids=["stock", "attached"])
@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_trainers(pair, tmp_path, kind, attach):
    found = [losses_of(tmp_path, rows, kind, attach) for rows in pair]
    assert found[0] == found[1]
    assert len(set(found[0])) > 2


@pytest.mark.slow
@pytest.mark.parametrize("attach", [False, True], ids=["stock", "attached"])
@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_trainers_with_workers(pair, tmp_path, kind, attach):
    packed, lazy = pair
    expected = losses_of(tmp_path, packed, kind, attach)
    assert losses_of(tmp_path, lazy, kind, attach, dataloader_num_workers=2) == expected


def test_your_own_loop(pair):
    one, other = (list(hfp.prepare_dataloader(Accelerator(cpu=True), rows, hfp.TokenBudget(128))) for rows in pair)
    assert len(one) == len(other) > 1
    assert all(map(same, one, other))


def test_masks_that_are_applied_are_noticed(tmp_path):
    """As with the rows of pack(): training on all tokens is asked for, but labels are masked."""
    for rows in both(tmp_path / "masks", source=documents(45).map(with_masks)):
        trainer = trainer_of(tmp_path, SFTTrainer, data=rows, completion_only_loss=False)
        with pytest.raises(PackingError, match="completion_only_loss: expected None, got False, .* labels of -100"):
            hfp.attach(trainer, hfp.TokenBudget(128))
    for rows in both(tmp_path / "tokens"):
        trainer = trainer_of(tmp_path, SFTTrainer, data=rows, completion_only_loss=False)
        hfp.attach(trainer, hfp.TokenBudget(128))
