"""Hooks for one forward of a language model, which compute the loss in chunks of tokens instead of the logits.

While the model runs, its output layer only gets the first token of the row. The output is a `_FirstLogits`, which
records what the model's forward does with logits, such as scaling or capping them. At the end of the forward, a hook
runs the output layer and the recorded functions on the chunks, and returns the loss with the model's outputs. The hook
runs inside the wrappers of DDP and FSDP, as the model's own loss does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.training.losses import weighted_loss
from hf_packing.training.sum_of_chunks import sum_of_chunks
from hf_packing.training.token_losses import TokenLosses


class UnsupportedHeadError(PackingError):
    """The error for a model whose loss cannot be computed in chunks."""


class ChunkedHead:
    """Hooks for one forward of a model, which replace the logits by the loss.

    Args:
        inner: the model.
        labels: int64 [1, tokens].
        weights: float [1, tokens].
        shift: True if the logits of a token predict the next token's label.
        size: number of tokens in a chunk.
        token_losses: where the losses of all labels are kept; None to keep none.
    """

    def __init__(
        self,
        inner: PreTrainedModel,
        labels: Tensor,
        weights: Tensor,
        shift: bool,
        size: int,
        token_losses: TokenLosses | None = None,
    ) -> None:
        self.inner, self.layer, self.size = inner, inner.get_output_embeddings(), size
        self.shape, self.token_losses = labels.shape, token_losses
        if shift:  # the last token predicts nothing
            labels, weights = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL), F.pad(weights[:, 1:], (0, 1))
        chosen = (labels[0] != IGNORED_LABEL).nonzero()[:, 0]  # waits for the device, before the model runs
        self.chosen = chosen if len(chosen) else chosen.new_zeros(1)  # so that the loss always has a gradient
        self.labels, self.weights = labels[:, self.chosen], weights[:, self.chosen]
        self.labeled = self.chosen + 1 if shift and len(chosen) else self.chosen
        """int64 [chosen]: the tokens whose labels are predicted."""
        self.hidden: Tensor | None = None
        """The input of the output layer, float [1, tokens, width]; None if the output layer was left alone."""
        self.reason = "the output layer was not called"

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager: within the block, the model returns the loss instead of the logits."""
        handles = (
            self.layer.register_forward_pre_hook(self._keep_first_token),
            self.layer.register_forward_hook(self._without_graph, prepend=True),
            self.layer.register_forward_hook(self._record),
            self.inner.register_forward_hook(self._add_loss, prepend=True),  # before FSDP frees the weights
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep_first_token(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        """Keep the input of the output layer, and return the first token, unless something rules out chunks."""
        if self.hidden is not None:
            raise UnsupportedHeadError("the forward calls the output layer more than once")
        hidden = args[0] if len(args) == 1 else None
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[:2] != self.shape:
            self.reason = "the input of the output layer is not a tensor [1, tokens, width]"
        elif _is_distributed(self.layer):
            self.reason = "the output layer is distributed by tensor parallelism"
        elif any(each._backward_hooks for each in self.layer.parameters()):
            self.reason = "a weight of the output layer has a hook"
        else:
            device = hidden.device.type
            self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            if torch.float16 in (hidden.dtype, self.autocast[1] if self.autocast[0] else None):
                self.reason = "gradients in float16 have to be scaled before they are computed"
                return None
            self.hidden = hidden
            return (hidden[:, :1],)
        return None

    def _without_graph(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Cut the output of the first token off the weights, but not off the input.

        Hooks of FSDP, which run later, notice by the gradient of this output that the backward pass has begun.
        """
        if self.hidden is None:
            return output
        if not isinstance(output, Tensor):
            raise UnsupportedHeadError("the output layer does not return a tensor")
        return output.detach() + 0 * args[0].sum().to(output.dtype)

    def _record(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Return the output as a tensor that records what the forward does with it."""
        if self.hidden is None:
            return output
        self.gate = output
        first = output.as_subclass(_FirstLogits)
        first.of_logits = partial(_as_type, output.dtype)  # FSDP may have changed the dtype
        return first

    def _add_loss(self, _: nn.Module, __: tuple[Any, ...], outputs: Any) -> Any:
        """Compute the loss, and return the model's outputs with the loss, and without logits."""
        if self.hidden is None:
            return outputs
        first: Any = getattr(outputs, "logits", None)
        of_logits = getattr(first, "of_logits", None)
        if of_logits is None or first.shape[:2] != (1, 1):
            raise UnsupportedHeadError("the forward does more with the logits than functions of single tokens")
        self.of_logits: Callable[[Tensor], Tensor] = of_logits
        enabled, dtype = self.autocast
        hidden = self.hidden[:, self.chosen.to(self.hidden.device)]
        with _unsharded(self.inner, self.layer), torch.autocast(hidden.device.type, dtype, enabled=enabled):
            loss = self._result(hidden)
        others = {name: value for name, value in outputs.items() if name not in ("logits", "loss")}
        return type(outputs)(**others, loss=loss)

    def _result(self, hidden: Tensor) -> Tensor:
        """Return what takes the place of the loss in the outputs, given the hidden states of the chosen tokens."""
        return sum_of_chunks(self._loss_of_chunk, hidden, self.size, self.gate)

    def _loss_of_chunk(self, hidden: Tensor, chunk: slice) -> Tensor:
        """Return the weighted sum of cross-entropies of a chunk of the chosen tokens, whose hidden states are given."""
        logits = self.of_logits(self.layer.forward(hidden))  # without hooks, which FSDP expects to be called once
        see = None if self.token_losses is None else partial(self.token_losses.put, tokens=self.labeled[chunk])
        return weighted_loss(logits, self.labels[:, chunk], self.weights[:, chunk], shift=False, see=see)


class _FirstLogits(Tensor):
    """The logits of a row's first token, which record how to compute the model's output from the logits of any tokens.

    The method `of_logits` does this. It is missing if the forward calls a function that cannot be repeated.
    """

    of_logits: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        repeat = _repeated(function, args, kwargs)  # first, since a function may work in place
        result = super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        if isinstance(result, cls):
            result.of_logits = repeat
        elif result is None and isinstance(args[0], cls):  # as for logits[...] = -inf
            args[0].of_logits = None
        return result


def _repeated(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """Return a function of logits that calls `function`, or None if the arguments cannot be computed from logits."""
    values: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    traced = {name: each.of_logits for name, each in values.items() if isinstance(each, _FirstLogits)}
    known = {name: of_logits for name, of_logits in traced.items() if of_logits is not None}
    if not known or len(known) < len(traced):
        return None

    def repeat(logits: Tensor) -> Tensor:
        now = values | {name: of_logits(logits) for name, of_logits in known.items()}
        result: Tensor = function(*(now[place] for place in range(len(args))), **{name: now[name] for name in kwargs})
        return result

    return repeat


def _as_type(dtype: torch.dtype, logits: Tensor) -> Tensor:
    return logits.to(dtype)


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
