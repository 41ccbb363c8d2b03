import pytest
import torch
import torch.nn.attention.flex_attention as of_torch

from hf_packing.attention import choose_kernel
from hf_packing.attention.find_route import known_routes


@pytest.fixture(autouse=True)
def no_known_routes():
    """A test finds its routes itself."""
    known_routes.clear()


@pytest.fixture
def on_hopper(monkeypatch):
    """A machine of compute capability 9.0 without kernels or choices."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(choose_kernel, "KERNELS", [])
    for name in ("_chosen", "_trials", "_of_the_hub"):
        monkeypatch.setattr(choose_kernel, name, {})
    monkeypatch.setattr(choose_kernel, "_warned", set())


@pytest.fixture
def on_cpu(monkeypatch):
    """Let FlexAttention compute gradients on a CPU, without compiling. torch refuses the former, but can do it."""
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    monkeypatch.setattr(of_torch, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
