"""What batchings refuse: bad arguments, rows that do not fit, and fixed shapes that are too small."""

from dataclasses import replace

import numpy as np
import pytest

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of_documents, sizes_of_packs


def documents(*lengths):
    return sizes_of_documents(np.array(lengths))


def packs(lengths, offsets, bucket=None):
    return sizes_of_packs(np.array(lengths), np.array(offsets), bucket and np.array(bucket))


ARGUMENTS = [
    (hfp.TokenBudget, {"max_tokens": 0}),
    (hfp.TokenBudget, {"max_tokens": 2.5}),
    (hfp.TokenBudget, {"balance": "none"}),
    (hfp.TokenBudget, {"overflow": "cut"}),
    (hfp.TokenBudget, {"linear_cost": -1}),
    (hfp.TokenBudget, {"match_documents_per_step": 0}),
    (hfp.TokenBudget, {"max_documents": 0}),
    (hfp.TokenBudget, {"max_patches": 0}),
    (hfp.TokenBudget, {"seed": -1}),
    (hfp.BucketBatches, {"tokens_per_batch": 0}),
    (hfp.BucketBatches, {"order": "long"}),
    (hfp.BucketBatches, {"cycles": 2}),
]


@pytest.mark.parametrize(("batching", "argument"), ARGUMENTS, ids=str)
def test_arguments(batching, argument):
    ((name, _),) = argument.items()
    first = {hfp.TokenBudget: "max_tokens", hfp.BucketBatches: "tokens_per_batch"}[batching]
    with pytest.raises(PackingError, match=f"^{name}: expected"):
        batching(**{first: 8} | argument)


PICTURES = replace(documents(5, 6, 7), patches=np.array([0, 90, 4]))

ROWS = [
    (hfp.TokenBudget(4), documents(3, 9, 2), "max_tokens: row 1 has 9 tokens.* at most 4 .*overflow='split'"),
    (hfp.TokenBudget(8, overflow="split"), packs([4, 5], [0, 2]), "max_tokens: row 0 has 9 tokens.* pack into rows"),
    (hfp.TokenBudget(10, max_documents=2), packs([2] * 7, [0, 2, 5, 7]), "max_documents: row 1 has 3 documents.* 2 "),
    (hfp.TokenBudget(50, max_patches=60), PICTURES, "max_patches: row 1 has 90 patches, .* at most 60 .*smaller pic"),
    (hfp.TokenBudget(50, max_patches=60), documents(5), "max_patches: expected None for rows of text, got 60"),
    (hfp.TokenBudget(8), documents(3, 2, 1, 0), "dataset: .* each of 4 ranks, got 3 rows, not counting 1 empty"),
    (hfp.BucketBatches(16), packs([32], [0, 1], [32]), "tokens_per_batch: expected at least 32.* got 16"),
    (hfp.BucketBatches(16), documents(3, 4), "dataset: expected a column 'bucket'"),
    (hfp.BucketBatches(16), packs([8, 9], [0, 1, 2], [8, 8]), "column 'bucket': .* row 1 has 9 tokens .* 8 tokens"),
    (InOrder(max_tokens=4), documents(3, 5), "tokens: expected at most 4 tokens in each row, but row 1 has 5"),
    (InOrder(max_documents=1), packs([1, 2], [0, 2]), "max_segments: expected at most 1 documents.* row 0 has 2"),
]


@pytest.mark.parametrize(("batching", "sizes", "message"), ROWS)
def test_rows(batching, sizes, message):
    with pytest.raises(PackingError, match=f"^{message}"):
        batching.plan(sizes, Epoch(0, world_size=4))


SHAPES = [
    (hfp.TokenBudget(100), (99, 8), "tokens"),
    (hfp.BucketBatches(100), (9, 8), "tokens"),
    (hfp.TokenBudget(9, max_documents=8), (9, 8), "max_segments"),
    (hfp.TokenBudget(100), (None, 8), "tokens"),
    (hfp.TokenBudget(100), (100, None), "max_segments"),
    (hfp.TokenBudget(1), (1, 1), "max_segments"),
    (hfp.TokenBudget(9, length_schedule=hfp.LengthSchedule(2, 5)), (9, 8), "length_schedule"),
    (InOrder(1), (9, 8), "tokens"),
]


@pytest.mark.parametrize(("batching", "shapes", "argument"), SHAPES)
def test_fixed_shapes(batching, shapes, argument):
    with pytest.raises(PackingError, match=f"^{argument}: expected"):
        batching.within(shapes)


def test_an_epoch_below_zero():
    sampler = RankBatchSampler(hfp.TokenBudget(8), documents(3, 2))
    with pytest.raises(PackingError, match="epoch: expected an integer from 0"):
        sampler.set_epoch(-1)
