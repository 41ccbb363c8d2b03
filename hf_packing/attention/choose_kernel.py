"""Choose the kernel on which an attention call runs on CUDA.

`KERNELS` is the table of kernels, from the fastest to the most general. A call runs on the first kernel that is
installed, takes all arguments of the call, and passes a trial, in which it is compared with exact attention. If there
is no such kernel, exact attention runs segment by segment, and a warning says why.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from hf_packing.attention.exact_attention import attend_by_segment
from hf_packing.attention.kernels import AMPERE, BLACKWELL, HALF_PRECISION, HOPPER, Call, FlexKernel, VarlenKernel

Kernel = VarlenKernel | FlexKernel


def _load_flash_attn_3() -> Callable[..., Any] | None:
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


def _load_flash_attn_2() -> Callable[..., Any] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


def _load_torch_varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


KERNELS: list[Kernel] = [
    VarlenKernel("flash-attn 3", _load_flash_attn_3, from_capability=HOPPER, below_capability=BLACKWELL),
    VarlenKernel("flash-attn 2", _load_flash_attn_2),
    VarlenKernel("torch varlen_attn", _load_torch_varlen, is_torch=True),
    FlexKernel(),
]
"""The table of kernels. `use_hub_kernel` puts kernels from the Hugging Face hub at its front."""

_chosen: dict[Call, str | None] = {}
"""The names of the kernels that were chosen for calls; None for exact attention."""

_trials: dict[tuple[str, Call], str] = {}
"""The results of trials: why a kernel does not pass for a kind of call; an empty string if it does."""

_warned: set[str] = set()
"""The warnings that were already given in this process."""


def use_hub_kernel(name: str) -> None:
    """Put a kernel from the Hugging Face hub at the front of the table of kernels.

    `patch_model` calls this with the attention function that the user has chosen for the model, if it is a kernel from
    the hub. transformers has then loaded this kernel together with the model. No other kernel is ever downloaded.

    Args:
        name: the repository, as in `attn_implementation="kernels-community/flash-attn2"`.
    """
    if name in [kernel.name for kernel in KERNELS]:
        return

    def load() -> Callable[..., Any] | None:
        try:
            (_, function, *_), _ = lazy_import_flash_attention(name)
        except (ImportError, OSError, ValueError):  # in a process in which transformers has not loaded it, and cannot
            return None
        return function  # type: ignore[no-any-return]

    KERNELS.insert(0, VarlenKernel(name, load))
    _chosen.clear()


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Kernel | None:
    """Return the kernel on which an attention call runs, or None for exact attention, segment by segment.

    The arguments are those of `attend_by_segment`, with tensors on a CUDA device.
    """
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    name = _choose(
        torch.compiler.is_compiling(),
        query.device,
        query.dtype,
        query.shape[1],
        key.shape[1],
        query.shape[-1],
        value.shape[-1],
        is_causal,
        window is not None,
        softcap is not None,
        None if sinks is None else sinks.dtype,
        sinks is not None and (trains or (torch.is_grad_enabled() and sinks.requires_grad)),
        dropout > 0,
        torch.are_deterministic_algorithms_enabled(),
    )
    return next((kernel for kernel in KERNELS if kernel.name == name), None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(is_traced: bool, *call_fields: Any) -> str | None:
    """Return the name of a call's kernel, or None for exact attention.

    While torch.compile traces a model, there are no trials: FlexAttention is used if it has passed one before, as in
    the proof of `patch_model`, and other kernels are used unless they have failed one.

    Args:
        is_traced: whether torch.compile traces the model. It then calls this function, and keeps the result.
        call_fields: the fields of `Call`, since torch.compile passes on only plain values.
    """
    call = Call(*call_fields)
    if call not in _chosen:
        refusals: dict[str, str] = {}
        chosen = None
        for kernel in KERNELS:
            reason = kernel.refusal(call)
            if not reason and is_traced:
                reason = _trials.get((kernel.name, call), "has had no trial" if isinstance(kernel, FlexKernel) else "")
            elif not reason:
                if (kernel.name, call) not in _trials:
                    _trials[kernel.name, call] = fails_trial(kernel, call)
                reason = _trials[kernel.name, call]
            if not reason:
                chosen = kernel.name
                break
            refusals[kernel.name] = reason
        _warn(call, refusals, chosen)
        if is_traced:
            return chosen
        _chosen[call] = chosen
    return _chosen[call]


def _warn(call: Call, refusals: dict[str, str], chosen: str | None) -> None:
    """Warn if attention runs segment by segment, or if an installed kernel fails; of each such case, once in a process.

    float64 is left out, since only checks use it.
    """
    failed = any(reason.startswith(_FAILS) for reason in refusals.values())
    if call.dtype == torch.float64 or (chosen is not None and not failed):
        return
    if chosen is not None:
        advice = f"{chosen} runs instead"
    elif call.dtype not in HALF_PRECISION:
        advice = "Load the model in bfloat16, or train with bf16=True or fp16=True"
    elif call.capability < AMPERE:
        advice = "The kernels need a GPU of compute capability 8.0 or newer"
    elif call.has_dropout:
        advice = f"Set the attention dropout in the model's configuration to 0, or run `{_INSTALL}`"
    else:
        advice = f"Run `{_INSTALL}`, or `pip install --upgrade torch` for varlen_attn, which torch has since 2.10"
    if advice in _warned:
        return
    _warned.add(advice)
    what = "an attention kernel failed" if chosen else "attention runs segment by segment, which is exact, but slow"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    warnings.warn(f"{what} ({reasons}). {advice}", stacklevel=2)


_INSTALL = "pip install flash-attn --no-build-isolation"

_FAILS = "fails"

_TRIALS = (((300, 1, 99), 5), ((150, 130, 260), 200))
"""Lengths of segments and a window for the rows of a trial. The rows have several blocks of FlexAttention, and two
different sizes, since torch.compile compiles a function for sizes that vary when it sees the second size."""

_SOFTCAP = 2.0
"""The soft cap in a trial, which is low enough to change most scores."""

_TOLERANCE = 0.01
"""The error allowed in a trial beyond twice that of exact attention in the same dtype, as a share of the largest
value. A wrong argument changes results by far more."""


def fails_trial(kernel: Kernel, call: Call) -> str:
    """Compare a kernel with exact attention in float32, in outputs and gradients, on two small random rows.

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
            for lengths, window in _TRIALS:
                if (error := _error_in_trial(kernel, call, lengths, window if call.has_window else None)) is not None:
                    return f"{_FAILS} a trial with an error of {error:.2g}"
        except torch.cuda.OutOfMemoryError:
            raise  # which says nothing about the kernel
        except Exception as error:  # kernels may raise anything
            return f"{_FAILS} with {type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    return ""


