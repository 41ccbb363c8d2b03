"""Isolation proven on a real batch: planted leaks are found and named, and the model is left as it was."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from leaky_models import LEAKS, NOT_NAMED, Behind, NormOfTokens, leaky
from model_inputs import documents
from model_state import state_of
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build, enable_checkpointing
from torch._dynamo.utils import counters
from training_by_hand import batch_of

import hf_packing as hfp
from hf_packing.attention import prove_on_batch
from hf_packing.attention.batch_proof import BatchCase, sampled_documents
from hf_packing.attention.kinds.packed import read_layout

LENGTHS = (200, 40, 200, 7, 40, 120, 210, 33)
SHORT = (30, 17, 30, 7, 20, 30, 55, 45, 12, 32, 17, 17)


def batch_with(lengths=LENGTHS, seed=0):
    return batch_of(documents(seed, lengths))


@pytest.mark.parametrize("regime", fast_only(sorted(LEAKS), "distance", "gradients", "segments"))
def test_a_leak_is_found_and_named(regime):
    model, module = leaky(regime)
    hfp.patch_model(model)  # three short documents do not show it
    with torch.autocast("cpu", torch.bfloat16, enabled=regime == "autocast"):
        proof = prove_on_batch(model, batch_with())
    assert NOT_NAMED.get(regime, f"the difference begins in {module}") in proof.problem
    assert ("begins in" in proof.problem) == (regime not in NOT_NAMED)
    assert str(proof).startswith("not isolated on 8 documents of up to 210 tokens, 850 in all, in training mode and ")


def test_a_norm_that_is_frozen_stays_frozen():
    model = patched()
    model.model.layers[0].mlp = torch.nn.Sequential(NormOfTokens(), model.model.layers[0].mlp)
    norm = model.train().model.layers[0].mlp[0].norm.eval()
    assert prove_on_batch(model, batch_with()).problem == ""
    assert model.training
    assert not norm.training
    norm.train()
    assert "layers.0.mlp" in prove_on_batch(model, batch_with()).problem


STOCK = ["llama", "mixtral", "gemma2", "gpt_oss", "mamba2", "jamba", "bart", "roberta", "qwen3_next", "deepseek_v3"]
STOCK += ["gpt2", "falcon", "bloom", "olmo2", "phi3", "granitemoehybrid", "lfm2", "minimax", "modernbert", "rwkv"]


HALF = torch.bfloat16
PROVEN = [(name, dtype, training) for name in STOCK for dtype in (torch.float32, HALF) for training in (True, False)]


@pytest.mark.parametrize(
    ("architecture", "dtype", "training"), fast_only(PROVEN, ("mixtral", HALF, True), ("mamba2", HALF, False))
)
def test_stock_models_are_proven(architecture, dtype, training):
    model = patched_tiny(architecture, "masked" if "bert" in architecture else "causal").to(dtype)
    proof = prove_on_batch(model, batch_with(SHORT), training)
    assert proof.problem == ""
    assert len(proof.alone) >= 2
    assert proof.gradients == training


def test_nothing_is_left_behind():
    model = patched().train()
    model.model.register_buffer("seen", torch.zeros(1))
    model.model.register_forward_pre_hook(lambda module, _: module.seen.add_(1) and None)
    model.lm_head.eval()
    before = state_of(model)
    assert prove_on_batch(model, batch_with()).problem == ""
    assert state_of(model) == before


def test_dropout_does_not_hide_a_leak_and_causes_none():
    model = patched()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert prove_on_batch(model, batch_with()).problem == ""
    assert (model.config.attention_dropout, model.model.layers[0].self_attn.attention_dropout) == (0.5, 0.5)
    model, module = leaky("training")
    model.model.layers[1].self_attn.attention_dropout = 0.5
    assert module in prove_on_batch(hfp.patch_model(model), batch_with()).problem


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model = patched().train()
    enable_checkpointing(model, use_reentrant=reentrant)
    model.enable_input_require_grads()
    proof = prove_on_batch(model, batch_with())
    assert proof.problem == ""
    assert proof.gradients != reentrant  # autograd.grad does not work with the reentrant kind


@pytest.mark.survey
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_is_proven_as_it_is_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(patched().train(), backend="aot_eager")
    proof = prove_on_batch(compiled, batch_with())
    assert (proof.problem, proof.gradients) == ("", True)
    torch._dynamo.reset()
    counters.clear()
    torch.compile(patched(), backend="eager")(**batch_with())
    assert counters["stats"]["unique_graphs"] == 1, "what torch knows of compiled code was restored, too"
    model, module = leaky("distance")
    compiled = torch.compile(hfp.patch_model(model), backend="aot_eager")
    assert module in prove_on_batch(compiled, batch_with()).problem


def test_a_model_that_is_not_patched():
    batch = batch_with()
    assert prove_on_batch(build("Llama", use_cache=False), batch).problem == ""
    problem = prove_on_batch(build("Llama", use_cache=True), batch).problem
    assert problem.endswith("the difference begins in LlamaAttention (model.layers.0.self_attn)")


def test_check_isolation_of_a_batch():
    batch = batch_with()
    report = hfp.check_isolation(patched(), batch=batch)
    assert (report.isolated, report.modes, report.max_leak) == (True, ("evaluation", "training"), 0)
    assert report.reason.startswith(
        "8 documents of up to 210 tokens, 850 in all, in training mode and float32; no document changes the"
    )
    alone = "documents of 33, 40, 200 tokens are the same alone, longer ones did not run alone"
    assert report.reason.endswith(f"; {alone}; kernel: exact attention, segment by segment")
    model, module = leaky("training")
    report = hfp.check_isolation(hfp.patch_model(model), batch=batch)
    assert (report.isolated, report.modes) == (False, ("training",))
    assert module in report.reason


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (batch_with([9]), {}, "expected several documents, got one document of 9 tokens"),
        ({"position_ids": torch.arange(4)[None]}, {}, "expected input_ids, got position_ids"),
        (batch_with(), {"rows": 2}, "expected no other argument"),
    ],
)
def test_batches_that_prove_nothing_are_refused(batch, options, message):
    with pytest.raises(hfp.PackingError, match=f"batch: {message}"):
        hfp.check_isolation(patched(), batch=batch, **options)


def test_documents_of_one_token_id_are_replaced_too():
    assert prove_on_batch(patched(), batch_of([[5] * 9, [5] * 4, [5] * 30])).problem == ""


def replaced_of(number):
    return BatchCase(patched(), batch_with([1] * number), False, read_layout).replacements[0]


def test_a_leak_at_any_distance_reaches_a_document_that_is_kept():
    assert replaced_of(3) == [0, 2]
    replaced = set(replaced_of(64))
    kept = set(range(64)) - replaced
    assert len(replaced) == 32
    for distance in range(1, 32):
        assert any(index + distance in kept for index in replaced)
        assert any(index - distance in kept for index in replaced)


def test_ranks_with_any_number_of_documents_make_the_same_calls():
    model, calls, counts = patched(), np.zeros(1, int), []  # a proof would undo what a list collects
    model.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    for lengths in ([9], LENGTHS):
        prove_on_batch(model, batch_with(lengths))
        counts.append(int(calls[0]))
    assert counts == [7, 14]


@pytest.mark.parametrize("distance", fast_only([1, 2, 4, -2], -2))
def test_a_leak_below_rounding_from_another_document(distance):
    """Each document of 8 tokens reads the document so many places before it, or after it."""
    model = hfp.patch_model(build("Llama").to(torch.bfloat16))
    layer = model.model.layers[1]
    layer.mlp = Behind(layer.mlp, lambda hidden: hidden + 1e-2 * hidden.roll(8 * distance, dims=1))
    proof = prove_on_batch(model, batch_with([8] * 12))
    assert "replacing documents changed the outputs of other documents" in proof.problem


lengths = st.lists(st.integers(1, 300), min_size=1, max_size=70)


@given(lengths)
def test_laws_of_sampled_documents(lengths):
    documents = list(range(0, len(lengths), 2))
    chosen = sampled_documents(lengths, documents, sum(lengths))
    assert 1 <= len(chosen) == len({lengths[number] for number in chosen}) <= 3
    assert set(chosen) <= set(documents)
    own = [lengths[number] for number in documents]
    assert min(own) in [lengths[number] for number in chosen]
    fitting = [length for length in own if length <= sum(lengths) // 4]
    assert max(lengths[number] for number in chosen) == max(fitting, default=min(own))


@pytest.mark.parametrize("lengths", [[40, 30, 420], [40, 420, 30], [420, 30, 40], [20, 30, 40, 420]], ids=str)
def test_each_document_is_kept_once_beside_replaced_ones(lengths):
    """Tokens of the longest document, or those behind it, read tokens of another document far back."""
    model, _ = leaky("distance")
    hfp.patch_model(model)
    found = prove_on_batch(model, batch_with(lengths))
    assert found.problem.startswith("replacing documents changed the outputs of other documents")
