"""Attention in rows of trees that is wrong, in place of `attend_along_paths`."""

import torch

from hf_packing.attention.exact_tree_attention import attend_along_paths


def to_the_whole_row(query, key, value, *_, scale, **__):
    plain = torch.nn.functional.scaled_dot_product_attention
    return plain(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


def with_far_gradients(query, key, value, row, **options):
    attended = attend_along_paths(query, key, value, row, **options)
    return attended + (value.sum() - value.sum().detach()) * 1e-3
