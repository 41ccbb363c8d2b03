from functools import partial
from itertools import islice

import pytest
import torch
import torch.nn.attention.flex_attention as of_torch

from hf_packing.attention import choose_kernel, find_route, kernels, tree_attention, varlen
from hf_packing.attention.find_route import known_routes
from hf_packing.attention.route import methods_for


@pytest.fixture(autouse=True)
def no_known_routes():
    """A test finds its routes itself."""
    known_routes.clear()


@pytest.fixture
def one_method(monkeypatch):
    """A model that is refused is not tried with all methods, but with the first one."""
    monkeypatch.setattr(find_route, "methods_for", lambda *given: islice(methods_for(*given), 1))


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


@pytest.fixture
def as_on_cuda(monkeypatch, on_hopper):  # noqa: ARG001
    """Models choose kernels as on CUDA, in any dtype."""

    def kernel_for(q, k, v, scale, **options):  # noqa: ARG001
        return choose_kernel.choose_kernel(q, k, v, **options)

    monkeypatch.setattr(kernels, "HALF_PRECISION", (torch.float32, torch.float64))
    monkeypatch.setattr(varlen, "_kernel_for", kernel_for)
    monkeypatch.setattr(tree_attention, "_kernel_for", partial(kernel_for, is_causal=True, in_trees=True))
