"""FlexAttention in rows of trees: its masks against literal ones and torch's own, and its results.

On a CPU, torch computes FlexAttention without kernels and without looking at blocks, so attention and blocks are tested
separately; and in one slow test together, where torch compiles it for the CPU.
"""

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
from forests import forests
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_stand_ins import half
from torch._dynamo.utils import counters

from hf_packing.attention import flex
from hf_packing.attention.exact_tree_attention import attend_along_paths
from hf_packing.attention.flex import BLOCK
from hf_packing.attention.flex_trees import attend_in_trees_with_flex, tree_block_mask
from hf_packing.attention.kernel_trials import fails_trial
from hf_packing.attention.kernels import FlexKernel
from hf_packing.attention.tree_row import TreeRow
from hf_packing.trees.segments import TreeSegments

CPU = torch.device("cpu")


@st.composite
def long_forests(draw):
    """Trees with several blocks."""
    lengths, parents = draw(forests(most=6))
    return tuple(draw(st.sampled_from([each, 60 * each, 130 * each])) for each in lengths), parents


WIDE = ((300, 40, 200, 1, 129, 256), (-1, 0, 0, 2, 0, -1))

windows = st.sampled_from([None, 1, 5, BLOCK, BLOCK + 1, 300])

chunks = st.sampled_from([None, 7, 100, 256])


def literal_mask(trees, window, chunk):
    mask = torch.zeros(trees.tokens, trees.tokens, dtype=torch.bool)
    for segment in range(len(trees.lengths)):
        path = torch.from_numpy(trees.path_of(segment))
        at = torch.arange(len(path))
        sees = at[:, None] >= at
        sees &= at[:, None] - at < (window or len(path))
        sees &= at[:, None] // (chunk or len(path)) == at // (chunk or len(path))
        mask[path[:, None], path] = sees
    return mask


@settings(max_examples=40)
@given(st.one_of(forests(), long_forests()), windows, chunks)
@example(WIDE, None, None)
@example(WIDE, 150, None)
def test_the_mask_is_that_of_the_paths(forest, window, chunk):
    trees = TreeSegments(*forest)
    place = torch.arange(trees.tokens)
    mask = tree_block_mask(trees, window, chunk, CPU)
    assert torch.equal(mask.mask_mod(0, 0, place[:, None], place), literal_mask(trees, window, chunk))


def listed(mask, name):
    """The blocks that a mask lists, as a tensor of booleans."""
    counts, indices = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(mask, f"{name}_indices")[0, 0]
    assert counts.dtype == indices.dtype == torch.int32
    dense = torch.zeros(len(counts), indices.shape[-1], dtype=torch.bool)
    for row, (count, each) in enumerate(zip(counts.tolist(), indices, strict=True)):
        assert sorted(each.tolist()) == list(range(len(each)))
        dense[row, each[:count].long()] = True
    return dense


@settings(max_examples=40, deadline=None)
@given(st.one_of(forests(), long_forests()), windows, chunks)
@example(WIDE, None, None)
@example(WIDE, 150, None)
@example(((BLOCK, BLOCK, BLOCK), (-1, 0, 0)), None, None)
def test_no_visible_block_is_missing_and_full_blocks_are_full(forest, window, chunk):
    trees = TreeSegments(*forest)
    ours = tree_block_mask(trees, window, chunk, CPU)
    theirs = of_torch.create_block_mask(ours.mask_mod, None, None, trees.tokens, trees.tokens, device="cpu")
    assert ours.shape == theirs.shape
    # the compiled kernel reads indices one after another, whatever the strides are
    assert all(getattr(ours, f"{name}_indices").is_contiguous() for name in ("kv", "full_kv", "q", "full_q"))
    partial, full, expected, expected_full = (
        listed(mask, name) for mask in (ours, theirs) for name in ("kv", "full_kv")
    )
    assert torch.equal(partial.T, listed(ours, "q"))
    assert torch.equal(full.T, listed(ours, "full_q"))
    assert not (partial & full).any()
    assert not (full & ~expected_full).any()
    assert not ((expected | expected_full) & ~(partial | full)).any()
    if window is None and chunk is None:
        assert torch.equal(partial, expected)
        assert torch.equal(full, expected_full)