def _error_in_trial(kernel: Kernel, call: Call, lengths: tuple[int, ...], window: int | None) -> float | None:
    """Return the largest error of a kernel, or None if it is small enough."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(call.device)

    tokens = sum(lengths)
    shapes = (call.heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.value_dim)
    exact = [random(1, heads, tokens, size).to(call.dtype).float() for heads, size in shapes]
    if call.sinks is not None:
        exact.append(random(call.heads).to(call.sinks).float())
    half = [tensor.to(call.dtype) for tensor in exact[:3]] + [tensor.to(call.sinks) for tensor in exact[3:]]
    weight = random(1, call.heads, tokens, call.value_dim)
    cu_seq_lens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=call.device)
    options: dict[str, Any] = {"scale": 0.5 * call.head_dim**-0.5, "is_causal": call.is_causal, "window": window}
    options |= {"softcap": _SOFTCAP if call.has_softcap else None, "dropout": 0.0}

    def by_segment(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the only one that no setting of torch refuses
            return attend_by_segment(q, k, v, list(lengths), sinks=sinks, **options)

    def by_kernel(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return kernel.attend(q, k, v, cu_seq_lens, max(lengths), sinks=sinks, **options)

    wanted, plain, got = (
        _with_gradients(*each, weight) for each in ((by_segment, exact), (by_segment, half), (by_kernel, half))
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
