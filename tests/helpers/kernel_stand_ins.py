"""Functions that stand in the place of attention kernels, which need CUDA.

They have exactly the signatures of the released versions, as tools.kernel_signatures has read them, and compute exact
attention from the arguments that they are given.
"""

import json
from itertools import pairwise

import pytest
import torch

from hf_packing.attention import kernels
from hf_packing.attention.exact import attend_exactly, attend_with_scores
from hf_packing.attention.kernels import VarlenKernel
from hf_packing.attention.layout import Layout
from tools.kernel_signatures import SIGNATURES, function_with

KNOWN = json.loads(SIGNATURES.read_text())

VARLEN = {
    (name.startswith("torch"), signature): pytest.param(name, signature, id=f"{name} {version}")
    for name in KNOWN
    if name in ("torch varlen_attn", "flash-attn 2", "flash-attn 3", "flash-attn 4")
    or name.startswith("kernels-community/")
    for version, signature in reversed(KNOWN[name].items())
}.values()
"""All different signatures, each with the first version that has it."""

TORCH = KNOWN["torch varlen_attn"]

NEWEST = KNOWN["flash-attn 2"]["2.8.3.post2"]

LISTS = [f"{full}{side}_{each}" for side in ("kv", "q") for full in ("", "full_") for each in ("num_blocks", "indices")]
"""The arguments of a BlockMask that list blocks."""


def of_torch(given):
    """torch: causal attention is a window up to 0, and heads must be equal."""
    groups = given["query"].shape[1] != given["key"].shape[1]
    assert groups == given.get("enable_gqa", False), "Expect query and key/value to have the same number of heads"
    window = given["window_size"]
    return exact(given["query"], given["key"], given["value"], given, "cu_seq", "max", given["scale"], *window)


def of_flash_attn(given):
    """flash-attn: `causal` sets the right side of the window to 0."""
    left, right = given["window_size"]
    if "learnable_sink" in given:  # flash-attn 4, which takes -1 on the left alone for a limit
        assert -1 not in (left, right)
        left, right = (-1 if each is None else each for each in (left, right))
    right = 0 if given["causal"] else right
    rare = "s_aux alibi_slopes block_table seqused_q seqused_k qv q_descale k_descale v_descale"
    assert all(given.get(name) is None for name in rare.split())
    scale, tensors, softcap = given["softmax_scale"], [given[each] for each in "qkv"], given["softcap"] or None
    output = exact(*tensors, given, "cu_seqlens", "max_seqlen", scale, left, right, softcap=softcap)
    return (output, None) if "pack_gqa" in given else output  # flash-attn 3 also returns log-sum-exps


def exact(query, key, value, given, borders, longest, scale, left, right, **options):
    borders, longest = [[given[f"{name}_{side}"] for side in "qk"] for name in (borders, longest)]
    assert [each.dtype for each in borders] == [torch.int32] * 2
    assert all(length >= each.diff().max() for length, each in zip(longest, borders, strict=True))
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert right in (0, left), "only windows to both sides, or to the left"
    tensors = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    options |= {"scale": query.shape[-1] ** -0.5 if scale is None else scale, "is_causal": right == 0}
    window = None if left < 0 else left + 1
    if borders[0] is not borders[1]:  # which cuDNN's causal attention would take for cross-attention
        return at_last_keys(*tensors, borders, window=window, **options)[0].transpose(0, 1)
    layout = Layout.of([length for length in borders[0].diff().tolist() if length])
    return attend_exactly(*tensors, layout, window=window, **options)[0].transpose(0, 1)


def at_last_keys(query, key, value, borders, *, scale, is_causal, window, softcap=None):
    """Attention of segments whose queries belong to their last keys or, if it is not causal, to any."""
    assert is_causal or window is None
    outputs = []
    for (first, last), (first_key, last_key) in zip(*(pairwise(each.tolist()) for each in borders), strict=True):
        keys = last_key - first_key
        back = torch.arange(keys - last + first, keys)[:, None] - torch.arange(keys)
        mask = torch.where((back >= 0) & (back < (window or keys)) | (not is_causal), 0.0, -torch.inf)
        k, v = key[:, :, first_key:last_key], value[:, :, first_key:last_key]
        outputs.append(attend_with_scores(query[:, :, first:last], k, v, mask, scale, True, softcap, None, 0.0))
    return torch.cat(outputs, dim=2)


def stand_in(name, signature, body=None):
    function = function_with(signature, body or (of_torch if name.startswith("torch") else of_flash_attn))
    return VarlenKernel(name, lambda: function, is_torch=name.startswith("torch"))


def tensors(dim=16, value_dim=16, dtype=torch.float64, tokens=12):
    """Queries, keys and values, which get gradients."""
    torch.manual_seed(0)
    shapes = ((4, dim), (2, dim), (2, value_dim))
    return [torch.randn(1, heads, tokens, size, dtype=dtype, requires_grad=True) for heads, size in shapes]


def choose(dtype=torch.bfloat16, layer=None, **changes):
    """The name of the kernel that is chosen for a call, or None."""
    query, _, value = tensors(dtype=dtype)
    kernel = kernels.choose(layer or torch.nn.Identity(), query, value, {"dropout": 0.0} | changes)
    return None if kernel is None else kernel.name


def assert_equal_with_gradients(ours, expected, inputs):
    """Compare outputs, and their gradients for the inputs."""
    assert torch.allclose(ours, expected, atol=1e-12)
    weight = torch.randn_like(expected)
    gradients = [torch.autograd.grad((each * weight).sum(), inputs, retain_graph=True) for each in (ours, expected)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-11)
