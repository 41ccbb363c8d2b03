"""Compare the logits of a model, and distinguish differences that rounding explains from larger differences."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.token_axes import LARGEST_FINITE
from hf_packing.errors import ModelNotSupportedError


class NoLanguageModelError(ModelNotSupportedError):
    """Raised for a model that does not return logits for each token."""

    SUPPORTED = (
        "causal and masked language models are supported, as loaded by AutoModelForCausalLM or AutoModelForMaskedLM; "
        "train other models, such as classifiers and reward models, on padded batches without hf_packing"
    )
    """The end of an error message about a model that is not supported."""


def what_is_missing(model: PreTrainedModel) -> str:
    """Return the end of an error message about a model that cannot be called with input_ids alone.

    The text says why the model is not supported. If no reason is known, the text is empty.
    """
    if model.config.is_encoder_decoder:
        return (
            f"; {type(model).__name__} is an encoder-decoder, which takes two texts; {NoLanguageModelError.SUPPORTED}"
        )
    with suppress(Exception):  # custom model code may raise anything
        if model.get_output_embeddings() is None:
            return f"; {type(model).__name__} has no head for a vocabulary; {NoLanguageModelError.SUPPORTED}"
    return ""


def logits_of(model: PreTrainedModel, output: Any) -> Tensor:
    """Return the logits in a model's output, [rows, tokens, vocabulary], as float32 or float64.

    Raises:
        NoLanguageModelError: the output has no logits of this shape.
    """
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "prediction_logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        found = f"logits of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "no logits"
        name = type(model).__name__
        raise NoLanguageModelError(
            f"model: expected logits of shape [rows, tokens, vocabulary], but {name} returns {found}; "
            f"{NoLanguageModelError.SUPPORTED}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def comparable(logits: Tensor) -> Tensor:
    """Return a boolean mask that is True for finite logits, except for large values that stand for infinity."""
    return logits.abs() < LARGEST_FINITE


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference of comparable logits; infinity if a logit is comparable in only one tensor."""
    both = comparable(left) & comparable(right)
    if not torch.equal(comparable(left), comparable(right)):
        return math.inf
    return float((left - right)[both].abs().max()) if both.any() else 0.0


def spread(logits: Tensor) -> float:
    """Return the standard deviation of the comparable logits."""
    return float(logits[comparable(logits)].std())


ROUNDING_FACTOR = 4
"""Factor on the measured effect of rounding. The product is the allowed difference between the logits of a packed
document and of the same document alone. On 210 tiny architectures, and on small copies of large models, logits differed
by up to twice the effect of rounding."""

ALWAYS_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Always allowed difference between the logits of a packed document and of the same document alone, in standard
deviations of the logits. Packed documents give tensors of other shapes to kernels, and parts of most models compute in
float32 whatever the model's dtype is."""

