"""Logits that are computed when somebody reads them, and in chunks of tokens where a cross-entropy reads them.

For 16,384 tokens and a vocabulary of 152,000, logits take 10 GB in float32, and their gradient takes as much again.
Within `observed_logits`, the output layer of a model returns `Logits`. They stand for the logits in the model's own
forward, in its wrappers, and in the loss of a trainer, which all run as they are. `F.cross_entropy` computes its loss
and its gradients for one chunk of tokens at a time, and only for tokens that have a label. Any other function that
needs values gets the logits of the whole row.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_packing.attention import inner_model, labels_of_trees
from hf_packing.errors import PackingError
from hf_packing.training.next_tokens import NextTokens
from hf_packing.training.sum_of_chunks import sum_of_chunks
from hf_packing.training.token_losses import TokenLosses

CHUNK_LOGITS = 2**27
"""The largest number of logits in a chunk: 512 MB in float32. Computing a loss takes three to four times as much."""

_logger = logging.getLogger(__name__)


_Step = Callable[[Tensor], Tensor]
"""A function that a forward calls on logits, and that changes each logit by itself."""


@dataclass(frozen=True)
class Weighting:
    """A weighted sum of cross-entropies, which takes the place of the cross-entropy that a model computes."""

    following: NextTokens
    weights: Tensor
    """float [1, tokens]: the weight of each token's label."""
    items: Any
    """The number by which the model divides the sum, or by which the sum is divided if the model takes a mean."""


@contextmanager
def observed_logits(
    model: nn.Module,
    shape: torch.Size,
    weighting: Weighting | None = None,
    token_losses: TokenLosses | None = None,
    size: int | None = None,
) -> Iterator["Observed"]:
    """Context manager: within the block, a model's logits are `Logits`.

    Args:
        model: a model, with or without wrappers.
        shape: numbers of rows and tokens of the batch.
        weighting: a sum to take the place of the model's cross-entropy; None to leave it as it is.
        token_losses: where the cross-entropies of all labels are kept; None to keep none.
        size: the largest number of tokens in a chunk; None for as many as make CHUNK_LOGITS logits.
    """
    inner = inner_model(model)
    layer = inner.get_output_embeddings()
    reason, can_observe = _reason_against_chunks(layer, model, inner)
    observed = Observed(inner, layer, shape, size or tokens_of_chunk(inner), weighting, token_losses, reason)
    with (
        observed.installed() if can_observe else nullcontext(),
        labels_of_trees() if weighting is not None else nullcontext(),
    ):
        yield observed
    if observed.reason and shape.numel() > observed.size and _REPORTED.get(inner) != observed.reason:
        _REPORTED[inner] = observed.reason
        _logger.warning("%s: the loss needs the logits of whole rows, since %s", type(inner).__name__, observed.reason)


@contextmanager
def called_on_outputs(module: nn.Module, function: Callable[[Any], None]) -> Iterator[None]:
    """Context manager: within the block, a function sees the outputs of each forward of a module, or changes them.

    For a model without its wrappers, it runs inside of DDP and FSDP, as a loss does, while the weights are gathered.
    """
    handle = module.register_forward_hook(lambda _, __, outputs: function(outputs), prepend=True)
    try:
        yield
    finally:
        handle.remove()


