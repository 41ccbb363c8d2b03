"""Leaks that only training has are refused; what training draws at random is switched off, and all is put back."""

import copy
import itertools

import pytest
import torch
from leaky_models import NormOfTokens
from model_state import state_of
from peft import LoraConfig, get_peft_model
from tiers import fast_only
from tiny_models import build, enable_checkpointing
from torch import nn

import hf_packing as hfp
from tools.tiny_model import tiny_model


class Centred(nn.Module):
    def forward(self, hidden):
        return hidden - hidden.mean(1, keepdim=True) if self.training else hidden


class MovingAverage(nn.Module):
    """Updated, then used; or used, then updated."""

    def __init__(self, used_before):
        super().__init__()
        self.used_before = used_before
        self.register_buffer("average", torch.zeros(64))

    def forward(self, hidden):
        average = self.average.clone()
        if self.training:
            self.average.mul_(0.9).add_(0.1 * hidden.detach().mean((0, 1)))
        return hidden - (average if self.used_before else self.average.clone())


class Counting(nn.Module):
    """Remembers in an attribute."""

    average = 0.0

    def forward(self, hidden):
        if self.training:
            self.average = 0.9 * self.average + 0.1 * hidden.detach().mean()
        return hidden - self.average


REMEMBERS = "in training mode, the same tokens gave other logits .* or depends on earlier batches"

LEAKS = {
    "batch norm": (NormOfTokens, "in training mode, changing one document changed the logits of another"),
    "centred": (Centred, "in training mode, changing one document changed the logits of another"),
    "average": (lambda: MovingAverage(False), REMEMBERS),
    "late average": (lambda: MovingAverage(True), REMEMBERS),
    "attribute": (Counting, REMEMBERS),
}


def with_module(module):
    model = build("Llama", num_hidden_layers=1)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, module)
    return model


@pytest.mark.usefixtures("one_method")
@pytest.mark.parametrize("leak", fast_only(LEAKS, "late average"))
def test_leaks_of_training_are_seen_and_refused(leak):
    make, message = LEAKS[leak]
    model = with_module(make())
    model.config.use_cache = False
    before = state_of(model)
    report = hfp.check_isolation(model)
    assert not report.isolated
    assert report.modes == ("training",)
    assert report.reason.startswith("in training mode, ")
    with pytest.raises(hfp.ModelNotSupportedError, match=message):
        hfp.patch_model(model)
    assert state_of(model) == before


RANDOM = {
    "Llama": {"attention_dropout": 0.4},
    "GPT2": {"resid_pdrop": 0.4, "embd_pdrop": 0.3, "attn_pdrop": 0.2},
    "Mixtral": {"router_jitter_noise": 0.5, "attention_dropout": 0.3},
    "OPTForCausalLM": {"layerdrop": 0.7, "dropout": 0.3, "word_embed_proj_dim": 64, "ffn_dim": 96},
}


@pytest.mark.parametrize("name", fast_only(RANDOM, "Llama", "GPT2"))
def test_what_training_draws_at_random_is_switched_off_and_on_again(name):
    model = build(name)
    for setting, value in RANDOM[name].items():
        setattr(model.config, setting, value)
    model = type(model)(model.config)
    before = copy.deepcopy(model.config.to_dict())
    drops = {n: dict(vars(m), training=None) for n, m in model.named_modules()}
    report = hfp.check_isolation(hfp.patch_model(model))
    assert (report.isolated, report.modes, report.unproven) == (True, ("evaluation", "training"), "")
    hfp.unpatch_model(model)
    assert model.config.to_dict() == before
    assert {n: dict(vars(m), training=None) for n, m in model.named_modules()} == drops
    ids = torch.arange(5, 20)[None]
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
def test_dropout_of_others_is_switched_off():
    model = get_peft_model(build("Llama"), LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.5))
    report = hfp.check_isolation(hfp.patch_model(model))
    assert (report.modes, report.unproven) == (("evaluation", "training"), "")


class Noisy(nn.Module):
    def forward(self, hidden):
        return hidden + torch.randn_like(hidden) if self.training else hidden


def test_training_that_cannot_be_made_quiet_is_reported():
    model = hfp.patch_model(with_module(Noisy()))
    report = hfp.check_isolation(model)
    assert report.isolated
    reason = "the model draws random numbers in training mode even with dropout switched off"
    assert report.route.unproven == report.unproven == reason
    assert str(report).count("training mode not proven: the model draws random numbers") == 1


@pytest.mark.usefixtures("one_method")
def test_leaks_are_seen_beside_noise():
    with pytest.raises(hfp.ModelNotSupportedError, match="in training mode, changing one document"):
        hfp.patch_model(with_module(nn.Sequential(Noisy(), Centred())))


@pytest.mark.usefixtures("one_method")
def test_a_model_that_is_others_each_time_in_training_is_refused():
    calls = itertools.count()

    class Clock(nn.Module):
        def forward(self, hidden):
            return hidden * (1 + next(calls) % 7 * 0.1) if self.training else hidden

    with pytest.raises(hfp.ModelNotSupportedError, match="in training mode, the same tokens gave other logits"):
        hfp.patch_model(with_module(nn.Sequential(Noisy(), Clock())))


def test_a_model_that_cannot_be_called_in_training():
    class Failing(nn.Module):
        def forward(self, hidden):
            if self.training:
                raise ValueError("labels are missing")
            return hidden

    report = hfp.check_isolation(hfp.patch_model(with_module(Failing())))
    assert (report.isolated, report.modes) == (True, ("evaluation",))
    assert "training mode not proven: the model cannot be called in training mode with input_ids alone: labels" in str(
        report
    )


def test_everything_is_put_back():
    """Modes that differ between modules, buffers, random states, what needs gradients, hooks."""
    model = with_module(nn.Identity())
    model.aside = nn.BatchNorm1d(64)

    def count(_, __, output):
        model.aside(output[0])

    model.model.norm.register_forward_hook(count)
    model.train()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.aside(torch.randn(9, 64))
    before = state_of(model)
    hfp.patch_model(model)
    patched = state_of(model)
    hfp.check_isolation(model)
    assert state_of(model) == patched
    hfp.unpatch_model(model)
    assert state_of(model) == before


@pytest.mark.parametrize("architecture", fast_only(["llama", "jamba"], "llama"))
@pytest.mark.parametrize("reentrant", fast_only([True, False], True))
def test_gradient_checkpointing(architecture, reentrant):
    model = tiny_model(architecture, "causal")
    enable_checkpointing(model, use_reentrant=reentrant)
    report = hfp.check_isolation(hfp.patch_model(model))
    assert report.isolated
    assert report.modes == ("evaluation", "training")
    assert ("only logits were compared" in report.unproven) == reentrant
