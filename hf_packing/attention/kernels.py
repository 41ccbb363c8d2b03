"""Choose and call the kernels that compute attention on CUDA.

`KERNELS` is the table of kernels, from the fastest to the most general. There are two kinds: functions that take
cumulative segment lengths, such as those of flash-attn, of the hub's kernels and of torch, and torch's FlexAttention.
What a function takes is read from its arguments, not from a version number. A call runs on the first kernel that is
installed, takes all arguments of the call, and has failed in no proof. If there is none, exact attention runs, and a
warning says why.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from hf_packing.attention.exact import TracedRow, with_gathered_keys
from hf_packing.attention.flex import attend_with_flex, pad_head_dim
from hf_packing.attention.layout import Layout, within
from hf_packing.attention.model import Arguments

DEVICES = {"cuda"}
"""The types of devices that have kernels."""

HALF_PRECISION = (torch.float16, torch.bfloat16)

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
    "is_causal": ("causal",),
    "window": ("window_size",),
    "grouped": ("enable_gqa",),
    "softcap": ("softcap",),
    "dropout": ("dropout_p",),
    "deterministic": ("deterministic",),
}
"""The names that kernels have for each argument: those of flash-attn and the hub's kernels, then those of torch."""


class Call(NamedTuple):
    """The properties of an attention call that decide on its kernel."""

    dtype: torch.dtype
    head_dim: int
    """The head dimension of queries and keys or that of values, whichever is larger."""
    asked: tuple[str, ...] = ()
    """What the call asks for besides: any of "window", "chunk", "softcap", "sinks", "dropout", and "window on both
    sides" of queries whose keys come from other ranks."""
    hub: str | None = None
    """The name of the layer's kernel from the hub, or None."""


