"""Kernels on a CUDA device against exact attention by segment; skipped where there is none."""

import pytest
import torch
from tiny_models import build

import hf_packing as hfp
from hf_packing.attention import kernels
from hf_packing.attention.exact_attention import attend_by_segment
from hf_packing.attention.tiny_model import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = [130, 1, 64, 300, 17]


@pytest.mark.parametrize("backend", ["flash_attn_3", "flash_attn", "torch"])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("is_causal", [True, False])
def test_kernel_is_attention_by_segment(monkeypatch, backend, window, is_causal):
    """In bfloat16 a kernel may differ from float32 no more than plain attention in bfloat16 does, and a little."""
    backends = {name: getattr(kernels, f"{name}_varlen") for name in ("flash_attn_3", "flash_attn", "torch")}
    for other in backends.keys() - {backend}:
        monkeypatch.setattr(kernels, f"{other}_varlen", lambda: None)
    if backends[backend]() is None or (backend == "flash_attn_3" and not kernels.runs_flash_3(torch.device("cuda"))):
        pytest.skip(f"no {backend} kernel here")
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 64) for heads in (8, 2, 2)]
    exact = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    how = {"scale": 0.125, "is_causal": is_causal, "window": window}
    borders = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0, dtype=torch.int32)
    expected = attend_by_segment(*exact, LENGTHS, **how)
    plain = attend_by_segment(*half, LENGTHS, **how)
    ours = kernels.attend_with_kernel(*half, borders, max(LENGTHS), **how)
    weight = torch.randn_like(expected)
    outputs = [(expected, exact), (plain, half), (ours, half)]
    grads = [torch.autograd.grad((output.float() * weight).sum(), inputs) for output, inputs in outputs]
    for wanted, naive, got in [(expected, plain, ours), *zip(*grads, strict=True)]:
        allowed = 2 * (naive.float() - wanted).abs().max() + 1e-2
        assert (got.float() - wanted).abs().max() <= allowed


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patched_models(name, dtype):
    model = hfp.patch_model(build(name, dtype).cuda())
    assert hfp.check_isolation(model).isolated


@pytest.mark.parametrize("architecture", ["mamba", "jamba", "qwen3_next", "bloom", "bert"])
def test_models_that_run_by_segment(architecture):
    kind = "masked" if architecture == "bert" else "causal"
    for dtype in (torch.bfloat16, torch.float32):
        model = hfp.patch_model(tiny_model(architecture, kind, dtype).cuda())
        assert hfp.check_isolation(model).isolated


def test_autocast():
    model = hfp.patch_model(build("Qwen3").cuda())
    batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    inputs = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.isfinite(model(**inputs).loss)
