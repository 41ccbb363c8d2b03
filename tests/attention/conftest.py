from itertools import islice

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch

from hf_packing.attention import kernels, patch
from hf_packing.attention.route import known_routes, methods_for


@pytest.fixture(autouse=True)
def no_known_routes():
    """A test finds its routes itself."""
    known_routes.clear()


@pytest.fixture
def one_method(monkeypatch):
    """A model that is refused is not tried with all methods, but with the first one."""
    monkeypatch.setattr(patch, "methods_for", lambda *given: islice(methods_for(*given), 1))


@pytest.fixture
def on_gpu(monkeypatch):
    """A machine without kernels or choices, which takes its CPU for the GPU."""
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "KERNELS", [])
    for name in ("_chosen", "_struck"):
        monkeypatch.setattr(kernels, name, {})
    kernels._warn.cache_clear()
    kernels.hub_kernel.cache_clear()


@pytest.fixture
def on_cpu(monkeypatch):
    """Let FlexAttention compute gradients on a CPU, without compiling. torch refuses the former, but can do it."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    monkeypatch.setattr(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


@pytest.fixture
def as_on_cuda(monkeypatch, on_gpu):  # noqa: ARG001
    """Models choose kernels as on CUDA, in any dtype."""
    monkeypatch.setattr(kernels, "HALF_PRECISION", (torch.bfloat16, torch.float32, torch.float64))
    monkeypatch.setattr(kernels, "_chosen", {})
