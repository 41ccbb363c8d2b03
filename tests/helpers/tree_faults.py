"""Attention that is wrong in rows of trees, and right in packed rows."""

import torch

from hf_packing.attention import function
from hf_packing.attention.exact import attend_exactly


def to_the_whole_row(query, key, value, *_, scale, **__):
    plain = torch.nn.functional.scaled_dot_product_attention
    return plain(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def with_far_gradients(query, key, value, layout, **options):
    attended = attend_exactly(query, key, value, layout, **options)
    return attended + (value.sum() - value.sum().detach()) * 1e-3


def break_trees(monkeypatch, fault):
    def attend(query, key, value, layout, **options):
        computes = fault if layout.trees.has_branches else attend_exactly
        return computes(query, key, value, layout, **options)

    monkeypatch.setattr(function, "attend_exactly", attend)
