"""Run a language model with the loss, without the logits of whole rows, which can be larger than the model.

For 16,384 tokens and a vocabulary of 152,000, logits take 10 GB in float32, and their gradient takes as much again.
`run_with_loss` computes logits for one chunk of tokens at a time, and only for tokens that have a label.

A test on a short document compares this loss with the loss of whole logits. If they differ, or if the output layer
cannot be used in this way, whole logits are computed; a warning of the logger of this file gives the reason.
"""

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedModel

from hf_packing.attention import inner_model, input_device
from hf_packing.collate import is_tree_batch
from hf_packing.columns import LABELS
from hf_packing.training.chunked_head import ChunkedHead, UnsupportedHeadError
from hf_packing.training.losses import (
    ITEMS,
    TARGETS,
    WEIGHTS,
    model_to_test,
    predicts_next,
    short_batch,
    weighted_loss,
)
from hf_packing.training.next_tokens import NextTokenHead, NextTokens, check_predicts_next
from hf_packing.training.token_losses import TokenLosses
from hf_packing.training.tree_batch import TREE_KEYS_OF_THE_LOSS

CHUNK_LOGITS = 2**27
"""The largest number of logits in a chunk: 512 MB in float32. Computing a loss takes three to four times as much."""

_logger = logging.getLogger(__name__)

_TESTED_TOKENS = 5
"""Number of tokens in a chunk of the short document that tests a model."""

_CLOSE, _CLOSE_ROUNDED = 1e-5, 1e-3
"""The largest relative differences at which two losses count as equal, in single and in half precision."""

_CLOSE_GRADIENT, _CLOSE_ROUNDED_GRADIENT = 1e-4, 5e-2
"""The same for gradients, relative to the largest one."""


def run_with_loss(
    model: nn.Module,
    inputs: Mapping[str, Any],
    labels: Tensor,
    weights: Tensor,
    *,
    keep_logits: bool = False,
    token_losses: TokenLosses | None = None,
) -> tuple[Tensor, Any]:
    """Run a model on a batch, and return the weighted sum of cross-entropies and the model's outputs.

    Args:
        model: a patched language model, with or without wrappers.
        inputs: a packed batch or a batch of trees; what only the loss needs is not passed on to the model.
        labels: int64 [1, tokens]; -100 marks a token without a label.
        weights: float [1, tokens]; 0 for a token without a label.
        keep_logits: True if the outputs must have the logits of the whole row. If False, the outputs may lack logits.
        token_losses: where the losses of all labels are kept; None to keep none.

    Raises:
        PackingError: the batch is one of trees, but the model's logits do not predict the next token.
    """
    inner, shift = inner_model(model), predicts_next(model)
    following = None
    if is_tree_batch(inputs):
        check_predicts_next(model)
        following = NextTokens.of_batch(inputs, labels)
    given = inputs_of_model(inputs)

    def loss_of(logits: Tensor) -> Tensor:
        if following is not None:
            return following.weighted_loss(logits, weights, token_losses)
        see = None if token_losses is None else partial(token_losses.put, tokens=slice(int(shift), None))
        return weighted_loss(logits, labels, weights, shift, see)

    size = tokens_of_chunk(inner)
    # chunks may gather weights once more: with FSDP2, all ranks have to do the same, however long their rows are
    fits = labels.numel() <= size and not isinstance(inner, FSDPModule)
    if keep_logits or fits or not can_chunk(model, inner):
        outputs = model(**given)
        return loss_of(outputs.logits), outputs
    if following is None:
        head = ChunkedHead(inner, labels, weights, shift, size, token_losses)
    else:
        head = NextTokenHead(inner, following, weights, size, token_losses)
    try:
        with head.installed():
            outputs = model(**given)
    except UnsupportedHeadError as error:  # the forward is another one in training mode
        _TESTED[inner] = _TESTED[inner][0], str(error)
        return run_with_loss(model, inputs, labels, weights, token_losses=token_losses)
    if head.hidden is None:
        _report(inner, head.reason)
        return loss_of(outputs.logits), outputs
    return outputs.loss, outputs


