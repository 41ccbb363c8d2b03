"""Batches of fixed shapes: documents, losses and routers notice nothing of the padding, in any kind of model."""

from dataclasses import replace

import pytest
import torch
from forms import check_gradients
from patched_models import patched, patched_tiny
from tiny_models import build
from training_by_hand import DOCUMENTS

import hf_packing as hfp
from hf_packing.attention import prove_on_batch
from hf_packing.errors import PackingError

TOKENS = sum(map(len, DOCUMENTS))
ROWS = [{"input_ids": tokens} for tokens in DOCUMENTS]


def outputs_and_gradients(model, collator, rows):
    model.zero_grad()
    outputs = model(**collator(rows))
    outputs.loss.backward()
    return outputs, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check_that_padding_changes_nothing(model, collator, padding, rows=ROWS):
    """Loss and gradients are the model's own, with everything that it adds to the cross-entropy."""
    any_shape = replace(collator, tokens=None, max_segments=None)
    expected, gradients = outputs_and_gradients(model, any_shape, rows)
    found, found_gradients = outputs_and_gradients(model, collator, rows)
    assert found.logits.shape[1] == TOKENS + padding
    assert torch.allclose(found.logits[:, :TOKENS], expected.logits, atol=1e-12)
    assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-12)
    check_gradients(found_gradients, gradients)


def test_a_rotary_embedding_that_changes_with_the_largest_position():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = hfp.patch_model(build("Llama", torch.float64, rope_parameters=rope, max_position_embeddings=64))
    check_that_padding_changes_nothing(model, hfp.PackingCollator(tokens=TOKENS + 100, max_segments=5), 100)
    longer = {name: value for name, value in hfp.PackingCollator()(ROWS).items() if name in ("input_ids", "labels")}
    with torch.no_grad():  # the longest of the padding's positions would have changed the documents' results
        assert not torch.allclose(
            model(**longer, position_ids=torch.arange(TOKENS)[None] % 20).logits,
            model(**longer, position_ids=torch.cat([torch.arange(20), 80 + torch.arange(TOKENS - 20)])[None]).logits,
        )


def test_a_masked_language_model():
    rows = [{"input_ids": tokens, "labels": [9, *[-100] * (len(tokens) - 1)]} for tokens in DOCUMENTS]
    collator = hfp.PackingCollator(keep_first_labels=True, tokens=TOKENS + 17, max_segments=9)
    model = patched_tiny("bert", "masked", torch.float64).train()
    check_that_padding_changes_nothing(model, collator, 17, rows)
    model = patched_tiny("bert", "masked", torch.float64).train()
    copied = [{"input_ids": tokens, "labels": tokens} for tokens in DOCUMENTS]
    with pytest.raises(PackingError, match="labels: expected labels that differ from input_ids, got 29 labels"):
        model(**collator(copied))


def test_routers_are_refused():
    """The loss for load balancing would also count the padding."""
    model = patched("Mixtral", torch.float64)
    full, filled = (hfp.PackingCollator(tokens=TOKENS + more, max_segments=9)(ROWS) for more in (0, 60))
    assert model(**full, output_router_logits=True).aux_loss > 1
    with pytest.raises(PackingError, match="aux_loss: expected none with batches of fixed shapes, since Mixtral"):
        model(**filled, output_router_logits=True)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_the_proof_on_a_batch(name):
    model = patched(name)
    proof = prove_on_batch(model, hfp.PackingCollator(tokens=TOKENS + 17, max_segments=9)(ROWS))
    assert proof.problem == ""
    assert (proof.tokens, proof.documents) == (TOKENS + 17, len(ROWS) + 1)
