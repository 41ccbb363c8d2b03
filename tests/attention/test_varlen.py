"""The attention function itself: local masks, what kernels are given, and every argument that it refuses."""

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.masking_utils import causal_mask_function, or_masks

import hf_packing as hfp
from hf_packing.attention import kernels
from hf_packing.attention.exact import attend_exactly
from hf_packing.attention.function import LocalMask, packed_varlen, packed_varlen_mask
from hf_packing.attention.kernels import kernel_of


class Attention(torch.nn.Module):
    is_causal = True


def tensors(rows=1, tokens=12):
    torch.manual_seed(0)
    return [torch.randn(rows, heads, tokens, 8) for heads in (4, 2, 2)]


BORDERS = torch.tensor([0, 5, 8, 12], dtype=torch.int32)


ONE_QUERY = {"query": torch.zeros(1, 4, 1, 8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({name: torch.ones(1, 12)}, f"{name}: ") for name in ("attention_mask", "position_bias", "indices")),
        ({"something_new": 3}, "something_new: "),
        ({"output_attentions": True}, "output_attentions: "),
        *(
            ({"cu_seq_lens_q": torch.tensor(borders)}, "cu_seq_lens_q: ")
            for borders in ([0, 5, 11], [0, 8, 5, 12], [0, 5, 5, 12], [1, 12])
        ),
        ({"rows": 2, "cu_seq_lens_q": torch.tensor([0, 5, 24])}, "cu_seq_lens_q: .* no border at"),
        ({"cu_seq_lens_q": None}, "Attention was given neither cu_seq_lens_q nor position_ids"),
        (ONE_QUERY, "Attention has 1 queries for 12 keys"),
    ],
)
def test_refused(arguments, message):
    arguments = {"attention_mask": None, "cu_seq_lens_q": BORDERS, **arguments}
    query, key, value = tensors(rows=arguments.pop("rows", 1))
    with pytest.raises(hfp.PackingError, match=message):
        packed_varlen(Attention(), arguments.pop("query", query), key, value, **arguments)


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
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    attended, _ = packed_varlen(Attention(), query, key, value, LocalMask(**{kind: size}), cu_seq_lens_q=borders)
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
        attend = staticmethod(attend_exactly)

    sinks = torch.arange(4) / 4
    for borders in (BORDERS, BORDERS.long()):
        arguments = *tensors(), mask
        for more in ({}, {"s_aux": sinks}, {"softcap": 2.0, "sliding_window": 3}):
            layer = Attention()
            with kernels.switched_off():
                loop, _ = packed_varlen(layer, *arguments, cu_seq_lens_q=borders, **more)
            assert kernel_of(layer) == "exact attention, segment by segment"
            kernels.KERNELS[:] = [Kernel("a kernel")]
            attended, _ = packed_varlen(layer, *arguments, cu_seq_lens_q=borders, max_length_q=5, **more)
            assert torch.equal(attended, loop)
            assert kernel_of(layer) == "a kernel"


def test_masks_of_custom_functions_are_refused():
    overlaid = or_masks(causal_mask_function, causal_mask_function)
    for how in ({"mask_function": overlaid}, {"use_vmap": True}):
        with pytest.raises(hfp.PackingError, match="does not support a mask made of custom functions"):
            packed_varlen_mask(batch_size=1, q_length=3, kv_length=3, **how)
    assert packed_varlen_mask(batch_size=1, q_length=3, kv_length=3, mask_function=causal_mask_function) is None
