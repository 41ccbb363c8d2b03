"""Call the kernels that compute attention within the segments of a packed row, or in trees, on CUDA.

There are two kinds of kernels: functions that take cumulative segment lengths, such as those of flash-attn, of the
hub's kernels and of torch, and torch's FlexAttention. What a function takes is read from its arguments, not from a
version number. The table of kernels is in choose_kernel.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_packing.attention.flex import attend_with_flex, pad_head_dim
from hf_packing.attention.flex_trees import attend_in_trees_with_flex
from hf_packing.attention.layout import Layout
from hf_packing.attention.path_keys import PathKeys, gather_keys, gather_plan

HALF_PRECISION = (torch.float16, torch.bfloat16)

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
"""CUDA compute capabilities."""

_MAX_HEAD_DIM = 256

_HEAD_DIM_STEP = 8
"""Variable-length kernels require head dimensions that are multiples of this number, and not larger than
`_MAX_HEAD_DIM`."""

_NAMES = {
    "query": ("q", "query"),
    "key": ("k", "key"),
    "value": ("v", "value"),
    "cu_seq_lens_q": ("cu_seqlens_q", "cu_seq_q"),
    "cu_seq_lens_k": ("cu_seqlens_k", "cu_seq_k"),
    "max_length_q": ("max_seqlen_q", "max_q"),
    "max_length_k": ("max_seqlen_k", "max_k"),
    "scale": ("softmax_scale", "scale"),
    "is_causal": ("causal", "is_causal"),
    "window": ("window_size",),
    "grouped": ("enable_gqa",),
    "softcap": ("softcap",),
    "sinks": ("s_aux", "learnable_sink"),
    "dropout": ("dropout_p",),
    "deterministic": ("deterministic",),
}
"""The names that kernels have for each argument: those of flash-attn and the hub's kernels, then those of torch."""


