"""A model whose modules change after it was patched: right, or refused."""

import copy
import re

import peft
import pytest
import torch
from tiers import fast_only
from tiny_models import build
from torch import nn

import hf_packing as hfp
from hf_packing.attention.by_segment import SegmentedForward
from hf_packing.attention.route import PATCH
from tools.tiny_model import tiny_model

LENGTHS = (5, 3, 7)


def logits_and_alone(model):
    """The logits of documents in a packed row of the patched model, and of each alone on the same model unpatched."""
    documents = [torch.randint(3, 90, (each,)) for each in LENGTHS]
    row = hfp.PackingCollator()([{"input_ids": torch.cat(documents), "seq_lengths": [*LENGTHS]}])
    row.pop("labels", None)
    found = model(**row).logits[0]
    with hfp.unpatch_model(model):
        alone = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in documents])
    return found, alone


def replaced(model):
    model.model.layers[0] = copy.deepcopy(build("Llama").model.layers[1]).double()


def put_in(model):
    model.model.layers.append(type(model.model.layers[0])(model.config, 2).double())


def attention_replaced(model):
    model.model.layers[1].self_attn = build("Llama").model.layers[1].self_attn.double()


def in_front(model):
    model.model.layers.insert(0, build("Llama").model.layers[0].double())


REFUSED = {
    "a layer that was replaced": (replaced, r"model\.layers\.0: expected .* got a new LlamaDecoderLayer"),
    "a layer put in": (put_in, r"model\.layers\.2: expected .* got a new LlamaDecoderLayer"),
    "a layer put in front": (in_front, r"model\.layers\.0: expected .* got a new LlamaDecoderLayer"),
    "another attention": (attention_replaced, r"model\.layers\.1\.self_attn: expected .* got a new LlamaAttention"),
}


@pytest.mark.parametrize("name", fast_only(REFUSED, "a layer that was replaced"))
def test_new_modules_are_refused_until_the_model_is_patched_again(name):
    change, message = REFUSED[name]
    model = hfp.patch_model(build("Llama", torch.float64).eval())
    logits_and_alone(model)
    change(model)
    for _ in range(2):
        with pytest.raises(hfp.PackingError, match=message):
            logits_and_alone(model)
    hfp.unpatch_model(model)
    hfp.patch_model(model)
    found, alone = logits_and_alone(model)
    assert torch.allclose(found, alone, atol=1e-12)


def removed(model):
    del model.model.layers[0]
    return model


def adapters(model):
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).double()


def other_leaves(model):
    for layer in model.model.layers:
        layer.mlp.up_proj = nn.Linear(64, layer.mlp.up_proj.out_features, bias=False).double()
    return model


def wrapped(model):
    class Wrapper(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args, **named):
            return self.layer(*args, **named) * 2

    model.model.layers[0] = Wrapper(model.model.layers[0])
    return model


def in_another_order(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    return model


RIGHT = {each.__name__: each for each in (removed, adapters, other_leaves, wrapped, in_another_order)}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # of PEFT
@pytest.mark.parametrize("name", fast_only(RIGHT, "wrapped"))
def test_what_keeps_the_patch_is_right(name):
    model = hfp.patch_model(build("Llama", torch.float64).eval())
    before = logits_and_alone(model)[1]
    changed = RIGHT[name](model)
    inner = changed.get_base_model() if name == "adapters" else changed
    torch.manual_seed(0)
    for _ in range(2):
        found, alone = logits_and_alone(inner)
        assert torch.allclose(found, alone, atol=1e-12)
    assert before.shape == alone.shape


def test_a_module_that_runs_by_segment_is_not_replaced():
    model = hfp.patch_model(tiny_model("lfm2", "causal").double().eval())
    ours = {each.module: each for each in getattr(model, PATCH).replaced if isinstance(each, SegmentedForward)}
    found, alone = logits_and_alone(model)
    assert torch.allclose(found, alone, atol=1e-12)
    name = next(name for name, each in model.named_modules() if each in ours)
    owner, _, key = name.rpartition(".")
    new = copy.deepcopy(model.get_submodule(name))
    for module in new.modules():
        vars(module).pop("forward", None)
    setattr(model.get_submodule(owner), key, new)
    with pytest.raises(hfp.PackingError, match=rf"{re.escape(name)}: expected .* got a new {type(new).__name__}"):
        logits_and_alone(model)
