"""What a deep model costs: layers that are built alike are searched once, and a wrong assumption is noticed."""

import functools
from unittest.mock import patch

import pytest
import torch
from tiers import fast_only
from torch import nn

import hf_packing as hfp
from hf_packing.attention.route import route_of
from hf_packing.attention.search import Search
from tools.tiny_model import tiny_model


@pytest.fixture
def searched(monkeypatch):
    """The names of the modules that are searched, one entry for each search of a module."""
    names = []
    classify = Search._classify

    def counted(self, call):
        names.append(call.forward.plan.name)
        return classify(self, call)

    monkeypatch.setattr(Search, "_classify", counted)
    return names


def forwards_to_patch(model):
    """Patch a model, and return the number of forwards that this takes."""
    count, stock = 0, type(model).forward

    def counted(self, *args, **kwargs):
        nonlocal count
        count += 1
        return stock(self, *args, **kwargs)

    with patch.object(type(model), "forward", functools.wraps(stock)(counted)):
        hfp.patch_model(model)
    return count


@pytest.mark.parametrize("architecture", fast_only(["llama", "mamba2"], "llama"))
def test_the_price_does_not_grow_with_depth(architecture, searched):
    prices = []
    for layers in (3, 4):
        searched.clear()
        forwards = forwards_to_patch(tiny_model(architecture, "causal", num_hidden_layers=layers))
        prices.append((forwards, len(searched)))
    (forwards, searches), (more_forwards, more_searches) = prices
    assert searches == more_searches
    assert abs(forwards - more_forwards) <= 1  # one more if the loss is rounded differently in training mode
    assert 10 < forwards < 50
    assert searches > 3


class Scaled(nn.Module):
    """An MLP that, in some layers only, also reads the token before."""

    def __init__(self, mlp, share=0.0):
        super().__init__()
        self.mlp = mlp
        self.share = share

    def forward(self, hidden):
        return self.mlp(hidden + self.share * hidden.roll(1, dims=1))


READS_TOKEN_BEFORE = set()
"""Ids of the modules that read the token before. No module shows that it is one of them."""


class ScaledInSecret(Scaled):
    def forward(self, hidden):
        return self.mlp(hidden + (id(self) in READS_TOKEN_BEFORE) * hidden.roll(1, dims=1))


def deep_llama(mlp):
    model = tiny_model("llama", "causal", num_hidden_layers=4)
    for layer in model.model.layers:
        layer.mlp = mlp(layer.mlp)
    return model


def test_a_layer_with_another_setting_is_searched_itself(searched):
    model = deep_llama(Scaled)
    model.model.layers[2].mlp.share = 0.5
    route = route_of(hfp.patch_model(model))
    assert [plan.name for plan in route.by_segment] == ["model.layers.2.mlp"]
    assert {"model.layers.0.mlp", "model.layers.2.mlp"} < set(searched)
    assert "model.layers.1.mlp" not in searched


@pytest.mark.parametrize("layers", fast_only([[3], [1, 2, 3]], [1, 2, 3]))
def test_layers_that_only_seem_alike_are_found_by_the_second_search(searched, layers):
    """It searches every layer."""
    model = deep_llama(ScaledInSecret)
    READS_TOKEN_BEFORE.update(id(model.model.layers[layer].mlp) for layer in layers)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    try:
        route = route_of(hfp.patch_model(model))
    finally:
        READS_TOKEN_BEFORE.clear()
    assert [plan.name for plan in route.by_segment] == [f"model.layers.{layer}.mlp" for layer in layers]
    assert searched.count("model.layers.0.mlp") == 2  # once in each search
    assert searched.count("model.layers.3.mlp") == 1
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_the_route_is_found_once(searched):
    first = route_of(hfp.patch_model(tiny_model("mamba", "causal")))
    searched.clear()
    assert route_of(hfp.patch_model(tiny_model("mamba", "causal"))) == first
    assert not searched