def reduced_logits(model: nn.Module, reduce: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
    """Context manager: within the block, a model returns the result of a function in place of its logits."""
    return called_on_outputs(inner_model(model), lambda outputs: setattr(outputs, "logits", reduce(outputs.logits)))


def tokens_of_chunk(inner: PreTrainedModel) -> int:
    """Return the largest number of tokens whose logits are computed at a time."""
    return max(1, CHUNK_LOGITS // getattr(inner.config.get_text_config(), "vocab_size", 1))


_REPORTED: "weakref.WeakKeyDictionary[PreTrainedModel, str]" = weakref.WeakKeyDictionary()
"""The last reason that was reported for each model."""


def _reason_against_chunks(layer: Any, model: nn.Module, inner: PreTrainedModel) -> tuple[str, bool]:
    """Return why the logits of whole rows are needed, or an empty text, and whether they can be observed at least."""
    name = next((name for name, module in model.named_modules() if module is layer), None)
    if not name:
        return "the model's get_output_embeddings returns no output layer", False
    parts = name.split(".")
    around = [model, *(model.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))]
    if torch.compiler.is_compiling() or any(is_compiled(module) for module in around):
        return "the output layer is compiled", False
    if any(isinstance(module, FullyShardedDataParallel) for module in around[around.index(inner) :]):
        return "the first version of FSDP shards the output layer on its own", True
    if any(hasattr(each, "ds_id") for each in layer.parameters()):
        return "DeepSpeed ZeRO-3 shards the output layer", True
    if any(each._backward_hooks for each in layer.parameters()):
        return "a weight of the output layer has a hook", True
    hooks = [(*module._backward_hooks.values(), *module._backward_pre_hooks.values()) for module in around]
    if not all(map(_is_of_torch, chain(*hooks))):
        return "the output layer, or a module around it, has a backward hook", False
    return "", True


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile compiles a module's forward."""
    forward = vars(module).get("forward")
    forwards = forward, getattr(forward, "before", None)  # a patch may have replaced a compiled forward
    compiled = any(hasattr(each, "_torchdynamo_orig_callable") for each in forwards)
    return compiled or "_orig_mod" in module._modules or module._compiled_call_impl is not None


class Observed:
    """The logits and cross-entropies of one forward, in which this takes the place of the output layer's forward."""

    def __init__(
        self,
        inner: PreTrainedModel,
        layer: Any,
        shape: torch.Size,
        size: int,
        weighting: Weighting | None,
        token_losses: TokenLosses | None,
        reason: str,
    ) -> None:
        self.inner, self.layer, self.shape, self.size = inner, layer, shape, size
        self.weighting, self.token_losses = weighting, token_losses
        self.sums: list[Tensor] = []
        """The sum over labels of each cross-entropy of the logits, without a graph."""
        self.reason = reason
        """Why the logits of whole rows are computed; empty if they are not."""
        self.trained: list[Tensor] = []
        """The weights of the layer, and tensors with which the model's forward has changed the logits."""
        self.has_graph = False
        self.is_used = False
        """True if something was computed of the logits in chunks, or is going to be."""
        self._autocast = False, torch.bfloat16

    @contextmanager
    def installed(self) -> Iterator[None]:
        replaced, self._forward, known = vars(self.layer).get("forward"), self.layer.forward, self.reason
        self.layer.forward = partial(self._return_logits, known)
        self.reason = known or "the output layer was not called"
        try:
            yield
        finally:
            del self.layer.forward
            if replaced is not None:
                self.layer.forward = replaced

    def _return_logits(self, reason: str, hidden: Any, *others: Any, **named: Any) -> Any:
        places = torch.arange(self.shape.numel()).view(self.shape)
        self.reason = reason or self._reason_of(hidden, *others, *named)
        self.has_graph = torch.is_grad_enabled()
        if self.reason:
            output = self._forward(hidden, *others, **named)
            is_known = type(output) is Tensor and output.shape[:2] == self.shape
            return Logits.known(self, output, places) if is_known else output
        self.trained = [each for each in self.layer.parameters() if each.requires_grad]
        like = self._forward(hidden[:, :1])[0, 0].detach()
        return Logits.later(self, hidden, None, places, [self._of], like)

    def _reason_of(self, hidden: Any, *others: Any) -> str:
        if others or not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[:2] != self.shape:
            return "the input of the output layer is not a tensor [1, tokens, width]"
        device = hidden.device.type
        self._autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        if _is_distributed(self.layer):
            return "the output layer is distributed by tensor parallelism"
        if torch.float16 in (hidden.dtype, self._autocast[1] if self._autocast[0] else None):
            return "gradients in float16 have to be scaled before they are computed"
        return ""

    def _of(self, hidden: Tensor) -> Tensor:
        """Run the layer without its hooks, which FSDP expects to be called once."""
        enabled, dtype = self._autocast
        with _unsharded(self.inner, self.layer), torch.autocast(hidden.device.type, dtype, enabled=enabled):
            return self._forward(hidden)  # type: ignore[no-any-return]


class Logits(Tensor):
    """Logits [..., vocabulary] of tokens of a batch, which are known, or computed as soon as a function needs values.

    Until then, the memory of the tensor is a single NaN, so that no code takes it for numbers.
    """

    observed: Observed
    hidden: Tensor
    """float [..., width], the input of the output layer, if the logits were not known from the beginning."""
    steps: list[_Step]
    """The functions that make logits of `hidden`. Views have the same list, since they share memory."""
    places: Tensor
    """The index of each token in the batch, int64 [...] on the CPU."""
    base: "Logits | None" = None
    """The logits with which these share memory, as views do."""
    taken: _Step
    """Returns these logits, given those of `base`."""
    is_copy: bool = False
    """True if a custom autograd function, such as that of DDP, has copied the logits."""
    _whole: Tensor | None = None

    @property
    def whole(self) -> Tensor | None:
        """The logits, once they are known."""
        if self._whole is None and self.base is not None and self.base.whole is not None:
            self._whole = self.taken(self.base.whole)
        return self._whole

    @classmethod
    def known(cls, observed: Observed, whole: Tensor, places: Tensor) -> "Logits":
        logits = whole.as_subclass(cls)
        logits.observed, logits._whole, logits.places = observed, whole, places
        return logits

    @classmethod
    def later(
        cls, observed: Observed, hidden: Tensor, before: Tensor | None, places: Tensor, steps: list[_Step], like: Tensor
    ) -> "Logits":
        """Return logits that are computed later, from logits `before`, or from the input of the output layer."""
        apply: Callable[..., Logits] = _InGraph.apply
        logits: Logits = apply(steps, like, before, hidden, *observed.trained)
        logits.observed, logits.hidden, logits.steps, logits.places = observed, hidden, steps, places
        logits.is_copy = observed.has_graph and not torch.is_grad_enabled()
        return logits

    def values(self) -> Tensor:
        """Return the logits, and keep them."""
        if self.base is not None:
            self.base.values()
        if self.whole is None:
            with torch.set_grad_enabled(self.observed.has_graph):  # as in the forward, whoever reads the logits first
                self._whole = _after(self.steps, self._in_graph())
        assert self.whole is not None
        return self.whole

    def _in_graph(self) -> Tensor:
        """Return the hidden states. Their gradients also reach the stand-in, on which DDP and FSDP may have hooks."""
        apply: Callable[..., Tensor] = _Reaching.apply
        return apply(self.hidden, self._gate())

    def _gate(self) -> Tensor:
        """Return the stand-in, if it is sure that gradients may bypass it."""
        if self.is_copy and type(self.grad_fn).__name__ != "_DDPSinkBackward":
            raise PackingError(
                "logits: expected no custom autograd function that returns a copy of the logits, got "
                f"{type(self.grad_fn).__name__}, whose backward pass would not run"
            )
        return self._stand_in()

    def _stand_in(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.__name__
        if name == "__get__":
            name = function.__self__.__name__
        if name in _WITHOUT_VALUES or (name == "register_hook" and args[0].whole is None and _is_of_torch(args[1])):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], cls) else None
        is_custom = first is not None and first.observed.has_graph and not torch.is_grad_enabled()
        found = None
        if function is F.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
        elif first is not None and (not is_custom or name == "clone"):
            found = first._later(function, name, args[1:], kwargs)
        if found is not None:
            return found

        def read(each: Any) -> Any:
            return each.values() if isinstance(each, cls) else each

        result = function(*tree_map(read, args), **tree_map(read, kwargs))
        if first is None or is_custom or not isinstance(result, Tensor):
            return result
        if result is first.whole:  # changed in place
            return first
        is_changed = name.strip("_") in _OF_SINGLE_LOGITS and result.shape == first.shape
        return cls.known(first.observed, result, first.places) if is_changed else result

    def _later(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Logits | None":
        """Return the result of a function that needs no values yet, or None for any other function."""
        if name in ("register_hook", "retain_grad") and self.observed.is_used and self.whole is None:
            raise PackingError(
                f"logits: expected a hook before the loss is computed, got {name} afterwards; a loss is "
                "computed from chunks of logits, so that no gradient of these logits arrives here. Compute the loss "
                "from logits that you have called register_hook or retain_grad on"
            )
        others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        of_every_token = all(_is_of_every_token(each, self.shape[-1]) for each in others)
        if name.strip("_") in _OF_SINGLE_LOGITS and of_every_token and (args or kwargs or name != "type"):
            self.observed.trained += [each for each in others if each.requires_grad]

            def step(logits: Tensor) -> Tensor:
                return function(logits, *args, **kwargs)  # type: ignore[no-any-return]

            if not (name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))):
                return self._with(self.places, step=step)
            if self.whole is None and self.base is None:  # in place
                self.steps.append(step)
            else:
                step(self.values())
            return self
        if name in _OF_SHAPES:
            reshaped = function(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args, **kwargs)
            shape = reshaped.shape[:-1]
            if reshaped.shape[-1:] == self.shape[-1:] and reshaped.dtype == self.dtype:
                return self._with(
                    self.places.reshape(shape), lambda rows: rows.reshape(*shape, rows.shape[-1]), is_view=True
                )
        if name == "__getitem__":
            index, last = _index_of_tokens(args[0], self.ndim)
            if last is not None and last != slice(None):
                tokens: Any = self[(*index, slice(None))]
                return Logits.known(self.observed, tokens.values()[..., last], tokens.places)
            if last is not None:
                is_view = not any(isinstance(each, Tensor) for each in index)
                on_cpu = tuple(each.cpu() if isinstance(each, Tensor) else each for each in index)
                return self._with(self.places[on_cpu], lambda rows: rows[(*index, slice(None))], is_view=is_view)
        return None

    def _with(
        self, places: Tensor, select: _Step = lambda rows: rows, step: _Step | None = None, is_view: bool = False
    ) -> "Logits":
        """Return the logits of some tokens, or in another shape, or after one more function."""
        more = [] if step is None else [step]
        if self.whole is not None:
            return Logits.known(self.observed, _after(more, select(self.whole)), places)
        like = _after(more, torch.empty(self.shape[-1], dtype=self.dtype, device=self.device))
        steps = self.steps if is_view else [*self.steps, *more]
        logits = Logits.later(self.observed, select(self.hidden), self._gate(), places, steps, like)
        if is_view:
            logits.base, logits.taken = self, select
        else:
            self.observed.is_used = True
        return logits

    def of_tokens(self, tokens: Tensor) -> "Logits":
        """Return the logits of some tokens of a batch, int64 [chosen], which may be the same ones."""
        rows: Any = self[0, tokens.to(self.device)]
        assert isinstance(rows, Logits)
        return rows

    def in_chunks(self, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Call a function on the logits of chunks of tokens, and join the results. Backward computes chunks again.

        Args:
            function: a function of the logits of a chunk, float [tokens, vocabulary], and of the chunk.
        """
        if self.whole is not None:
            return function(self.whole, slice(0, len(self.whole)))
        self.observed.is_used, hidden, size = True, self._in_graph()[None], self.observed.size
        chunks = [slice(begin, begin + size) for begin in range(0, max(hidden.shape[1], 1), size)]
        run = self._of_chunk(function)
        if len(chunks) > 1:
            run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([run(hidden[:, chunk], chunk) for chunk in chunks])

    def summed(self, tokens: Tensor, function: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Sum a function over chunks of tokens, whose gradients are computed at once. See `sum_of_chunks`.

        Args:
            tokens: int64 [chosen], the tokens to take; at least one, so that the sum always has a gradient.
            function: a function of the logits of a chunk, float [tokens, vocabulary], and of the chunk.
        """
        if self.whole is not None:
            return function(self.whole[tokens.to(self.whole.device)], slice(0, len(tokens)))
        self.observed.is_used = True
        hidden = self.hidden[tokens.to(self.hidden.device)][None]
        with _unsharded(self.observed.inner, self.observed.layer):  # also while gradients are computed
            return sum_of_chunks(self._of_chunk(function), hidden, self.observed.size, self._gate())

    def _of_chunk(self, function: Callable[[Tensor, slice], Tensor]) -> Callable[[Tensor, slice], Tensor]:
        return lambda hidden, chunk: function(_after(self.steps, hidden)[0], chunk)


def _after(steps: Iterable[_Step], values: Tensor) -> Tensor:
    for step in steps:
        values = step(values)
    return values


def _cross_entropy(
    logits: Any,
    target: Tensor,
    *,
    weight: Any,
    size_average: Any,
    ignore_index: int,
    reduce: Any,
    reduction: str,
    label_smoothing: float,
) -> Tensor | None:
    """Compute `F.cross_entropy` in chunks, and note its sum. Return None if torch has to compute it as usual."""
    ndims = (logits.ndim, target.ndim) if isinstance(logits, Logits) else None
    if ndims != (2, 1) or (weight, size_average, reduce) != (None, None, None):
        return None
    observed: Observed = logits.observed
    losses_of = partial(F.cross_entropy, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    items: Any = None
    if observed.weighting is not None:
        if reduction == "none" or label_smoothing:
            raise PackingError(
                "loss: expected a cross-entropy with reduction='sum' or 'mean' and without label smoothing for "
                f"loss='sequence' and for documents that share prefixes, got reduction={reduction!r} and "
                f"label_smoothing={label_smoothing}; it cannot be weighted. Use loss='token' and no shared prefixes"
            )
        found, items = _weighted(logits, observed.weighting, observed.token_losses), observed.weighting.items
    elif reduction == "none":
        found = logits.in_chunks(lambda rows, chunk: losses_of(rows, target[chunk]))
    else:
        labeled = (target != ignore_index).nonzero()[:, 0]
        items = len(labeled) or torch.nan  # the mean over no labels is not a number
        found = _summed(logits, labeled if len(labeled) else labeled.new_zeros(1), target, losses_of)
    observed.sums.append(found.detach().sum())
    return found / items if reduction == "mean" else found


def _summed(logits: Logits, chosen: Tensor, target: Tensor, losses_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the sum of the losses of some tokens, int64 [chosen], a float scalar."""
    token_losses = None if logits.observed.sums else logits.observed.token_losses

    def sum_of(rows: Tensor, chunk: slice) -> Tensor:
        losses = losses_of(rows, target[chosen[chunk]])
        if token_losses is not None:
            token_losses.put(losses, logits.places[chosen[chunk].cpu()])
        return losses.sum()

    return logits.summed(chosen, sum_of)


def _weighted(logits: Logits, weighting: Weighting, token_losses: TokenLosses | None) -> Tensor:
    """Return the weighted sum, a float scalar, if the logits are those of the tokens of the batch, in their order."""
    predictors, tokens, labels = weighting.following
    rows = len(logits.places)
    if rows < weighting.weights.shape[1] - 1 or not torch.equal(logits.places, torch.arange(rows)):
        raise PackingError(
            "loss: expected a cross-entropy of the logits of all tokens of a batch, got one of logits of other tokens, "
            "whose documents cannot be told apart"
        )
    weights = weighting.weights[0, tokens]
    # in a tree, a token may predict several labels
    chosen, row_of_label = predictors.unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]

    def sum_of(rows: Tensor, chunk: slice) -> Tensor:
        own = ((row_of_label >= chunk.start) & (row_of_label < chunk.stop)).nonzero()[:, 0]
        losses = -NextTokens(row_of_label[own] - chunk.start, tokens[own], labels[own]).log_probs(rows)
        if token_losses is not None:
            token_losses.put_at(losses, tokens[own])
        return losses @ weights[own].to(losses)

    return logits.summed(chosen if len(chosen) else chosen.new_zeros(1), sum_of)


class _InGraph(torch.autograd.Function):
    """A NaN in the shape of logits, with a place in the graph.

    A gradient arrives here if a custom autograd function has read the logits. It goes on to the input of the output
    layer and to its weights.
    """

    @staticmethod
    def forward(
        ctx: Any, steps: list[_Step], like: Tensor, before: Tensor | None, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        ctx.steps, ctx.trained = steps, trained
        ctx.zeros_of_before = None if before is None else _zeros_like(before)
        ctx.save_for_backward(hidden)
        nan = torch.full((1,), torch.nan, dtype=like.dtype, device=like.device)
        shape = torch.Size((*hidden.shape[:-1], like.shape[-1]))
        # no view, since FSDP2 warns of views
        nan = nan.new_empty(0).set_(nan.untyped_storage(), 0, shape, (0,) * len(shape))
        return Tensor._make_subclass(Logits, nan)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        of_before = None if ctx.zeros_of_before is None else ctx.zeros_of_before()
        if not any(gradient.stride()):  # zeros that `sum_of_chunks` sends through the gate
            of_hidden = _zeros_like(hidden)() if of_before is None else None
            return None, None, of_before, of_hidden, *[None] * len(ctx.trained)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = _after(ctx.steps, leaf)
        found = torch.autograd.grad(logits, [leaf, *ctx.trained], gradient, allow_unused=True)
        return None, None, of_before, *found


class _Reaching(torch.autograd.Function):
    """Hidden states whose backward pass also reaches a stand-in, with a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stand_in: Tensor) -> Tensor:
        ctx.zeros = _zeros_like(stand_in)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, ctx.zeros()


def _zeros_like(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes a gradient of zeros for a tensor, in the memory of one number.

    It has the dtype of the tensor, too: autograd copies a gradient of another one, and a copy takes all its memory.
    """
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    return lambda: torch.zeros((), dtype=dtype, device=device).expand(shape)


def _is_of_torch(hook: Any) -> bool:
    """Return whether a hook is one of DDP or FSDP, which only wait for the backward pass."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("torch.distributed.")


def _is_of_every_token(value: Tensor, vocabulary: int) -> bool:
    """Return whether a tensor is a number, or a bias of the vocabulary."""
    is_bias = value.ndim > 0 and value.shape[:-1].numel() == 1 and value.shape[-1] == vocabulary
    return (value.ndim == 0 or is_bias) and value.is_leaf and not isinstance(value, Logits)


def _index_of_tokens(index: Any, ndim: int) -> tuple[tuple[Any, ...], slice | None]:
    """Return an index of tokens and the slice of the vocabulary; None for the slice if the index is another one."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(each is None or isinstance(each, (bool, list)) for each in parts):
        return (), None
    taken = sum(each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1 for each in parts)
    dots = [number for number, each in enumerate(parts) if each is Ellipsis]
    begin = dots[0] if dots else len(parts)
    parts = (*parts[:begin], *[slice(None)] * (ndim - taken + len(dots)), *parts[begin + len(dots) :])
    return parts[:-1], parts[-1] if isinstance(parts[-1], slice) else None


_OF_SINGLE_LOGITS = frozenset(
    ("float", "double", "half", "bfloat16", "to", "type", "clone", "contiguous", "neg", "tanh")
    + ("mul", "rmul", "imul", "multiply", "div", "truediv", "itruediv", "true_divide")
    + ("add", "radd", "iadd", "sub", "isub", "rsub", "clamp", "masked_fill")
)
"""Names, without underscores, of functions that change each logit by itself. With numbers and biases, they can wait."""

_OF_SHAPES = frozenset(("view", "reshape", "flatten", "squeeze", "unsqueeze"))

_WITHOUT_VALUES = frozenset(
    ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_meta")
    + ("is_sparse", "_base", "_backward_hooks", "size", "dim", "numel", "stride", "is_floating_point", "is_complex")
    + ("is_tensor", "_is_view", "get_device", "element_size", "__len__", "__hash__")
)
"""Names of functions and attributes that need no values of logits."""


@contextmanager
def _unsharded(inner: nn.Module, layer: nn.Module) -> Iterator[None]:
    """Context manager: within the block, weights of the output layer that FSDP2 shards on their own are gathered."""
    units = [module for module in inner.modules() if isinstance(module, FSDPModule) and layer in module.modules()]
    sharded = [unit for unit in units if unit is not inner] if _is_distributed(layer) else []
    for unit in sharded:
        unit.unshard()
    try:
        yield
    finally:
        for unit in sharded:
            unit.reshard()


def _is_distributed(layer: nn.Module) -> bool:
    return any(type(each).__name__ == "DTensor" for each in layer.parameters())
