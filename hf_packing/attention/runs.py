"""Run a model undisturbed: without dropout and noise, and without a trace in the model.

`Runner` restores the modules, the weights, the modes and the random state. `Embeddings` makes the embedded tokens of a
run leaf tensors, with respect to which gradients can be computed, and changes them by rounding errors.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import Signature, embedding_of, inner_model, input_device, is_compiled
from hf_packing.attention.route import PATCH, READ_ARGUMENTS, is_patched
from hf_packing.attention.snapshot import (
    ModuleSnapshot,
    WeightSnapshot,
    attention_of,
    in_mode,
    restored_random_state,
    seed_all,
    use_attention,
    without_randomness,
)
from hf_packing.errors import ModelNotSupportedError


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


LONGEST_TESTED = 29
"""The most tokens of a random document with which isolation is tested."""


def what_is_missing(model: PreTrainedModel) -> str:
    """Return the reason why a model cannot be called with input_ids alone, as text for the end of an error message;
    an empty string if the reason is unknown."""
    if model.config.is_encoder_decoder:
        return (
            f"; {type(model).__name__} is an encoder-decoder, which takes two texts; {NoLanguageModelError.SUPPORTED}"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < LONGEST_TESTED:
        return f"; isolation is tested on up to {LONGEST_TESTED} tokens, but max_position_embeddings is {positions}"
    with suppress(Exception):  # custom model code may raise anything
        if model.get_output_embeddings() is None:
            return f"; {type(model).__name__} has no head for a vocabulary; {NoLanguageModelError.SUPPORTED}"
    return ""


def logits_of(model: nn.Module, output: Any) -> Tensor:
    """Return the logits in a model's output, [rows, tokens, vocabulary], as float32 or float64. If the model is a
    backbone, return its last hidden states, [rows, tokens, hidden size].

    Raises:
        NoLanguageModelError: the output has no logits of this shape.
    """
    found = (getattr(output, name, None) for name in ("logits", "prediction_logits", "last_hidden_state"))
    logits = next((each for each in found if each is not None), None)
    if getattr(output, "mc_logits", None) is not None:
        raise NoLanguageModelError(
            f"model: expected a model with one head, but {type(model).__name__} also returns mc_logits, and takes rows "
            "of several choices, [rows, choices, tokens], which packed rows do not have; "
            f"{NoLanguageModelError.SUPPORTED}"
        )
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        shown = f"logits of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "no logits"
        raise NoLanguageModelError(
            f"model: expected logits of shape [rows, tokens, vocabulary], but {type(model).__name__} returns {shown}; "
            f"{NoLanguageModelError.SUPPORTED}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def computation_dtype(model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """Return the dtype of autocast if autocast is on for this device; otherwise, return the dtype of the model."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype


SEED = 0
"""The random seed of every run. Runs on inputs of equal shapes then draw the same random numbers."""

_FEW_PARAMETERS = 5_000_000
"""A model with at most this number of parameters runs on one thread: its operations on a few short documents are so
small that they would mostly wait for other threads."""

_random_state_lock = threading.RLock()
"""Lock that a thread holds while it changes the random state."""


