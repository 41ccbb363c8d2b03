"""How much of a model's work grows with the number of tokens, and how much with the number of pairs of tokens."""

from dataclasses import replace
from typing import Any

from torch import nn

from hf_packing.attention import inner_model
from hf_packing.sampling.balance import LINEAR_COST
from hf_packing.sampling.epoch_plan import Batching
from hf_packing.sampling.token_budget import TokenBudget


def with_cost_of(batching: Batching, model: nn.Module | None) -> Batching:
    """Return the batching with the linear_cost of a model, unless it already has one."""
    if model is None or not isinstance(batching, TokenBudget) or batching.linear_cost is not None:
        return batching
    return replace(batching, linear_cost=linear_cost_of(inner_model(model).config))


def linear_cost_of(config: Any) -> float:
    """Return how many pairs of tokens attention compares in the time that everything else works on one token.

    Linear layers take two operations for each of their weights. Attention takes four for each of its dimensions and
    each pair of tokens. In a causal model half of the pairs are masked, but its kernels reach about half the speed of
    large matrix products, so both halves are counted.

    Args:
        config: of a transformers model.

    Returns:
        The ratio, counting gated MLPs and the layers that attend to whole documents; LINEAR_COST if the configuration
        does not have the sizes. It decides nothing but the balance between ranks.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = _first_of(config, "hidden_size", "n_embd", "d_model")
    layers = _first_of(config, "num_hidden_layers", "n_layer")
    if not hidden or not layers:
        return float(LINEAR_COST)
    heads = _first_of(config, "num_attention_heads", "n_head") or 1
    head_size = _first_of(config, "head_dim") or hidden // heads
    queries, keys = heads * head_size, (_first_of(config, "num_key_value_heads") or heads) * head_size
    inner = _first_of(config, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * hidden
    experts = _first_of(config, "num_experts_per_tok") or 1
    weights = 2 * hidden * (queries + keys) + 3 * hidden * inner * experts
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    attending = sum(kind == "full_attention" for kind in kinds) or 1
    return weights * layers / (2 * queries * attending)


def _first_of(config: Any, *names: str) -> int:
    """Return the first of these fields that is a whole number above zero; 0 if none is."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 0)
