"""Gradients, losses and evaluations do not depend on how a batch is split; every document is seen once an epoch.

On one process; test_processes.py has more of them.
"""

from collections import Counter

import pytest
import torch
from processes import epochs_seen, losses, read
from training_by_hand import gradients_of_a_padded_batch, largest_difference
from training_process import documents, train

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed

NUMBER = 24


@pytest.mark.parametrize("through", ["trainer", "sft", "loop"])
def test_every_document_once_in_every_epoch(tmp_path, through):
    train(tmp_path, through=through, documents=NUMBER, accumulation=2)
    counts, orders = epochs_seen(tmp_path, ranks=1)
    rows = documents(NUMBER)
    trained = zip(rows["input_ids"], rows["labels"], strict=True)
    expected = Counter(tuple(ids) for ids, labels in trained if set(labels[1:]) != {-100})
    assert list(counts) == [0, 1, 2]
    assert all(count == expected for count in counts.values())
    assert len({tuple(order) for order in orders.values()}) == 3


@pytest.mark.parametrize("through", ["trainer", "loop"])
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_the_gradient_does_not_depend_on_the_split(tmp_path, loss, through):
    expected, value = gradients_of_a_padded_batch(documents(NUMBER), loss)
    for accumulation, max_tokens in [(1, 1000), (4, 150)]:
        folder = tmp_path / str(accumulation)
        settings = {"accumulation": accumulation, "max_tokens": max_tokens, "match_documents_per_step": NUMBER}
        settings |= {"epochs": 1, "dtype": "float64", "optimizer": "sgd"}
        train(folder, through=through, loss=loss, documents=NUMBER, **settings)
        assert len(read(folder, "seen", 0)) == accumulation
        assert largest_difference(torch.load(folder / "gradients.pt"), expected) <= 1e-12
        assert losses(folder)[1] == pytest.approx(value, rel=1e-6)


def test_the_gradient_of_sft_trainer(tmp_path):
    """Its fused head computes the loss in float32."""
    expected, _ = gradients_of_a_padded_batch(documents(NUMBER), "sequence")
    settings = {"accumulation": 4, "max_tokens": 150, "match_documents_per_step": NUMBER, "epochs": 1}
    train(tmp_path, through="sft", loss="sequence", documents=NUMBER, dtype="float64", optimizer="sgd", **settings)
    assert largest_difference(torch.load(tmp_path / "gradients.pt"), expected) <= 1e-5


def test_evaluation_of_a_loop_is_the_same_at_any_batch_size(tmp_path):
    settings = {"epochs": 1, "optimizer": "sgd", "dtype": "float64", "match_documents_per_step": NUMBER}
    train(tmp_path, through="loop", documents=NUMBER, max_tokens=1000, eval_batch_sizes=[1, 2, 4], **settings)
    found = [line["loss"] for line in read(tmp_path, "evaluated", 0)]
    assert len(found) == 3
    assert max(found) - min(found) <= 1e-9 * max(found)
