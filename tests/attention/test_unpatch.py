"""A patch that is taken off: models are as they were before."""

import copy
import subprocess
import sys
from functools import partial

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


def with_modes_and_hooks():
    """Modes that differ between modules, a buffer that forwards change, and a weight without a gradient."""
    model = build("Llama", num_hidden_layers=1)
    model.aside = torch.nn.BatchNorm1d(64)
    model.model.norm.register_forward_hook(lambda _, __, output: (model.aside(output[0]), None)[1])
    model.train()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    model.aside(torch.randn(9, 64))
    return model


UNDONE = {name: partial(tiny_model, name, "causal") for name in ("llama", "mamba", "jamba", "bart", "dbrx")}
"""DBRX has an inner configuration whose attention is None, which transformers itself would refuse to set."""
UNDONE["modes and hooks"] = with_modes_and_hooks
UNDONE |= {
    f"rwkv {every} {mode}": lambda every=every, mode=mode: tiny_model("rwkv", "causal", rescale_every=every).train(mode)
    for every in (1, 2)
    for mode in (True, False)
}


@pytest.mark.parametrize("name", fast_only(UNDONE, "llama", "mamba", "modes and hooks"))
def test_everything_is_as_before(name):
    """RWKV rescales its weights in a forward."""
    model = UNDONE[name]()
    before = state_of(model)
    hfp.patch_model(model)
    patched = state_of(model)
    assert hfp.check_isolation(model).isolated
    assert state_of(model) == patched
    hfp.unpatch_model(model)
    assert state_of(model) == before
    assert (None in [attention for _, attention in before["attention"]]) == (name == "dbrx")
    if "rwkv" in name:
        model.eval()(torch.tensor([[5, 6, 7]]))
        assert state_of(model)["values"] != before["values"]


def test_patched_for_a_block():
    model = build("Llama")
    with hfp.patched(model) as same:
        assert same is model
        assert hfp.check_isolation(model).isolated
        with hfp.patched(model):
            pass
        assert model.config._attn_implementation == NAME
        with pytest.raises(ValueError, match="hf_packing"):  # which transformers does not run
            model.generate_batch([[5, 6]])
    assert model.config._attn_implementation != NAME


def test_what_is_not_patched():
    with pytest.raises(hfp.PackingError, match="LlamaForCausalLM is not patched"):
        hfp.unpatch_model(build("Llama"))


def test_patching_twice_is_patching_once():
    model = hfp.patch_model(patched())
    hfp.unpatch_model(model)
    assert model.config._attn_implementation != NAME


def test_a_copy_is_patched_on_its_own():
    model = patched()
    other = copy.deepcopy(model)
    hfp.unpatch_model(other)
    assert not other._forward_pre_hooks
    assert hfp.check_isolation(model).isolated


@pytest.mark.slow
def test_pickled_models_work_in_another_process(tmp_path):
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


def test_saved_models_know_nothing_of_it(tmp_path):
    patched().save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


def test_a_forward_that_takes_no_borders_and_arguments_that_nobody_knows():
    class Narrow(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None):
            return super().forward(input_ids=input_ids, position_ids=position_ids)

    torch.manual_seed(0)
    model = hfp.patch_model(Narrow(LlamaConfig(**SIZES)))
    assert not route_of(model).method.borders
    with pytest.raises(TypeError, match="unexpected keyword argument 'labls'"):
        model(torch.tensor([[5, 6, 7]]), position_ids=torch.tensor([[0, 1, 0]]), labls=1)


def test_not_a_model():
    for check in (hfp.patch_model, hfp.check_isolation):
        with pytest.raises(hfp.PackingError, match="model: expected a transformers PreTrainedModel, got Linear"):
            check(torch.nn.Linear(2, 2))
