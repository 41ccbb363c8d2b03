"""Batches that are filled up to fixed shapes or to multiples: documents, losses and routers notice nothing of it."""

from dataclasses import replace

import pytest
import torch
from aligned_layers import with_aligned_layers
from forms import check_gradients
from leaky_models import Behind, MixesGradients
from patched_models import patched, patched_tiny
from tiers import fast_only, slow
from tiny_models import build
from training_by_hand import DOCUMENTS

import hf_packing as hfp
from hf_packing.attention import prove_on_batch, sees_labels
from hf_packing.errors import PackingError
from tools.tiny_model import tiny_model

TOKENS = sum(map(len, DOCUMENTS))
ROWS = [{"input_ids": tokens} for tokens in DOCUMENTS]


def outputs_and_gradients(model, collator, rows):
    model.zero_grad()
    outputs = model(**collator(rows))
    outputs.loss.backward()
    return outputs, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def check_that_filling_changes_nothing(model, collator, rows=ROWS, close=1e-12):
    """Loss and gradients are the model's own, with everything that it adds to the cross-entropy."""
    any_shape = replace(collator, tokens=None, max_segments=None, align_tokens=1)
    expected, gradients = outputs_and_gradients(model, any_shape, rows)
    found, found_gradients = outputs_and_gradients(model, collator, rows)
    is_real = collator(rows)["seq_idx"][0] >= 0
    assert not is_real.all()
    assert torch.allclose(found.logits[:, is_real], expected.logits, atol=close)
    in_float32 = found.get("aux_loss") is not None  # as transformers computes it
    assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-6 if in_float32 else close)
    if in_float32:
        assert found.aux_loss.item() > 1
        assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), abs=1e-6)
    check_gradients(found_gradients, gradients, close)


FILLED = [
    {"tokens": TOKENS + 100, "max_segments": 9},
    {"align_tokens": 64},
    {"align_tokens": 12},
    {"align_tokens": 8, "tokens": 64, "max_segments": 9},
]
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
"""Their layers and their loss for load balancing see every token."""
MODELS = {
    "windows": lambda: patched("Mistral", torch.float64),
    "learned positions": lambda: patched("GPT2", torch.float64, n_positions=64),
    "latent attention": lambda: patched("DeepseekV3", torch.float64),
    "sinks and experts": lambda: patched("GptOss", torch.float64, **EXPERTS),
    "experts": lambda: patched("Mixtral", torch.float64, **EXPERTS),
    "qwen3_moe": lambda: patched_tiny("qwen3_moe", "causal", torch.float64, experts_implementation="eager", **EXPERTS),
    "olmoe": lambda: patched_tiny("olmoe", "causal", torch.float64, experts_implementation="eager", **EXPERTS),
    "mamba": lambda: patched_tiny("mamba", "causal", torch.float64),
    "mamba2": lambda: patched_tiny("mamba2", "causal", torch.float64),
    "jamba": lambda: patched_tiny("jamba", "causal", torch.float64, experts_implementation="eager", **EXPERTS),
    "qwen3_next": lambda: patched_tiny(
        "qwen3_next", "causal", torch.float64, experts_implementation="eager", **EXPERTS
    ),
}
IN_FLOAT32 = {"mamba": 1e-5, "mamba2": 1e-5, "jamba": 1e-5, "qwen3_next": 1e-5, "latent attention": 1e-6}
"""Models whose scans or routers compute in float32, and how close they are."""


@pytest.mark.parametrize("filled", FILLED, ids=str)
@pytest.mark.parametrize("name", fast_only(MODELS, "windows", "experts", "mamba"))
def test_documents_in_a_filled_batch(name, filled):
    check_that_filling_changes_nothing(MODELS[name](), hfp.PackingCollator(**filled), close=IN_FLOAT32.get(name, 1e-12))


def test_tensors_into_which_one_batch_after_another_is_written():
    """Such buffers keep the max_length_q of the first batch, an int that knows its lengths."""
    model, collator = patched("Llama", torch.float64), hfp.PackingCollator(tokens=64, max_segments=9)
    buffers, batch = collator(ROWS), collator(ROWS[::-1])
    for each in (buffers, buffers, batch):
        expected = model(**each).logits
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            buffers[name].copy_(value)
    assert torch.equal(model(**buffers).logits, expected)


def test_a_rotary_embedding_that_changes_with_the_largest_position():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = hfp.patch_model(build("Llama", torch.float64, rope_parameters=rope, max_position_embeddings=64))
    for filled in FILLED:
        check_that_filling_changes_nothing(model, hfp.PackingCollator(**filled))
    longer = {name: value for name, value in hfp.PackingCollator()(ROWS).items() if name in ("input_ids", "labels")}
    with torch.no_grad():  # the longest of the padding's positions would have changed the documents' results
        assert not torch.allclose(
            model(**longer, position_ids=torch.arange(TOKENS)[None] % 20).logits,
            model(**longer, position_ids=torch.cat([torch.arange(20), 80 + torch.arange(TOKENS - 20)])[None]).logits,
        )


