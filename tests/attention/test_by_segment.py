"""Models with modules that run segment by segment: what they refuse, and what stays as it was."""

import pytest
import torch
import transformers
from patched_models import patched_tiny
from training_by_hand import DOCUMENTS, batch_of

import hf_packing as hfp
from hf_packing.attention.packed_row import PackedRow, use_row
from hf_packing.attention.tiny_model import tiny_model


def test_a_wrapped_module_called_past_its_model():
    with pytest.raises(hfp.PackingError, match=r"MambaMixer \(backbone.layers.0.mixer\) was called outside its model"):
        patched_tiny("mamba").backbone.layers[0].mixer(torch.zeros(1, 5, 64))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_refused(name):
    inputs = {each: value for each, value in batch_of(DOCUMENTS).items() if each != "labels"}
    with pytest.raises(hfp.PackingError, match=f"{name}: expected no cache on this patched model"):
        patched_tiny("jamba")(**inputs, **{name: transformers.DynamicCache()})


def test_an_argument_that_was_not_there_when_it_was_patched():
    model = patched_tiny("jamba")
    name = hfp.check_isolation(model).route.by_segment[0].name
    with (
        use_row(PackedRow.from_lengths([2, 3])),
        pytest.raises(hfp.PackingError, match=f"{name}.*: the tensor 1.gate of shape .* did not occur when"),
    ):
        model.get_submodule(name)(hidden_states=torch.zeros(1, 5, 64), gate=torch.zeros(1, 5))


@pytest.mark.slow
def test_the_route_is_found_once():
    first, second = (hfp.check_isolation(hfp.patch_model(tiny_model("mamba", "causal"))).route for _ in range(2))
    assert second is first
