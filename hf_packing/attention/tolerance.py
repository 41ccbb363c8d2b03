"""Logits of any model, and how far apart two of them are."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hf_packing.attention.token_axes import LARGEST
from hf_packing.errors import ModelNotSupportedError

SUPPORTED = (
    "causal and masked language models are supported, as AutoModelForCausalLM and AutoModelForMaskedLM load them; "
    "train others, such as classifiers and reward models, on padded batches without hf_packing"
)
"""What to do with other models."""


class NoLanguageModelError(ModelNotSupportedError):
    """A model whose output is not about tokens."""


def what_is_missing(model: PreTrainedModel) -> str:
    """Why a model that cannot be called with tokens alone may be none that is supported; empty where it may be one."""
    if model.config.is_encoder_decoder:
        return f"; {type(model).__name__} is an encoder-decoder, which takes two texts: {SUPPORTED}"
    with suppress(Exception):  # of a stranger's model
        if model.get_output_embeddings() is None:
            return f"; {type(model).__name__} has no head for a vocabulary: {SUPPORTED}"
    return ""


def logits_of(model: PreTrainedModel, output: Any) -> Tensor:
    """[rows, tokens, vocabulary], at least float32.

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
            f"model: expected logits of shape [rows, tokens, vocabulary], {name} has {found}; {SUPPORTED}"
        )
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def comparable(logits: Tensor) -> Tensor:
    """bool: which logits are numbers, and no stand-in for minus infinity."""
    return logits.abs() < LARGEST


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Over all comparable logits; infinity where one is comparable and the other is not."""
    both = comparable(left) & comparable(right)
    if not torch.equal(comparable(left), comparable(right)):
        return math.inf
    return float((left - right)[both].abs().max()) if both.any() else 0.0


def spread(logits: Tensor) -> float:
    """Standard deviation of the comparable logits."""
    return float(logits[comparable(logits)].std())


TIMES = 4
"""Packed documents may be this many times further apart than rounding was seen to move them. On 210 tiny architectures
and on small models of large ones, they were apart by up to twice of it."""

LEAST = {torch.float64: 1e-5, torch.float32: 1e-4}
"""What is always allowed between packed and alone, in standard deviations of the logits: kernels see other shapes, and
parts of most models compute in float32 whatever the model's dtype."""

MOST = {torch.float64: 1e-4, torch.float32: 1e-3}
"""What is never allowed, however far rounding moves a model: a fault in its attention could not be told from it."""

LEAST_LEAK = 1e-6
"""What is always allowed in a document that was not changed. Shapes stay the same there, so dense models give no
difference at all; with experts, other tokens make other shapes."""

HALF_LEAK, ROUTED_HALF_LEAK = 1e-3, 2e-2
"""The same in half precision, without and with experts."""

