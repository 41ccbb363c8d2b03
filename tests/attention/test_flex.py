"""FlexAttention with masks from borders, against literal masks, torch's own and exact attention.

The kernels of FlexAttention need CUDA. On a CPU, torch computes it without kernels and without looking at blocks, so
attention and blocks are tested separately; and in one slow test together, where torch compiles it for the CPU.
"""

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch
from hypothesis import example, given, settings
from kernel_stand_ins import LISTS, assert_equal_with_gradients
from literal_masks import WIDE, Row, borders_of, calls, literal_mask, rows
from tiers import rarely
from torch._dynamo.utils import counters

from hf_packing.attention import flex
from hf_packing.attention.exact import attend_exactly, keys_along_paths
from hf_packing.attention.flex import BLOCK, Borders, attend_with_flex, row_mask
from hf_packing.attention.layout import Layout


def mask_of(row, *how):
    borders = Borders(borders_of(row.lengths), sum(row.lengths))
    if not row.trees.has_branches:
        return row_mask(borders, borders, *how)
    _, *runs = keys_along_paths(row.layout, *how, torch.device("cpu"))
    return row_mask(*(Borders(each.cu_seq_lens, each.tokens) for each in runs), *how[:2])


def places_of_keys(row, *how):
    if not row.trees.has_branches:
        return torch.arange(row.trees.tokens)
    return keys_along_paths(row.layout, *how, torch.device("cpu"))[0]


@settings(max_examples=30)
@given(rows(60, 130))
@example((WIDE, (True, None, None)))
@example((WIDE, (True, 150, None)))
@example((WIDE, (True, None, 100)))
def test_the_mask_is_the_literal_one(drawn):
    """A key may be gathered several times, and each query sees one of them."""
    row, how = drawn
    places, tokens = places_of_keys(row, *how), row.trees.tokens
    seen = mask_of(row, *how).mask_mod(0, 0, torch.arange(tokens)[:, None], torch.arange(len(places)))
    seen = torch.zeros(tokens, tokens, dtype=torch.int64).index_add_(1, places, seen.long())
    assert torch.equal(seen, literal_mask(row, *how).long())


def listed(mask, name):
    """The blocks that a mask lists, as a tensor of booleans."""
    counts, indices = getattr(mask, f"{name}_num_blocks")[0, 0], getattr(mask, f"{name}_indices")[0, 0]
    assert counts.dtype == indices.dtype == torch.int32
    assert 0 <= int(indices.min()) <= int(indices.max()) < indices.shape[-1]
    dense = torch.zeros(len(counts), indices.shape[-1], dtype=torch.bool)
    for row, (count, each) in enumerate(zip(counts.tolist(), indices, strict=True)):
        assert len(set(each[:count].tolist())) == count
        dense[row, each[:count].long()] = True
    return dense


@settings(max_examples=25)
@given(rows(60, 130))
@example((Row((300, 1, 99)), (True, None, None)))
@example((Row((BLOCK,) * 3), (False, None, None)))
@example((Row((1,)), (True, None, None)))
@example((Row((700,)), (False, 300, None)))
@example((Row((5,) * 60), (True, 3, None)))
@example((WIDE, (True, None, None)))
@example((WIDE, (True, 150, None)))
@example((Row((BLOCK, BLOCK, BLOCK), (-1, 0, 0)), (True, None, None)))
def test_no_visible_block_is_missing_and_full_blocks_are_full(drawn):
    """Blocks are those of torch's own mask."""
    row, how = drawn
    ours, sizes = mask_of(row, *how), (row.trees.tokens, len(places_of_keys(row, *how)))
    theirs = of_torch.create_block_mask(ours.mask_mod, None, None, *sizes, device="cpu")
    assert ours.shape == theirs.shape == (1, 1, *sizes)
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    # the compiled kernel reads indices one after another, whatever the strides are
    assert all(getattr(ours, f"{name}_indices").is_contiguous() for name in ("kv", "full_kv", "q", "full_q"))
    partial, full, expected, expected_full = (
        listed(mask, name) for mask in (ours, theirs) for name in ("kv", "full_kv")
    )
    assert torch.equal(partial.T, listed(ours, "q"))
    assert torch.equal(full.T, listed(ours, "full_q"))
    assert torch.equal(partial, expected)
    assert torch.equal(full, expected_full)


def test_a_row_has_full_blocks_and_others():
    """A test of the tests above: no kind of blocks is missing, and windows leave blocks out."""
    mask = mask_of(Row((300, 1, 99)), True, None, None)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 3, 2]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 0, 0]]]
    mask = mask_of(WIDE, True, None, None)
    partial, full = listed(mask, "kv"), listed(mask, "full_kv")
    assert full.any()
    assert partial.any()
    assert listed(mask_of(WIDE, True, 20, None), "kv").sum() < (partial | full).sum()