class Call(NamedTuple):
    """Everything that decides on the kernel. All attention calls with an equal `Call` run on the same kernel."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    has_window: bool
    has_softcap: bool
    sinks: torch.dtype | None
    """The dtype of the sinks; None if there are none."""
    trains_sinks: bool
    """Whether the call has sinks, and gradients are computed."""
    has_dropout: bool
    is_deterministic: bool
    """Whether torch.use_deterministic_algorithms is on."""
    in_trees: bool = False
    """Whether the row has trees. A kernel then gets fewer queries than keys, or another mask."""

    @property
    def capability(self) -> tuple[int, int]:
        """The CUDA compute capability of the device."""
        return torch.cuda.get_device_capability(self.device)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class VarlenKernel:
    """A function that computes attention from cumulative segment lengths, as flash-attn and torch have it.

    Args:
        name: the name in reports and warnings.
        load: function that returns the kernel's function, or None if it is not installed.
        from_capability: the lowest CUDA compute capability that the kernel supports.
        below_capability: the lowest CUDA compute capability that the kernel does not support any more.
        is_torch: whether the function is one of torch. It then follows torch.use_deterministic_algorithms by itself,
            and needs `enable_gqa` for queries that have more heads than keys.
    """

    name: str
    load: Callable[[], Callable[..., Any] | None]
    from_capability: tuple[int, int] = AMPERE
    below_capability: tuple[int, int] | None = None
    is_torch: bool = False

    @cached_property
    def function(self) -> Callable[..., Any] | None:
        return self.load()

    @cached_property
    def arguments(self) -> dict[str, str]:
        """The function's own names of the arguments in `_NAMES` that it takes."""
        assert self.function is not None
        own = inspect.signature(self.function).parameters
        return {meaning: name for meaning, names in _NAMES.items() for name in names if name in own}

    def refusal(self, call: Call) -> str:
        """Return why the kernel does not take a call; an empty string if it does."""
        if self.function is None:
            return "not installed"
        capability = call.capability
        if capability < self.from_capability or (self.below_capability and capability >= self.below_capability):
            return f"does not run on a GPU of compute capability {capability[0]}.{capability[1]}"
        if call.dtype not in HALF_PRECISION:
            return f"takes no {call.dtype_name}"
        if max(call.head_dim, call.value_dim) > _MAX_HEAD_DIM:
            return f"takes head dimensions up to {_MAX_HEAD_DIM}"
        if call.has_softcap and call.has_dropout:
            return "takes no soft cap together with dropout"
        asked = {
            "window": call.has_window,
            "softcap": call.has_softcap,
            "sinks": call.sinks is not None,
            "dropout": call.has_dropout,
            "deterministic": call.is_deterministic and not self.is_torch,
        }
        own = inspect.signature(self.function).parameters.values()
        required = {each.name for each in own if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
        if unknown := sorted(required - set(self.arguments.values())):
            return f"requires {' and '.join(unknown)}"
        if missing := [meaning for meaning, is_asked in asked.items() if is_asked and meaning not in self.arguments]:
            return f"takes no {' and no '.join(missing)}"
        if call.sinks and (call.trains_sinks or call.sinks != torch.bfloat16 or capability < HOPPER):
            return "takes sinks only in bfloat16, on Hopper, and without gradients"
        return ""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_lens: Tensor,
        max_length: int | None,
        *,
        scale: float,
        is_causal: bool,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
        of_keys: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """Compute the result of `attend_by_segment` with one call of the kernel.

        Args:
            cu_seq_lens: cumulative segment lengths, int32 [segments + 1], on the query's device.
            max_length: number of tokens in the longest segment; None if it has to be read from the device.
            of_keys: cu_seq_lens and max_length of the keys, if segments have more keys than queries. The queries of a
                segment then belong to its last keys. All other arguments are explained in `attend_by_segment`.

        Returns:
            Attention output, [1, heads, tokens, value_dim].
        """
        if max_length is None:
            max_length = int(cu_seq_lens.diff().max())
        cu_seq_lens_k, max_length_k = (cu_seq_lens, max_length) if of_keys is None else of_keys
        value_dim = value.shape[-1]
        head_dim = -(-max(query.shape[-1], value_dim) // _HEAD_DIM_STEP) * _HEAD_DIM_STEP
        q, k, v = (pad_head_dim(tensor[0].transpose(0, 1), head_dim) for tensor in (query, key, value))
        takes = self.arguments
        if "scale" not in takes and not math.isclose(scale, head_dim**-0.5):
            q = q * (scale * head_dim**0.5)
        if q.shape[1] != k.shape[1] and self.is_torch and "grouped" not in takes:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        back = -1 if window is None else window - 1
        sides = (back, 0) if is_causal else (back, back)
        given: dict[str, Any] = {
            "query": q,
            "key": k,
            "value": v,
            "cu_seq_lens_q": cu_seq_lens,
            "cu_seq_lens_k": cu_seq_lens_k,
            "max_length_q": max_length,
            "max_length_k": max_length_k,
            "scale": scale,
            "is_causal": is_causal,
            "window": sides if window is not None or "is_causal" not in takes else None,
            "grouped": q.shape[1] != k.shape[1],
            "softcap": softcap,
            "sinks": sinks,
            "dropout": dropout or None,
            "deterministic": torch.are_deterministic_algorithms_enabled() or None,
        }
        own = {takes[meaning]: each for meaning, each in given.items() if each is not None and meaning in takes}
        assert self.function is not None
        attended = self.function(**own)
        attended = attended[0] if isinstance(attended, tuple) else attended  # some also return log-sum-exps
        output: Tensor = attended[..., :value_dim].transpose(0, 1)[None]
        return output

    def attend_in_trees(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: Layout,
        *,
        window: int | None = None,
        chunk: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """Compute the result of `attend_along_paths`, with keys gathered along paths.

        If this takes several calls, each gathers its keys once more in the backward pass, so that the gathered keys of
        only one call are in memory.
        """

        def attend(group: PathKeys) -> Tensor:
            k, v = (gather_keys(tensor, group.places) for tensor in (key, value))
            how = {"is_causal": True, "window": window, "dropout": dropout, **options}
            of_keys = group.cu_seq_lens_k, group.longest_k
            own = query[:, :, group.begin : group.end]
            return self.attend(own, k, v, group.cu_seq_lens_q, group.longest_q, of_keys=of_keys, **how)

        groups = gather_plan(row, window, chunk, query.device)
        if len(groups) == 1:
            return attend(groups[0])
        if not torch.is_grad_enabled():
            return torch.cat([attend(group) for group in groups], dim=2)
        has_dropout = dropout > 0
        parts = [checkpoint(attend, each, use_reentrant=False, preserve_rng_state=has_dropout) for each in groups]
        return torch.cat(parts, dim=2)


@dataclass(frozen=True, eq=False)
class FlexKernel:
    """torch's FlexAttention, with a mask that is made from the borders of the segments."""

    name: str = "FlexAttention"

    def refusal(self, call: Call) -> str:
        """Return why FlexAttention does not take a call; an empty string if it does."""
        if call.dtype not in HALF_PRECISION:  # in float32, it rounds to TF32, or is slow
            return f"takes no {call.dtype_name}"
        return "takes no dropout" if call.has_dropout else ""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_lens: Tensor, max_length: int | None, **options: Any
    ) -> Tensor:
        """Compute the result of `attend_by_segment`. The arguments are those of `VarlenKernel.attend`."""
        del max_length, options["dropout"]
        return attend_with_flex(query, key, value, cu_seq_lens, **options)

    def attend_in_trees(self, query: Tensor, key: Tensor, value: Tensor, row: Layout, **options: Any) -> Tensor:
        """Compute the result of `attend_along_paths`, with a mask."""
        del options["dropout"]
        return attend_in_trees_with_flex(query, key, value, row, **options)
