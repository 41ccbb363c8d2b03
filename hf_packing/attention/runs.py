"""Run a model undisturbed: without dropout and noise, and without a trace in the model.

`Runner` restores the modules, the weights, the modes and the random state. It can make the embedded tokens of a run
leaf tensors, with respect to which gradients can be computed, and change them by rounding errors.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_packing.attention.kernels import HALF_PRECISION
from hf_packing.attention.model import Signature, embedding_of, inner_model, input_device, is_compiled
from hf_packing.attention.route import PATCH, READ_ARGUMENTS
from hf_packing.attention.snapshot import (
    RANDOM_SETTINGS,
    WeightSnapshot,
    attention_of,
    in_mode,
    restored,
    restored_random_state,
    seed_all,
    temporarily,
    use_attention,
    without_randomness,
)
from hf_packing.errors import ModelNotSupportedError
from hf_packing.upstream.transformers import attention_name, can_set_attention


class NotCallableError(ModelNotSupportedError):
    """Error for a model that cannot be called with token ids alone, or does not return logits for each token."""


class NoLanguageModelError(NotCallableError):
    """Error for a model that does not return logits for each token."""

    SUPPORTED = (
        "causal and masked language models are supported, as loaded by AutoModelForCausalLM or AutoModelForMaskedLM; "
        "train other models, such as classifiers and reward models, on padded batches: after patch_model(model), their "
        "backbones run without the padding"
    )
    """Text for the end of an error message, which says which models are supported."""


STOCK_ATTENTIONS = ("eager", "sdpa", "flex_attention")

_WRITTEN_OUT = "eager"
"""The attention function with which documents also run alone if the model's own one gives other outputs. Eager
attention is plain PyTorch code in the model's file. Others have had bugs: in transformers 5.17, "sdpa" ignores Gemma
2's soft cap."""


def logits_of(model: nn.Module, output: Any) -> Tensor:
    """Return the logits in a model's output, [rows, tokens, vocabulary], as float32 or float64. If the model is a
    backbone, return its last hidden states, [rows, tokens, hidden size].

    Raises:
        NoLanguageModelError: the output has no logits of this shape.
    """
    found = (getattr(output, name, None) for name in ("logits", "prediction_logits", "last_hidden_state"))
    logits = next((each for each in found if each is not None), None)
    shown = f"logits of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "no logits"
    if getattr(output, "mc_logits", None) is not None:
        shown = "also mc_logits"
    elif isinstance(logits, Tensor) and logits.ndim == 3:
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
    raise NoLanguageModelError(
        f"model: expected one head, and logits of shape [rows, tokens, vocabulary], but {type(model).__name__} returns "
        f"{shown}; {NoLanguageModelError.SUPPORTED}"
    )


_FEW_PARAMETERS = 5_000_000
"""A model with at most this number of weights runs on one thread: its operations on a few short documents are so
small that they would mostly wait for other threads."""

_random_state_lock = threading.RLock()
"""Lock that a thread holds while it changes the random state."""

Embedded = list[tuple[Tensor, Tensor]]
"""Pairs (what was given to an embedding, the embedded tokens that it returned), one for each call."""


