"""Exact attention against attention over the whole row with a literal mask, in float64, outputs and gradients."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from kernel_stand_ins import assert_equal_with_gradients
from literal_masks import borders_of, calls, literal_mask
from torch.nn import functional

from hf_packing.attention.exact import TracedRow, attend_exactly, attend_exactly_compiled, gather_tokens
from hf_packing.attention.layout import Layout


def dense(query, key, value, mask, scale, softcap, sinks=None):
    """One softmax over the whole row."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp().view(1, -1, 1, 1))
    return weights / total @ value


@settings(max_examples=100)
@given(calls(5))
def test_is_dense_attention_with_a_mask(call):
    """In packed rows compiled, too."""
    row, inputs, how = call
    mask = literal_mask(row, *(how[each] for each in ("is_causal", "window", "chunk")))
    theirs = dense(*inputs[:3], mask, how["scale"], how["softcap"], how.get("sinks"))
    assert_equal_with_gradients(attend_exactly(*inputs[:3], row.layout, **how), theirs, inputs)
    if not row.trees.has_branches:
        ours = attend_exactly_compiled(*inputs[:3], TracedRow(borders_of(row.lengths), max(row.lengths)), **how)
        assert_equal_with_gradients(ours, theirs, inputs)


@pytest.mark.parametrize(("lengths", "number"), [([3, 5, 3, 9, 3], 3), ([7] * 30, 1)])
def test_segments_of_equal_length_run_in_one_call(lengths, number, monkeypatch):
    attend = Mock(wraps=functional.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    tensors = [torch.randn(1, 2, sum(lengths), 4, dtype=torch.float64) for _ in range(3)]
    attend_exactly(*tensors, Layout.of(lengths), scale=0.5, is_causal=True)
    assert attend.call_count == number


def test_dropout_drops_and_keeps_the_mean():
    torch.manual_seed(0)
    lengths = [1000, 1000]
    for softcap in (None, 5.0):
        zeros, ones = torch.zeros(1, 1, sum(lengths), 4), torch.ones(1, 1, sum(lengths), 4)
        how = {"scale": 1.0, "is_causal": False, "softcap": softcap, "dropout": 0.5}
        output = attend_exactly(zeros, zeros, ones, Layout.of(lengths), **how)
        assert output.std() > 0.01
        assert output.mean() == pytest.approx(1, abs=0.01)


def test_gradients_of_shared_keys_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    key = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = gather_tokens(key, torch.tensor([0] * 600 + [1]))
    gathered.backward(torch.ones_like(gathered))
    assert key.grad.flatten().tolist() == [600, 1]
    assert key.grad.dtype == torch.bfloat16
