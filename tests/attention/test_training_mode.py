"""What training draws at random is switched off, and on again."""

import copy

import pytest
import torch
from model_inputs import documents
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from tiers import fast_only
from tiny_models import build, enable_checkpointing
from training_by_hand import batch_of

import hf_packing as hfp
from hf_packing.attention import prove_on_batch
from tools.tiny_model import tiny_model

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


ADAPTERS = [
    LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.5),
    TrainableTokensConfig(token_indices=[5, 9, 20], task_type="CAUSAL_LM"),  # looked up past the embedding's forward
]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
@pytest.mark.parametrize("config", ADAPTERS)
def test_adapters_are_proven_in_training(config):
    report = hfp.check_isolation(hfp.patch_model(get_peft_model(build("Llama"), config)))
    assert (report.modes, report.unproven) == (("evaluation", "training"), "")
    assert report.max_gradient_leak == 0


def llama_with(hook):
    model = build("Llama", num_hidden_layers=1)
    model.model.layers[0].mlp.register_forward_hook(hook)
    return model


def noise(module, _, hidden):
    return hidden + torch.randn_like(hidden) if module.training else hidden


def fail(module, *_):
    if module.training:
        raise ValueError("labels are missing")


def test_training_that_cannot_be_made_quiet_is_reported():
    report = hfp.check_isolation(hfp.patch_model(llama_with(noise)))
    assert report.isolated
    reason = "the model draws random numbers in training mode even with dropout switched off"
    assert report.route.unproven == report.unproven == reason
    assert str(report).count(f"training mode not proven: {reason}") == 1


def test_a_model_that_cannot_be_called_in_training():
    report = hfp.check_isolation(hfp.patch_model(llama_with(fail)))
    assert (report.isolated, report.modes) == (True, ("evaluation",))
    reason = "the model cannot be called in training mode with input_ids alone: labels are missing"
    assert f"training mode not proven: {reason}" in str(report)


@pytest.mark.parametrize("architecture", fast_only(["llama", "jamba"], "llama"))
@pytest.mark.parametrize("reentrant", fast_only([True, False], True))
def test_gradient_checkpointing(architecture, reentrant):
    model = tiny_model(architecture, "causal")
    enable_checkpointing(model, use_reentrant=reentrant)
    report = hfp.check_isolation(hfp.patch_model(model))
    assert report.isolated
    assert report.modes == ("evaluation", "training")
    assert ("only logits were compared" in report.unproven) == reentrant


class _FailsBackward(torch.autograd.Function):
    """The backward pass of a row of more than 30 tokens raises an error."""

    @staticmethod
    def forward(_, hidden):
        return hidden.clone()

    @staticmethod
    def backward(_, gradient):
        if gradient.shape[1] > 30:
            raise ValueError("too many tokens")
        return gradient


@pytest.mark.usefixtures("one_method")
def test_a_backward_pass_that_fails_on_packed_rows_only_is_refused():
    model = llama_with(lambda _, __, hidden: _FailsBackward.apply(hidden))
    failure = "the backward pass fails on the packed {}, but not on documents alone: ValueError: too many tokens"
    with pytest.raises(hfp.ModelNotSupportedError, match=failure.format("row")):
        hfp.patch_model(model)
    batch = batch_of(documents(lengths=(7, 20, 12)))
    patched = hfp.patch_model(llama_with(lambda *_: None))
    patched.model.layers[0].register_forward_hook(lambda _, __, hidden: _FailsBackward.apply(hidden))
    assert prove_on_batch(patched, batch).problem == failure.format("batch")


def test_tokens_that_are_embedded_in_several_calls_have_no_gradients_to_compare():
    model = hfp.patch_model(build("Llama"))

    def embed(_, args, given):
        calls = given["input_ids"].split(20, dim=1)  # documents alone are shorter
        embedded = torch.cat([*map(model.model.embed_tokens, calls)], dim=1)
        return args, {**given, "input_ids": None, "inputs_embeds": embedded}

    model.model.register_forward_pre_hook(embed, with_kwargs=True)
    proof = prove_on_batch(model, batch_of(documents()))
    assert (proof.problem, proof.gradients) == ("", False)