def test_a_row_has_full_blocks_and_others():
    """A test of the tests above: no kind of blocks is missing, and windows leave blocks out."""
    mask = tree_block_mask(TreeSegments(*WIDE), None, None, CPU)
    partial, full = listed(mask, "kv"), listed(mask, "full_kv")
    assert full.any()
    assert partial.any()
    assert not (partial | full).tril().equal(torch.ones_like(full).tril())
    windowed = tree_block_mask(TreeSegments(*WIDE), 20, None, CPU)
    assert listed(windowed, "kv").sum() < (partial | full).sum()


@pytest.mark.usefixtures("on_cpu")
@settings(max_examples=15)
@given(
    forests(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([None, 4]),
    st.sampled_from([None, 2.3]),
    st.booleans(),
    st.sampled_from([(16, 16), (8, 6)]),
)
def test_is_exact_attention(forest, window, chunk, softcap, has_sinks, dims):
    """Outputs and gradients, those of sinks included, in float64."""
    trees = TreeSegments(*forest)
    torch.manual_seed(0)
    shapes = [(4, dims[0]), (2, dims[0]), (2, dims[1])]
    inputs = [torch.randn(1, heads, trees.tokens, dim, dtype=torch.float64) for heads, dim in shapes]
    inputs = [each.requires_grad_() for each in [*inputs, *([torch.randn(4).double()] if has_sinks else [])]]
    how = {"scale": 0.3, "window": window, "chunk": chunk, "softcap": softcap}
    how |= {"sinks": inputs[3]} if has_sinks else {}
    outputs = [
        attend(*inputs[:3], TreeRow.of(trees), **how) for attend in (attend_in_trees_with_flex, attend_along_paths)
    ]
    assert torch.allclose(*outputs, atol=1e-12)
    weight = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad((each * weight).sum(), inputs) for each in outputs]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


@pytest.mark.usefixtures("on_cpu", "on_hopper")
def test_it_passes_its_trial():
    cases = ({}, {"has_window": True}, {"has_softcap": True}, {"sinks": torch.bfloat16, "trains_sinks": True})
    for case in cases:
        assert fails_trial(FlexKernel(), half(**case, in_trees=True)) == ""


@pytest.mark.usefixtures("on_cpu")
def test_a_mask_is_made_once_for_the_layers_of_a_model():
    row = TreeRow.of(TreeSegments(*WIDE))
    tensors = [torch.randn(1, 1, row.tokens, 16) for _ in range(3)]
    with torch.no_grad():
        attend_in_trees_with_flex(*tensors, row, scale=0.3)
        kept = dict(row.kept)
        attend_in_trees_with_flex(*tensors, row, scale=0.3)
        assert row.kept == kept
        attend_in_trees_with_flex(*tensors, row, scale=0.3, window=3)
    assert len(row.kept) == len(kept) + 1 == 2


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch compiles no FlexAttention for processors without vector instructions",
)
@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
def test_compiled_code_fits_trees_of_any_shape(monkeypatch, tmp_path):
    """torch's CPU code goes through blocks too. Two sizes are compiled, then no size, shape, window or chunk is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flex, "_needs_compiler", lambda _: True)
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    forest = [WIDE, ((150, 130, 600), (-1, 0, 0)), ((400, 300, 20, 1000), (-1, 0, 1, 0)), ((131, 2, 700), (-1, 0, -1))]
    limited = ((None, None), (64, None), (None, 256), (300, 100))
    for number, (shape, (window, chunk)) in enumerate(zip(forest, limited, strict=True)):
        row = TreeRow.of(TreeSegments(*shape))
        torch.manual_seed(number)
        tensors = [torch.randn(1, heads, row.tokens, 32) for heads in (4, 2, 2)]
        how = {"scale": 0.1 + number / 10, "window": window, "chunk": chunk}
        with torch.no_grad():
            found = attend_in_trees_with_flex(*tensors, row, **how)
        assert torch.allclose(found, attend_along_paths(*tensors, row, **how), atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == [2, 2, 2]
    flex._compiled.cache_clear()
    torch._dynamo.reset()
