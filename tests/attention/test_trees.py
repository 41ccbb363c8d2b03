"""Rows of trees on patched models: every document has the logits and gradients that it has alone."""

import re
import warnings

import pytest
import torch
from model_inputs import CHAT, inputs_of
from patched_models import patched, patched_tiny
from tiers import fast_only, slow
from tiny_models import build
from tree_faults import break_trees, to_the_whole_row, with_far_gradients

import hf_packing as hfp
from hf_packing.attention import prove_on_batch
from hf_packing.attention.exact import attend_exactly
from hf_packing.attention.kernels import kernel_of
from hf_packing.attention.kinds.trees import TreeLayout
from hf_packing.attention.route import route_of
from hf_packing.trees.segments import TreeSegments
from tools.tiny_model import tiny_model


def llama(trees=False):
    return patched("Llama", trees=trees, num_hidden_layers=1)


def of_trees(name, trees=True):
    return patched_tiny(name, "causal", torch.float64, trees, num_hidden_layers=1)


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_a_row_of_roots_is_a_packed_row_bit_for_bit(name):
    model = of_trees(name, trees=False)
    roots = TreeSegments((5, 9, 3), (-1, -1, -1))
    batch = inputs_of(roots)
    packed = hfp.PackingCollator()([{"input_ids": batch["input_ids"][0].numpy(), "seq_lengths": roots.lengths}])
    del packed["labels"]
    assert torch.equal(model(**batch).logits, model(**packed).logits)
    assert "trees" not in route_of(model).facts.proven, "a row without branches needs no proof of trees"


def test_a_model_takes_trees_once_they_are_proven():
    model = llama().train()
    with pytest.raises(hfp.PackingError, match=r"call patch_model\(model, trees=True\)"):
        model(**inputs_of(CHAT))
    hfp.patch_model(model, trees=True)
    logits = model(**inputs_of(CHAT)).logits
    assert "trees" in route_of(model).facts.proven
    assert model.training
    assert kernel_of(model) == "exact attention, segment by segment"
    again = model(**inputs_of(CHAT)).logits
    assert torch.equal(logits, again)
    with hfp.unpatch_model(model):
        pass
    assert "trees" in route_of(model).facts.proven, "the route is installed again as it was"


def test_modules_run_few_paths_at_once(monkeypatch):
    model, shapes = of_trees("mamba"), []
    trees = TreeSegments((10, *[6] * 5), (-1, *[0] * 5))
    module = next(type(each) for each in model.modules() if type(each).__name__ == "MambaMixer")
    own = module.forward
    monkeypatch.setattr(module, "forward", lambda self, x, *a, **k: shapes.append(x.shape[:2]) or own(self, x, *a, **k))
    found = []
    for most, paths in ((TreeLayout.most_tokens_of_call, 5), (32, 2)):
        monkeypatch.setattr(TreeLayout, "most_tokens_of_call", most)
        shapes.clear()
        found.append(model(**inputs_of(trees)).logits)
        assert max(number for number, length in shapes if length == 16) == paths
    assert torch.allclose(*found, atol=1e-4)


def with_window(window):
    return lambda *arguments, **options: attend_exactly(*arguments, **options | {"window": window})


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        slow("Mistral", with_window(None), "logits differ by .* between the row of trees and the document alone"),
        ("Llama", with_far_gradients, "gradients of one document reach another"),
        slow("Llama", to_the_whole_row, "changing one segment of a tree changed the logits"),
    ],
)
def test_the_proof_notices_faults(monkeypatch, name, fault, message):
    """And leaves a patched model as it was."""
    model = patched(name)
    break_trees(monkeypatch, fault)
    with pytest.raises(hfp.ModelNotSupportedError, match=message):
        hfp.patch_model(model, trees=True)
    assert "trees" not in route_of(model).facts.proven
    monkeypatch.undo()
    assert "trees" in route_of(hfp.patch_model(model, trees=True)).facts.proven


@pytest.mark.parametrize("name", fast_only(["xlnet", "cpmant"], "cpmant"))
def test_unstable_prefixes_are_refused_in_those_words(name):
    model = tiny_model(name, "causal", num_hidden_layers=1)
    with pytest.raises(hfp.ModelNotSupportedError, match="the outputs for a prefix are not stable.*what follows"):
        hfp.patch_model(model, trees=True)
    assert route_of(model) is None
    hfp.patch_model(model)
    with pytest.raises(hfp.ModelNotSupportedError, match="the outputs for a prefix are not stable"):
        hfp.patch_model(model, trees=True)
    assert route_of(model) is not None, "the model was patched before"
    with pytest.raises(hfp.ModelNotSupportedError, match="the outputs for a prefix are not stable"):
        hfp.patch_model(patched_tiny("bert", "masked", num_hidden_layers=1), trees=True)


@pytest.mark.slow
def test_compiled_models_run_trees_uncompiled():
    torch._dynamo.reset()
    model = hfp.patch_model(build("Llama"), trees=True)
    expected = model(**inputs_of(CHAT)).logits
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(**inputs_of(CHAT)).logits, expected)
    layer = hfp.patch_model(build("Qwen3"), trees=True)  # whose layers no other test has compiled too often
    for each in layer.model.layers:
        each.compile(backend="eager")
    warnings.simplefilter("ignore")  # dynamo warns about tensors that the proof has made
    with pytest.raises(Exception, match="expected rows of trees, and rows on several ranks, in uncompiled code"):
        layer(**inputs_of(CHAT))


def tree_batch():
    return inputs_of(TreeSegments((9, 14, 6, 17, 5, 12, 20, 7, 7), (-1, 0, 0, 2, 2, 4, -1, 6, 6)))


PROVEN = [(name, training) for name in ("gpt2", "mamba") for training in (False, True)]


@pytest.mark.parametrize(("name", "training"), fast_only(PROVEN, ("gpt2", False), ("mamba", True)))
def test_a_batch_of_trees_is_proven(name, training):
    proof = prove_on_batch(of_trees(name), tree_batch(), training)
    assert not proof.problem
    assert (proof.tokens, proof.documents) == (97, 5)
    assert "of up to 32 tokens" in proof.where
    assert proof.alone
    assert proof.gradients == training
    assert proof.max_leak == 0


def with_far_outputs(query, key, value, row, **options):
    first = value.repeat_interleave(query.shape[1] // value.shape[1], 1)[:, :, 15:16]
    return attend_exactly(query, key, value, row, **options) + first * 1e-2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (with_far_outputs, "replacing documents changed the outputs of other documents.*LlamaAttention"),
        (to_the_whole_row, "replacing documents changed the outputs of other documents.*LlamaAttention"),
        (with_far_gradients, "gradients of one document reach another document"),
        (with_window(3), "logits differ by .* between the packed batch and the document alone"),
    ],
)
def test_a_batch_of_trees_shows_faults(monkeypatch, fault, message):
    model = llama(trees=True)
    break_trees(monkeypatch, fault)
    assert re.search(message, prove_on_batch(model, tree_batch()).problem)


def test_reports_of_trees():
    model = llama(trees=True)
    report = hfp.check_isolation(model, batch=tree_batch())
    assert report.isolated
    assert (report.max_leak, report.max_gradient_leak) == (0, 0)
    assert "trees: shared prefixes are computed once" in str(report)