class Runner:
    """Runs a model, and restores it.

    Args:
        model: a model of transformers, with or without wrappers.
        called: the module to call: the model with its wrappers, which is the default, or its backbone.
    """

    def __init__(self, model: nn.Module, called: nn.Module | None = None) -> None:
        self.model = inner_model(model)
        self.called = model if called is None else called
        self.device = input_device(self.model)
        self.signature = Signature(self.model if self.called is model else self.called)
        self.is_compiled = is_compiled(model)
        self.multiple = 1
        """The number of tokens in a call has to be a multiple of this number, as far as is known."""
        self.seed = 0
        """The random seed of every run. Runs on inputs of equal shapes then draw the same random numbers."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self._is_small = sum(each.numel() for each in tensors) <= _FEW_PARAMETERS
        half = {each.dtype for each in tensors} & {*HALF_PRECISION}
        self._dtypes = half or ({torch.bfloat16} if getattr(self.model, "is_quantized", False) else set())
        """The dtypes of weights in half precision, and those of embedded tokens in earlier runs."""
        self._outermost = model
        self._is_in_series = False

    @property
    def dtype(self) -> torch.dtype:
        """The least precise dtype among those of weights, autocast and embedded tokens. FSDP may run a model in half
        precision whose weights are float32, and quantized layers do the same."""
        kind = self.device.type
        own = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.dtype
        least: torch.dtype = max({own, *self._dtypes}, key=lambda dtype: torch.finfo(dtype).eps)
        return least

    @contextmanager
    def undisturbed(
        self, training: bool, as_trained: bool = False, without: Sequence[str] = RANDOM_SETTINGS
    ) -> Iterator[None]:
        """Context manager: within the block, the model runs in one mode, without dropout, and with gradients in
        training mode. After the block, the modules, the weights, the modes and the random state are restored.

        In training mode, the model is not restored between runs, so that what it remembers shows as a leak.

        Args:
            training: whether the mode is training mode.
            as_trained: whether a model that trains keeps its modules in the modes in which it trains, and is not
                restored between runs in evaluation mode either.
            without: words in the names of the settings of randomness that are switched off in training mode.
        """
        with ExitStack() as stack:
            stack.enter_context(_random_state_lock)
            stack.enter_context(restored_random_state(self.device))
            if self._is_small and self.device.type == "cpu":
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(1)
            if not (as_trained and training and self.model.training):
                stack.enter_context(in_mode(self.model, training))
            stack.enter_context(torch.set_grad_enabled(training))  # some models check this in training mode
            for module in self.called.modules():
                if isinstance(module, FSDPModule):  # weights stay gathered after a forward without a backward pass
                    module.reshard()
            self._weights = WeightSnapshot(self._outermost)
            stack.callback(self._weights.restore)
            if not self.is_compiled:  # it would be compiled again
                stack.enter_context(self._weights)
            if training:
                stack.enter_context(without_randomness(self.model, without))
            if training or as_trained:
                stack.enter_context(self._restored())
                stack.enter_context(temporarily(self, _is_in_series=True))
            yield

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Context manager: undo the changes of modules after the block, and those of weights before the next one."""
        self._weights.restore()
        with restored(*self._outermost.modules()):
            yield

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run a forward, restore the model, and return the output. Arguments that it does not take are left out."""
        patch = getattr(self.model, PATCH, None)
        read = READ_ARGUMENTS if patch and patch.replaced[0].installed else ()  # not all are in the signature
        given = {name: value for name, value in inputs.items() if name in read or self.signature.takes(name)}
        if self.model.training or self._is_in_series:  # else, random numbers would be a fault
            seed_all(self.seed)
        with nullcontext() if self._is_in_series else self._restored():
            output = self.called(**given)
        if type(output) is tuple:
            raise TypeError("expected a ModelOutput, whose values have names such as logits, but it returns a tuple")
        return output

    def eagerly(self) -> AbstractContextManager[Any]:
        """Return a context manager in which code that torch.compile has compiled runs uncompiled."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()

    @contextmanager
    def unpatched(self, attention: str | None = None) -> Iterator[None]:
        """Context manager: within the block, the model works as before it was patched, with an attention function of
        this name or, if None, with its own. It runs uncompiled, and is restored after each run."""
        patch = getattr(self.model, PATCH, None)
        # backward passes may use other threads than the block, so the patch itself is switched off and on again
        with nullcontext() if patch is None else patch.suspended(), use_attention(attention_of(self.model)):
            if attention is not None:
                self.model.set_attn_implementation(attention)
            with self.eagerly(), temporarily(self, _is_in_series=False):
                yield

    @property
    def other_attention(self) -> str | None:
        """The attention function with which documents run alone if they differ with the model's own one."""
        with self.unpatched():
            own = attention_name(self.model.config)
        known = own in STOCK_ATTENTIONS or "flash" in str(own)
        return _WRITTEN_OUT if known and own != _WRITTEN_OUT and can_set_attention(self.model) else None

    @contextmanager
    def leaves(self, tokens: int | None = None, noisy: bool = False) -> Iterator[Embedded]:
        """Context manager: within the block, embedded tokens are leaf tensors, with respect to which gradients can be
        computed.

        Args:
            tokens: number of tokens in the calls of the embedding that count; by default, all calls count.
            noisy: whether every entry is changed by a rounding error.

        Yields:
            A list, to which each forward adds its leaves.
        """
        found: Embedded = []

        def cut(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            embedded, *scales = output if isinstance(output, tuple) else [output]
            if tokens not in (None, embedded.shape[:-1].numel()):
                return output
            self._dtypes.add(embedded.dtype)
            leaf = embedded.detach()
            if noisy:
                leaf = with_rounding_errors(leaf, self.dtype)
            leaf.requires_grad_(torch.is_grad_enabled())
            found.append(((*args, *kwargs.values())[0], leaf))
            given = leaf.clone()  # a module may change its input in place
            return (given, *scales) if scales else given

        with ExitStack() as stack:
            for each in embeddings_of(self.model):
                stack.enter_context(each.register_forward_hook(cut, with_kwargs=True))
            yield found


def embeddings_of(model: nn.Module) -> list[nn.Module]:
    """Return the embedding of a model, and other ones that share its weight, as in encoders and decoders."""
    embedding = embedding_of(model)
    return [
        each
        for each in model.modules()
        if each is embedding
        # not an output layer that shares the weight
        or (getattr(each, "weight", None) is embedding.weight and "Embedding" in str(type(each).__mro__))
    ]


def with_rounding_errors(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values that are 1 + eps or 1 - eps times as large, at random, with the eps of a dtype."""
    signs = torch.randint(2, values.shape, generator=torch.Generator().manual_seed(0)).to(values) * 2 - 1
    return values * (1 + signs * torch.finfo(dtype).eps)
