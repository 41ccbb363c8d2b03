"""Tiny models: small, the same each time, and large enough inside that everything matters."""

import pytest
import torch

from tools.tiny_model import SETTINGS, THRESHOLDS, architectures, tiny_config, tiny_model


def test_tiny_models_are_small_and_their_weights_large_where_values_are_free():
    assert {"llama", "mamba"} <= set(architectures("causal"))
    assert "bert" in architectures("masked")
    assert not set(SETTINGS) & set(THRESHOLDS)
    assert tiny_config("bert", "causal").is_decoder
    assert tiny_model("llama", "causal", torch.float64).dtype == torch.float64
    with pytest.raises(ValueError, match="phi4_multimodal has .* parameters even with small settings, expected"):
        tiny_model("phi4_multimodal", "causal")
    model = tiny_model("mamba2", "causal")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert all(parameter.std() > 0.05 for parameter in parameters.values() if parameter.dim() >= 2)
    assert all((parameter == 1).all() for name, parameter in parameters.items() if name.endswith("norm.weight"))
