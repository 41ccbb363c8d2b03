"""What the proof of patch_model and check_isolation would not let pass: faults put into models on purpose."""

import pytest
import torch
from tiers import fast_only
from tiny_models import build
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.attention.probe import Probe
from hf_packing.attention.search import Search
from hf_packing.attention.snapshot import attention_of
from hf_packing.attention.tiny_model import tiny_model


def llama(**changes):
    return build("Llama", num_hidden_layers=1, **changes)


class OtherGradient(torch.nn.Module):
    """Returns what it is given; its gradient is another one, always or in training mode alone."""

    def __init__(self, norm, change, only_training=False):
        super().__init__()
        self.norm, self.change, self.only_training = norm, change, only_training

    def forward(self, hidden):
        hidden = self.norm(hidden)
        if hidden.requires_grad and (self.training or not self.only_training):
            hidden.register_hook(self.change)
        return hidden


def with_gradient(*how):
    model = llama(use_cache=False)
    model.model.norm = OtherGradient(model.model.norm, *how)
    return model


def from_the_next_token(gradient):
    return gradient + 0.5 * gradient.roll(1, dims=1)


@pytest.mark.parametrize("only_training", fast_only([False, True], True))
def test_gradients_that_cross_borders(only_training):
    mode = "in training mode, " if only_training else ""
    report = hfp.check_isolation(with_gradient(from_the_next_token, only_training))
    assert not report.isolated
    assert report.max_leak < 1e-4
    assert report.max_gradient_leak > 1e-3
    assert f"{mode}gradients of one document reach another" in report.reason
    with pytest.raises(hfp.ModelNotSupportedError, match=f"{mode}gradients of a packed document reach another"):
        hfp.patch_model(with_gradient(from_the_next_token, only_training))


def test_gradients_that_are_not_those_of_documents_alone_are_refused():
    with pytest.raises(hfp.ModelNotSupportedError, match="a document's gradients differ by"):
        hfp.patch_model(with_gradient(lambda gradient: gradient * (1.5 if gradient.shape[1] > 30 else 1.0)))


def test_the_attention_written_out_is_a_reference_beside_the_models_own(monkeypatch):
    """Others have had gaps: transformers 5.17 lets "sdpa" ignore Gemma 2's soft cap."""
    model = llama(attn_implementation="sdpa")
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS,
        "sdpa",
        lambda module, query, *args, **kwargs: own(module, query * 0.9, *args, **kwargs),
    )
    assert hfp.check_isolation(hfp.patch_model(model)).route.name == "varlen"


def test_a_model_that_does_not_look_at_its_tokens():
    model = llama()

    def forget(_, __, output):
        output.logits = torch.arange(output.logits[0].numel()).view_as(output.logits).float()

    model.register_forward_hook(forget)
    with pytest.raises(hfp.PackingError, match="expected logits that depend on input_ids"):
        hfp.check_isolation(model)


class Convolution(torch.nn.Module):
    """Every token sees three; outside a segment there are zeros, as in padding of zeros."""

    def __init__(self, width, ahead):
        super().__init__()
        self.conv = torch.nn.Conv1d(width, width, 3)
        self.sides = (2 - ahead, ahead)

    def forward(self, hidden):
        return self.conv(torch.nn.functional.pad(hidden.transpose(1, 2), self.sides)).transpose(1, 2)


@pytest.mark.parametrize(("ahead", "sharing"), fast_only([(0, "ragged"), (1, "equal"), (2, "equal")], (1, "equal")))
def test_segments_share_a_padded_call_only_where_padding_is_not_looked_at(ahead, sharing):
    model = llama()
    model.model.layers[0].mlp = Convolution(model.config.hidden_size, ahead)
    route = hfp.check_isolation(hfp.patch_model(model)).route
    assert [step.sharing for step in route.by_segment] == [sharing]


def stop(*_, **__):
    raise KeyboardInterrupt


INTERRUPTED = [
    (Search, "run"),
    (Probe, "largest_leak"),
    *((Probe, name) for name in ("alone", "alone_with_gradients", "packed_with_gradients")),
]


@pytest.mark.parametrize(("where", "name"), fast_only(INTERRUPTED, INTERRUPTED[0]))
@pytest.mark.parametrize("architecture", fast_only(["llama", "jamba"], "llama"))
def test_an_interruption_leaves_the_model_as_it_was(monkeypatch, where, name, architecture):
    model = tiny_model(architecture, "causal")
    before, hooks = attention_of(model), [dict(vars(module)) for module in model.modules()]
    monkeypatch.setattr(where, name, stop)
    with pytest.raises(KeyboardInterrupt):
        hfp.patch_model(model)
    assert not is_patched(model)
    assert attention_of(model) == before
    assert [dict(vars(module)) for module in model.modules()] == hooks
    monkeypatch.undo()
    assert hfp.check_isolation(hfp.patch_model(model)).isolated