class Runner:
    """Runs a model, and restores it.

    Args:
        model: a model of transformers, with or without wrappers.
        called: the module to call: the model with its wrappers, which is the default, or its backbone.
    """

    def __init__(self, model: nn.Module, called: nn.Module | None = None) -> None:
        self.model = inner_model(model)
        self.called = called or model
        self.device = input_device(self.model)
        self.signature = Signature(self.model if self.called is model else self.called)
        self.is_compiled = is_compiled(model)
        self.is_small = sum(each.numel() for each in self.model.parameters()) <= _FEW_PARAMETERS
        self.embeddings = Embeddings(self.model)
        self.seed = SEED
        self._matmuls = _MatmulDtype()
        self._modules: ModuleSnapshot | None = None
        self._weights: WeightSnapshot | None = None
        self._watched: set[bool] = set()
        self._is_in_series = False
        self._is_unpatched = False

    @property
    def dtype(self) -> torch.dtype:
        """The least precise dtype among those of weights, autocast, embedded tokens and matrix products. FSDP may run a
        model in half precision whose weights are float32, and quantized layers do the same."""
        known = {computation_dtype(self.model, self.device), *self._matmuls.half, *self.embeddings.dtypes}
        return max(known, key=lambda dtype: torch.finfo(dtype).eps)

    @contextmanager
    def undisturbed(self, training: bool, keeps_modes: bool = False) -> Iterator[None]:
        """Context manager: within the block, the model runs in one mode, without dropout, and with gradients in
        training mode. After the block, the modules, the weights, the modes and the random state are restored.

        Args:
            training: whether the mode is training mode.
            keeps_modes: whether a model that trains keeps its modules in the modes in which it trains.
        """
        with ExitStack() as stack:
            stack.enter_context(_random_state_lock)
            stack.enter_context(restored_random_state(self.device))
            if self.is_small and self.device.type == "cpu":
                stack.enter_context(_on_one_thread())
            if not (keeps_modes and training and self.model.training):
                stack.enter_context(in_mode(self.model, training))
            stack.enter_context(torch.set_grad_enabled(training))  # some models check this in training mode
            self._weights = self._weights or WeightSnapshot(self.model)
            stack.callback(self._weights.restore)
            if training:
                stack.enter_context(without_randomness(self.model))
            yield

    @contextmanager
    def in_series(self) -> Iterator[None]:
        """Context manager: within the block, the model is not restored between runs."""
        with self._restored():
            self._is_in_series = True
            try:
                yield
            finally:
                self._is_in_series = False

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Context manager: undo the changes of modules after the block, and those of weights before the next one."""
        if self._is_in_series:
            yield
            return
        assert self._weights is not None
        if self._modules is None or not self._modules.is_current:
            self._modules = ModuleSnapshot(*self.model.modules())
        self._weights.restore()
        try:
            yield
        finally:
            self._modules.restore()

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run a forward, restore the model, and return the output. Arguments that it does not take are left out."""
        assert self._weights is not None
        reads = is_patched(self.model) and not self._is_unpatched
        read = READ_ARGUMENTS if reads else ()  # not all are in the signature
        given = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
            if name in read or self.signature.takes(name)
        }
        if self.model.training or self._is_in_series:  # else, random numbers would be a fault
            seed_all(self.seed)
        with self._restored(), ExitStack() as watched:
            if not self.is_compiled and self.model.training not in self._watched:  # slow, and would compile again
                self._watched.add(self.model.training)
                watched.enter_context(self._weights)
                watched.enter_context(self._matmuls)
            return self.called(**given)

    def buffers_written(self) -> list[str]:
        """Return the names of the buffers that runs in series have changed."""
        assert self._weights is not None
        written = {id(tensor) for tensor in self._weights.changed()}
        return [name for name, buffer in self.model.named_buffers() if id(buffer) in written]

    def eagerly(self) -> AbstractContextManager[Any]:
        """Return a context manager in which code that torch.compile has compiled runs uncompiled."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()

    @contextmanager
    def unpatched(self, attention: str | None = None) -> Iterator[None]:
        """Context manager: within the block, the model works as before it was patched, with an attention function of
        this name or, if None, with its own."""
        patch = getattr(self.model, PATCH, None)
        # backward passes may use other threads than the block, so the patch itself is switched off and on again
        with nullcontext() if patch is None else patch.suspended(), use_attention(attention_of(self.model)):
            if attention is not None:
                self.model.set_attn_implementation(attention)
            self._is_unpatched = True
            try:
                yield
            finally:
                self._is_unpatched = False

    @property
    def own_attention(self) -> str:
        """The name of the model's attention function before the model was patched."""
        patch = getattr(self.model, PATCH, None)
        own = {} if patch is None else {id(config): name for config, name in patch.attention_before}
        attention: str = own.get(id(self.model.config), self.model.config._attn_implementation)
        return attention


@contextmanager
def _on_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _MatmulDtype(TorchFunctionMode):
    """Context manager: within the block, detect matrix products in half precision. Quantized layers compute them,
    whatever the dtypes of the layers' inputs and outputs are."""

    _NAMES = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.half: set[torch.dtype] = set()

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self._NAMES:
            dtypes = {tensor.dtype for tensor in args if isinstance(tensor, Tensor)}
            self.half |= dtypes & {torch.float16, torch.bfloat16}
        return function(*args, **(kwargs or {}))


Embedded = list[tuple[Tensor, Tensor]]
"""Pairs (what was given to a module, the embedded tokens that it returned), one for each call."""


