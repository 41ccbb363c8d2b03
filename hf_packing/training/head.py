"""Logits that are computed when somebody reads them, and in chunks of tokens where a cross-entropy reads them.

For 16,384 tokens and a vocabulary of 152,000, logits take 10 GB in float32, and their gradient takes as much again.
Within `observed_logits`, the output layer of a model returns `Logits`. They stand for the logits in the model's own
forward, in its wrappers, and in the loss of a trainer, which all run as they are. `F.cross_entropy` computes its loss
and its gradients for one chunk of tokens at a time, and only for tokens that have a label. Any other function that
needs values gets the logits of the whole row.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_packing.attention import compiles_forward, inner_model, labels_of_trees, temporarily
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.training.sum_of_chunks import chunks_of, sum_of_chunks
from hf_packing.upstream.torch import WITHOUT_VALUES, PlainTensors, backward_hooks, subclassed, tree_leaves, tree_map

CHUNK_LOGITS = 2**27
"""The largest number of logits in a chunk: 512 MB in float32. Computing a loss takes three to four times as much."""

_CHUNK_TOKENS = 1024
"""Largest number of tokens in a chunk whose result is kept for each token. More of them gain nothing, and their logits
leave the processor's caches."""

_logger = logging.getLogger(__name__)

_Step = Callable[[Tensor], Tensor]
"""A function of logits, or of the inputs of the output layer."""

Reducer = Callable[[Tensor, slice], Tensor]
"""A function (logits of a chunk of tokens, float [tokens of the chunk, vocabulary]; the chunk) -> a result."""


class Weighting(NamedTuple):
    """A weighted sum of cross-entropies, which takes the place of the cross-entropy that a model computes."""

    rows: Tensor
    """The token that predicts each label, int64 [labels]."""
    labels: Tensor
    """int64 [labels]."""
    weights: Tensor
    """float [labels]: the weight of each label."""
    items: Any
    """The number by which the model divides the sum, or by which the sum is divided if the model takes a mean."""
    targets: Tensor
    """The labels that the cross-entropy has to get, int64 [tokens]."""


@contextmanager
def observed_logits(model: nn.Module, shape: torch.Size, weighting: Weighting | None = None) -> Iterator["Head"]:
    """Context manager: within the block, the output layer of a model returns `Logits`, wherever that is possible.

    Args:
        model: a model, with or without wrappers.
        shape: numbers of rows and tokens of the batch; of several rows, logits are computed as usual.
        weighting: a sum to take the place of the model's cross-entropy; None to leave it as it is.
    """
    inner = inner_model(model)
    head = Head(inner, shape, weighting)
    head.reason, can_observe = _reason_for_whole_rows(head.layer, model, inner)
    with (
        head.installed() if can_observe and shape[0] == 1 else nullcontext(),
        labels_of_trees() if weighting is not None else nullcontext(),
    ):
        yield head
    if head.reason and shape.numel() > head.size:
        _warn_once(type(inner).__name__, head.reason)


def called_on_outputs(module: nn.Module, function: Callable[[Any], None]) -> RemovableHandle:
    """Let a function see the outputs of each forward of a module, or change them, within a `with` block.

    For a model without its wrappers, it runs inside of DDP and FSDP, as a loss does, while the weights are gathered.
    """
    return module.register_forward_hook(lambda _, __, outputs: function(outputs), prepend=True)


def join_chunks(logits: Tensor, rows: Tensor, function: Reducer) -> Tensor:
    """Call a function on the logits of chunks of tokens, and join the results. Backward computes chunks again.

    Args:
        logits: logits [..., vocabulary], of any kind.
        rows: the tokens to take, int64 [chosen], which may be the same ones.
        function: returns a tensor [tokens of the chunk, ...].
    """
    inputs, logits_of = _rows_of(logits, rows)
    size = min(logits.head.size, _CHUNK_TOKENS) if isinstance(logits, Logits) else _CHUNK_TOKENS
    chunks = chunks_of(len(rows), size)

    def run(part: Tensor, chunk: slice) -> Tensor:
        return function(logits_of(part), chunk)

    if len(chunks) > 1 and isinstance(logits, Logits) and logits.known is None:
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([run(inputs[chunk], chunk) for chunk in chunks])