def tokens_of_chunk(inner: PreTrainedModel) -> int:
    """Return the largest number of tokens whose logits are computed at a time."""
    return max(1, CHUNK_LOGITS // getattr(inner.config.get_text_config(), "vocab_size", 1))


def inputs_of_model(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without what only the loss needs."""
    return {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}


_NOT_FOR_THE_MODEL = {LABELS, *TREE_KEYS_OF_THE_LOSS, ITEMS, TARGETS, WEIGHTS}


_TESTED: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, str]]" = weakref.WeakKeyDictionary()
"""The cache of `_test`: for each model, the output layer and its hooks when it was tested, and the result."""

_REPORTED: "weakref.WeakKeyDictionary[PreTrainedModel, str]" = weakref.WeakKeyDictionary()
"""The last message about each model."""


def can_chunk(model: nn.Module, inner: PreTrainedModel) -> bool:
    """Return whether the loss of a model can be computed in chunks, and report the reason if it cannot."""
    reason = _reason_against(model, inner)
    if reason:
        _report(inner, reason)
    return not reason


def _reason_against(model: nn.Module, inner: PreTrainedModel) -> str:
    """Return why the loss of a model cannot be computed in chunks; an empty text if it can."""
    layer = inner.get_output_embeddings()
    if not isinstance(layer, nn.Module):
        return "the model's get_output_embeddings returns no output layer"
    around = _modules_around(layer, model)
    if torch.compiler.is_compiling() or any(_is_compiled(module) for module in around):
        return "the output layer is compiled"
    if any(isinstance(module, FullyShardedDataParallel) for module in around[around.index(inner) :]):
        return "the first version of FSDP shards the output layer on its own"
    if any(hasattr(each, "ds_id") for each in layer.parameters()):
        return "DeepSpeed ZeRO-3 shards the output layer"
    hooks = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    key = weakref.ref(layer), [id(hook) for hook in hooks]
    if inner not in _TESTED or _TESTED[inner][0] != key:
        _TESTED[inner] = key, _test(model)
    return _TESTED[inner][1]


def _report(inner: PreTrainedModel, reason: str) -> None:
    if _REPORTED.get(inner) != reason:
        _REPORTED[inner] = reason
        _logger.warning("%s: the loss needs the logits of whole rows, since %s", type(inner).__name__, reason)


def _modules_around(layer: nn.Module, model: nn.Module) -> list[nn.Module]:
    """Return the modules that contain an output layer, from the outermost to the layer itself."""
    name = next(name for name, module in model.named_modules() if module is layer)
    parts = name.split(".")
    return [model, *(model.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts) + 1))]


def _is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    forwards = forward, getattr(forward, "before", None)  # a patch may have replaced a compiled forward
    compiled = any(hasattr(each, "_torchdynamo_orig_callable") for each in forwards)
    return compiled or "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _test(model: nn.Module) -> str:
    """Compute a short document's loss, and its gradient of hidden states, in chunks and from whole logits.

    Returns:
        An empty text if the results are equal, else a text that says what is wrong.
    """
    if (tested := model_to_test(model)) is None:
        return "the weights are not in memory, and no small model of the same class can be built"
    was_training, device = tested.training, input_device(tested)
    tested.eval()
    try:
        with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            return _compare(tested, predicts_next(model))
    except Exception as error:  # a forward that does not work with the logits of one token can fail in many ways
        return f"a short document in chunks raises {type(error).__name__}: {error}"
    finally:
        tested.train(was_training)


def _compare(model: PreTrainedModel, shift: bool) -> str:
    packed, batch = short_batch(model)
    labels = packed["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    weights = torch.linspace(0.5, 1.5, labels.shape[1], device=labels.device)[None]  # each token has its own weight
    head, hidden = ChunkedHead(model, labels, weights, shift, _TESTED_TOKENS), []
    handle = head.layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    try:
        logits = model(**inputs).logits
    finally:
        handle.remove()
    if logits.shape[-1] <= int(labels.max()):
        return "the vocabulary is too small"  # such labels would put a CUDA device into an error state for good
    whole = weighted_loss(logits, labels, weights, shift)
    with head.installed():
        chunked = model(**inputs).loss
    if head.hidden is None:
        return head.reason
    rounded = head.autocast[0] or head.hidden.dtype not in (torch.float32, torch.float64)
    equal = _is_close(chunked, whole, _CLOSE_ROUNDED if rounded else _CLOSE)
    if equal and head.hidden.requires_grad:
        (found,), (expected,) = torch.autograd.grad(chunked, head.hidden), torch.autograd.grad(whole, hidden[0])
        equal = _is_close(found, expected, _CLOSE_ROUNDED_GRADIENT if rounded else _CLOSE_GRADIENT)
    return "" if equal else "on a short document, the loss in chunks is not the loss of whole logits"


def _is_close(found: Tensor, expected: Tensor, close: float) -> bool:
    return float((found - expected).detach().abs().max()) <= close * float(expected.detach().abs().max())
