"""torch.compile on patched models: the same result, and no stop in the layers."""

import pytest
import torch
from torch._dynamo.utils import counters
from training_by_hand import DOCUMENTS, batch_of, losses_and_gradients

import hf_packing as hfp
from hf_packing.attention.exact_attention import attend_by_segment, attend_by_segment_compiled
from hf_packing.attention.tiny_model import tiny_model


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_breaks(layers, architecture="llama", kind="causal"):
    torch._dynamo.reset()
    counters.clear()
    model = hfp.patch_model(tiny_model(architecture, kind, num_hidden_layers=layers))
    expected = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    found = losses_and_gradients(torch.compile(model, backend="aot_eager"), [batch_of(DOCUMENTS)])
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, gradient in found[1].items():
        assert torch.allclose(gradient, expected[1][name.removeprefix("_orig_mod.")], atol=1e-4), name
    assert counters["frames"]["ok"] > 0
    return sum(counters["graph_break"].values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks, not we
@pytest.mark.parametrize(("architecture", "kind"), [("llama", "causal"), ("bert", "masked")])
def test_no_graph_break_in_a_layer(architecture, kind):
    assert compiled_breaks(6, architecture, kind) == compiled_breaks(2, architecture, kind)


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, while they are traced
@pytest.mark.slow
def test_a_model_that_runs_by_segment():
    model = hfp.patch_model(tiny_model("jamba", "causal"))
    expected = losses_and_gradients(model, [batch_of(DOCUMENTS)])[0]
    assert losses_and_gradients(torch.compile(model, backend="aot_eager"), [batch_of(DOCUMENTS)])[0] == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_one_node_is_the_same_attention(is_causal, window, softcap, has_sinks):
    """Its backward pass is written out by hand."""
    torch.manual_seed(0)
    lengths = [5, 1, 5, 9]
    borders = torch.tensor([0, 5, 6, 11, 20], dtype=torch.int32)
    shapes = [(1, 4, 20, 8), (1, 2, 20, 8), (1, 2, 20, 6)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sinks else None
    how = {"scale": 0.3, "is_causal": is_causal, "window": window, "softcap": softcap, "dropout": 0.0}
    wanted = [tensor for tensor in (*tensors, sinks) if tensor is not None]
    expected = attend_by_segment(*tensors, lengths, sinks=sinks, **how)
    found = attend_by_segment_compiled(*tensors, borders, sinks, **how)
    assert torch.allclose(found, expected, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        assert torch.allclose(one, other, atol=1e-12)


def test_dropout_is_refused():
    tensors = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(hfp.PackingError, match="dropout: expected 0 in compiled attention on cpu, got 0.1"):
        attend_by_segment_compiled(
            *tensors, torch.tensor([0, 4]), None, scale=1.0, is_causal=True, window=None, softcap=None, dropout=0.1
        )
