"""Kernels on a CUDA device against exact attention; skipped where there is none."""

import json
import os

import pytest
import torch
from accelerate import PartialState
from model_inputs import CHAT, inputs_of
from parts_of_rows import logits_of_part
from processes import on_ranks
from tiny_models import build

import hf_packing as hfp
from hf_packing.attention import block_of, kernels
from hf_packing.attention.exact import attend_exactly
from hf_packing.attention.flex import Borders, row_mask
from hf_packing.attention.kernels import KERNELS, Call, VarlenKernel
from hf_packing.attention.kinds.split import SplitLayout, exchange_of
from hf_packing.attention.kinds.trees import TreeLayout
from hf_packing.attention.layout import Layout
from hf_packing.planning.rank_layout import RowPart, lay_out
from hf_packing.trees.segments import TreeSegments
from tools.tiny_model import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),  # of torch's own compiler, as are the next three
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:\\s+Online softmax is disabled"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

LENGTHS = [130, 1, 64, 300, 17]


def kernel_named(name, **how):
    """Return a kernel, or skip the test if it is not installed or does not take the call on this GPU."""
    kernel = next(each for each in KERNELS if each.name == name)
    asked = tuple(
        each for each in ("window", "softcap", "sinks", "dropout", "chunk", "trees") if how.get(each) is not None
    )
    if reason := kernel.refusal(Call(torch.bfloat16, max(how["dim"], how["value_dim"]), asked)):
        pytest.skip(f"{name}: {reason}")
    return kernel


def exact_and_half(tokens, dim, value_dim, sinks):
    """Queries, keys, values and sinks in float32, and the same in bfloat16."""
    shapes = [(1, heads, tokens, size) for heads, size in ((8, dim), (2, dim), (2, value_dim))]
    half = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    half += [] if sinks is None else [sinks.requires_grad_()]
    return [tensor.detach().float().requires_grad_() for tensor in half], half


def assert_close(kernel, layout, how, tensors):
    """Compare outputs and gradients. A kernel in bfloat16 may differ from float32 no more than plain attention in
    bfloat16 does, and a little."""

    def attended(function, q, k, v, sinks=None):
        return function(q, k, v, layout, scale=0.2, sinks=sinks, **how)

    exact, half = tensors
    cases = (attend_exactly, exact), (attend_exactly, half), (kernel.attend, half)
    outputs = [(attended(function, *inputs), inputs) for function, inputs in cases]
    weight = torch.randn_like(outputs[0][0])
    grads = [torch.autograd.grad((output.float() * weight).sum(), inputs) for output, inputs in outputs]
    for wanted, naive, got in [[output for output, _ in outputs], *zip(*grads, strict=True)]:
        allowed = 2 * (naive.float() - wanted).abs().max() + 1e-2 * wanted.abs().max()
        assert (got.float() - wanted).abs().max() <= allowed


@pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 12)])
def test_kernel_is_attention_by_segment(name, window, is_causal, softcap, has_sinks, dim, value_dim):
    torch.manual_seed(0)
    sinks = torch.randn(8, device="cuda").bfloat16() if has_sinks else None
    how = {"is_causal": is_causal, "window": window, "softcap": softcap}
    kernel = kernel_named(name, dim=dim, value_dim=value_dim, sinks=sinks, **how)
    tensors = exact_and_half(sum(LENGTHS), dim, value_dim, sinks)
    assert_close(kernel, Layout.of(LENGTHS, torch.device("cuda")), how, tensors)


@pytest.mark.parametrize("is_causal", [True, False])
def test_flex_attention_in_rows_of_many_sizes(is_causal):
    """The first two sizes are compiled, and the results stay right where blocks are cut or missing."""
    how = {"is_causal": is_causal, "window": None, "softcap": None}
    kernel = kernel_named("FlexAttention", dim=64, value_dim=64, **how)
    for seed, lengths in enumerate(([64], [128, 128], [1000, 24], [7] * 300, [4096, 5], [513, 511, 3000])):
        for window in (None, 100, 700):
            torch.manual_seed(seed)
            q, k, v = (torch.randn(1, heads, sum(lengths), 64, device="cuda").bfloat16() for heads in (8, 2, 2))
            layout, options = Layout.of(lengths, torch.device("cuda")), {"scale": 0.1, **how, "window": window}
            with torch.no_grad():
                found = kernel.attend(q, k, v, layout, **options).float()
                naive = attend_exactly(q, k, v, layout, **options).float()
                wanted = attend_exactly(q.float(), k.float(), v.float(), layout, **options)
            assert (found - wanted).abs().max() <= 2 * (naive - wanted).abs().max() + 1e-2