NEVER_ALLOWED = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest difference that is ever allowed, however large the effect of rounding is. A larger difference could also be
caused by a fault in attention."""

_LEAST_LEAK = 1e-6
"""Change of a document's logits that is always allowed when another document is replaced. All shapes stay the same, so
the logits of dense models do not change at all. Experts, however, get other numbers of tokens, and so other shapes."""

_HALF_LEAK, _HALF_LEAK_WITH_EXPERTS = 1e-3, 2e-2
"""Change of a document's logits, in half precision, that is allowed when another document is replaced: the first number
for models without experts, the second for models with experts."""

_HALF_MAX, _HALF_RMS, _HALF_MEDIAN_WITH_EXPERTS = 0.2, 0.05, 0.05
"""Limits in half precision for the largest, the root mean square and the median difference. The largest or the root
mean square difference must be within its limit. In models with experts, a median within its limit is enough, since
rounding sends single tokens to other experts. On tiny bfloat16 models of 2 to 12 layers, rounding caused differences of
0 to 0.25, 0 to 0.04 and 0 to 0.05; a lost window, scale or sink caused differences of at least 0.4, 0.07 and 0.07."""


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that rounding explains, in standard deviations of a model's logits."""

    dtype: torch.dtype
    """Dtype in which the model computes."""
    has_experts: bool
    rounding: float | None = None
    """Measured effect of rounding on a logit; None if the effect could not be measured."""

    @property
    def is_measured(self) -> bool:
        """Whether limits follow from the measured effect of rounding. In half precision, rounding has as large an
        effect as some faults, so limits are fixed."""
        return self.dtype in ALWAYS_ALLOWED

    @property
    def difference(self) -> float:
        """Largest allowed difference, in single or double precision, between the logits of a packed document and of the
        same document alone."""
        least, most = ALWAYS_ALLOWED[self.dtype], NEVER_ALLOWED[self.dtype]
        return min(max(least, ROUNDING_FACTOR * (self.rounding or 0.0)), most)

    @property
    def leak(self) -> float:
        """Largest allowed change of a document's logits when another document is replaced."""
        if not self.is_measured:
            return _HALF_LEAK_WITH_EXPERTS if self.has_experts else _HALF_LEAK
        if self.rounding is None:
            return ALWAYS_ALLOWED[self.dtype]
        most = (NEVER_ALLOWED if self.has_experts else ALWAYS_ALLOWED)[self.dtype]
        return min(max(_LEAST_LEAK, ROUNDING_FACTOR * self.rounding), most)

    def note(self) -> str:
        """Return the end of an error message about a difference. The text is empty if rounding cannot be the cause."""
        if not self.is_measured or not self.rounding or ROUNDING_FACTOR * self.rounding <= NEVER_ALLOWED[self.dtype]:
            return ""
        return (
            f"; rounding alone changes the logits by {self.rounding:.2g} standard deviations in {self.dtype}, so the "
            "cause may be a fault or rounding; load the model in float64, and patch the model again"
        )

    def unexplained(self, packed: Sequence[Tensor], alone: Sequence[Tensor], lenience: float = 1) -> float:
        """Return the largest difference between packed documents and the same documents alone, or 0 if rounding
        explains the difference.

        Args:
            packed: logits of each packed document, [tokens, vocabulary], float32 or float64.
            alone: logits of each document run alone, [tokens, vocabulary], float32 or float64.
            lenience: factor on the allowed difference.
        """
        return max(
            0.0, *(self._unexplained_in_one(left, right, lenience) for left, right in zip(packed, alone, strict=True))
        )

    def _unexplained_in_one(self, packed: Tensor, alone: Tensor, lenience: float) -> float:
        largest, unit = largest_difference(packed, alone), spread(alone)
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
) -> float | None:
    """Measure the effect of rounding on a logit.

    Each document is run again, in a batch of two copies, with every entry of its embeddings changed by one rounding
    error. The perturbation shows how rounding errors grow through the model, and the batch shows how much the results
    of kernels differ for other shapes. The tokens stay the same.

    Args:
        model: a model of transformers.
        logits: function that maps tokens [rows, tokens], with one document in each row, to logits
            [rows * tokens, vocabulary].
        documents: tokens of each document.
        alone: logits of each document run alone, [tokens, vocabulary].

    Returns:
        The largest difference, in standard deviations of the logits; None if the model cannot run such a batch.
    """
    found = 0.0
    try:
        with _perturbed_embeddings(model):
            for tokens, expected in zip(documents, alone, strict=True):
                copies = torch.split(logits(torch.tensor([list(tokens)] * 2)), len(tokens))
                found = max(found, *(largest_difference(copy, expected) / spread(expected) for copy in copies))
    except Exception:  # custom model code may raise anything
        return None
    return found if math.isfinite(found) else None


@contextmanager
def _perturbed_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within the block, change every entry of the embeddings by one rounding error, up or down at
    random."""
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
    """Return the dtype of autocast if autocast is on; otherwise, return the dtype of the model."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype


class MatmulDtype(TorchFunctionMode):
    """Context manager: within the block, note in `half` the dtype of matrix products in half precision.

    Quantized layers compute in half precision, whatever the dtypes of their inputs and outputs are.
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
