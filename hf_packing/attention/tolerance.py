"""Compare the logits of a model, and tell differences that rounding explains from differences that are faults."""

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
    """A model that has no logits for each token."""

    SUPPORTED = (
        "causal and masked language models are supported, as AutoModelForCausalLM and AutoModelForMaskedLM load them; "
        "train others, such as classifiers and reward models, on padded batches without hf_packing"
    )
    """The end of a message that refuses a model."""


def what_is_missing(model: PreTrainedModel) -> str:
    """Return the end of a message about a model that cannot be called with input_ids alone: why it may not be
    supported, or an empty string."""
    if model.config.is_encoder_decoder:
        return (
            f"; {type(model).__name__} is an encoder-decoder, which takes two texts: {NoLanguageModelError.SUPPORTED}"
        )
    with suppress(Exception):  # custom model code may raise anything
        if model.get_output_embeddings() is None:
            return f"; {type(model).__name__} has no head for a vocabulary: {NoLanguageModelError.SUPPORTED}"
    return ""


def logits_of(model: PreTrainedModel, output: Any) -> Tensor:
    """Return the logits in a model's output, [rows, tokens, vocabulary], as float32 or float64.

    Raises:
        NoLanguageModelError: there are none.
    """
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "prediction_logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        found = f"those of shape {list(logits.shape)}" if isinstance(logits, Tensor) else "none"
        name = type(model).__name__
        raise NoLanguageModelError(
            f"model: expected logits of shape [rows, tokens, vocabulary], {name} has {found}; "
            f"{NoLanguageModelError.SUPPORTED}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def comparable(logits: Tensor) -> Tensor:
    """Return a boolean mask of the logits that are finite, and not a stand-in for minus infinity."""
    return logits.abs() < LARGEST_FINITE


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference of comparable logits; infinity if a logit is comparable on one side only."""
    both = comparable(left) & comparable(right)
    if not torch.equal(comparable(left), comparable(right)):
        return math.inf
    return float((left - right)[both].abs().max()) if both.any() else 0.0


def spread(logits: Tensor) -> float:
    """Return the standard deviation of the comparable logits."""
    return float(logits[comparable(logits)].std())


ROUNDING_FACTOR = 4
"""Packed documents may differ from documents alone by this many times the measured effect of rounding. On 210 tiny
architectures, and on small copies of large models, they differed by up to twice that effect."""

ALWAYS_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Difference between packed and alone that is always allowed, in standard deviations of the logits: kernels get other
shapes, and parts of most models compute in float32 whatever the model's dtype is."""

NEVER_ALLOWED = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Difference that is never allowed, however large the effect of rounding is: it could also be a fault in attention."""

_LEAST_LEAK = 1e-6
"""Change that is always allowed when another document is replaced. All shapes stay the same, so dense models show no
change at all; experts get other numbers of tokens, and so other shapes."""

_HALF_LEAK, _HALF_LEAK_WITH_EXPERTS = 1e-3, 2e-2
"""The same in half precision, without and with experts."""

_HALF_MAX, _HALF_RMS, _HALF_MEDIAN_WITH_EXPERTS = 0.2, 0.05, 0.05
"""In half precision, the largest or the root mean square difference must be below its limit. With experts, the median
is enough, since rounding sends single tokens to another expert. On tiny bfloat16 models of 2 to 12 layers, the effect
of rounding was 0 to 0.25, 0 to 0.04 and 0 to 0.05; that of a lost window, scale or sink at least 0.4, 0.07
and 0.07."""


@dataclass(frozen=True)
class Tolerance:
    """The largest differences that rounding explains, in standard deviations of a model's logits."""

    dtype: torch.dtype
    """Of the computation."""
    has_experts: bool
    rounding: float | None = None
    """Measured effect of rounding on a logit; None if it could not be measured."""

    @property
    def is_measured(self) -> bool:
        """Whether limits follow from the measured effect of rounding. In half precision, rounding has as large an
        effect as some faults, so limits are fixed."""
        return self.dtype in ALWAYS_ALLOWED

    @property
    def difference(self) -> float:
        """Largest difference between a document packed and alone, in single or double precision."""
        least, most = ALWAYS_ALLOWED[self.dtype], NEVER_ALLOWED[self.dtype]
        return min(max(least, ROUNDING_FACTOR * (self.rounding or 0.0)), most)

    @property
    def leak(self) -> float:
        """Largest change of a document when another one was changed."""
        if not self.is_measured:
            return _HALF_LEAK_WITH_EXPERTS if self.has_experts else _HALF_LEAK
        if self.rounding is None:
            return ALWAYS_ALLOWED[self.dtype]
        most = (NEVER_ALLOWED if self.has_experts else ALWAYS_ALLOWED)[self.dtype]
        return min(max(_LEAST_LEAK, ROUNDING_FACTOR * self.rounding), most)

    def note(self) -> str:
        """Return the end of a message about a difference: a note if rounding could explain it, or an empty string."""
        if not self.is_measured or not self.rounding or ROUNDING_FACTOR * self.rounding <= NEVER_ALLOWED[self.dtype]:
            return ""
        return (
            f"; rounding alone changes its logits by {self.rounding:.2g} standard deviations in {self.dtype}, so a "
            "fault cannot be told from rounding: load the model in float64, and patch it again"
        )

    def unexplained(self, packed: Sequence[Tensor], alone: Sequence[Tensor], lenience: float = 1) -> float:
        """Return the largest difference between documents packed and alone, or 0 if rounding explains it.

        Args:
            packed: logits of each document, [tokens, vocabulary], float32 or float64.
            alone: the same.
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
    error. The perturbation shows how rounding errors grow through the model; the batch shows how much kernels differ on
    other shapes. The tokens stay the same.

    Args:
        model: of transformers.
        logits: maps tokens [rows, tokens], each row a document, to logits [rows * tokens, vocabulary].
        documents: tokens of each.
        alone: logits of each, [tokens, vocabulary].

    Returns:
        The largest difference in standard deviations of the logits; None if the model cannot run such a batch.
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
    """Move every entry of the embeddings up or down, at random, by the precision in which the model computes."""
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
    """Return the dtype of autocast, or else of the model."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype


class MatmulDtype(TorchFunctionMode):
    """Inside the block, note whether matrix products are computed in half precision. Quantized layers compute in half
    precision whatever the dtype of their input and output is."""

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
