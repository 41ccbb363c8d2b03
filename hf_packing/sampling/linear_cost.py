"""The time that linear layers take for one token, in units of the time that attention takes for one pair of tokens."""

from typing import Any

LINEAR_COST = 6 * 2048
"""The default time of linear layers for one token, in units of the time of attention for one pair of tokens.

The value holds for a model of width 2048.
"""


def linear_cost_of(config: Any) -> float:
    """Return the time that linear layers take for one token, relative to the time of attention for one pair of tokens.

    For one token, linear layers take two operations per weight. For one pair of tokens, attention takes four operations
    per dimension. In a causal model, half of the pairs are masked, but attention kernels reach about half the speed of
    large matrix products, so all pairs are counted.

    Args:
        config: the configuration of a transformers model.

    Returns:
        The ratio of the two times; LINEAR_COST if the configuration does not have the needed sizes. MLPs are assumed to
        be gated, and only layers that attend to whole documents are counted as attention. The ratio only affects the
        balance between ranks.
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
    """Return the value of the first named field that is a nonzero integer, or 0 if there is no such field."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 0)
