"""torch.compile on patched models: the same result, one graph, and few compilations however batches differ."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from patched_models import patched_tiny
from tiers import fast_only, rarely
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import counters
from training_by_hand import DOCUMENTS, batch_of, losses_and_gradients
from transformers.generation.configuration_utils import CompileConfig

import hf_packing as hfp
from hf_packing.attention import function, kernels
from hf_packing.attention.exact import TracedRow, attend_exactly, attend_exactly_compiled
from hf_packing.attention.kernels import FlexKernel, VarlenKernel
from hf_packing.attention.layout import Layout
from tools.tiny_model import tiny_model


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def assert_as_uncompiled(compiled, batches, expected, close):
    """Compare losses and gradients of a compiled model with those that it had before."""
    loss, gradients = losses_and_gradients(compiled, batches)
    assert loss == pytest.approx(expected[0], rel=close / 10)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[1][name.removeprefix("_orig_mod.")], atol=close), name


class Compilations:
    """A backend that runs graphs as they are, and counts how often each of them is compiled."""

    def __init__(self):
        self.of_graph = Counter()

    def __call__(self, graph, _):
        self.of_graph[torch._guards.CompileContext.current_compile_id().frame_id] += 1
        return graph


def random_batches(number, **shapes):
    """From 1 to 20 documents in each; among the first, one is a single document, and one a single token."""
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, rng.integers(2, 16), rng.integers(1, 21)) for _ in range(number - 2)]
    lengths[2:2] = [[7], [1]]
    rows = [[{"input_ids": rng.integers(3, 60, length)} for length in each] for each in lengths]
    return map(hfp.PackingCollator(**shapes), rows)


def compilations(model, *numbers, **shapes):
    """How often each graph was compiled after each of these numbers of batches."""
    torch._dynamo.reset()
    backend = Compilations()
    compiled = torch.compile(model, backend=backend)
    counted = []
    with torch.no_grad():
        for done, batch in enumerate(random_batches(max(numbers), **shapes), 1):
            found, expected = compiled(**batch), model(**batch)
            assert torch.allclose(found.logits, expected.logits, atol=1e-4)
            assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-4, nan_ok=True)
            if done in numbers:
                counted.append(backend.of_graph.copy())
    return counted


FIXED = {"tokens": 300, "max_segments": 21}
GRAPHS = [("mistral", {}), ("mamba", FIXED), ("mixtral", FIXED), ("jamba", FIXED)]
MORE_GRAPHS = [("mamba", {}), *((each, FIXED) for each in ("mistral", "gpt_oss", "llama4_text", "qwen3_next", "gpt2"))]


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, while they are traced
@pytest.mark.parametrize(("architecture", "shapes"), [*fast_only(GRAPHS), *rarely(MORE_GRAPHS)])
def test_every_graph_is_compiled_once_with_fixed_shapes_and_a_few_times_without(architecture, shapes):
    """Masks with windows are made in the graph, too. Modules of Mamba that run by segment divide it into graphs; their
    number does not depend on its layers. Layers of different kinds that run the same code, such as those of Qwen3Next,
    are compiled separately."""
    graphs = {"mistral": 1, "mamba": 4}.get(architecture)
    model = patched_tiny(architecture, "causal", **({"num_hidden_layers": 1} if graphs else {}))
    few, many = compilations(model, 3 if graphs else 5, 6 if graphs else 25, **shapes)
    assert graphs in (None, len(many))
    assert not shapes or few == many
    assert max(many.values()) <= (4 if not shapes else 1 if graphs else 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_longest_document_is_no_guard(monkeypatch):
    """A kernel gets its length as an integer, on a device that has kernels."""
    lengths = []

    @torch.library.custom_op("hf_packing_tests::kernel", mutates_args=())
    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        assert longest >= borders.diff().max()
        lengths.append(longest)
        each = [length for length in borders.diff().tolist() if length]
        return attend_exactly(query, key, value, Layout.of(each), scale=scale, is_causal=True).contiguous()

    kernel.register_fake(lambda query, key, value, *_: torch.empty_like(query))  # noqa: ARG005
    model = patched_tiny("llama", "causal")

    def attend(query, key, value, row, *, scale, **_):
        return kernel(query, key, value, row.cu_seq_lens, row.max_length, scale)

    used = SimpleNamespace(attend=attend)
    monkeypatch.setattr(function, "choose", lambda *_, **__: used)
    assert max(compilations(model, 30)[0].values()) <= 4
    assert len(set(lengths)) > 8
    lengths.clear()
    assert list(compilations(model, 12, **FIXED)[0].values()) == [1]
    assert set(lengths) == {FIXED["tokens"]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fixed", [pytest.param({}, marks=pytest.mark.slow), FIXED])
def test_activation_checkpointing_in_one_graph(fixed):
    model = patched_tiny("llama", "causal", torch.float64, num_hidden_layers=1).train()
    batches = list(random_batches(4, **fixed))[: 3 if fixed else 2]  # the third one is a single document
    expected = losses_and_gradients(model, batches)
    model.gradient_checkpointing_enable()
    backend = Compilations()
    assert_as_uncompiled(torch.compile(model, backend=backend), batches, expected, 1e-10)
    assert len(backend.of_graph) == 1
    assert not fixed or list(backend.of_graph.values()) == [1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_was_compiled_before_it_is_patched():
    model = tiny_model("llama", "causal", num_hidden_layers=1)
    backend = Compilations()
    compiled = torch.compile(model, backend=backend)
    batch = {name: value for name, value in batch_of(DOCUMENTS).items() if name != "labels"}
    plain = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        before = compiled(**plain, use_cache=False).logits
        hfp.patch_model(compiled)
        assert torch.allclose(compiled(**batch).logits, model(**batch).logits, atol=1e-4)
        assert len(backend.of_graph) == 2
        hfp.unpatch_model(compiled)
        assert torch.allclose(compiled(**plain, use_cache=False).logits, before, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_inner_model_alone_reads_the_borders_itself():
    """It is traced as a part of the patched model only while that one runs."""
    model = patched_tiny("llama", "causal", num_hidden_layers=1)
    inner = torch.compile(model.model, backend="eager")
    batch = {name: value for name, value in batch_of(DOCUMENTS).items() if name != "labels"}
    with torch.no_grad():
        assert torch.allclose(inner(**batch)[0], model.model(**batch)[0], atol=1e-4)
        with pytest.raises(hfp.PackingError, match="expected segments of the same lengths as in cu_seq_lens_q"):
            inner(**{**batch, "cu_seq_lens_q": torch.tensor([0, 29], dtype=torch.int32)})


def test_what_the_package_needs_of_dynamo():
    """maybe_mark_dynamic is called in hf_packing.attention.route alone, skip_code in hf_packing.attention.forward."""
    backend = Compilations()
    compiled = torch.compile(lambda each: each * 2, backend=backend)
    for tokens in (7, 8):
        tensor = torch.ones(1, tokens)
        torch._dynamo.maybe_mark_dynamic(tensor, [1])
        compiled(tensor)
    assert list(backend.of_graph.values()) == [1]

    def inner(value):
        return value * 2

    def outer(value):
        return inner(value) + 1

    skip_code(outer.__code__)
    backend = Compilations()
    assert torch.compile(outer, backend=backend)(torch.ones(2)).tolist() == [3, 3]
    assert len(backend.of_graph) == 1  # of inner
    compiled = torch.compile(lambda value: outer(value), backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size=(-1, -1), enable_gqa):  # noqa: ARG001
    """A kernel that runs anywhere."""
    assert (window_size, enable_gqa) == ((-1, 0), True)
    tensors = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    row = TracedRow(cu_seq_q, max_q)
    return attend_exactly_compiled(*tensors, row, scale=scale, is_causal=True)[0].transpose(0, 1)


KERNELS = {
    "none": [],
    "torch varlen_attn": [VarlenKernel("torch varlen_attn", lambda: varlen_attn, is_torch=True)],
    "FlexAttention": [FlexKernel()],
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks, not we
@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [
        *fast_only([("llama", "none"), ("llama", "FlexAttention")]),
        *rarely([("bert", "none"), ("llama", "torch varlen_attn")]),
    ],
)
def test_no_graph_break_in_a_layer(request, monkeypatch, architecture, kernel):
    """Also with its backward pass; a break in a layer that all layers share would be counted once for all of them."""
    for fixture in ("as_on_cuda", "on_cpu") if KERNELS[kernel] else ():
        request.getfixturevalue(fixture)
    kernels.KERNELS[:] = KERNELS[kernel]
    model = hfp.patch_model(tiny_model(architecture, "masked" if architecture == "bert" else "causal"))
    for other in ("attend_exactly", "attend_exactly_compiled") if KERNELS[kernel] else ():
        monkeypatch.setattr(function, other, lambda *_, **__: pytest.fail("not on the kernel"))
    batches = [batch_of(DOCUMENTS)]
    expected = losses_and_gradients(model, batches)
    assert_as_uncompiled(torch.compile(model, backend="aot_eager"), batches, expected, 1e-4)
    assert counters["frames"]["ok"] > 0
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_dropout_is_refused():
    tensors = [torch.randn(1, 2, 4, 8) for _ in range(3)]
    with pytest.raises(hfp.PackingError, match="dropout: expected 0 in compiled attention on cpu, got 0.1"):
        attend_exactly_compiled(*tensors, TracedRow(torch.tensor([0, 4]), 4), scale=1.0, is_causal=True, dropout=0.1)


@pytest.mark.filterwarnings("ignore")  # of torch, while it exports
@pytest.mark.parametrize(
    "make_program",
    [
        lambda model, ids: torch.export.export(model, (), {"input_ids": ids}),
        lambda model, ids: torch.jit.trace(lambda ids: model(ids).logits, (ids,)),
    ],
)
def test_a_patched_model_is_not_exported(make_program):
    with pytest.raises(hfp.PackingError, match="model: expected a model without a patch in torch.export"):
        make_program(patched_tiny("llama", "causal", num_hidden_layers=1), torch.tensor([[5, 6, 7, 8]]))


@pytest.mark.filterwarnings("ignore")  # of torch and transformers, while they are traced
@pytest.mark.parametrize("architecture", fast_only(["llama", "bloom", "qwen2_moe"], "llama"))
def test_generate_compiled_as_one_graph(architecture):
    stock, model = (make(architecture, "causal", num_hidden_layers=1) for make in (tiny_model, patched_tiny))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected = stock.generate(ids, **options)
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True
    assert torch.equal(model.generate(ids, compile_config=compiled, **options), expected)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