@dataclass(frozen=True, eq=False)
class VarlenKernel:
    """A function that computes attention from cumulative segment lengths, as flash-attn and torch have it.

    Args:
        name: the name in reports and warnings.
        load: function that returns the kernel's function, or None if it is not installed.
        is_torch: whether the function is one of torch, which needs `enable_gqa`, or repeated keys, for queries that
            have more heads than keys.
    """

    name: str
    load: Callable[[], Any]
    is_torch: bool = False

    @cached_property
    def function(self) -> Any:
        return self.load()

    @cached_property
    def arguments(self) -> dict[str, str]:
        """The arguments in `_NAMES` that the function takes, with the function's own names of them."""
        own = inspect.signature(self.function).parameters
        return {meaning: name for meaning, names in _NAMES.items() for name in names if name in own}

    @cached_property
    def no_limit(self) -> Any:
        """The value for no limit on a side of a window: -1, or None for flash-attn 4, which takes -1 for a limit."""
        name = self.arguments.get("window")
        return inspect.signature(self.function).parameters[name].default[0] if name else -1

    def refusal(self, call: Call) -> str:
        """Return why the kernel does not take a call; an empty string if it does."""
        if self.function is None:
            return "not installed"
        if call.dtype not in HALF_PRECISION:
            return f"takes no {call.dtype}"
        if call.head_dim > _MAX_HEAD_DIM:
            return f"takes head dimensions up to {_MAX_HEAD_DIM}"
        missing = [meaning for meaning in ("scale", *call.asked) if meaning not in self.arguments]
        return f"takes no {' and no '.join(missing)}" if missing else ""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: Layout | TracedRow,
        *,
        scale: float,
        is_causal: bool,
        window: int | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        **refused: None,  # noqa: ARG002
    ) -> Tensor:
        """Compute the result of `attend_exactly`, whose arguments these are, on the query's device."""
        back = self.no_limit if window is None else window - 1
        options = {
            "scale": scale,
            "is_causal": is_causal,
            "window": (back, 0 if is_causal else back),
            "softcap": softcap,
            "dropout": dropout or None,
            "deterministic": torch.are_deterministic_algorithms_enabled() or None,
        }
        attend = partial(self._call, query, options)
        return with_gathered_keys(attend, key, value, row, is_causal, window, dropout=dropout)

    def _call(
        self,
        query: Tensor,
        options: Arguments,
        key: Tensor,
        value: Tensor,
        queries: Layout | TracedRow,
        keys: Layout | TracedRow,
    ) -> Tensor:
        """Call the kernel's function. The queries of each segment belong to its last keys."""
        value_dim = value.shape[-1]
        head_dim = -(-max(query.shape[-1], value_dim) // _HEAD_DIM_STEP) * _HEAD_DIM_STEP
        q, k, v = (pad_head_dim(tensor[0].transpose(0, 1), head_dim) for tensor in (query, key, value))
        is_grouped = q.shape[1] != k.shape[1]
        if is_grouped and self.is_torch and "grouped" not in self.arguments:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        given = options | {"query": q, "key": k, "value": v, "grouped": is_grouped}
        for side, row in (("q", queries), ("k", keys)):
            given[f"cu_seq_lens_{side}"] = row.cu_seq_lens.to(query.device, torch.int32)
            given[f"max_length_{side}"] = row.max_length
        attended = self.function(
            **{name: given[meaning] for meaning, name in self.arguments.items() if given[meaning] is not None}
        )
        attended = attended[0] if isinstance(attended, tuple) else attended  # some also return log-sum-exps
        output: Tensor = attended[..., :value_dim].transpose(0, 1)[None]
        return output


class FlexKernel:
    """torch's FlexAttention, with a mask that is made from the borders of the segments."""

    name = "FlexAttention"

    def refusal(self, call: Call) -> str:
        """Return why FlexAttention does not take a call; an empty string if it does."""
        if call.dtype not in HALF_PRECISION:  # in float32, it rounds to TF32, or is slow
            return f"takes no {call.dtype}"
        missing = [name for name in ("dropout", "window on both sides") if name in call.asked]
        return f"takes no {' and no '.join(missing)}" if missing else ""

    attend = staticmethod(attend_with_flex)


Kernel = VarlenKernel | FlexKernel


def _find(module: str, name: str = "flash_attn_varlen_func") -> Any:
    """Return a kernel's function, or None if it is not installed."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return None


KERNELS: list[Kernel] = [
    VarlenKernel("flash-attn 4", partial(_find, "flash_attn.cute")),
    VarlenKernel("flash-attn 3", partial(_find, "flash_attn_interface")),
    VarlenKernel("flash-attn 2", partial(_find, "flash_attn")),
    VarlenKernel("torch varlen_attn", partial(_find, "torch.nn.attention.varlen", "varlen_attn"), is_torch=True),
    FlexKernel(),
]
"""The table of kernels. The kernel of a layer from the Hugging Face hub comes before them."""

HUB_KERNEL = "_hub_kernel"
"""The attribute of an attention layer that names its kernel from the hub, if the model was loaded with one. Compiled
code can read an attribute."""


@cache
def hub_kernel(name: str) -> VarlenKernel:
    """Return a kernel from the Hugging Face hub, with which transformers has loaded a model. No other kernel is ever
    downloaded.

    Args:
        name: the repository, as in `attn_implementation="kernels-community/flash-attn2"`.
    """

    def load() -> Any:
        try:
            return lazy_import_flash_attention(name)[0][1]
        except (ImportError, OSError, ValueError):  # in a process in which transformers has not loaded it, and cannot
            return None

    return VarlenKernel(name, load)


def _kernels_for(hub: str | None) -> list[Kernel]:
    """Return the kernels of a layer, the first choice first."""
    return KERNELS if hub is None else [hub_kernel(hub), *KERNELS]


EXACT = "exact attention, segment by segment"
"""What `kernel_of` returns for attention that runs without a kernel."""

_latest: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The kernel on which the latest call of each attention layer ran. Compiled layers do not enter theirs here."""

_chosen: dict[Call, str | None] = {}
"""The names of the kernels that were chosen for calls; None for exact attention."""

_struck: dict[str, str] = {}
"""The names of kernels that have failed in a proof, with the reason. They are not used again in this process."""

_is_off: ContextVar[bool] = ContextVar("_is_off", default=False)


def kernel_of(model: nn.Module) -> str:
    """Return the kernels on which the attention layers of a patched model ran in their latest calls.

    Returns:
        The names of the kernels, such as "flash-attn 2" or "torch varlen_attn", joined by " and "; or "exact attention,
        segment by segment". An empty string if no layer has called `packed_varlen` yet.
    """
    return " and ".join(sorted(_ran_on(model)))


def _ran_on(model: nn.Module) -> set[str]:
    return {_latest[module] for module in model.modules() if module in _latest}


def switched_off() -> AbstractContextManager[None]:
    """Return a context manager: within the block, attention is exact."""
    return within(_is_off, True)


def choose(layer: nn.Module, query: Tensor, value: Tensor, options: Arguments) -> Kernel | None:
    """Return the kernel on which an attention call of a layer runs, or None for exact attention.

    Args:
        layer: the module that computes attention.
        options: arguments of `attend_exactly` that a kernel may not take.
    """
    is_traced = torch.compiler.is_compiling()
    kernel, hub = None, getattr(layer, HUB_KERNEL, None)
    if query.device.type in DEVICES and (is_traced or not _is_off.get()):
        asked = [name for name, value in options.items() if isinstance(value, Tensor) or value]
        name = _choose(query.dtype, max(query.shape[-1], value.shape[-1]), tuple(asked), hub)
        kernel = next((kernel for kernel in _kernels_for(hub) if kernel.name == name), None)
    if not is_traced:
        _latest[layer] = EXACT if kernel is None else kernel.name
    return kernel


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(*fields: Any) -> str | None:
    """Return the name of the kernel for a `Call`, or None for exact attention; torch.compile passes on plain values."""
    call = Call(*fields)
    if call not in _chosen:
        refusals = {kernel.name: _struck.get(kernel.name) or kernel.refusal(call) for kernel in _kernels_for(call.hub)}
        _chosen[call] = next((name for name, reason in refusals.items() if not reason), None)
        if _chosen[call] is None and not _struck and call.dtype != torch.float64:  # which only checks use
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
            _warn(
                f"attention runs segment by segment, which is exact, but slow ({reasons}). Kernels need "
                "bfloat16 or float16, as with bf16=True or fp16=True, and no attention dropout; for packed rows with "
                "it, run `pip install flash-attn --no-build-isolation`"
            )
    return _chosen[call]


@cache
def _warn(text: str) -> None:
    """Give a warning, once in a process."""
    warnings.warn(text, stacklevel=2)


@contextmanager
def fallbacks(model: nn.Module) -> Iterator[Callable[[str], bool]]:
    """Context manager for a proof, which finds kernels that are wrong or raise errors.

    Yields a function to call when the proof fails, with the reason. It strikes the kernels on which the model's
    attention layers ran, and returns True if the proof should run again, on the kernels that come next. If attention
    was exact, no kernel is to blame: the function returns False, and the kernels are used again. So they are if an
    error leaves the block. Otherwise, a warning names the kernels that have failed.
    """
    before = _struck

    def fall_back(reason: str) -> bool:
        failed = {each for each in _ran_on(model) if not each.startswith(EXACT)} - {*_struck}
        _strike(_struck | dict.fromkeys(failed, reason.strip().partition("\n")[0]) if failed else before)
        return bool(failed)

    try:
        yield fall_back
    except BaseException:
        _strike(before)
        raise
    if failed := [f"{name}: {reason}" for name, reason in _struck.items() if name not in before]:
        _warn(f"an attention kernel failed ({'; '.join(failed)}). {kernel_of(model)} runs instead")


def _strike(struck: dict[str, str]) -> None:
    """Set which kernels are struck. Compiled code, which has kept its kernels, is dropped."""
    global _struck
    if struck != _struck:
        _struck = struck
        _chosen.clear()
        torch.compiler.reset()
