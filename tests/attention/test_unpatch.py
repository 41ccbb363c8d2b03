"""A patch that is taken off, and models that are refused: they are as they were before."""

import copy
import subprocess
import sys

import pytest
import torch
from model_state import state_of
from patched_models import patched
from tiers import fast_only
from tiny_models import SIZES, build
from transformers import LlamaConfig, LlamaForCausalLM

import hf_packing as hfp
from hf_packing.attention.function import NAME
from hf_packing.attention.route import route_of
from tools.tiny_model import tiny_model

UNDONE = ("llama", "mamba", "jamba", "bart")


@pytest.mark.parametrize("architecture", fast_only(UNDONE, "llama", "mamba"))
def test_everything_is_as_before(architecture):
    model, ids = tiny_model(architecture, "causal"), torch.tensor([[5, 6, 7, 8]])
    # The cache of a decoder without its encoder has as many layers as the encoder, in transformers itself.
    decoding = {"max_new_tokens": 5, "do_sample": False, "use_cache": architecture != "bart"}
    text, before = model.generate(ids, **decoding), state_of(model)
    hfp.unpatch_model(hfp.patch_model(model))
    assert state_of(model) == before
    assert torch.equal(model.generate(ids, **decoding), text)


class TestUndone:
    def test_patched_for_a_block(self):
        model = build("Llama")
        with hfp.patched(model) as same:
            assert same is model
            assert hfp.check_isolation(model).isolated
            with hfp.patched(model):
                pass
            assert model.config._attn_implementation == NAME
        assert model.config._attn_implementation != NAME

    def test_what_is_not_patched(self):
        with pytest.raises(hfp.PackingError, match="LlamaForCausalLM is not patched"):
            hfp.unpatch_model(build("Llama"))

    def test_patching_twice_is_patching_once(self):
        model = hfp.patch_model(patched())
        hfp.unpatch_model(model)
        assert model.config._attn_implementation != NAME

    def test_a_copy_is_patched_on_its_own(self):
        model = patched()
        other = copy.deepcopy(model)
        hfp.unpatch_model(other)
        assert not other._forward_pre_hooks
        assert hfp.check_isolation(model).isolated

    @pytest.mark.slow
    def test_pickled_models_work_in_another_process(self, tmp_path):
        torch.save(patched(), tmp_path / "model.pt")
        code = (
            "import sys, torch, hf_packing as hfp\n"
            "model = torch.load(sys.argv[1], weights_only=False)\n"
            "assert hfp.check_isolation(model).isolated\n"
            "hfp.unpatch_model(model)\n"
            "print(model.config._attn_implementation)\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "sdpa"

    def test_inner_configurations_without_an_attention(self):
        """DBRX has one whose attention is None, which transformers itself would refuse to set."""
        sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 128}
        experts = {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}
        model = build(
            "Dbrx", **sizes, attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, ffn_config=experts
        )
        before = state_of(model)
        hfp.unpatch_model(hfp.patch_model(model))
        assert state_of(model) == before
        assert None in [attention for _, attention in before["attention"]]

    def test_saved_models_know_nothing_of_it(self, tmp_path):
        patched().save_pretrained(tmp_path)
        assert NAME not in (tmp_path / "config.json").read_text()


REFUSED = {
    "hashing that is random": (
        ("reformer", "causal", {"attn_layers": ["lsh", "local"]}),
        "ReformerModelWithLMHead: .* the same tokens gave other logits the second time",
    ),
    "streams of the row's length": (
        ("prophetnet", "causal", {"num_decoder_layers": 1}),
        "ProphetNetForCausalLM: .* changed the logits of another .* ProphetNetNgramSelfAttention .* cannot run on a "
        "single segment",
    ),
    "an attention whose kernel is absent": (
        ("mra", "masked", {"num_hidden_layers": 1}),
        "MraForMaskedLM: .* isolation cannot be tested, since changing the first tokens",
    ),
}


@pytest.mark.parametrize("trait", REFUSED)
def test_refused_and_left_as_it_was(trait):
    (architecture, kind, changes), message = REFUSED[trait]
    model = tiny_model(architecture, kind, **changes)
    before = state_of(model)
    with pytest.raises(hfp.ModelNotSupportedError, match=message):
        hfp.patch_model(model)
    assert state_of(model) == before


def test_a_forward_that_takes_no_borders():
    class Narrow(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None):
            return super().forward(input_ids=input_ids, position_ids=position_ids)

    torch.manual_seed(0)
    model = hfp.patch_model(Narrow(LlamaConfig(**SIZES)))
    assert not route_of(model).method.borders


def test_a_model_that_fails_without_a_mask():
    model = build("Llama")
    model.register_forward_pre_hook(lambda _, __, kwargs: kwargs["attention_mask"].sum() and None, with_kwargs=True)
    with pytest.raises(hfp.ModelNotSupportedError, match="cannot be called with input_ids alone: 'attention_mask'"):
        hfp.patch_model(model)


def test_not_a_model():
    for check in (hfp.patch_model, hfp.check_isolation):
        with pytest.raises(hfp.PackingError, match="model: expected a transformers PreTrainedModel, got Linear"):
            check(torch.nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("rescale_every", fast_only([1, 2, 0], 1))
@pytest.mark.parametrize("training", fast_only([True, False], True))
def test_weights_that_a_forward_rescales_are_put_back(rescale_every, training):
    model = tiny_model("rwkv", "causal", rescale_every=rescale_every).train(training)
    before = state_of(model)
    hfp.patch_model(model)
    assert hfp.check_isolation(model).isolated
    hfp.unpatch_model(model)
    assert state_of(model) == before
    model.eval()(torch.tensor([[5, 6, 7]]))
    assert (state_of(model)["values"] != before["values"]) is (rescale_every > 0)