class Embeddings:
    """Makes the embedded tokens of a model leaf tensors, with respect to which gradients can be computed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.dtypes: set[torch.dtype] = set()
        """The dtypes of the embedded tokens in earlier runs."""
        self._model = model
        self._whole: nn.Module | None = None

    @contextmanager
    def leaves(self, shape: torch.Size | None = None, noisy: slice | None = None) -> Iterator[Embedded]:
        """Context manager: within the block, embedded tokens are leaf tensors.

        Args:
            shape: numbers of rows and tokens of a single forward, in which one tensor of this shape becomes a leaf: the
                output of the embedding or, if the embedding runs segment by segment, of the innermost module around it.
                All forwards of the model are then cut at the same module. By default, everything that the embedding
                and others with the same weight return becomes a leaf, in any number of forwards.
            noisy: the rows in which every entry is changed by a rounding error.

        Yields:
            A list, to which each forward adds its leaves.
        """
        found: Embedded = []

        def cut(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if shape is not None:
                fits = isinstance(first, Tensor) and first.ndim == 3 and first.shape[:2].numel() == shape.numel()
                if found or not fits or self._whole not in (None, module):
                    return None
                self._whole = module
            self.dtypes.add(first.dtype)
            leaf = first.detach() if noisy is None else self._with_rounding_errors(first.detach(), noisy)
            found.append(
                (args[0] if args else next(iter(kwargs.values())), leaf.requires_grad_(torch.is_grad_enabled()))
            )
            given = leaf.clone()  # a module may change its input in place
            return (given, *output[1:]) if isinstance(output, tuple) else given

        modules = self._tables() if shape is None else self._around()
        hooks = [module.register_forward_hook(cut, with_kwargs=True) for module in modules]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _tables(self) -> list[nn.Module]:
        """Return the embedding, and the embeddings that share its weight, but not an output layer that does."""
        embedding: nn.Module = self._model.get_input_embeddings()
        same = [each for each in self._model.modules() if getattr(each, "weight", None) is embedding.weight]
        others = [each for each in same if isinstance(each, nn.Embedding) or "Embedding" in type(each).__name__]
        return list(dict.fromkeys([embedding, *others]))

    def _around(self) -> list[nn.Module]:
        """Return the embedding, and the modules that contain it, from the inside to the outside."""
        embedding = self._model.get_input_embeddings()
        name = next((name for name, module in self._model.named_modules() if module is embedding), "")
        names = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        return [self._model.get_submodule(each) for each in names if each]

    def _with_rounding_errors(self, embedded: Tensor, rows: slice) -> Tensor:
        """Return embedded tokens with every entry of some rows multiplied by 1 + eps or 1 - eps at random."""
        dtypes = embedded.dtype, computation_dtype(self._model, embedded.device)
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, embedded[rows].shape, generator=generator).to(embedded) * 2 - 1
        noisy = embedded.clone()
        noisy[rows] *= 1 + signs * max(torch.finfo(each).eps for each in dtypes)
        return noisy


def gradients_of(score: Tensor, leaves: list[Tensor]) -> list[Tensor] | None:
    """Return the gradients of `score` with respect to some leaves; None if the model computes no gradients."""
    try:
        found = torch.autograd.grad(score, leaves, retain_graph=True, allow_unused=True)
    except (RuntimeError, AssertionError):  # only for inference, or with reentrant activation checkpointing
        return None
    return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]


_VOCABULARY_SAMPLE = 64
"""Number of vocabulary entries for which an output layer computes logits. The logits of all entries would need more
memory than the rest of the forward."""


@contextmanager
def with_sampled_vocabulary(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within the block, the linear layers of the output layer compute only some logits.

    The output layer may consist of several linear layers, such as those of LoRA. All other modules run as usual. If the
    model adds a bias for each vocabulary entry itself, all logits are computed.
    """
    head, size = model.get_output_embeddings(), len(embedding_of(model).weight)
    linears = [
        module
        for module in (() if head is None else head.modules())
        if type(module).forward is nn.Linear.forward and "forward" not in vars(module) and module.out_features == size
    ]
    own = {id(module.bias) for module in linears}
    if any(tensor.numel() == size and id(tensor) not in own for tensor in (*model.parameters(), *model.buffers())):
        linears = []
    for module in linears:
        module.forward = _SampledLinear(module)
    try:
        yield
    finally:
        for module in linears:
            del module.forward


class _SampledLinear:
    """A replacement for the forward of a linear layer, which computes every n-th output only."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        step = max(1, len(weight) // _VOCABULARY_SAMPLE)
        return F.linear(hidden, weight[::step], None if bias is None else bias[::step])