def test_borders_with_empty_segments_at_the_end():
    """Batches of fixed shapes are filled with empty segments."""
    both = torch.tensor([0, 200, 300, 300, 300], dtype=torch.int32), borders_of([200, 100])
    filled, plain = (row_mask(Borders(each, 300), Borders(each, 300), True, None) for each in both)
    place = torch.arange(300)
    assert torch.equal(filled.mask_mod(0, 0, place[:, None], place), plain.mask_mod(0, 0, place[:, None], place))
    assert torch.equal(filled.to_dense(), plain.to_dense())


@pytest.mark.usefixtures("on_cpu")
@settings(max_examples=15)
@given(calls(12))
def test_is_exact_attention(call):
    """Outputs and gradients, those of sinks included, in float64."""
    row, inputs, how = call
    ours, exact = (attend(*inputs[:3], row.layout, **how) for attend in (attend_with_flex, attend_exactly))
    assert_equal_with_gradients(ours, exact, inputs)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("row", [WIDE, Row((5, 7))])
def test_a_mask_is_made_once_for_the_layers_of_a_model(monkeypatch, row):
    layout, made = row.layout, []
    monkeypatch.setattr(flex, "row_mask", lambda *how: made.append(how) or row_mask(*how))
    tensors = [torch.randn(1, 1, layout.tokens, 16) for _ in range(3)]
    with torch.no_grad():
        for window in (None, None, 3, None):
            attend_with_flex(*tensors, layout, scale=0.3, is_causal=True, window=window)
    assert len(made) == 2


def parts_of_mask(borders, tokens, *how):
    """All that the compiled kernel reads: the lists of blocks, and what each token sees."""
    mask, place = row_mask(*[Borders(borders, tokens)] * 2, *how), torch.arange(tokens)
    return [getattr(mask, name) for name in LISTS] + [mask.mask_mod(0, 0, place[:, None], place)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
@pytest.mark.parametrize("how", [(True, 16), (False, 300), (True, None, 100)])
def test_a_compiled_model_makes_the_same_masks(how):
    """By inductor, for one size and for any; with several segments, and with empty ones at the end."""
    torch._dynamo.reset()
    made = torch.compile(parts_of_mask, fullgraph=True)
    for lengths in ((130, 1, 64, 300, 17, 188, 0, 0), (5, 700, 95, 0, 0, 0, 0, 0), (1000, 24, 513), (7,) * 60):
        borders = borders_of(lengths)
        for ours, eager in zip(
            made(borders, sum(lengths), *how), parts_of_mask(borders, sum(lengths), *how), strict=True
        ):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()
    torch._dynamo.reset()


COMPILED = [
    (WIDE, {}),
    (Row((150, 130, 600), (-1, 0, 0)), {"window": 64}),
    (Row((400, 300, 20, 1000), (-1, 0, 1, 0)), {"chunk": 256}),
    (Row((131, 2, 700), (-1, 0, -1)), {"window": 300, "chunk": 100}),
]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch compiles no FlexAttention for processors without vector instructions",
)
@pytest.mark.filterwarnings("ignore")  # of torch, while it compiles
@pytest.mark.parametrize("has_branches", [*rarely([False]), True])
def test_compiled_code_fits_rows_of_any_size(monkeypatch, tmp_path, has_branches):
    """torch's CPU code goes through blocks too. Two sizes are compiled, then no size, shape, window or soft cap is.

    torch's cache of compiled code does not tell values of ATEN_CPU_CAPABILITY apart, so the test has its own.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flex, "_needs_compiler", lambda _: True)
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    for softcap in (None,) if has_branches else (None, 3.0, 4.0):
        for number, (row, how) in enumerate(COMPILED):
            torch.manual_seed(number)
            tensors = [torch.randn(1, heads, sum(row.lengths), 32) for heads in (4, 2, 2)]
            layout = row.layout if has_branches else Layout.of(row.lengths)
            how = how | {"scale": 0.1 + number / 10, "softcap": softcap, "is_causal": True}
            with torch.no_grad():
                ours, exact = (attend(*tensors, layout, **how) for attend in (attend_with_flex, attend_exactly))
            assert torch.allclose(ours, exact, atol=1e-5)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:4] == [2, 2, 2]
    assert graphs[5:] == graphs[4:5] * len(graphs[5:])
    flex._compiled.cache_clear()
    torch._dynamo.reset()
