"""Losses and their weights, beside sums over documents one by one."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from whole_rows import bert

import hf_packing as hfp
from hf_packing.training.step_counts import StepCounts, micro_batch_counts


def test_a_token_classifiers_own_loss():
    """Of a packed batch, it is the mean over the labels of the documents, the first ones too."""
    stock = bert("TokenClassification", num_labels=3).eval()
    model = hfp.patch_model(copy.deepcopy(stock))
    rows = [{"input_ids": [5, 6, 3], "labels": [2, -100, 1]}, {"input_ids": [9, 12, 7, 8], "labels": [0, 0, 2, -100]}]
    alone = [
        F.cross_entropy(stock(torch.tensor([row["input_ids"]])).logits[0], torch.tensor(row["labels"]), reduction="sum")
        for row in rows
    ]
    found = model(**hfp.PackingCollator(keep_first_labels=True)(rows)).loss
    assert float(found.detach()) == pytest.approx(float(sum(alone).detach()) / 5, rel=1e-12)
    without_first = model(**hfp.PackingCollator()(rows)).loss
    assert abs(float(without_first.detach()) - float(found.detach())) > 1e-3


@settings(max_examples=30)
@given(st.lists(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=2), min_size=1))
def test_facts_of_steps_on_two_ranks(steps):
    seen = StepCounts()
    for ranks in steps:
        batches = [hfp.PackingCollator()([{"input_ids": [5] * length} for length in lengths]) for lengths in ranks]
        seen.add(torch.stack([micro_batch_counts([batch], "token") for batch in batches]))
    found = seen.take(50)
    tokens = [[sum(lengths) for lengths in ranks] for ranks in steps]
    squares = [[sum(n * n for n in lengths) for lengths in ranks] for ranks in steps]
    assert found["packing_efficiency"] == pytest.approx(np.mean(tokens) / 50)
    assert found["documents_per_step"] == pytest.approx(sum(len(own) for ranks in steps for own in ranks) / len(steps))
    assert found["tokens_per_step"] == pytest.approx(np.sum(tokens) / len(steps))
    assert found["token_utilization"] == pytest.approx(np.mean([np.mean(step) / max(step) for step in tokens]))
    assert found["attention_utilization"] == pytest.approx(np.mean([np.mean(step) / max(step) for step in squares]))
    assert seen.take(50) == {}
