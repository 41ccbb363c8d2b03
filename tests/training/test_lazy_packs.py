"""Lazy packs in training: the batches and losses of the rows of pack()."""

import datasets
import pytest
import torch
from accelerate import Accelerator
from datasets import concatenate_datasets, load_from_disk
from patched_models import patched_tiny
from trainers import documents as labeled_documents

import hf_packing as hfp

pytestmark = pytest.mark.filterwarnings("ignore:pack applies:UserWarning")


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
    "repeated": lambda rows: concatenate_datasets([rows.select([2, 1]), rows]),
    "mapped": lambda rows: rows.map(lambda row: {"labels": [-100] * 5 + row["labels"][5:]}),
    "without position_ids": lambda rows: rows.remove_columns("position_ids"),
}
SOURCES = {"tokens": None, "labels": with_labels, "masks": with_masks}


def batches_of(rows, batching=None, **how):
    return list(hfp.prepare_dataloader(Accelerator(cpu=True), rows, batching or hfp.TokenBudget(128), **how))


def check_same(packed, lazy, **how):
    one, other = batches_of(packed, **how), batches_of(lazy, **how)
    assert len(one) == len(other) > 0
    assert all(map(same, one, other))


@pytest.mark.parametrize(
    ("view", "source"), [*((view, "labels") for view in VIEWS), ("all", "tokens"), ("all", "masks")]
)
def test_micro_batches(tmp_path, view, source):
    made = documents(45) if SOURCES[source] is None else documents(45).map(SOURCES[source])
    packed, lazy = map(VIEWS[view], both(tmp_path, source=made))
    assert max(map(len, packed["seq_lengths"])) > 1
    check_same(packed, lazy, num_workers=int(view == "shuffled"))


def test_micro_batches_of_buckets(tmp_path):
    check_same(*both(tmp_path, hfp.Bucket((16, 32, 64))), batching=hfp.BucketBatches(64))


def test_lazy_rows_of_trees():
    """Their sizes are found by reading all rows, as those of any dataset with a transform."""
    prompts = [[number, *range(20)] for number in range(8)]
    source = datasets.Dataset.from_dict({"input_ids": [[*prompts[n % 8], 30 + n] for n in range(40)]})
    rows = [hfp.pack(source, hfp.BestFit(64), lazy=lazy, share_prefixes=4) for lazy in (False, True)]
    check_same(*rows, model=patched_tiny("llama", "causal", trees=True))


def test_rows_are_read_without_the_formatting_of_datasets(tmp_path, monkeypatch):
    _, lazy = both(tmp_path)
    loader = hfp.prepare_dataloader(Accelerator(cpu=True), lazy, hfp.TokenBudget(64))
    for name in ("__getitems__", "__getitem__"):
        monkeypatch.setattr(datasets.Dataset, name, lambda *_: pytest.fail("formatted"))
    assert len(list(loader)) > 1
    with pytest.raises(pytest.fail.Exception, match="formatted"):
        lazy[0]
