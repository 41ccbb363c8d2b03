"""Compare logits of a model, and decide whether rounding explains the differences between them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.token_axes import LARGEST_FINITE
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
    """Return the reason why a model cannot be called with input_ids alone, as text for the end of an error message.

    Return an empty string if the reason is unknown.
    """
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
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "prediction_logits", None)
    if logits is None:
        logits = getattr(output, "last_hidden_state", None)
    if getattr(output, "mc_logits", None) is not None:
        raise NoLanguageModelError(
            f"model: expected a model with one head, but {type(model).__name__} also returns mc_logits, and takes rows "
            "of several choices, [rows, choices, tokens], which packed rows do not have; "
            f"{NoLanguageModelError.SUPPORTED}"
        )
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        found = f"logits of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "no logits"
        name = type(model).__name__
        raise NoLanguageModelError(
            f"model: expected logits of shape [rows, tokens, vocabulary], but {name} returns {found}; "
            f"{NoLanguageModelError.SUPPORTED}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def comparable(logits: Tensor) -> Tensor:
    """Return a boolean tensor that is True for every logit with a magnitude below `LARGEST_FINITE`.

    Larger values stand for infinity, and cannot be compared.
    """
    return logits.abs() < LARGEST_FINITE


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest absolute difference between the logits in two tensors of equal shape.

    A logit that is infinite in both tensors is ignored. Return infinity if a logit is infinite in only one tensor.
    """
    both = comparable(left) & comparable(right)
    if not torch.equal(comparable(left), comparable(right)):
        return math.inf
    return float((left - right)[both].abs().max()) if both.any() else 0.0


LARGEST_GRADIENT_LEAK = 1e-6
"""Largest allowed gradient of a document's logits with respect to another document, as a share of the largest gradient
with respect to the document itself. Without a leak, the gradient is exactly 0 in any precision."""


def largest_gradient_leak(gradients: list[list[Tensor]]) -> float:
    """Return the largest gradient of a document's logits with respect to another document's embeddings, divided by the
    largest gradient with respect to the document's own embeddings.

    Args:
        gradients: the gradients of packed documents, as `Probe.packed_with_gradients` returns them.
    """
    leak = 0.0
    for number, found in enumerate(gradients):
        own = float(found[number].abs().max())
        others = max(float(each.abs().max()) for other, each in enumerate(found) if other != number)
        leak = max(leak, others / own if own else float("inf") if others else 0.0)
    return leak