def _rows_of(logits: Tensor, rows: Tensor) -> tuple[Tensor, _Step]:
    """Return what is kept of some tokens, [chosen, width], and the function that makes their logits of it."""
    rows = rows.to(logits.device)
    if isinstance(logits, Logits) and logits.known is None:
        return logits.inputs_of(rows), logits.of
    known = logits.values() if isinstance(logits, Logits) else logits
    return known.flatten(0, -2)[rows], lambda part: part


class Head:
    """The output layer of a model in one forward: it takes the place of the layer's forward, and runs it later."""

    def __init__(self, inner: PreTrainedModel, shape: torch.Size, weighting: Weighting | None) -> None:
        self.shape, self.weighting = shape, weighting
        self.layer: Any = inner.get_output_embeddings()
        self.size = max(1, CHUNK_LOGITS // getattr(inner.config.get_text_config(), "vocab_size", 1))
        """The largest number of tokens whose logits are computed at a time."""
        self.reason = ""
        """Why the logits of whole rows are computed; empty if they are not."""
        self.sums: list[Tensor] = []
        """The sum over labels of each cross-entropy of the logits, without a graph."""
        self.is_read_later = False
        """Whether logits are read after the forward. Without gradients in training, they are then computed at once:
        they may be those of a reference, with other adapters than when they are read."""
        self.has_graph = False
        """Whether the forward of the model is recorded for a backward pass."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        self._forward = self.layer.forward
        with temporarily(self.layer, forward=self._return_logits):
            yield

    def _return_logits(self, hidden: Any, *others: Any, **named: Any) -> Any:
        self.reason = self.reason or self._reason_of(hidden, *others, *named)
        if self.reason or (self.is_read_later and self.layer.training and not torch.is_grad_enabled()):
            output = self._forward(hidden, *others, **named)
            is_known = type(output) is Tensor and output.shape[:2] == self.shape
            return Logits.of_values(self, output, self._places(output)) if is_known else output
        self.has_graph, kind = torch.is_grad_enabled(), hidden.device.type
        self._autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        like = self._forward(hidden[:, :1])[0, 0].detach()
        return Logits.later(self, hidden, self._places(like), (), like, hidden, *self.layer.parameters())

    def _places(self, like: Tensor) -> Tensor:
        """Return what `Logits.places` describes, for the logits of all tokens."""
        return torch.empty((*self.shape, 1), device="meta").expand(*self.shape, like.shape[-1])

    def _reason_of(self, hidden: Any, *others: Any) -> str:
        if others or not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[:2] != self.shape:
            return "the input of the output layer is not a tensor [1, tokens, width]"
        if _is_distributed(self.layer):
            return "the output layer is distributed by tensor parallelism"
        kind = hidden.device.type
        if torch.float16 in (hidden.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)):
            return "gradients in float16 have to be scaled before they are computed"
        return ""

    def run(self, hidden: Tensor) -> Tensor:
        """Run the layer without its hooks, which FSDP expects to be called once."""
        with self.gathered(), self._autocast:
            return self._forward(hidden)  # type: ignore[no-any-return]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager: within the block, weights of a layer that is sharded alone by FSDP2 are gathered."""
        is_sharded = _is_distributed(self.layer) and isinstance(self.layer, FSDPModule)
        if is_sharded:
            self.layer.unshard()
        try:
            yield
        finally:
            if is_sharded:
                self.layer.reshard()


class Logits(Tensor):
    """Logits [..., vocabulary] of tokens of a batch, which are known, or computed as soon as a function needs values.

    Until then, the memory of the tensor is a single NaN, so that no code takes it for numbers.
    """

    head: Head
    hidden: Tensor
    """float [rows, tokens, width]: the input of the output layer, if the logits were not known from the beginning."""
    places: Tensor
    """A tensor without memory in the shape of the logits. Its strides are those of a view of one number for each token
    of the batch, so they say which token each of the logits belongs to."""
    steps: tuple[_Step, ...]
    """The functions that make these logits of the output of the layer."""
    base: "Logits | None" = None
    """The logits with which these share memory, as views do."""
    taken: _Step
    """Returns the values of these logits, given those of `base`."""
    is_copy: bool = False
    """True if a custom autograd function, such as that of DDP, has copied the logits."""
    _known: Tensor | None = None

    @classmethod
    def of_values(cls, head: Head, values: Tensor, places: Tensor) -> "Logits":
        logits = values.as_subclass(cls)
        logits.head, logits._known, logits.places = head, values, places
        return logits

    @classmethod
    def later(
        cls,
        head: Head,
        hidden: Tensor,
        places: Tensor,
        steps: tuple[_Step, ...],
        like: Tensor,
        source: Tensor,
        *weights: Tensor,
    ) -> "Logits":
        """Return logits that are computed later.

        Args:
            like: a tensor with the dtype and on the device of the logits.
            source: the logits from which these are made, or the input of the output layer.
            weights: the weights from which they are made, which DDP looks for in the graph of a model's outputs.
        """
        apply: Callable[..., Logits] = _StandIn.apply
        logits = apply(like.new_full((1,), torch.nan), places.shape, source, *weights)
        logits.head, logits.hidden, logits.places, logits.steps = head, hidden, places, steps
        logits.is_copy = head.has_graph and not torch.is_grad_enabled()
        return logits

    @property
    def known(self) -> Tensor | None:
        """The values of the logits, once they are known."""
        if self.base is not None and self.base.known is not None:
            self.values()
        return self._known

    def values(self) -> Tensor:
        """Return the logits, and keep them."""
        if self._known is None:
            if self.base is not None:
                self._known = self.taken(self.base.values())
            else:
                with torch.set_grad_enabled(self.head.has_graph):  # as in the forward, whoever reads the logits first
                    self._known = self.of(self.inputs_of(slice(None))).view(self.shape)
        return self._known

    def tokens(self, device: Any) -> Tensor:
        """Return the token of the batch that each of the logits belongs to, int64 [...]."""
        every = torch.arange(self.head.shape.numel(), device=device)
        return every.as_strided(self.shape[:-1], self.places.stride()[:-1], self.places.storage_offset())

    def inputs_of(self, rows: Tensor | slice) -> Tensor:
        """Return the input of the output layer for some tokens, [chosen, width]. Its gradients also reach the stand-in,
        on which DDP and FSDP may have hooks."""
        apply: Callable[..., Tensor] = _Reaching.apply
        return apply(self.hidden, self._stand_in()).flatten(0, 1)[self.tokens(self.device).flatten()[rows]]

    def of(self, inputs: Tensor) -> Tensor:
        """Return logits, given the input of the output layer, [tokens, width]."""
        logits = self.head.run(inputs[None])
        for step in self.steps:
            logits = step(logits)
        return logits[0]

    def _stand_in(self) -> Tensor:
        """Return the tensor without values, if it is sure that gradients may bypass it."""
        if self.is_copy and self.grad_fn is not None and type(self.grad_fn).__name__ != "_DDPSinkBackward":
            raise _refusal(type(self.grad_fn).__name__.removesuffix("Backward"))
        with PlainTensors():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, _name_of(function)
        waits = name in ("register_hook", "retain_grad") and args[0].known is None
        if waits and not maker_of(*args[1:]).startswith(_WAITING):
            if args[0].head.sums:
                raise _refusal(name)
            # no loss is computed yet, so it can be one of whole rows
            args[0].head.reason, waits = "a hook is registered on the logits", False
        if waits or name in _WITHOUT_VALUES:
            with PlainTensors():
                return function(*args, **kwargs)
        if function is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
            return loss
        first = args[0] if args and isinstance(args[0], cls) else None
        # a custom autograd function runs without a graph, and expects plain tensors; that of DDP only clones
        if first is not None and (name == "clone" or torch.is_grad_enabled() or not first.head.has_graph):
            later = first._after(name, lambda logits: function(logits, *args[1:], **kwargs), args[1:], kwargs)
            if later is not None:
                return later

        def read(each: Any) -> Any:
            return each.values() if isinstance(each, cls) else each

        result = function(*tree_map(read, args), **tree_map(read, kwargs))
        return first if first is not None and result is first.known else result  # first was changed in place

    def _after(self, name: str, function: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Logits | None":
        """Return the logits after a function of single tokens with these other arguments: a view of these, or the
        logits after one more step, or both. Return None for any other function."""
        others, vocabulary = tree_leaves((args, kwargs)), self.shape[-1]
        weights = [each for each in others if isinstance(each, Tensor)]
        if name in _OF_SINGLE_LOGITS and all(_is_of_every_token(each, vocabulary) for each in others):
            places, is_step, is_view = self.places, True, False
        elif name in _VIEWS and not weights and not any(isinstance(each, torch.dtype) for each in others):
            places, is_view = function(self.places), True
            # a part of the vocabulary
            is_step = name == "__getitem__" and isinstance(args[0], tuple) and args[0][:-1] == (Ellipsis,)
            if places.stride()[-1:] != (0,) or not (places.shape[-1] == vocabulary or is_step):
                return None
        else:
            return None
        if self.known is not None:
            return Logits.of_values(self.head, function(self.known), places)
        before = torch.empty(vocabulary, dtype=self.dtype, device=self.device)
        like = function(before) if is_step else before
        if like is before and not is_view:  # nothing to do, as for float() of float32
            return self
        steps = (*self.steps, function) if is_step else self.steps
        logits = Logits.later(self.head, self.hidden, places, steps, like, self._stand_in(), *weights)
        if is_view:
            logits.base, logits.taken = self, function
        return logits


def _cross_entropy(logits: Any, target: Tensor, **options: Any) -> Tensor | None:
    """Compute `F.cross_entropy` in chunks, and note its sum. Return None if torch has to compute it as usual."""
    if (
        not isinstance(logits, Logits)
        or (logits.ndim, target.ndim) != (2, 1)
        or any(options[name] is not None for name in ("weight", "size_average", "reduce"))
    ):
        return None
    head, reduction, weights = logits.head, options["reduction"], None
    losses_of: Callable[..., Tensor] = partial(F.cross_entropy, **{**options, "reduction": "none"})
    if head.weighting is not None:
        rows, labels, weights, items, targets = head.weighting
        places = logits.tokens("cpu")
        is_whole = len(places) >= head.shape[1] - 1 and torch.equal(places, torch.arange(len(places)))
        if reduction == "none" or options["label_smoothing"] or not is_whole:
            raise PackingError(
                "loss: expected a cross-entropy of the logits of all tokens of a batch, with reduction='sum' or 'mean' "
                "and without label smoothing, for loss='sequence' and for documents that share prefixes or are on "
                "several ranks; another one cannot be weighted. Use loss='token', no shared prefixes and "
                "max_ranks_per_document=1"
            )
        is_changed = not torch.equal(target, targets[: len(target)].to(target.device))
        if is_changed or options["ignore_index"] != IGNORED_LABEL:
            raise PackingError(
                "loss: expected a cross-entropy of the labels of the batch, got other labels, or another ignore_index. "
                "With loss='sequence', loss_weights, shared prefixes and several ranks per document, labels are "
                "weighted before the loss is computed: change them in the dataset"
            )
    elif reduction == "none":
        rows = torch.arange(len(target), device=target.device)
        losses = join_chunks(logits, rows, lambda each, chunk: losses_of(each, target[chunk]))
        head.sums.append(losses.detach().sum())
        return losses
    else:
        rows = (target != options["ignore_index"]).nonzero()[:, 0]
        items = len(rows) or torch.nan  # the mean over no labels is not a number
        rows = rows if len(rows) else rows.new_zeros(1)
        labels = target[rows]

    inputs, logits_of = _rows_of(logits, rows)

    def sum_of(part: Tensor, chunk: slice) -> Tensor:
        losses = losses_of(logits_of(part), labels[chunk])
        return losses.sum() if weights is None else losses @ weights[chunk].to(losses)

    if logits.known is not None:
        total = sum_of(inputs, slice(0, len(rows)))
    else:
        with head.gathered():  # also while gradients are computed
            total = sum_of_chunks(sum_of, inputs, head.size)
    head.sums.append(total.detach())
    return total / items if reduction == "mean" else total


class _StandIn(torch.autograd.Function):
    """A NaN in the shape of logits, with a place in the graph, so that DDP and FSDP can wait for its gradient.

    The gradient is zero, since sums and values reach the hidden states by themselves.
    """

    @staticmethod
    def forward(ctx: Any, nan: Tensor, shape: torch.Size, source: Tensor, *weights: Tensor) -> Tensor:
        ctx.zeros, ctx.weights = _zeros_like(source), len(weights)
        # no view, since FSDP2 warns of views
        values = nan.new_empty(0).set_(nan.untyped_storage(), 0, shape, (0,) * len(shape))
        return subclassed(Logits, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if any(gradient.stride()) and gradient.any():
            raise _refusal("one that has returned their gradient")
        return None, None, ctx.zeros(), *[None] * ctx.weights


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


def _name_of(function: Any) -> str:
    """Return the name of a function that torch calls on a tensor, or of the attribute that it reads."""
    name: str = (function.__self__ if function.__name__ == "__get__" else function).__name__
    return name


def _refusal(name: str) -> PackingError:
    return PackingError(
        "logits: expected no hook and no custom autograd function that needs the gradient of logits whose loss was "
        f"computed in chunks, got {name}; give it torch.cat([logits]), which has the values of whole rows, and compute "
        "the loss of them"
    )


def _is_of_every_token(value: Any, vocabulary: int) -> bool:
    """Return whether an argument is no tensor, a tensor of one number, or a bias of the vocabulary."""
    if not isinstance(value, Tensor):
        return True
    fits = value.ndim == 0 or value.numel() == value.shape[-1] == vocabulary
    return fits and value.is_leaf and not isinstance(value, Logits)


_OF_SINGLE_LOGITS = frozenset(
    ("float", "double", "to", "clone", "contiguous", "neg", "tanh", "mul", "div", "add", "sub")
)
"""Names of functions that change each logit by itself. With numbers and biases, they can wait. Operators have the names
of these functions, too."""

_VIEWS = frozenset(("view", "reshape", "flatten", "squeeze", "transpose", "__getitem__"))
"""Names of functions that may return a view of the logits of some tokens."""

_WITHOUT_VALUES = frozenset(
    ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_meta")
    + ("is_sparse", "size", "dim", "numel", "stride", "is_floating_point", "is_complex")
    + ("is_tensor", *WITHOUT_VALUES, "get_device", "element_size", "__len__", "__hash__")
)
"""Names of functions and attributes that need no values of logits."""


@cache
def _warn_once(model: str, reason: str) -> None:
    _logger.warning("%s: the loss needs the logits of whole rows, since %s", model, reason)


def _reason_for_whole_rows(layer: Any, model: nn.Module, inner: PreTrainedModel) -> tuple[str, bool]:
    """Return why the logits of whole rows are needed, or an empty text, and whether they can be observed at least."""
    name = next((name for name, module in model.named_modules() if module is layer), None)
    if name is None:
        return "the model's get_output_embeddings returns no output layer", False
    around = [model, *map(model.get_submodule, accumulate(name.split("."), "{}.{}".format))]
    if torch.compiler.is_compiling() or any(map(compiles_forward, around)):
        return "the output layer is compiled", False
    hooks = chain(*map(backward_hooks, around))
    if not all(maker_of(hook).startswith("torch.distributed.") for hook in hooks):
        return "the output layer, or a module around it, has a backward hook", False
    if any(isinstance(module, FullyShardedDataParallel) for module in around[around.index(inner) :]):
        return "the first version of FSDP shards the output layer on its own", True
    if any(hasattr(each, "ds_id") for each in layer.parameters()):
        return "DeepSpeed ZeRO-3 shards the output layer", True
    if any(map(backward_hooks, layer.parameters())):
        return "a weight of the output layer has a hook", True
    return "", True


_WAITING = ("torch.distributed.", "deepspeed.", "lightning")
"""Beginnings of the names of modules whose hooks on the outputs of a model read no gradient: those of DDP, FSDP,
DeepSpeed and Lightning's Fabric only wait for the backward pass."""


def maker_of(function: Any = None) -> str:
    """Return the name of the module that a function is from; of methods, partial functions and patches, of what they
    call."""
    called = getattr(function, "__func__", getattr(function, "func", function))
    return str(getattr(called, "__module__", ""))


def _is_distributed(layer: nn.Module) -> bool:
    return any(type(each).__name__ == "DTensor" for each in layer.parameters())
