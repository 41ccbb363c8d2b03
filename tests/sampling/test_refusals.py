"""What is refused before training: arguments, rows that do not fit, fixed shapes, and columns that contradict."""

from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from trainers import Plain
from tree_rows import tree_row

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of, sizes_of_documents, sizes_of_packs


def documents(*lengths):
    return sizes_of_documents(np.array(lengths))


def packs(lengths, offsets, bucket=None):
    return sizes_of_packs(np.array(lengths), np.array(offsets), bucket and np.array(bucket))


def plan(batching, sizes):
    return lambda: batching.plan(sizes, Epoch(0, world_size=4))


def within(batching, *shapes):
    return lambda: batching.within(shapes)


def table(**columns):
    return lambda: sizes_of(datasets.Dataset.from_dict(columns))


def read(*rows):
    return lambda: sizes_of(Plain(rows))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])

    def __len__(self):
        return 3


PICTURES = replace(documents(5, 6, 7), patches=np.array([0, 90, 4]))
ONE = {"input_ids": [1]}
TREE, _ = tree_row([[5, 6, 7], [5, 6, 8, 9], [3]])

REFUSED = [
    (lambda: hfp.TokenBudget(0), "max_tokens"),
    (lambda: hfp.TokenBudget(2.5), "max_tokens"),
    (lambda: hfp.TokenBudget(8, balance="none"), "balance"),
    (lambda: hfp.TokenBudget(8, overflow="cut"), "overflow"),
    (lambda: hfp.TokenBudget(8, linear_cost=-1), "linear_cost"),
    (lambda: hfp.TokenBudget(8, match_documents_per_step=0), "match_documents_per_step"),
    (lambda: hfp.TokenBudget(8, max_documents=0), "max_documents"),
    (lambda: hfp.TokenBudget(8, max_patches=0), "max_patches"),
    (lambda: hfp.TokenBudget(8, seed=-1), "seed"),
    (lambda: hfp.TokenBudget(8, max_ranks_per_document=0), "max_ranks_per_document: expected an integer from 1 to"),
    (lambda: hfp.TokenBudget(2**30, max_ranks_per_document=2), "max_ranks_per_document: .* from 1 to 1, got 2"),
    (
        lambda: hfp.TokenBudget(8, max_ranks_per_document=2, max_patches=9),
        "max_patches: expected None with max_ranks_per_document=2, got 9",
    ),
    (
        lambda: hfp.TokenBudget(8, max_ranks_per_document=2, share_prefixes=True),
        "share_prefixes: expected False with max_ranks_per_document=2, got True",
    ),
    (
        lambda: hfp.TokenBudget(8, max_ranks_per_document=2, max_documents=9),
        "max_documents: .* with max_ranks_per_document=2, got 9",
    ),
    (
        plan(hfp.TokenBudget(8, max_ranks_per_document=2), documents(3, 17)),
        "max_tokens: row 1 has 17 .* a row on 2 ranks",
    ),
    (
        plan(hfp.TokenBudget(50, max_ranks_per_document=2), sizes_of(Plain([TREE] * 4))),
        "max_ranks.* rows of trees, got 2",
    ),
    (lambda: hfp.TokenBudget(8, align_tokens=2.0), "align_tokens: expected an integer from 1"),
    (lambda: hfp.TokenBudget(23, align_tokens=24), "max_tokens: expected at least align_tokens=24, got 23"),
    (lambda: hfp.TokenBudget(8, align_tokens=2, share_prefixes=True), "align_tokens: .* share_prefixes=True"),
    (lambda: hfp.TokenBudget(8, align_tokens=2, max_ranks_per_document=2), "align_tokens: .* max_ranks_per_document=2"),
    (
        lambda: hfp.TokenBudget(8, align_tokens=2, length_schedule=hfp.LengthSchedule(2, 5)),
        "align_tokens: expected 1 with length_schedule=LengthSchedule",
    ),
    (plan(hfp.TokenBudget(50, align_tokens=2), sizes_of(Plain([TREE] * 4))), "align_tokens: .* rows of trees, got 2"),
    (
        plan(hfp.TokenBudget(10, align_tokens=4), documents(9)),
        "max_tokens: row 0 has 9 tokens, .* at most 8 in multiples of 4 .* overflow='split'",
    ),
    (lambda: hfp.BucketBatches(8, align_tokens=16), "tokens_per_batch: expected at least align_tokens=16, got 8"),
    (
        plan(hfp.BucketBatches(8, align_tokens=3), packs([4, 4], [0, 2], [8])),
        "tokens_per_batch: expected at least 9, the capacity of the largest bucket in multiples of 3, got 8",
    ),
    (plan(InOrder(max_tokens=4, align_tokens=3), documents(4)), "tokens: expected at most 3 .* row 0 has 4"),
    (lambda: InOrder(2, max_tokens=8, align_tokens=16), "max_tokens: expected at least align_tokens=16, got 8"),
    (lambda: hfp.BucketBatches(0), "tokens_per_batch"),
    (lambda: hfp.BucketBatches(8, order="long"), "order"),
    (lambda: hfp.BucketBatches(8, cycles=2), "cycles"),
    (lambda: RankBatchSampler(hfp.TokenBudget(8), documents(3, 2)).set_epoch(-1), "epoch"),
    (plan(hfp.TokenBudget(4), documents(3, 9, 2)), "max_tokens: row 1 has 9 tokens.* at most 4 .*overflow='split'"),
    (plan(hfp.TokenBudget(9, max_length=4), documents(3, 9, 2)), "max_length: row 1 .* a document may .* at most 4"),
    (plan(hfp.TokenBudget(9, max_length=4), packs([4, 5], [0, 2])), "max_length: expected None for packed .* got 4"),
    (lambda: hfp.TokenBudget(9, max_length=10), "max_length: expected .* 9, got 10"),
    (plan(InOrder(2, max_length=4), packs([4, 5], [0, 2])), "max_length: expected None for packed .* got 4"),
    (plan(InOrder(2, max_length=4), sizes_of(Plain([TREE] * 4))), "max_length: expected None for packed .* got 4"),
    (plan(hfp.TokenBudget(8, overflow="split"), packs([4, 5], [0, 2])), "max_tokens: row 0 has 9 .* pack into rows"),
    (plan(hfp.TokenBudget(10, max_documents=2), packs([2] * 7, [0, 2, 5, 7])), "max_documents: row 1 has 3 .* 2 "),
    (plan(hfp.TokenBudget(50, max_patches=60), PICTURES), "max_patches: row 1 has 90 patches, .* at most 60 "),
    (
        plan(hfp.TokenBudget(50, max_patches=60), documents(5)),
        "max_patches: expected None for rows of text; .*, got 60",
    ),
    (
        plan(hfp.TokenBudget(8), documents(3, 2, 1, 0)),
        "dataset: .* each of 4 ranks .* got 3 rows, not counting 1 empty",
    ),
    (plan(hfp.BucketBatches(16), packs([32], [0, 1], [32])), "tokens_per_batch: expected at least 32.* got 16"),
    (plan(hfp.BucketBatches(16), documents(3, 4)), "dataset: expected a column 'bucket'"),
    (plan(hfp.BucketBatches(16), packs([8, 9], [0, 1, 2], [8, 8])), "column 'bucket': .* row 1 has 9 tokens .* 8 "),
    (plan(InOrder(max_tokens=4), documents(3, 5)), "tokens: expected at most 4 tokens in each row, but row 1 has 5"),
    (plan(InOrder(max_documents=1), packs([1, 2], [0, 2])), "max_segments: expected at most 1 .* row 0 has 2"),
    (plan(InOrder(1), documents(0, 0)), "dataset: .* each of 1 ranks .* got 0 rows"),
    (within(hfp.TokenBudget(100), 99, 8), "tokens"),
    (within(hfp.BucketBatches(100), 9, 8), "tokens"),
    (within(hfp.TokenBudget(9, max_documents=8), 9, 8), "max_segments"),
    (within(hfp.TokenBudget(100), None, 8), "tokens"),
    (within(hfp.TokenBudget(100), 100, None), "max_segments"),
    (within(hfp.TokenBudget(1), 1, 1), "max_segments"),
    (within(hfp.TokenBudget(9, length_schedule=hfp.LengthSchedule(2, 5)), 9, 8), "length_schedule"),
    (within(hfp.TokenBudget(9, max_ranks_per_document=2), 9, 8), "max_ranks_per_document: expected 1 .* got 2"),
    (within(InOrder(1), 9, 8), "tokens"),
    (lambda: sizes_of(datasets.Dataset.from_dict(ONE).to_iterable_dataset()), "dataset: .* got IterableDataset"),
    (lambda: sizes_of(Stream()), "dataset: .* got Stream"),
    (table(text=["a"]), "column 'input_ids'"),
    (table(seq_lengths=[[3]]), "column 'input_ids'"),
    (table(input_ids=[[1]], position_ids=[[0]]), "dataset: expected a column 'seq_lengths', .* 'position_ids'"),
    (table(input_ids=[[1]], seq_idx=[[0]]), "dataset: expected a column 'seq_lengths', .* 'seq_idx'"),
    (table(input_ids=[[1]], cu_seq_lens_q=[[0, 1]]), "dataset: expected a column 'seq_lengths', .* 'cu_seq_lens_q'"),
    (table(input_ids=["text"]), "column 'input_ids': expected lists of integers, got string"),
    (table(input_ids=[[1]], seq_lengths=[3]), "column 'seq_lengths'"),
    (table(input_ids=[[1]], seq_lengths=[[1.5]]), "column 'seq_lengths'"),
    (table(input_ids=[[1] * 3] * 2, seq_lengths=[[3], [-2]]), "column 'seq_lengths': .* of row 1, got \\[-2"),
    (table(input_ids=[[1] * 3] * 2, seq_lengths=[[3], [2, 2]]), "column 'seq_lengths': .* of row 1, got \\[2, 2"),
    (table(input_ids=[[1]], seq_lengths=[[1]], bucket=[4.0]), "column 'bucket'"),
    (table(input_ids=[[1]] * 2, seq_lengths=[[1]] * 2, bucket=[4, None]), "column 'bucket'"),
    (read([1, 2]), "dataset: expected rows that are mappings, but row 0"),
    (read({"seq_lengths": [1]}), "column 'input_ids'"),
    (read({"input_ids": None}), "column 'input_ids', row 0"),
    (read({"input_ids": torch.ones(1, 3)}), "column 'input_ids', row 0"),
    (read({"input_ids": [[1, 2, 3]]}), "column 'input_ids', row 0"),
    (read({"input_ids": "text"}), "column 'input_ids', row 0"),
    (read(ONE | {"seq_lengths": [1]}, ONE), "column 'seq_lengths'.* row 1"),
    (read(ONE | {"labels": [1]}, ONE), "column 'labels'.* row 1"),
    (read(ONE | {"completion_mask": [0]}, ONE), "column 'completion_mask'.* row 1"),
    (read(ONE, ONE | {"assistant_masks": [0]}), "column 'assistant_masks'.* row 1"),
    (read({"input_ids": [1, 2, 3], "seq_lengths": 3}), "column 'seq_lengths', row 0"),
    (read({"input_ids": [1, 2, 3], "seq_lengths": [2, 2]}), "column 'seq_lengths': .* of row 0, got \\[2, 2"),
    (read({"input_ids": [1, 2, 3], "seq_lengths": [1.5, 1.5]}), "column 'seq_lengths', row 0"),
    (read(ONE | {"seq_lengths": [1], "bucket": None}), "column 'bucket', row 0"),
    (read(TREE, TREE | {"segment_lengths": [1, 1, 2, 1]}), "column 'segment_lengths': .* row 1"),
    (read(TREE, TREE | {"parents": [-1, 0, 0]}), "column 'parents': .* row 1"),
    (read(TREE, TREE | {"parents": [-1, 0, 3, -1]}), "column 'parents': .* row 1"),
    (read(TREE, TREE | {"ends": [1, 2, 4]}), "column 'ends': .* row 1"),
    (read(TREE, TREE | {"ends": [1, -1, 3]}), "column 'ends': .* row 1"),
]


@pytest.mark.parametrize(("call", "argument"), REFUSED, ids=[argument for _, argument in REFUSED])
def test_refused(call, argument):
    with pytest.raises(PackingError, match=f"^{argument}"):
        call()
