"""Choose the kernel on which an attention call runs on CUDA.

`KERNELS` is the table of kernels, from the fastest to the most general. A call runs on the first kernel that is
installed, takes all arguments of the call, and passes a trial, in which it is compared with exact attention. If there
is no such kernel, exact attention runs segment by segment, or path by path in trees, and a warning says why.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from hf_packing.attention.kernel_trials import FAILS, fails_trial
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
"""The table of kernels. The kernel of a layer from the Hugging Face hub comes before them, see `use_hub_kernel`."""

HUB_KERNEL = "_hub_kernel"
"""The attribute of an attention layer that names its kernel from the hub. Compiled code can read an attribute."""

_of_the_hub: dict[str, Kernel] = {}
"""The kernels from the hub with which models were loaded, by name."""

_chosen: dict[tuple[str | None, Call], str | None] = {}
"""The names of the kernels that were chosen for calls, by the layer's kernel from the hub; None for exact attention."""

_trials: dict[tuple[str, Call], str] = {}
"""The results of trials: why a kernel does not pass for a kind of call; an empty string if it does."""

_warned: set[str] = set()
"""The warnings that were already given in this process."""


def use_hub_kernel(layer: nn.Module, name: str) -> None:
    """Let the calls of a layer run on a kernel from the Hugging Face hub, if it takes them.

    `patch_model` calls this with the attention function that the user has chosen for the model, if it is a kernel from
    the hub. transformers has then loaded this kernel together with the model. No other kernel is ever downloaded.

    Args:
        layer: a module that computes attention.
        name: the repository, as in `attn_implementation="kernels-community/flash-attn2"`.
    """

    def load() -> Callable[..., Any] | None:
        try:
            (_, function, *_), _ = lazy_import_flash_attention(name)
        except (ImportError, OSError, ValueError):  # in a process in which transformers has not loaded it, and cannot
            return None
        return function  # type: ignore[no-any-return]

    _of_the_hub.setdefault(name, VarlenKernel(name, load))
    setattr(layer, HUB_KERNEL, name)


def _kernels_for(hub: str | None) -> list[Kernel]:
    """Return the kernels of a layer, the first choice first."""
    return KERNELS if hub is None else [_of_the_hub[hub], *KERNELS]


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
    in_trees: bool = False,
    hub: str | None = None,
) -> Kernel | None:
    """Return the kernel on which an attention call runs, or None for exact attention.

    The arguments are those of `attend_by_segment`, with tensors on a CUDA device; or, with `in_trees`, those of
    `attend_along_paths`. `hub` names the layer's kernel from the hub.
    """
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    name = _choose(
        torch.compiler.is_compiling(),
        hub,
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
        in_trees,
    )
    return next((kernel for kernel in _kernels_for(hub) if kernel.name == name), None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(is_traced: bool, hub: str | None, *call_fields: Any) -> str | None:
    """Return the name of a call's kernel, or None for exact attention.

    While torch.compile traces a model, there are no trials: FlexAttention is used if it has passed one before, as in
    the proof of `patch_model`, and other kernels are used unless they have failed one.

    Args:
        is_traced: whether torch.compile traces the model. It then calls this function, and keeps the result.
        hub: the name of the layer's kernel from the hub, or None.
        call_fields: the fields of `Call`, since torch.compile passes on only plain values.
    """
    call = Call(*call_fields)
    if (hub, call) not in _chosen:
        refusals: dict[str, str] = {}
        chosen = None
        for kernel in _kernels_for(hub):
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
        _chosen[hub, call] = chosen
    return _chosen[hub, call]


def _warn(call: Call, refusals: dict[str, str], chosen: str | None) -> None:
    """Warn if attention runs without a kernel, or if an installed kernel fails; of each such case, once in a process.

    float64 is left out, since only checks use it.
    """
    failed = any(reason.startswith(FAILS) for reason in refusals.values())
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
    where, unit = (" in rows of trees", "path") if call.in_trees else ("", "segment")
    if (advice + where) in _warned:
        return
    _warned.add(advice + where)
    slow = f"attention{where} runs {unit} by {unit}, which is exact, but slow"
    what = slow if chosen is None else f"an attention kernel failed{where}"
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    warnings.warn(f"{what} ({reasons}). {advice}", stacklevel=2)


_INSTALL = "pip install flash-attn --no-build-isolation"
