"""The micro-batches of one rank: epochs, skipping, resuming, and what is said of them."""

import numpy as np
import pytest
from plain_dataset import Plain

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.sampler import SLOTS, RankBatchSampler
from hf_packing.sampling.sizes import sizes_of, sizes_of_documents


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
    for name, value in {"plans": 0, SLOTS: 3, "dataset": "other", "batching": "other"}.items():
        with pytest.raises(PackingError, match=f"{name}: expected {value!r}, as when the checkpoint was saved"):
            sampler.check_can_resume(sampler.plan_inputs() | {name: value})
