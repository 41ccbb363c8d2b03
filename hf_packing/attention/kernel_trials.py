"""Try a kernel on small rows before it runs the first call of a kind: it has to agree with exact attention."""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_packing.attention.exact_attention import attend_by_segment
from hf_packing.attention.exact_tree_attention import attend_along_paths
from hf_packing.attention.kernels import Call, FlexKernel, VarlenKernel
from hf_packing.attention.layout import Layout
from hf_packing.trees.segments import TreeSegments

FAILS = "fails"
"""The first word of the reason why an installed kernel is not used."""

_TRIALS = (((300, 1, 99), 5), ((150, 130, 260), 200))
"""Lengths of segments and a window for the rows of a trial. The rows have several blocks of FlexAttention, and two
different sizes, since torch.compile compiles a function for sizes that vary when it sees the second size."""

_TREE_TRIALS = (
    (TreeSegments((140, 70, 1, 130, 90, 30), (-1, 0, 1, 0, -1, 4)), 5),
    (TreeSegments((300, 99, 7, 160, 1, 33), (-1, 0, 0, 0, 3, 3)), 200),
)
"""Trees and a window for the rows of a trial in trees. Most of their runs of tokens have fewer queries than keys."""

_SOFTCAP = 2.0
"""The soft cap in a trial, which is low enough to change most scores."""

_TOLERANCE = 0.01
"""The error allowed in a trial beyond twice that of exact attention in the same dtype, as a share of the largest
value. A wrong argument changes results by far more."""


def fails_trial(kernel: VarlenKernel | FlexKernel, call: Call) -> str:
    """Compare a kernel with exact attention in float32, in outputs and gradients, on two small random rows.

    If the call is one of a row of trees, so are the rows of the trial. A kernel that is right where queries and keys
    have the same borders may be wrong there: some kernels let the queries of a segment belong to its first keys.

    The error may be twice that of exact attention in the dtype of the call. Dropout is switched off. The random state
    is not changed.

    Args:
        kernel: a kernel that takes the call.
        call: the kind of call that is tried.

    Returns:
        Why the kernel does not pass; an empty string if it passes.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(call.sinks is None or call.trains_sinks))
        stack.enter_context(torch.autocast(call.device.type, enabled=False))
        try:
            for row, window in _TREE_TRIALS if call.in_trees else _TRIALS:
                if (error := _error_in_trial(kernel, call, row, window if call.has_window else None)) is not None:
                    return f"{FAILS} a trial with an error of {error:.2g}"
        except torch.cuda.OutOfMemoryError:
            raise  # which says nothing about the kernel
        except Exception as error:  # kernels may raise anything
            return f"{FAILS} with {type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    return ""


def _error_in_trial(
    kernel: VarlenKernel | FlexKernel, call: Call, row: tuple[int, ...] | TreeSegments, window: int | None
) -> float | None:
    """Return the largest error of a kernel in a row, given as lengths of segments or as trees; or None if the error is
    small enough."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(call.device)

    trees = Layout.of(row, call.device) if isinstance(row, TreeSegments) else None
    lengths = row.lengths if isinstance(row, TreeSegments) else row
    shapes = (call.heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.value_dim)
    exact = [random(1, heads, sum(lengths), size).to(call.dtype).float() for heads, size in shapes]
    if call.sinks is not None:
        exact.append(random(call.heads).to(call.sinks).float())
    half = [tensor.to(call.dtype) for tensor in exact[:3]] + [tensor.to(call.sinks) for tensor in exact[3:]]
    weight = random(1, call.heads, sum(lengths), call.value_dim)
    cu_seq_lens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=call.device)
    options: dict[str, Any] = {"scale": 0.5 * call.head_dim**-0.5, "window": window, "dropout": 0.0}
    options |= {"softcap": _SOFTCAP if call.has_softcap else None}

    def exactly(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only one that no setting of torch refuses
            if trees is not None:
                return attend_along_paths(q, k, v, trees, sinks=sinks, **options)
            return attend_by_segment(q, k, v, list(lengths), is_causal=call.is_causal, sinks=sinks, **options)

    def by_kernel(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        if trees is not None:
            return kernel.attend_in_trees(q, k, v, trees, sinks=sinks, **options)
        how = {"is_causal": call.is_causal, "sinks": sinks, **options}
        return kernel.attend(q, k, v, cu_seq_lens, max(lengths), **how)

    wanted, plain, got = (
        _with_gradients(*each, weight) for each in ((exactly, exact), (exactly, half), (by_kernel, half))
    )
    worst = None
    for w, p, g in zip(wanted, plain, got, strict=True):
        error, allowed = (w - g).abs().max(), 2 * (w - p).abs().max() + _TOLERANCE * w.abs().max()
        if not error <= allowed:
            worst = max(worst or 0.0, float(error))
    return worst


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Return the output of a function, and the gradients of its weighted sum if gradients are on, all in float32."""
    inputs = [tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in tensors]
    output = function(*inputs).float()
    gradients = torch.autograd.grad((output * weight).sum(), inputs) if torch.is_grad_enabled() else ()
    return [each.detach().float() for each in (output, *gradients)]