def test_compiled_masks_are_those_of_uncompiled_code():
    def blocks(borders):
        mask = row_mask(*[Borders(borders, 512)] * 2, True, None)
        return mask.kv_num_blocks, mask.kv_indices, mask.q_num_blocks, mask.q_indices

    borders = torch.tensor([0, 130, 131, 195, 495, 512, 512], dtype=torch.int32, device="cuda")
    for found, wanted in zip(torch.compile(blocks)(borders), blocks(borders), strict=True):
        assert torch.equal(found, wanted)


def test_masks_are_made_without_waiting_for_the_device():
    borders = torch.arange(0, 16385, 512, dtype=torch.int32, device="cuda")
    row_mask(*[Borders(borders, 16384)] * 2, True, None)
    try:
        torch.cuda.set_sync_debug_mode("error")
        row_mask(*[Borders(borders, 16384)] * 2, True, 4096)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:attention runs segment by segment")  # in float32
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Gemma2", "GptOss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patched_models(name, dtype):
    model = hfp.patch_model(build(name, dtype).cuda())
    report = hfp.check_isolation(model)
    assert report.isolated
    assert ("segment by segment" in report.kernel) is (dtype == torch.float32)


@pytest.mark.filterwarnings("ignore:attention runs segment by segment")  # in float32
@pytest.mark.parametrize("architecture", ["mamba", "jamba", "qwen3_next", "bloom", "bert"])
def test_models_that_run_by_segment(architecture):
    kind = "masked" if architecture == "bert" else "causal"
    for dtype in (torch.bfloat16, torch.float32):
        model = hfp.patch_model(tiny_model(architecture, kind, dtype).cuda())
        assert hfp.check_isolation(model).isolated


@pytest.mark.filterwarnings("ignore:attention runs segment by segment")  # where the model is patched in float32
def test_autocast():
    model = hfp.patch_model(build("Qwen3").cuda())
    batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    inputs = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.isfinite(model(**inputs).loss)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "GptOss"])
def test_fixed_shapes(name, compiled):
    """Kernels take empty segments, and a length above that of the longest segment.

    Every expert has every token: a compiled model rounds otherwise, and a router would choose other experts.
    """
    experts = {"num_experts_per_tok": 4} if name == "GptOss" else {}
    model = hfp.patch_model(build(name, torch.bfloat16, **experts).cuda())
    rows = [{"input_ids": [3 + place % 90 for place in range(length)]} for length in LENGTHS]
    found = []
    for shapes in ({}, {"tokens": 700, "max_segments": 20}):
        batch = hfp.PackingCollator(**shapes)(rows)
        inputs = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        model.zero_grad()
        outputs = (torch.compile(model) if compiled and shapes else model)(**inputs)
        outputs.loss.backward()
        gradients = [parameter.grad.float() for parameter in model.parameters()]
        found.append([outputs.loss.detach(), outputs.logits[:, : sum(LENGTHS)].detach().float(), *gradients])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 0.05 * one.abs().max() + 1e-3


TREES = TreeSegments((300, 64, 1, 130, 17, 200, 500, 40), (-1, 0, 1, 1, 0, 4, -1, 6))


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (32, None), (None, 100), (400, None)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 12)])
def test_flex_attention_is_attention_along_paths(window, chunk, softcap, has_sinks, dim, value_dim):
    torch.manual_seed(0)
    sinks = torch.randn(8, device="cuda").bfloat16() if has_sinks else None
    how = {"is_causal": True, "window": window, "softcap": softcap}
    kernel = kernel_named("FlexAttention", dim=dim, value_dim=value_dim, sinks=sinks, trees=True, **how)
    how["chunk"] = chunk
    assert_close(
        kernel, TreeLayout.of(TREES, torch.device("cuda")), how, exact_and_half(TREES.tokens, dim, value_dim, sinks)
    )


@pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS])
def test_chunks_in_packed_rows(name):
    torch.manual_seed(0)
    how = {"is_causal": True, "chunk": 50}
    kernel = kernel_named(name, dim=64, value_dim=64, **how)
    layout, tensors = Layout.of(LENGTHS, torch.device("cuda")), exact_and_half(sum(LENGTHS), 64, 64, None)
    assert_close(kernel, layout, how, tensors)


class Failing(VarlenKernel):
    def attend(self, query, *args, **options):
        return super().attend(query * 2, *args, **options)


class Raising(VarlenKernel):
    def attend(self, *_, **__):
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("kind", [Failing, Raising])
def test_a_kernel_that_fails_is_replaced(monkeypatch, kind):
    of_torch = next(each for each in KERNELS if each.name == "torch varlen_attn")
    monkeypatch.setattr(kernels, "KERNELS", [kind("failing", of_torch.load, is_torch=True), *KERNELS])
    for name in ("_chosen", "_struck"):
        monkeypatch.setattr(kernels, name, {})
    kernels._warn.cache_clear()
    with pytest.warns(UserWarning, match="an attention kernel failed .failing: "):
        model = hfp.patch_model(build("Llama", torch.bfloat16).cuda())
    assert hfp.check_isolation(model).kernel in [each.name for each in KERNELS]


@pytest.mark.filterwarnings("ignore:attention")  # in float32
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # newer versions have another name for it
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3", "Gemma2", "GptOss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patched_models_on_trees(name, dtype):
    model = hfp.patch_model(build(name, dtype).cuda(), trees=True)
    batch = {each: value.cuda() for each, value in inputs_of(CHAT).items()}
    report = hfp.check_isolation(model, batch=batch)
    assert report.isolated
    assert ("segment by segment" in report.kernel) is (dtype == torch.float32)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        model.zero_grad()
        model(**batch).logits.float().square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert gradients
        assert all(torch.isfinite(each).all() for each in gradients)


@pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS if isinstance(kernel, VarlenKernel)])
@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (True, 32), (False, None)])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 12)])
def test_documents_on_several_ranks(name, is_causal, window, dim, value_dim):
    """Each rank's tokens attend to all that they see, and a kernel gets fewer queries than keys."""
    torch.manual_seed(0)
    how = {"is_causal": is_causal, "window": window, "softcap": None}
    kernel = kernel_named(name, dim=dim, value_dim=value_dim, **how)
    (q, k, v), _ = exact_and_half(sum(LENGTHS), dim, value_dim, None)
    layout = lay_out(LENGTHS, 3, 180, linear_cost=0)
    assert layout.num_split
    for rank in range(3):
        row = SplitLayout.of_part(RowPart(layout, rank), q.device)
        seen = torch.from_numpy(exchange_of(row, is_causal, window, None).seen).cuda()
        own = torch.from_numpy(layout.places(rank)).cuda()
        part = [q[:, :, own], k[:, :, seen], v[:, :, seen]]
        exact, half = (
            [each.detach().to(dtype).requires_grad_() for each in part] for dtype in (q.dtype, torch.bfloat16)
        )
        whole = attend_exactly(q, k, v, Layout.of(LENGTHS, q.device), scale=0.2, **how)
        assert (attend_exactly(*exact, row, scale=0.2, **how) - whole[:, :, own]).abs().max() < 1e-4
        assert_close(kernel, row, how, (exact, half))


def run_on_one_card(folder, names):
    """Two processes run models on the one card that there may be, on which they cannot use NCCL."""
    os.environ["LOCAL_RANK"] = "0"
    state = PartialState(cpu=True)
    found = {}
    for name in names:
        model = tiny_model(name, "masked" if name == "bert" else "causal", torch.bfloat16).cuda()
        block_of(2)
        one, other = logits_of_part(hfp.patch_model(model), 2)
        found[name] = float((one - other).float().abs().max() / other.float().std()), kernels.kernel_of(model)
    (folder / f"{state.process_index}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "jamba", "bert"])
def test_models_run_rows_on_several_ranks(name, tmp_path):
    on_ranks(run_on_one_card, tmp_path, [name], ranks=2)
    apart, kernel = json.loads((tmp_path / "0.json").read_text())[name]
    assert apart < 0.25
    assert kernel