def own_gradients(gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return each document's gradients with respect to its own embeddings.

    Args:
        gradients: the gradients of packed documents, as `Probe.packed_with_gradients` returns them.

    Raises:
        ModelNotSupportedError: gradients of a document reach another document.
    """
    leak = largest_gradient_leak(gradients)
    if not leak <= LARGEST_GRADIENT_LEAK:
        raise ModelNotSupportedError(
            "gradients of a packed document reach another document; the largest gradient at another document's tokens "
            f"is {leak:.2g} times the largest gradient at the document's own tokens"
        )
    return [found[number] for number, found in enumerate(gradients)]


def through(buffers: list[str]) -> str:
    """Return the end of an error message, which names up to three buffers; an empty string if `buffers` is empty."""
    return f", through {', '.join(buffers[:3])}" if buffers else ""


def spread(logits: Tensor) -> float:
    """Return the standard deviation of logits, without the infinite logits, for which `comparable` is False."""
    return float(logits[comparable(logits)].std())


ROUNDING_FACTOR = 4
"""The logits of a packed document and of the same document alone may differ by this number times the measured effect of
rounding. On 210 tiny architectures, and on small copies of large models, the logits differed by up to twice the effect
of rounding."""

ALWAYS_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""A difference between the logits of a packed document and of the same document alone that is always allowed, by dtype,
in standard deviations of the logits. There are two reasons for the difference: kernels get tensors of other shapes if
documents are packed, and most models compute some parts in float32, whatever their dtype is."""

NEVER_ALLOWED = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Upper limit of the allowed difference between the logits of a packed document and of the same document alone, by
dtype, in standard deviations of the logits. The limit also applies if the effect of rounding is larger, since faults in
attention can cause such differences, too."""

_LEAST_LEAK = 1e-6
"""A document's logits may always change by up to this number of standard deviations when another document is replaced.
All shapes stay the same, so the logits of dense models do not change at all. Experts, however, get other numbers of
tokens, and so tensors of other shapes."""

_HALF_LEAK, _HALF_LEAK_WITH_EXPERTS = 1e-3, 2e-2
"""In half precision, a document's logits may change by this number of standard deviations when another document is
replaced. The first number is for models without experts, and the second number is for models with experts."""

_HALF_MAX, _HALF_RMS, _HALF_MEDIAN_WITH_EXPERTS = 0.2, 0.05, 0.05
"""Limits, in half precision, for differences between the logits of a packed document and of the same document alone, in
standard deviations of the logits. Rounding explains the differences if the largest difference or the root mean square
is within its limit. In models with experts, it is enough if the median is within its limit, since rounding may send
single tokens to other experts. On tiny bfloat16 models of 2 to 12 layers, rounding caused a largest difference of
up to 0.25, a root mean square of up to 0.04, and a median of up to 0.05. When attention ignored a window, a scale or an
attention sink by mistake, these values were at least 0.4, 0.07 and 0.07."""


@dataclass(frozen=True)
class Tolerance:
    """The limits up to which rounding explains differences between logits, in standard deviations of the logits."""

    dtype: torch.dtype
    """Dtype in which the model computes."""
    has_experts: bool
    rounding: float | None = None
    """The effect of rounding on the logits, as returned by `measure_rounding`; None if it was not measured."""
    unit: float | None = None
    """The standard deviation of the logits; None to compute it from the logits of each document."""

    @property
    def is_measured(self) -> bool:
        """True if the limits depend on the measured effect of rounding. In half precision, the limits are fixed, since
        the effect of rounding is as large as the effect of some faults."""
        return self.dtype in ALWAYS_ALLOWED

    @property
    def widest(self) -> "Tolerance":
        """The tolerance for the largest possible effect of rounding. In half precision, the limits are fixed."""
        return replace(self, rounding=math.inf)

    @property
    def difference(self) -> float:
        """The largest allowed difference between the logits of a packed document and of the same document alone. Only
        float32 and float64 have this limit."""
        least, most = ALWAYS_ALLOWED[self.dtype], NEVER_ALLOWED[self.dtype]
        return min(max(least, ROUNDING_FACTOR * (self.rounding or 0.0)), most)

    @property
    def leak(self) -> float:
        """The largest allowed change of a document's logits when another document in the row is replaced."""
        if not self.is_measured:
            return _HALF_LEAK_WITH_EXPERTS if self.has_experts else _HALF_LEAK
        if self.rounding is None:
            return ALWAYS_ALLOWED[self.dtype]
        most = (NEVER_ALLOWED if self.has_experts else ALWAYS_ALLOWED)[self.dtype]
        return min(max(_LEAST_LEAK, ROUNDING_FACTOR * self.rounding), most)

    def note(self) -> str:
        """Return text for the end of an error message about a difference between logits.

        If the measured effect of rounding is too large for the limits, the text says that rounding may be the cause of
        the difference. Otherwise, the text is empty.
        """
        if not self.is_measured or not self.rounding or ROUNDING_FACTOR * self.rounding <= NEVER_ALLOWED[self.dtype]:
            return ""
        return (
            f"; rounding alone changes the logits by {self.rounding:.2g} standard deviations in {self.dtype}, so "
            "rounding may be the cause of the difference; load the model in float64, and patch the model again"
        )

    def unexplained(self, packed: Sequence[Tensor], alone: Sequence[Tensor], lenience: float = 1) -> float:
        """Return the largest difference between the logits of packed documents and of the same documents run alone.

        A document is ignored if rounding explains its differences. If all documents are ignored, return 0.

        Args:
            packed: logits of each packed document, [tokens, vocabulary], float32 or float64.
            alone: logits of each document run alone, [tokens, vocabulary], float32 or float64.
            lenience: factor by which the limits of this tolerance are multiplied; in half precision, the limit
                for single logits is not multiplied.
        """
        return max(
            0.0, *(self._unexplained_in_one(left, right, lenience) for left, right in zip(packed, alone, strict=True))
        )

    def _unexplained_in_one(self, packed: Tensor, alone: Tensor, lenience: float) -> float:
        largest, unit = largest_difference(packed, alone), self.unit or spread(alone)
        if not math.isfinite(largest):
            return largest
        if self.is_measured:
            return 0.0 if largest <= self.difference * unit * lenience else largest
        apart = (packed - alone)[comparable(packed)].abs() / unit
        equal = largest <= _HALF_MAX * unit or float(apart.pow(2).mean().sqrt()) <= _HALF_RMS * lenience
        equal |= self.has_experts and float(apart.median()) <= _HALF_MEDIAN_WITH_EXPERTS * lenience
        return 0.0 if equal else largest


def measure_rounding(
    model: PreTrainedModel,
    logits: Callable[[Tensor], Tensor],
    documents: Sequence[Sequence[int]],
    alone: Sequence[Tensor],
    unit: Callable[[Tensor], float] = spread,
) -> float | None:
    """Measure the effect of rounding on the logits of a model.

    Each document is run again, in a batch of two copies. In the copies, every entry of the embeddings is changed by a
    rounding error. These changes show how rounding errors grow from layer to layer. The batch shows how much the
    results of kernels depend on the shapes of tensors.

    Args:
        model: a model of transformers.
        logits: function that maps token ids [rows, tokens], with one document in each row, to logits
            [rows * tokens, vocabulary], or to other outputs of each row, one row after another.
        documents: token ids of each document.
        alone: logits of each document run alone, [tokens, vocabulary].
        unit: function that returns the standard deviation of logits.

    Returns:
        The largest difference between the new logits and `alone`, in standard deviations of the logits; None if the
        model cannot run such a batch, or if the difference is not finite.
    """
    found = 0.0
    try:
        with _perturbed_embeddings(model):
            for tokens, expected in zip(documents, alone, strict=True):
                copies = logits(torch.tensor([list(tokens)] * 2)).chunk(2)
                found = max(found, *(largest_difference(copy, expected) / unit(expected) for copy in copies))
    except Exception:  # custom model code may raise anything
        return None
    return found if math.isfinite(found) else None


@contextmanager
def _perturbed_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within the block, change every entry of the model's token embeddings by a rounding error.

    Every entry is multiplied by 1 + eps or 1 - eps at random, where eps is the machine epsilon of the model's dtype.
    """
    generator = torch.Generator().manual_seed(0)

    def move(_: nn.Module, __: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        signs = torch.randint(2, first.shape, generator=generator).to(first) * 2 - 1
        precision = torch.finfo(computation_dtype(model, first.device)).eps
        moved = first * (1 + signs * max(precision, torch.finfo(first.dtype).eps))
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def computation_dtype(model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """Return the dtype of autocast if autocast is on for this device; otherwise, return the dtype of the model."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype


class MatmulDtype(TorchFunctionMode):
    """Context manager: within the block, detect matrix products in half precision, and store their dtype in `half`.

    If there are no such products, `half` is None. Quantized layers compute matrix products in half precision, whatever
    the dtypes of the layers' inputs and outputs are.
    """

    _NAMES = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.half: torch.dtype | None = None

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self._NAMES:
            for tensor in args:
                if isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16):
                    self.half = tensor.dtype
        return function(*args, **(kwargs or {}))


def has_experts(model: nn.Module) -> bool:
    return any("Expert" in type(module).__name__ or "Router" in type(module).__name__ for module in model.modules())
