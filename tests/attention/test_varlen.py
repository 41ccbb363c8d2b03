"""The attention function itself: local masks, what kernels are given, and every argument that it refuses."""

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    sliding_window_causal_mask_function,
)

import hf_packing as hfp
from hf_packing.attention import kernels
from hf_packing.attention.exact import attend_exactly
from hf_packing.attention.function import NAME, LocalMask, packed_varlen, packed_varlen_mask, register
from hf_packing.attention.kernels import kernel_of
from hf_packing.attention.layout import Layout, current_layout, within


class Attention(torch.nn.Module):
    is_causal = True


def tensors():
    torch.manual_seed(0)
    return [torch.randn(1, heads, 12, 8) for heads in (4, 2, 2)]


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


SINKS = torch.arange(4) / 4
GIVEN = [
    (None, {}, {}),
    (LocalMask(window=3), {}, {"window": 3}),
    (LocalMask(chunk=2), {}, {"chunk": 2}),
    (LocalMask(chunk=2), {"softcap": 2.0, "sliding_window": 3}, {"chunk": 2, "softcap": 2.0, "window": 3}),
    (None, {"s_aux": SINKS}, {"sinks": SINKS}),
]


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize(("mask", "more", "options"), GIVEN)
def test_what_exact_attention_and_kernels_are_given(mask, more, options):
    class Kernel(kernels.FlexKernel):
        name = "a kernel"
        attend = staticmethod(attend_exactly)

    layer, given = Attention(), tensors()
    expected = attend_exactly(*given, Layout.of(LENGTHS), scale=8**-0.5, is_causal=True, **options).transpose(1, 2)
    with kernels.switched_off():
        assert torch.equal(attend(layer, *given, mask, **more), expected)
    assert kernel_of(layer) == "exact attention, segment by segment"
    kernels.KERNELS[:] = [Kernel()]
    assert torch.equal(attend(layer, *given, mask, **more), expected)
    assert kernel_of(layer) == "a kernel"


def own_mask(_, __, query, key):
    return key >= query - 4


LOCAL = PreTrainedConfig(sliding_window=3, attention_chunk_size=3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mask_function": or_masks(causal_mask_function, causal_mask_function)}, "of its own, or_masks"),
        ({"mask_function": own_mask}, "a function of its own, own_mask"),
        *(
            ({"mask_function": and_masks(*both), "config": LOCAL, "local_size": 4}, "a function of its own, own_mask")
            for both in ((own_mask, causal_mask_function), (causal_mask_function, own_mask))
        ),
        ({"mask_function": sliding_window_causal_mask_function(4)}, "of its own, and_masks"),
        ({"use_vmap": True}, "a function of its own, causal_mask_function"),
        *(({"config": LOCAL, "local_size": size}, f"got a local mask of {size} tokens") for size in (3, 5)),
    ],
)
def test_masks_of_other_kinds_are_refused(how, message):
    with pytest.raises(hfp.PackingError, match=message):
        packed_varlen_mask(batch_size=1, q_length=9, kv_length=9, **how)


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
    tokens = torch.zeros(1, 9, 2)
    # no cache, whatever it is called, or no hidden states of an encoder
    assert create(config, tokens, None, None) == mask
    assert isinstance(create(config, tokens, torch.ones(1, 9, dtype=torch.bool).tril(-1), None), torch.Tensor)
