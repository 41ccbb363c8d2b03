"""Log-probabilities of documents, in packed rows and in rows of trees, are those of each document alone."""

from functools import cache

import pytest
import torch
from chunks import chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched
from tiny_models import build
from tree_oracle import gradients, losses_alone, oracle, patched_with_stock
from tree_rows import labeled_documents, tree_row

import hf_packing as hfp
from hf_packing.training.losses import with_share

DOCUMENTS = [[11, 5, 9, 7, 8], [11, 5, 9, 7, 21, 3], [11, 5], [11, 5, 9, 7, 8], [50, 51], [77]]
LABELS = [[-100, -100, 9, 7, 8], [-100, 5, -100, -100, 21, 3], [-100, 5], [-100] * 4 + [8], [-100, -100], [77]]

KINDS = {"oracle": oracle, "patched": patched_with_stock}


@cache
def model_of(kind):
    return KINDS[kind]("Llama")


def sums_alone(model, documents, labels):
    return torch.stack([-each.sum() for each in losses_alone(model, documents, labels)])


def check(found, expected, model, factors):
    """Compare the results, and the gradients of a sum in which each document has a factor of its own."""
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    (expected * factors).sum().backward()
    wanted = gradients(model)
    (found * factors).sum().backward()
    for name, each in gradients(model).items():
        assert torch.allclose(each, wanted[name], rtol=1e-10, atol=1e-12), name


def of_size(size, call, model, batch):
    if size is None:
        return call(model, batch)
    with chunks_of(size, model):
        return call(model, batch)


@pytest.mark.parametrize("size", [None, 1, 3], ids=lambda size: f"chunks of {size}")
@pytest.mark.parametrize("kind", KINDS)
def test_trees(size, kind):
    model = model_of(kind)
    row, order = tree_row(DOCUMENTS, LABELS)
    batch = hfp.PackingCollator()([row, row])
    expected = sums_alone(model, DOCUMENTS, LABELS)[[*order, *order]]
    assert (expected == 0).sum() == 4 < len(expected)
    with torch.no_grad():
        assert torch.allclose(of_size(size, hfp.document_logps, model, batch), expected, rtol=1e-12)
    found = of_size(size, hfp.document_logps, model, batch)
    check(found, expected, model, torch.linspace(-1, 2, 12, dtype=torch.float64))


@settings(max_examples=20)
@given(labeled_documents(tokens=5), st.sampled_from([None, 1, 2]))
def test_random_trees(case, size):
    model = model_of("oracle")
    row, order = tree_row(*case)
    found = of_size(size, hfp.document_logps, model, hfp.PackingCollator()([row]))
    expected = sums_alone(model, *case)[order]
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [None, 1, 3], ids=lambda size: f"chunks of {size}")
@pytest.mark.parametrize("shapes", [{}, {"tokens": 30, "max_segments": 9}], ids=str)
def test_packed_documents(size, shapes):
    model = model_of("patched")
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(DOCUMENTS, LABELS, strict=True)]
    batch = hfp.PackingCollator(**shapes)(rows)
    expected = sums_alone(model, DOCUMENTS, LABELS)
    found = of_size(size, hfp.document_logps, model, batch)
    check(found, expected, model, torch.linspace(-1, 2, 6, dtype=torch.float64))


def test_scores_and_batches_of_prepare_dataloader():
    model = patched("Llama", torch.float64)
    batch = hfp.PackingCollator()([{"input_ids": each} for each in DOCUMENTS])
    with torch.no_grad():
        found = hfp.document_logps(model, batch)
        planned = with_share(batch, "sequence", torch.tensor(3.0), keep_labels=False)
        assert torch.equal(hfp.document_logps(model, planned), found)
    scores = hfp.score(model, DOCUMENTS, progress=False).log_likelihood
    assert found.tolist() == pytest.approx(scores.tolist(), rel=1e-12)


def test_float32_model():
    found = hfp.document_logps(patched("Llama"), hfp.PackingCollator()([{"input_ids": each} for each in DOCUMENTS]))
    assert found.dtype == torch.float32
    assert found.shape == (len(DOCUMENTS),)
    assert found.requires_grad


def kept_for_the_backward_pass(model, batch):
    """The number of values of all logits that are kept, whole or in chunks of 4 tokens."""
    kept, weight = [], model.lm_head.weight

    def note(tensor):
        if tensor.shape[-1:] == (128,) and tensor.data_ptr() != weight.data_ptr():
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hfp.document_logps(model, batch)
    return sum(kept)


def test_logits_of_chunks_are_not_kept_for_the_backward_pass():
    model = patched("Llama", torch.float64)
    for layer in (model.lm_head, model.model.embed_tokens):
        layer.requires_grad_(False)
    batch = hfp.PackingCollator()([{"input_ids": [*range(3, 60)]}])
    assert kept_for_the_backward_pass(model, batch) >= 57 * 128
    with chunks_of(4, model):
        hfp.document_logps(model, batch)  # the first call tests the model
        assert kept_for_the_backward_pass(model, batch) < 57 * 128


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "batch: expected a batch from prepare_dataloader or PackingCollator, got list"),
        ({"input_ids": torch.tensor([[1, 2]])}, "got the keys: input_ids"),
        ({"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[1, 2]])}, "got the keys: input_ids, labels"),
        ({}, "got the keys: none"),
    ],
    ids=["list", "no labels", "no borders", "nothing"],
)
def test_a_wrong_batch(batch, message):
    with pytest.raises(hfp.PackingError, match=message):
        hfp.document_logps(patched("Llama"), batch)


def test_a_model_that_is_not_patched():
    with pytest.raises(hfp.PackingError, match="model: expected a model patched by patch_model"):
        hfp.document_logps(build("Llama"), hfp.PackingCollator()([{"input_ids": [1, 2]}]))