HALF_MAX, HALF_RMS, ROUTED_HALF_MEDIAN = 0.2, 0.05, 0.05
"""Half precision: the largest or the root mean square difference has to be below its limit; in a model with experts,
where rounding sends single tokens to another expert, the median may be instead. Measured on tiny bfloat16 models of 2
to 12 layers: rounding 0 to 0.25, 0 to 0.04, 0 to 0.05; a lost window, scale or sink from 0.4, 0.07, 0.07 up."""


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains in a model's logits; in standard deviations of theirs."""

    dtype: torch.dtype
    """That the model computes in."""
    routed: bool
    """Whether it has experts."""
    rounding: float | None = None
    """How far rounding was seen to move a logit; None where that could not be measured."""

    @property
    def is_measured(self) -> bool:
        """Half precision has limits of its own: there a rounding is as large as some faults."""
        return self.dtype in LEAST

    @property
    def apart(self) -> float:
        """Between a document packed and alone, in single or double precision."""
        return min(max(LEAST[self.dtype], TIMES * (self.rounding or 0.0)), MOST[self.dtype])

    @property
    def leak(self) -> float:
        """In a document that was not changed when another one was."""
        if not self.is_measured:
            return ROUTED_HALF_LEAK if self.routed else HALF_LEAK
        if self.rounding is None:
            return LEAST[self.dtype]
        most = (MOST if self.routed else LEAST)[self.dtype]
        return min(max(LEAST_LEAK, TIMES * self.rounding), most)

    def limits(self) -> str:
        """For a message: why rounding is no explanation, where it moves the model so far that nothing can be told."""
        if not self.is_measured or not self.rounding or TIMES * self.rounding <= MOST[self.dtype]:
            return ""
        return (
            f"; rounding alone moves its logits by {self.rounding:.2g} standard deviations in {self.dtype}, so a fault "
            "cannot be told from it: load the model in float64 to have it proven"
        )

    def unexplained(self, packed: Sequence[Tensor], alone: Sequence[Tensor], lenience: float = 1) -> float:
        """Largest difference of documents packed and alone; 0 where it is no more than rounding explains.

        Args:
            packed: logits of each document, [tokens, vocabulary], at least float32.
            alone: the same.
            lenience: how many times further apart they may be.
        """
        return max(
            0.0, *(self.unexplained_in_one(left, right, lenience) for left, right in zip(packed, alone, strict=True))
        )

    def unexplained_in_one(self, packed: Tensor, alone: Tensor, lenience: float) -> float:
        largest, unit = largest_difference(packed, alone), spread(alone)
        if not math.isfinite(largest):
            return largest
        if self.is_measured:
            return 0.0 if largest <= self.apart * unit * lenience else largest
        apart = (packed - alone)[comparable(packed)].abs() / unit
        equal = largest <= HALF_MAX * unit or float(apart.pow(2).mean().sqrt()) <= HALF_RMS * lenience
        equal |= self.routed and float(apart.median()) <= ROUTED_HALF_MEDIAN * lenience
        return 0.0 if equal else largest


def measure_rounding(
    model: PreTrainedModel,
    logits: Callable[[Tensor], Tensor],
    documents: Sequence[Sequence[int]],
    alone: Sequence[Tensor],
) -> float | None:
    """How far rounding moves a logit: each document again, its embeddings off by one rounding, in a batch of two.

    The one shows how far roundings grow on their way through the model, the other what kernels make of other shapes;
    neither changes what the model is asked.

    Args:
        model: of transformers.
        logits: of tokens [rows, tokens], each row a document; [rows * tokens, vocabulary].
        documents: tokens of each.
        alone: logits of each, [tokens, vocabulary].

    Returns:
        The largest difference in standard deviations of the logits; None where the model takes no such batch.
    """
    found = 0.0
    try:
        with off_by_one_rounding(model):
            for tokens, expected in zip(documents, alone, strict=True):
                copies = torch.split(logits(torch.tensor([list(tokens)] * 2)), len(tokens))
                found = max(found, *(largest_difference(copy, expected) / spread(expected) for copy in copies))
    except Exception:  # whatever a stranger's model raises
        return None
    return found if math.isfinite(found) else None


@contextmanager
def off_by_one_rounding(model: PreTrainedModel) -> Iterator[None]:
    """Every entry of the embeddings is off by the precision that the model computes in, up or down at random."""
    generator = torch.Generator().manual_seed(0)

    def move(_: nn.Module, __: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        ups = torch.randint(2, first.shape, generator=generator).to(first) * 2 - 1
        precision = torch.finfo(dtype_of_computation(model, first.device)).eps
        moved = first * (1 + ups * max(precision, torch.finfo(first.dtype).eps))
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def dtype_of_computation(model: PreTrainedModel, device: torch.device) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype


class DtypeOfProducts(TorchFunctionMode):
    """Notices the coarsest dtype of what is multiplied: quantised layers compute in half precision whatever they are
    given, and what they return."""

    NAMES = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.coarsest: torch.dtype | None = None

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.NAMES:
            for tensor in args:
                if isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16):
                    self.coarsest = tensor.dtype
        return function(*args, **(kwargs or {}))


def has_experts(model: nn.Module) -> bool:
    return any("Expert" in type(module).__name__ or "Router" in type(module).__name__ for module in model.modules())
