"""The attention function itself: local masks, what kernels are given, and every argument that it refuses."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    causal_mask_function,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
)

import hf_packing as hfp
from hf_packing.attention import kernels
from hf_packing.attention.exact import attend_exactly
from hf_packing.attention.function import NAME, LocalMask, packed_varlen, packed_varlen_mask, register
from hf_packing.attention.kernels import kernel_of
from hf_packing.attention.layout import Layout, current_layout, within


class Attention(torch.nn.Module):
    is_causal = True


def tensors(rows=1, tokens=12):
    torch.manual_seed(0)
    return [torch.randn(rows, heads, tokens, 8) for heads in (4, 2, 2)]


LENGTHS = [5, 3, 4]


def attend(layer, query, key, value, mask=None, lengths=LENGTHS, **more):
    with within(current_layout, Layout.of(lengths)):
        return packed_varlen(layer, query, key, value, mask, **more)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({name: torch.ones(1, 12)}, f"{name}: ") for name in ("mask", "position_bias", "indices")),
        ({"something_new": 3}, "something_new: "),
        ({"output_attentions": True}, "output_attentions: "),
        ({"lengths": [5, 8]}, "Attention: expected the 13 tokens of the row"),
        ({"key": torch.zeros(1, 2, 1, 8)}, "Attention has 12 queries for 1 keys"),
    ],
)
def test_refused(arguments, message):
    query, key, value = tensors()
    with pytest.raises(hfp.PackingError, match=message):
        attend(Attention(), query, arguments.pop("key", key), value, **arguments)


def test_outside_of_a_patched_model():
    """As in a model whose configuration is that of a patched one. The borders of packed rows are not known there."""
    with pytest.raises(hfp.PackingError, match=r"Attention: expected a call within the forward.*copy.deepcopy\(config"):
        packed_varlen(Attention(), *tensors(), None, cu_seq_lens_q=torch.tensor([0, 5, 12]), max_length_q=7)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    size=st.integers(1, 10),
    kind=st.sampled_from(["window", "chunk"]),
)
@example(lengths=[5, 3, 4], size=2, kind="chunk")
@example(lengths=[5, 3, 4], size=2, kind="window")
def test_local_masks_equal_masked_attention_of_each_document(lengths, size, kind):
    query, key, value = tensors(tokens=sum(lengths))
    attended = attend(Attention(), query, key, value, LocalMask(**{kind: size}), lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])
    visible = (document[:, None] == document) & (place[:, None] >= place)
    if kind == "window":
        visible &= place[:, None] - place < size
    else:
        visible &= place[:, None] // size == place // size
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True)
    assert torch.allclose(attended, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("mask", [None, LocalMask(chunk=2)])
def test_what_a_kernel_is_given(mask):
    class Kernel(kernels.FlexKernel):
        name = "a kernel"
        attend = staticmethod(attend_exactly)

    for more in ({}, {"s_aux": torch.arange(4) / 4}, {"softcap": 2.0, "sliding_window": 3}):
        layer, given = Attention(), (*tensors(), mask)
        with kernels.switched_off():
            loop = attend(layer, *given, **more)
        assert kernel_of(layer) == "exact attention, segment by segment"
        kernels.KERNELS[:] = [Kernel()]
        assert torch.equal(attend(layer, *given, **more), loop)
        assert kernel_of(layer) == "a kernel"


def test_masks_of_custom_functions_are_refused():
    overlaid = or_masks(causal_mask_function, causal_mask_function)
    for how in ({"mask_function": overlaid}, {"use_vmap": True}):
        with pytest.raises(hfp.PackingError, match="does not support a mask made of custom functions"):
            packed_varlen_mask(batch_size=1, q_length=3, kv_length=3, **how)


@pytest.mark.parametrize(
    ("create", "sizes", "mask"),
    [
        (create_causal_mask, {"sliding_window": 3}, None),
        (create_sliding_window_causal_mask, {"sliding_window": 3}, LocalMask(window=3)),
        (create_bidirectional_sliding_window_mask, {"sliding_window": 3}, LocalMask(window=4)),
        (create_chunked_causal_mask, {"sliding_window": 4, "attention_chunk_size": 3}, LocalMask(chunk=3)),
    ],
)
def test_masks_of_transformers(create, sizes, mask):
    register()
    config = PreTrainedConfig(attn_implementation=NAME, **sizes)
    given = {"inputs_embeds": torch.zeros(1, 9, 2), "attention_mask": None}
    if "bidirectional" not in create.__name__:
        given |= {"cache": None}
    assert create(config, **given) == mask
    given["attention_mask"] = torch.ones(1, 9, dtype=torch.bool).tril(-1)
    assert isinstance(create(config, **given), torch.Tensor)


def test_a_local_mask_of_another_kind_is_refused():
    config = PreTrainedConfig(sliding_window=3, attention_chunk_size=3)
    for size in (3, 5):
        with pytest.raises(hfp.PackingError, match=f"got a local mask of {size} tokens"):
            packed_varlen_mask(batch_size=1, q_length=9, kv_length=9, config=config, local_size=size)
