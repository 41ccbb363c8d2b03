"""Call variable-length attention kernels on CUDA: the kernels of flash-attn if flash-attn is installed, otherwise
torch's own kernel."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)

_MAX_HEAD_DIM = 256

_HEAD_DIM_STEP = 8
"""All kernels require head dimensions that are multiples of this number, and not larger than `_MAX_HEAD_DIM`."""


@cache
def flash_attn_3_varlen() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func` of flash-attn 3, which runs on Hopper GPUs. Return None if flash-attn 3 is not
    installed."""
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


@cache
def flash_attn_varlen() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func` of flash-attn 2, or None if flash-attn 2 is not installed."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


@cache
def torch_varlen() -> Callable[..., Any] | None:
    """Return `torch.nn.attention.varlen.varlen_attn`. Return None if this version of torch has no such function, or if
    the function does not take the arguments scale, window_size and enable_gqa."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= inspect.signature(varlen_attn).parameters.keys() else None


def runs_flash(device: torch.device) -> bool:
    """Return whether a device supports flash attention, which requires CUDA compute capability 8 (Ampere) or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def runs_flash_3(device: torch.device) -> bool:
    """Return whether a device supports flash-attn 3, which requires CUDA compute capability 9 (Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _takes_flash_3(query: Tensor, dropout: float) -> bool:
    return not dropout and flash_attn_3_varlen() is not None and runs_flash_3(query.device)


def has_kernel(
    query: Tensor, value: Tensor, *, softcap: float | None = None, sinks: Tensor | None = None, dropout: float = 0.0
) -> bool:
    """Return whether an installed kernel supports an attention call with these arguments.

    No kernel supports attention sinks. torch's own kernel does not support soft caps. Only flash-attn 2 supports
    dropout, but not together with soft caps.
    """
    head_dims = query.shape[-1], value.shape[-1]
    if query.dtype not in _KERNEL_DTYPES or sinks is not None or not runs_flash(query.device):
        return False
    if max(head_dims) > _MAX_HEAD_DIM or any(size % _HEAD_DIM_STEP for size in head_dims):
        return False
    if _takes_flash_3(query, dropout):
        return True
    if flash_attn_varlen() is not None:
        return softcap is None or not dropout
    return torch_varlen() is not None and softcap is None and not dropout


def attend_with_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    *,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute the result of `attend_by_segment` with one call of a CUDA kernel.

    Args:
        cu_seq_lens: cumulative segment lengths, int32 [segments + 1], on the query's device.
        max_length: number of tokens in the longest segment. All other arguments are explained in `attend_by_segment`.

    Returns:
        Attention output, [1, heads, tokens, value_dim].
    """
    value_dim = value.shape[-1]
    head_dim = max(query.shape[-1], value_dim)
    q, k, v = (_pad_head_dim(tensor[0].transpose(0, 1), head_dim) for tensor in (query, key, value))
    back = -1 if window is None else window - 1
    sides = (back, 0) if is_causal else (back, back)
    flash = {
        "cu_seqlens_q": cu_seq_lens,
        "cu_seqlens_k": cu_seq_lens,
        "max_seqlen_q": max_length,
        "max_seqlen_k": max_length,
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": sides,
        "softcap": softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if _takes_flash_3(query, dropout):
        flash_3 = flash_attn_3_varlen()
        assert flash_3 is not None
        attended = flash_3(q, k, v, **flash)
        attended = attended[0] if isinstance(attended, tuple) else attended  # some versions also return log-sum-exps
    elif (flash_2 := flash_attn_varlen()) is not None:
        attended = flash_2(q, k, v, dropout_p=dropout, **flash)
    else:
        varlen = torch_varlen()
        assert varlen is not None
        gqa = q.shape[1] != k.shape[1]
        attended = varlen(
            q, k, v, cu_seq_lens, cu_seq_lens, max_length, max_length, scale=scale, window_size=sides, enable_gqa=gqa
        )
    output: Tensor = attended[..., :value_dim].transpose(0, 1)[None]
    return output


def _pad_head_dim(tensor: Tensor, head_dim: int) -> Tensor:
    """Return a tensor with its last axis padded with zeros to the size `head_dim`. If the last axis already has this
    size, return the tensor unchanged."""
    missing = head_dim - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor
