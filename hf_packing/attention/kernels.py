"""Choose and call the kernels that compute attention in packed rows and in rows of trees on CUDA.

`KERNELS` is the table of kernels, from the fastest to the most general. There are two kinds: functions that take
cumulative segment lengths, such as those of flash-attn, of the hub's kernels and of torch, and torch's FlexAttention.
What a function takes is read from its arguments, not from a version number. A call runs on the first kernel that is
installed, takes all arguments of the call, and has failed in no proof. If there is none, exact attention runs, and a
warning says why.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

from hf_packing.attention.exact import Run, gather_tokens, runs_of
from hf_packing.attention.flex import attend_with_flex, pad_head_dim, row_mask, tree_mask
from hf_packing.attention.layout import Layout, within

DEVICES = {"cuda"}
"""The types of devices that have kernels."""

HALF_PRECISION = (torch.float16, torch.bfloat16)

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
"""CUDA compute capabilities."""

_MAX_HEAD_DIM = 256

_HEAD_DIM_STEP = 8
"""Variable-length kernels require head dimensions that are multiples of this number, and not larger than
`_MAX_HEAD_DIM`."""

MOST_KEYS = 32768
"""A call of a kernel gathers at most this many keys, unless a single path has more. With 8 heads of 128 numbers in
bfloat16, these keys and their values take 128 MiB, while a call of this size is long enough to keep a GPU busy."""

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
    hub: str | None = None
    """The name of the layer's kernel from the hub, or None."""

    @property
    def capability(self) -> tuple[int, int]:
        """The CUDA compute capability of the device."""
        return torch.cuda.get_device_capability(self.device)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class TracedRow(NamedTuple):
    """What compiled code knows of a packed row, in place of its Layout."""

    cu_seq_lens: Tensor
    max_length: int | None
    """Number of tokens in the longest segment; None if it has to be read from the device."""

    @property
    def has_branches(self) -> bool:
        return False

    @property
    def cache(self) -> dict[Any, Any]:
        return {}


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
        row: Layout | TracedRow,
        *,
        window: int | None = None,
        chunk: int | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """Compute the result of `attend_exactly`, whose arguments these are, on the query's device.

        In trees, keys are gathered along paths. If this takes several calls of the kernel, each gathers its keys once
        more in the backward pass, so that the gathered keys of only one call are in memory.
        """
        options |= {"window": window, "dropout": dropout}
        if not row.has_branches:
            borders, longest = row.cu_seq_lens.to(query.device, torch.int32), row.max_length
            if chunk is not None:
                borders, longest = cut_into_chunks(borders, chunk, query.shape[2]), chunk
            longest = int(borders.diff().max() if longest is None else longest)
            return self._call(query, key, value, (borders, longest), (borders, longest), **options)
        assert isinstance(row, Layout)

        def attend(group: PathKeys) -> Tensor:
            q = query[:, :, group.begin : group.end]
            k, v = (gather_tokens(tensor, group.places) for tensor in (key, value))
            return self._call(q, k, v, group.queries, group.keys, **options)

        groups = path_keys(row, window, chunk, query.device)
        if len(groups) == 1:
            return attend(groups[0])
        if not torch.is_grad_enabled():
            return torch.cat([attend(group) for group in groups], dim=2)
        keeps: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
        return torch.cat([checkpoint(attend, group, **keeps) for group in groups], dim=2)

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: "Lengths",
        keys: "Lengths",
        *,
        scale: float,
        is_causal: bool,
        window: int | None,
        dropout: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Call the kernel's function. The queries of each segment belong to its last keys.

        Returns:
            Attention output, [1, heads, tokens, value_dim].
        """
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
            "cu_seq_lens_q": queries[0],
            "cu_seq_lens_k": keys[0],
            "max_length_q": queries[1],
            "max_length_k": keys[1],
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


Lengths = tuple[Tensor, int]
"""Cumulative segment lengths, int32 [segments + 1], and the number of tokens in the longest segment."""


def cut_into_chunks(borders: Tensor, chunk: int, tokens: int) -> Tensor:
    """Cut all segments into chunks of at most `chunk` tokens. The number of borders depends on shapes alone, so that
    compiled code can run this function.

    Args:
        borders: borders of the segments, int32 [segments + 1].
        chunk: number of tokens in a chunk.
        tokens: number of tokens in all segments together.

    Returns:
        The borders of the chunks, int32 [segments + tokens // chunk + 1], with empty chunks at the end.
    """
    index = torch.arange(tokens, dtype=torch.int32, device=borders.device)
    starts = torch.repeat_interleave(borders[:-1], borders.diff(), output_size=tokens)
    cuts = torch.where((index - starts) % chunk == 0, index, tokens).sort().values
    return F.pad(cuts, (0, borders.shape[0]), value=tokens)[: borders.shape[0] + tokens // chunk]


@dataclass(frozen=True, eq=False)
class PathKeys:
    """The runs that one call of a kernel computes, and the places of their keys."""

    begin: int
    """The first token of these runs, whose queries are next to each other in the row."""
    end: int
    """The last token, plus 1."""
    places: Tensor
    """int64 [keys]: for each key, the index of its token in the row."""
    queries: Lengths
    keys: Lengths

    @classmethod
    def of(cls, runs: Sequence[Run], device: torch.device) -> "PathKeys":
        tokens = [each for run in runs for each in (run.prefix, np.arange(run.begin, run.end))]
        queries, keys = [run.end - run.begin for run in runs], [_keys_of(run) for run in runs]
        of_queries, of_keys = (
            (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device), max(lengths))
            for lengths in (queries, keys)
        )
        places = torch.from_numpy(np.concatenate(tokens)).to(device)
        return cls(runs[0].begin, runs[-1].end, places, of_queries, of_keys)


def _keys_of(run: Run) -> int:
    return len(run.prefix) + run.end - run.begin


def path_keys(layout: Layout, window: int | None, chunk: int | None, device: torch.device) -> list[PathKeys]:
    """Return the calls of a kernel that compute a row of trees, which the layers of a model share.

    Args:
        layout: the segments of the row.
        window, chunk: arguments of `attend_exactly`.
        device: where the calls run.
    """
    asked = ("keys along paths", window, chunk, device)
    if asked not in layout.cache:
        groups: list[list[Run]] = [[]]
        keys = 0
        for run in runs_of(layout.trees, window, chunk, joins=True):
            keys += _keys_of(run)
            if groups[-1] and keys > MOST_KEYS:
                groups.append([])
                keys = _keys_of(run)
            groups[-1].append(run)
        layout.cache[asked] = [PathKeys.of(group, device) for group in groups]
    calls: list[PathKeys] = layout.cache[asked]
    return calls


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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        row: Layout | TracedRow,
        *,
        is_causal: bool,
        window: int | None = None,
        chunk: int | None = None,
        dropout: float = 0.0,  # noqa: ARG002, refused unless 0
        **options: Any,
    ) -> Tensor:
        """Compute the result of `attend_exactly`, whose arguments these are, with a mask that layers share."""
        cache, asked = row.cache, ("mask of FlexAttention", is_causal, window, chunk)
        if asked not in cache:
            if isinstance(row, Layout) and row.has_branches:
                cache[asked] = tree_mask(row.trees, window, chunk, query.device)
            else:
                borders = row.cu_seq_lens.to(query.device, torch.int32)
                cache[asked] = row_mask(borders, query.shape[2], is_causal, window, chunk)
        return attend_with_flex(query, key, value, cache[asked], **options)


Kernel = VarlenKernel | FlexKernel


def _find(module: str, name: str = "flash_attn_varlen_func") -> Callable[..., Any] | None:
    """Return a kernel's function, or None if it is not installed."""
    try:
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return None


_FLASH_3, _FLASH_2 = partial(_find, "flash_attn_interface"), partial(_find, "flash_attn")

KERNELS: list[Kernel] = [
    VarlenKernel("flash-attn 3", _FLASH_3, from_capability=HOPPER, below_capability=BLACKWELL),
    VarlenKernel("flash-attn 2", _FLASH_2),
    VarlenKernel("torch varlen_attn", partial(_find, "torch.nn.attention.varlen", "varlen_attn"), is_torch=True),
    FlexKernel(),
]
"""The table of kernels. The kernel of a layer from the Hugging Face hub comes before them, see `use_hub_kernel`."""

HUB_KERNEL = "_hub_kernel"
"""The attribute of an attention layer that names its kernel from the hub. Compiled code can read an attribute."""

_of_the_hub: dict[str, Kernel] = {}
"""The kernels from the hub with which models were loaded, by name."""


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


EXACT = {False: "exact attention, segment by segment", True: "exact attention, path by path"}
"""What `kernel_of` returns for attention that runs without a kernel: in packed rows, and in rows of trees."""

_latest: WeakKeyDictionary[nn.Module, tuple[str, Call | None]] = WeakKeyDictionary()
"""The kernel on which the latest call of each attention layer ran, and the call, or None for exact attention. Compiled
layers do not enter theirs here."""

_chosen: dict[Call, str | None] = {}
"""The names of the kernels that were chosen for calls; None for exact attention."""

_struck: dict[tuple[str, Call], str] = {}
"""Kernels that have failed in a proof, with the kind of call and the reason."""

_warned: set[str] = set()
"""The warnings that were already given in this process."""

_is_off: ContextVar[bool] = ContextVar("_is_off", default=False)


def kernel_of(model: nn.Module) -> str:
    """Return the kernels on which the attention layers of a patched model ran in their latest calls.

    Returns:
        The names of the kernels, such as "flash-attn 2" or "torch varlen_attn", joined by " and "; or "exact attention,
        segment by segment", or "path by path" in a row of trees. An empty string if no layer has called `packed_varlen`
        yet.
    """
    return " and ".join(sorted({_latest[module][0] for module in model.modules() if module in _latest}))


def switched_off() -> AbstractContextManager[None]:
    """Return a context manager: within the block, attention is exact."""
    return within(_is_off, True)


def choose(
    layer: nn.Module,
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
) -> Kernel | None:
    """Return the kernel on which an attention call of a layer runs, or None for exact attention.

    Args:
        layer: the module that computes attention.
        in_trees: whether documents in the row share prefixes. All other arguments are those of `attend_exactly`.
    """
    is_traced = torch.compiler.is_compiling()
    kernel, call = None, None
    if query.device.type in DEVICES and (is_traced or not _is_off.get()):
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        call = Call(
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
            getattr(layer, HUB_KERNEL, None),
        )
        name = _choose(*call)
        kernel = next((kernel for kernel in _kernels_for(call.hub) if kernel.name == name), None)
    if not is_traced:
        ran = (EXACT[in_trees], None) if kernel is None else (kernel.name, call)
        if _latest.get(layer) != ran:
            _latest[layer] = ran
    return kernel


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(*fields: Any) -> str | None:
    """Return the name of the kernel for a `Call`, or None for exact attention; torch.compile passes on plain values."""
    call = Call(*fields)
    if call not in _chosen:
        _chosen[call], refusals = _first_that_takes(call)
        if _chosen[call] is None and not any((name, call) in _struck for name in refusals):
            _warn(call, None, refusals)
    return _chosen[call]


def _first_that_takes(call: Call) -> tuple[str | None, dict[str, str]]:
    """Return the name of the first kernel that takes a call, or None, and why those before it do not."""
    refusals: dict[str, str] = {}
    for kernel in _kernels_for(call.hub):
        reason = _struck.get((kernel.name, call)) or kernel.refusal(call)
        if not reason:
            return kernel.name, refusals
        refusals[kernel.name] = reason
    return None, refusals


def _warn(call: Call, chosen: str | None, refusals: dict[str, str]) -> None:
    """Warn that attention runs without a kernel, or that a kernel has failed; of each such case, once in a process.

    float64 is left out, since only checks use it.
    """
    if call.dtype == torch.float64:
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


@contextmanager
def fallbacks(model: nn.Module) -> Iterator[Callable[[str], bool]]:
    """Context manager for a proof, which finds kernels that are wrong or raise errors.

    Yields a function to call when the proof fails, with the reason. It strikes the kernels on which the model's
    attention layers ran, each for this kind of call, and returns True if the proof should run again, on the kernels
    that come next. If attention was exact, no kernel is to blame: the function returns False, and the kernels are
    used again. So they are if an error leaves the block. Otherwise, a warning names the kernels that have failed.
    """
    struck: list[tuple[str, Call]] = []

    def fall_back(reason: str) -> bool:
        latest = {_latest[module] for module in model.modules() if module in _latest}
        failed = [(name, call) for name, call in latest if call is not None and (name, call) not in _struck]
        if not failed:
            reinstate()
            return False
        struck.extend(failed)
        _strike(dict.fromkeys(failed, reason.strip().partition("\n")[0]))
        return True

    def reinstate() -> None:
        if struck:
            _strike({}, reinstated=struck)
            struck.clear()

    try:
        yield fall_back
    except BaseException:
        reinstate()
        raise
    for call in {call for _, call in struck}:
        _warn(call, *_first_that_takes(call))


def _strike(failed: dict[tuple[str, Call], str], reinstated: Sequence[tuple[str, Call]] = ()) -> None:
    """Strike kernels for kinds of calls, or reinstate them. Compiled code, which has kept its kernels, is dropped."""
    _struck.update(failed)
    for each in reinstated:
        del _struck[each]
    _chosen.clear()
    torch.compiler.reset()
