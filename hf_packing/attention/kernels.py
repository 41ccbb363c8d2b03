"""Variable-length attention kernels on CUDA: flash-attn if it is installed, otherwise torch's own."""

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
"""All kernels need head dimensions that are a multiple of this, and at most _MAX_HEAD_DIM."""


@cache
def flash_attn_3_varlen() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func` of flash-attn 3, for Hopper, or None."""
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


@cache
def flash_attn_varlen() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func` of flash-attn 2, or None."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


@cache
def torch_varlen() -> Callable[..., Any] | None:
    """Return `torch.nn.attention.varlen.varlen_attn`, or None if it is missing, or too old to take scale and window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    needed = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if needed <= inspect.signature(varlen_attn).parameters.keys() else None


def runs_flash(device: torch.device) -> bool:
    """Return whether a device supports flash attention: compute capability 8 (Ampere) or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def runs_flash_3(device: torch.device) -> bool:
    """Return whether a device supports flash-attn 3: compute capability 9 only."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _takes_flash_3(query: Tensor, dropout: float) -> bool:
    return not dropout and flash_attn_3_varlen() is not None and runs_flash_3(query.device)


def has_kernel(
    query: Tensor, value: Tensor, *, softcap: float | None = None, sinks: Tensor | None = None, dropout: float = 0.0
) -> bool:
    """Return whether a kernel supports this call.

    No kernel supports sinks, torch's does not support soft caps, and only flash-attn 2 supports dropout.
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
    """Compute `attend_by_segment` in one kernel, with borders in a tensor.

    Args:
        cu_seq_lens: int32 [segments + 1], on the device of the query.
        max_length: tokens of the longest segment.

    Returns:
        [1, heads, tokens, value_dim].
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
        attended = attended[0] if isinstance(attended, tuple) else attended  # earlier versions add the log-sum-exp
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
    """Pad the last axis with zeros. Skip the copy if there is nothing to pad."""
    missing = head_dim - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor
