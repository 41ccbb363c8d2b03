"""What `pack`, `map` and `unpack` refuse: the call, and the argument or column that the error names."""

from pathlib import Path

import datasets
import numpy as np
import pytest
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, concatenate_datasets

import hf_packing as hfp

pytestmark = pytest.mark.filterwarnings("ignore:(pack|packing) (applies|skips):UserWarning")

STRATEGY = hfp.BestFit(4)
IDS = [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10, 11]]


def documents(rows=IDS, **columns):
    return Dataset.from_dict({"input_ids": rows, **columns})


def pack(rows=IDS, strategy=STRATEGY, **columns):
    return hfp.pack(documents(rows, **columns), strategy)


def trees(strategy=STRATEGY, share_prefixes=2, **columns):
    return hfp.pack(documents(**columns), strategy, share_prefixes=share_prefixes)


def elsewhere(packed):
    """The same rows, without the plan that is stored beside them."""
    return Dataset.from_dict(packed.to_dict())


REORDERED = {
    "flatten_indices": lambda packed: packed.shuffle(seed=0).flatten_indices(),
    "map": lambda packed: packed.shuffle(seed=0).map(dict),
    "joining": lambda packed: concatenate_datasets([packed.select(range(3, 9)), packed.select(range(3))]),
}


def stored_plan(packed):
    return hfp.PackingPlan.load(Path(packed.cache_files[0]["filename"]).parent / "plan")


def plan_of(lengths, strategy=STRATEGY):
    return hfp.plan_packing(lengths, strategy)


REFUSED = {
    "pack a list": (lambda: hfp.pack(IDS, STRATEGY), "dataset: .*list"),
    "pack with a number": (lambda: hfp.pack(documents(), 4096), "strategy: "),
    "pack packed rows": (lambda: hfp.pack(pack(), STRATEGY), "column 'seq_lengths': .*packed already"),
    "pack trees": (lambda: hfp.pack(trees(), STRATEGY), "column 'tree_input_ids': "),
    "pack a transform": (lambda: hfp.pack(documents().with_transform(dict), STRATEGY), "dataset: .* attach .* map"),
    "pack a null": (lambda: pack([[1], None]), "column 'input_ids': .* row 1 is null"),
    "pack a null token": (lambda: pack([[1], [2, None]]), "column 'input_ids': .* row 1 is null"),
    "pack a mask of another length": (lambda: pack([[5, 6]], completion_mask=[[1]]), "column 'completion_mask': "),
    "pack a stream in a dict": (
        lambda: hfp.pack(DatasetDict(a=documents(), b=documents().to_iterable_dataset()), STRATEGY),
        r"dataset\['b'\]: dataset: ",
    ),
    "pack a dict of texts": (
        lambda: hfp.pack(DatasetDict(a=documents(), b=Dataset.from_dict({"text": ["a"]})), STRATEGY),
        r"dataset\['b'\]: column 'input_ids': ",
    ),
    "trees of a column of theirs": (lambda: trees(ends=IDS), "column 'ends': "),
    "trees of packs that cut": (lambda: trees(hfp.FixedLength(8)), ".*FixedLength"),
    "trees of buckets that cut": (lambda: trees(hfp.BucketByLength((4, 8))), "strategy: "),
    "trees with a threshold": (lambda: trees(hfp.Bucket((4, 8))), "padding_threshold: .* 0.01"),
    "trees with few documents": (lambda: trees(hfp.BestFit(8, max_documents=3)), "max_documents: .* 3"),
    "trees in order": (lambda: trees(hfp.FirstCome(8, max_documents=3)), "max_documents: .* 3"),
    "trees of long documents": (lambda: trees(hfp.BestFit(4, overflow="error")), ".*document 4 has 5 tokens"),
    "trees of long documents in windows": (
        lambda: trees(hfp.Multipack(4, overflow="error")),
        ".*document 4 has 5 tokens",
    ),
    **{
        f"share_prefixes={value!r}": (lambda value=value: trees(share_prefixes=value), "share_prefixes: ")
        for value in (0, -1, 2.0, "yes", None)
    },
    "unpack a list": (lambda: hfp.unpack(IDS), "packed: .*list"),
    "unpack shuffled rows": (lambda: hfp.unpack(pack().select([2, 0, 1])), "packed: .*shuffled or selected"),
    **{
        f"unpack rows of equal lengths after {how}": (
            lambda changed=changed: hfp.unpack(changed(pack([[n] * 4 for n in range(9)]))),
            "plan: .* None; of rows that were mapped, shuffled or joined, unpack those that pack",
        )
        for how, changed in REORDERED.items()
    },
    "unpack some rows": (lambda: hfp.unpack(pack().select(range(2))), "packed: expected all 3 rows .* got 2"),
    "unpack rows without borders": (lambda: hfp.unpack(pack().remove_columns("seq_lengths")), "column 'seq_lengths': "),
    "unpack with another plan": (
        lambda: hfp.unpack(pack(), plan_of([3, 0, 2, 1, 5], hfp.BestFit(4, seed=9))),
        "plan: .* fingerprint",
    ),
    "unpack without a plan": (lambda: hfp.unpack(elsewhere(pack())), "plan: .* None"),
    "unpack elsewhere with another plan": (
        lambda: hfp.unpack(elsewhere(pack()), plan_of([3, 0, 2, 1, 5], hfp.BestFit(4, seed=None))),
        "plan: .* seq_lengths",
    ),
    "unpack with the plan of other rows": (lambda: hfp.unpack(elsewhere(pack()), plan_of([1])), "plan: .* seq_lengths"),
    "unpack a column of numbers": (
        lambda: hfp.unpack(elsewhere(pack()).add_column("extra", [1, 2, 3]), plan_of([3, 0, 2, 1, 5])),
        "column 'extra': ",
    ),
    "unpack trees with another plan": (
        lambda: hfp.unpack(elsewhere(trees()), stored_plan(trees(hfp.FirstCome(4)))),
        "plan: .* segment_lengths",
    ),
}


@pytest.mark.parametrize("call", REFUSED)
def test_refused(call):
    refused, named = REFUSED[call]
    with pytest.raises(hfp.PackingError, match=f"^{named}"):
        refused()


NO_MASKS = [["yes"], [None], [[[1], [0]]], [1]]
OTHER_VALUES = [[[1, 2]], [[-1, 1]], [[0.5, 1.0]], [[float("nan"), 1.0]], [[None, 1]], [["0", "1"]]]


@pytest.mark.parametrize("mask", [*NO_MASKS, *OTHER_VALUES], ids=str)
def test_a_mask_of_other_values_than_0_and_1(mask):
    columns = {"input_ids": [[5, 6]], "completion_mask": mask}
    rows = [{name: values[0] for name, values in columns.items()}]
    ways = [lambda: hfp.pack(Dataset.from_dict(columns), STRATEGY), lambda: STRATEGY(columns)]
    if mask in OTHER_VALUES:
        ways.append(lambda: list(hfp.prepare_dataloader(Accelerator(cpu=True), rows, hfp.TokenBudget(8))))
        ways.append(lambda: hfp.PackingCollator()([{**rows[0], "labels": [-100, 6]}]))
    for way in ways:
        with pytest.raises(hfp.PackingError, match="column 'completion_mask': expected "):
            way()


NO_TOKENS = [[1, 0], ["a", "b"], [None, None], [[[1], [2]], [[3]]]]
ONE_ROW = [[[1, 1], 1], [[1, 1], "a"], [[1, 1], [[1]]], [[1, 1], [2**70]]]


@pytest.mark.parametrize("name", ["labels", "attention_mask", "assistant_masks"])
@pytest.mark.parametrize("values", [*NO_TOKENS, *ONE_ROW], ids=str)
def test_columns_that_would_be_made_or_left_out_instead(name, values):
    columns = {"input_ids": [[5, 6], [7]], name: values}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    ways = [lambda: STRATEGY(columns), lambda: list(stream.map(STRATEGY, batched=True))]
    if values in NO_TOKENS:  # others have no type in Arrow
        dataset = Dataset.from_dict(columns)
        ways += [lambda: hfp.pack(dataset, STRATEGY), lambda: dataset.map(STRATEGY, batched=True)]
    for way in ways:
        with pytest.raises(hfp.PackingError, match=f"column '{name}': expected lists of "):
            way()


@pytest.mark.parametrize("row", [np.array([1, 2]), [1, 2]])
def test_a_single_row(row):
    with pytest.raises(hfp.PackingError, match="batch: .* got a single row"):
        STRATEGY({"input_ids": row})
