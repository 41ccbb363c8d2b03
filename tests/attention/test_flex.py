"""FlexAttention with masks from borders, against torch's own masks and exact attention.

The kernels of FlexAttention need CUDA. On a CPU, torch computes it without kernels and without looking at blocks, so
attention and blocks are tested separately; and in one slow test together, where torch compiles it for the CPU.
"""

import gc
from itertools import accumulate

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from hf_packing.attention import flex
from hf_packing.attention.exact_attention import attend_by_segment
from hf_packing.attention.flex import BLOCK, attend_with_flex, block_mask


def borders_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


rows = st.lists(st.one_of(st.integers(1, 9), st.integers(100, 400)), min_size=1, max_size=4)

windows = st.sampled_from([None, 1, 3, 40, BLOCK, BLOCK + 1, 300])


@settings(max_examples=30)
@given(rows, st.booleans(), windows)
@example([300, 1, 99], True, None)
@example([BLOCK] * 3, False, None)
@example([1], True, None)
@example([700], False, 300)
@example([5] * 60, True, 3)
def test_blocks_are_those_of_create_block_mask(lengths, is_causal, window):
    tokens = sum(lengths)
    ours = block_mask(borders_of(lengths), tokens, is_causal, window)
    theirs = of_torch.create_block_mask(ours.mask_mod, None, None, tokens, tokens, device="cpu")
    assert ours.shape == theirs.shape == (1, 1, tokens, tokens)
    assert theirs.BLOCK_SIZE == ours.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, expected = (getattr(mask, f"{name}_num_blocks") for mask in (ours, theirs))
        assert (counts.dtype, counts.tolist()) == (expected.dtype, expected.tolist())
        indices, expected = (getattr(mask, f"{name}_indices") for mask in (ours, theirs))
        assert (indices.dtype, indices.shape) == (expected.dtype, expected.shape)
        assert indices.is_contiguous()
        assert 0 <= int(indices.min()) <= int(indices.max()) < indices.shape[-1]
        for count, row, other in zip(counts[0, 0].tolist(), indices[0, 0], expected[0, 0], strict=True):
            assert row[:count].tolist() == sorted(other[:count].tolist())


@settings(max_examples=50)
@given(rows, st.booleans(), windows)
def test_the_mask_is_that_of_the_segments(lengths, is_causal, window):
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(segment))
    back = place[:, None] - place
    expected = segment[:, None] == segment
    if is_causal:
        expected &= back >= 0
    if window is not None:
        expected &= back.abs() < window
    mask = block_mask(borders_of(lengths), len(segment), is_causal, window)
    assert torch.equal(mask.mask_mod(0, 0, place[:, None], place), expected)


def test_a_row_has_full_blocks_and_others():
    """A test of the tests above: neither kind of blocks is missing."""
    mask = block_mask(borders_of([300, 1, 99]), 400, True, None)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 3, 2]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 0, 0]]]


def test_borders_with_empty_segments_at_the_end():
    """Batches of fixed shapes are filled with empty segments."""
    filled = block_mask(torch.tensor([0, 200, 300, 300, 300], dtype=torch.int32), 300, True, None)
    plain = block_mask(borders_of([200, 100]), 300, True, None)
    place = torch.arange(300)
    assert torch.equal(filled.mask_mod(0, 0, place[:, None], place), plain.mask_mod(0, 0, place[:, None], place))
    assert torch.equal(filled.to_dense(), plain.to_dense())


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.sampled_from([1, 2, 5, 60, 130]), min_size=1, max_size=3))
    heads, kv_heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    dim, value_dim = draw(st.sampled_from([(8, 8), (16, 6), (24, 24)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim)]
    tensors = [torch.randn(1, each, sum(lengths), size, dtype=torch.float64) for each, size in shapes]
    how = {
        "scale": draw(st.sampled_from([0.3, 1.0])),
        "is_causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 1, 40])),
        "softcap": draw(st.sampled_from([None, 2.3])),
        "sinks": torch.randn(heads, dtype=torch.float64) if draw(st.booleans()) else None,
    }
    return tensors, lengths, how


@pytest.mark.usefixtures("on_cpu")
@settings(max_examples=25)
@given(cases())
def test_is_exact_attention(case):
    """Outputs and gradients, those of sinks included, in float64."""
    tensors, lengths, how = case
    inputs = [tensor.requires_grad_() for tensor in (*tensors, how["sinks"]) if tensor is not None]
    ours = attend_with_flex(*tensors, borders_of(lengths), **how)
    expected = attend_by_segment(*tensors, lengths, **how)
    assert torch.allclose(ours, expected, atol=1e-12)
    weight = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-11)


def test_a_mask_is_made_once_for_the_layers_of_a_model():
    borders = borders_of([5, 7])
    mask = flex._block_mask_of(borders, 12, True, None)
    assert flex._block_mask_of(borders, 12, True, None) is mask
    assert flex._block_mask_of(borders, 12, True, 3) is not mask
    assert flex._block_mask_of(borders.clone(), 12, True, None) is not mask
    borders[1] = 6
    changed = flex._block_mask_of(borders, 12, True, None)
    assert bool(mask.mask_mod(0, 0, torch.tensor(5), torch.tensor(4))) is False
    assert bool(changed.mask_mod(0, 0, torch.tensor(5), torch.tensor(4))) is True
    with torch.inference_mode():
        flex._block_mask_of(borders_of([5, 7]), 12, True, None)
    gc.collect()
    stored = len(flex._masks)
    del borders
    gc.collect()
    assert len(flex._masks) == stored - 1


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch compiles no FlexAttention for processors without vector instructions",
)
@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
def test_compiled_code_fits_rows_of_any_size(monkeypatch, tmp_path):
    """torch's CPU code goes through blocks too. Two sizes are compiled, then no size, window, scale or soft cap is.

    torch's cache of compiled code does not tell values of ATEN_CPU_CAPABILITY apart, so the test has its own.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flex, "_needs_compiler", lambda _: True)
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    rows = ([300, 1, 99], [150, 130, 600], [400, 300, 1000], [131, 2, 700])
    graphs = []
    for softcap in (None, 3.0, 4.0):
        for number, lengths in enumerate(rows):
            torch.manual_seed(number)
            tensors = [torch.randn(1, heads, sum(lengths), 32) for heads in (4, 2, 2)]
            how = {"scale": 0.1 + number / 10, "is_causal": True, "window": [None, 64, 300][number % 3]}
            with torch.no_grad():
                found = attend_with_flex(*tensors, borders_of(lengths), softcap=softcap, **how)
            assert torch.allclose(found, attend_by_segment(*tensors, lengths, softcap=softcap, **how), atol=1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:4] == [2, 2, 2]
    assert graphs[5:] == [graphs[4]] * 7
    flex._compiled.cache_clear()
    torch._dynamo.reset()