def test_a_masked_language_model():
    rows = [{"input_ids": tokens, "labels": [9, *[-100] * (len(tokens) - 1)]} for tokens in DOCUMENTS]
    collator = hfp.PackingCollator(keep_first_labels=True, tokens=TOKENS + 17, max_segments=9)
    for filled in (collator, hfp.PackingCollator(keep_first_labels=True, align_tokens=16)):
        model = patched_tiny("bert", "masked", torch.float64).train()
        check_that_filling_changes_nothing(model, filled, rows)
    model = patched_tiny("bert", "masked", torch.float64).train()
    copied = [{"input_ids": tokens, "labels": tokens} for tokens in DOCUMENTS]
    with pytest.raises(PackingError, match="labels: expected labels that differ from input_ids, got 29 labels"):
        model(**collator(copied))


def test_a_loss_of_routers_that_may_not_know_the_mask_is_refused():
    model = build("Mixtral", torch.float64, **EXPERTS)
    usual = type(model)

    class Other(usual):
        def forward(self, *args, **inputs):
            return usual.forward(self, *args, **inputs)

    model.__class__ = Other
    hfp.patch_model(model)
    assert model(**hfp.PackingCollator()(ROWS)).aux_loss > 1
    with pytest.raises(PackingError, match="aux_loss: expected none with batches that are filled up, since Other"):
        model(**hfp.PackingCollator(align_tokens=64)(ROWS))


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_the_proof_on_a_batch(name):
    """Filled tokens are of no document, also if they are more than the longest one has."""
    model = patched(name)
    for filled in FILLED:
        proof = prove_on_batch(model, hfp.PackingCollator(**filled)(ROWS))
        assert proof.problem == ""
        assert (proof.tokens, proof.documents) == (TOKENS, len(ROWS))


TAKE_MULTIPLES = {
    "causal": lambda: build("Llama", torch.float64),
    "experts": lambda: tiny_model("qwen3_moe", "causal", torch.float64, experts_implementation="eager"),
    "masked": lambda: tiny_model("bert", "masked", torch.float64, max_position_embeddings=512),
}


@pytest.mark.parametrize(
    ("name", "multiple", "in_forward"),
    [("causal", 16, True), slow("experts", 128, False), slow("masked", 32, True), slow("masked", 16, False)],
)
def test_layers_that_take_only_multiples_are_proven_as_others(name, multiple, in_forward):
    make = TAKE_MULTIPLES[name]
    model = hfp.patch_model(with_aligned_layers(make(), multiple, in_forward))
    report = hfp.check_isolation(model, collator=lambda rows: {**hfp.PackingCollator()(rows), "use_cache": False})
    assert (report.isolated, report.modes, report.unproven) == (True, ("evaluation", "training"), "")
    assert report.route.unproven == ""
    assert report.max_gradient_leak < 1e-12
    assert sees_labels(model) == (name == "masked")
    batch = hfp.PackingCollator(align_tokens=multiple)(ROWS)
    proof = prove_on_batch(model, batch)
    assert (proof.problem, proof.gradients) == ("", True)
    assert proof == prove_on_batch(hfp.patch_model(make()), batch)
    with pytest.raises((RuntimeError, PackingError), match=f"expected a multiple of {multiple} tokens"):
        model(**hfp.PackingCollator()(ROWS)).loss.backward()


def counted(hidden):
    return hidden + torch.arange(hidden.shape[1])[:, None] / 100


@pytest.mark.slow
def test_what_such_layers_do_not_hide():
    """An embedding by the place in the row changes no document if another one is replaced."""
    for leak, message in ((counted, "document's logits differ"), (MixesGradients(), "gradients of one document reach")):
        model = with_aligned_layers(build("Llama", torch.float64))
        model.model.layers[1].mlp = Behind(model.model.layers[1].mlp, leak)
        with pytest.raises(hfp.ModelNotSupportedError, match=message):
            hfp.patch_model(model)
    model = with_aligned_layers(patched("Llama", torch.float64))
    model.model.layers[1].mlp = Behind(model.model.layers[1].mlp, counted)
    problem = prove_on_batch(model, hfp.PackingCollator(align_tokens=16)(ROWS)).problem
    assert problem.endswith("and the document alone")


@pytest.mark.slow
def test_modules_by_segment_with_such_layers():
    """They are refused, since a document alone is no multiple."""
    with pytest.raises(
        hfp.ModelNotSupportedError, match=r"AlignedLinear .*mixer\.in_proj\) cannot run on a single seg"
    ):
        hfp.patch_model(with_aligned_layers(tiny_model("mamba", "causal", num_hidden_layers=1)))
    model = with_aligned_layers(patched_tiny("mamba", "causal", num_hidden_layers=1))
    with pytest.raises(hfp.ModelNotSupportedError, match="expected a multiple of 16 tokens"):
        model(**hfp.PackingCollator(align_tokens=16)(ROWS))
