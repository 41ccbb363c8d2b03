"""The probe: pack three documents in a row, change one of them, and look whether the others notice."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.collate import PackingCollator
from hf_packing.errors import ModelNotSupportedError, PackingError

DOCUMENT_LENGTHS = (13, 7, 21)
"""Tokens of the three documents: all different, and longer than the windows and kernels of convolutions."""

LEAK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Largest change of a logit, in standard deviations of the logits, that rounding alone may make. Parts of most models
compute in float32 whatever the model's dtype, so float64 is not held to its own precision."""
HALF_LEAK_TOLERANCE = 2e-2
"""In half precision. Shapes do not change when tokens do, so all but a few kernels give no difference at all."""

EQUALITY_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Largest difference between a document packed and alone, where kernels see other shapes; same unit."""

HALF_MAX, HALF_RMS, ROUTED_HALF_MEDIAN = 0.2, 0.05, 0.05
"""Half precision: the largest or the root mean square difference has to be below its limit; in a model with experts,
where rounding sends single tokens to another expert, the median may be instead. Measured on tiny bfloat16 models of 2
to 12 layers: rounding 0 to 0.25, 0 to 0.04, 0 to 0.05; a lost window, scale or sink from 0.4, 0.07, 0.07 up."""

LARGEST_LOGIT = 1e30
"""Some models set logits that must not be chosen to the smallest float."""

Tokens = list[list[int]]


@dataclass(frozen=True)
class IsolationReport:
    """Whether packed documents stay apart in a model, as it was called."""

    isolated: bool
    max_leak: float
    """Largest change of a logit of a document when another one was changed; nan where the model cannot be called."""
    reason: str
    """What was seen, in words."""


def check_isolation(model: PreTrainedModel, *, seed: int = 0) -> IsolationReport:
    """Whether packed documents read each other in this model, called as a plain training loop would call it.

    Three random documents are packed in a row by PackingCollator and given to the model as it is, with its own
    configuration (its `use_cache` among it) and dropout off. Then one document at a time is replaced, and the logits of
    the others are compared.

    Args:
        model: a causal language model of transformers, patched or not, on any device.
        seed: of the random tokens.

    Returns:
        IsolationReport.

    Raises:
        PackingError: not a PreTrainedModel, or one whose output has no logits.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> hfp.check_isolation(model).isolated  # its default use_cache=True switches the detection of packed rows off
        False
        >>> hfp.check_isolation(hfp.patch_model(model)).isolated
        True
    """
    check_model(model)
    probe = Probe(model, seed)
    with probe.quiet():
        try:
            leak, scale = probe.largest_leak()
        except PackingError:
            raise
        except Exception as error:  # whatever a stranger's model raises is the finding
            return IsolationReport(False, float("nan"), f"the model cannot be called on a packed row: {error}")
        if leak <= probe.leak_tolerance * scale:
            return IsolationReport(True, leak, "changing one document changed no other")
        reason = f"changing one document changed the logits of another by up to {leak:.2g}"
        if probe.leaks_only_through_cache():
            reason += (
                "; with use_cache=False it does not: transformers looks for packed rows only where there is no cache"
            )
        else:
            reason += f", with attention {model.config._attn_implementation!r}"
        return IsolationReport(
            False, leak, f"{reason}. hf_packing.patch_model(model) keeps documents apart, or says why not"
        )


def check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise PackingError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")


class Probe:
    """Runs a model on three random documents, together and alone."""

    def __init__(self, model: PreTrainedModel, seed: int = 0) -> None:
        embeddings = model.get_input_embeddings()
        vocabulary = getattr(embeddings, "num_embeddings", None) or model.config.get_text_config().vocab_size
        generator = np.random.default_rng(seed)
        self.model = model
        self.device = embeddings.weight.device
        # each document and its replacement differ in every token
        self.documents, self.others = [], []
        for length in DOCUMENT_LENGTHS:
            tokens = generator.integers(0, vocabulary, length)
            self.documents.append(tokens.tolist())
            self.others.append(((tokens + generator.integers(1, vocabulary, length)) % vocabulary).tolist())
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.accepted = None if takes_any else set(parameters)

    @property
    def in_half_precision(self) -> bool:
        autocast = torch.is_autocast_enabled(self.device.type)
        return autocast or self.model.dtype not in (torch.float32, torch.float64)

    @property
    def leak_tolerance(self) -> float:
        return HALF_LEAK_TOLERANCE if self.in_half_precision else LEAK_TOLERANCE[self.model.dtype]

    def difference(self, packed: list[Tensor], alone: list[Tensor]) -> float:
        """Largest difference of documents packed and alone; 0 where it is no more than the precision explains."""
        worst = 0.0
        for left, right in zip(packed, alone, strict=True):
            largest, unit = largest_difference(left, right), spread(right)
            if not math.isfinite(largest):
                equal = False
            elif self.in_half_precision:
                apart = (left - right)[comparable(left)].abs() / unit
                equal = largest <= HALF_MAX * unit or float(apart.pow(2).mean().sqrt()) <= HALF_RMS
                equal |= has_experts(self.model) and float(apart.median()) <= ROUTED_HALF_MEDIAN
            else:
                equal = largest <= EQUALITY_TOLERANCE[self.model.dtype] * unit
            worst = worst if equal else max(worst, largest)
        return worst

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Dropout off, no gradients; the modules' modes and the random state are put back."""
        training = [module for module in self.model.modules() if module.training]
        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        self.model.eval()
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def logits(self, **inputs: Any) -> Tensor:
        """[tokens, vocabulary], at least float32, of one row."""
        given = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        output = self.model(
            **{name: value for name, value in given.items() if self.accepted is None or name in self.accepted}
        )
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise PackingError(
                f"model: expected logits of shape [rows, tokens, vocabulary], {type(self.model).__name__} has none"
            )
        return logits[0].to(torch.promote_types(logits.dtype, torch.float32))

    def packed(self, documents: Tokens, **options: Any) -> list[Tensor]:
        """Logits of each document, all in one row."""
        batch = PackingCollator()([{"input_ids": tokens} for tokens in documents])
        del batch["labels"]
        return list(torch.split(self.logits(**batch, **options), [len(tokens) for tokens in documents]))

    def alone(self, **options: Any) -> list[Tensor]:
        """Logits of each document, one row each, with nothing but input_ids."""
        return [self.logits(input_ids=torch.tensor([tokens]), **options) for tokens in self.documents]

    def as_one_document(self, documents: Tokens, **options: Any) -> list[Tensor]:
        """Logits of the same tokens as a single document, without borders."""
        row = [token for tokens in documents for token in tokens]
        batch = PackingCollator()([{"input_ids": row}])
        del batch["labels"]
        return list(torch.split(self.logits(**batch, **options), [len(tokens) for tokens in documents]))

    def largest_leak(self, **options: Any) -> tuple[float, float]:
        """Largest change in a document that was not changed, and the standard deviation of the logits."""
        before = self.packed(self.documents, **options)
        if not all(comparable(logits).any() for logits in before):
            raise PackingError(f"model: expected finite logits, {type(self.model).__name__} has none")
        leak = 0.0
        for changed in range(len(self.documents)):
            after = self.packed(self.with_other(changed), **options)
            if not largest_difference(before[changed], after[changed]) > 0:
                raise PackingError(
                    f"model: expected logits that depend on input_ids, those of {type(self.model).__name__} do not"
                )
            leak = max(leak, *(largest_difference(before[i], after[i]) for i in range(len(before)) if i != changed))
        return leak, spread(torch.cat(before))

    def with_other(self, changed: int) -> Tokens:
        return [self.others[i] if i == changed else tokens for i, tokens in enumerate(self.documents)]

    def sees_leaks(self, **options: Any) -> bool:
        """Whether, with the borders taken away, changing the first document changes the second."""
        before = self.as_one_document(self.documents, **options)[1]
        after = self.as_one_document(self.with_other(0), **options)[1]
        return largest_difference(before, after) > self.leak_tolerance * spread(before)

    def leaks_only_through_cache(self) -> bool:
        try:
            leak, scale = self.largest_leak(use_cache=False)
        except Exception:  # a model without that argument has no such explanation
            return False
        return leak <= self.leak_tolerance * scale


def comparable(logits: Tensor) -> Tensor:
    """bool: which logits are numbers, and no stand-in for minus infinity."""
    return logits.abs() < LARGEST_LOGIT


def largest_difference(left: Tensor, right: Tensor) -> float:
    """Over all comparable logits; infinity where one is comparable and the other is not."""
    both = comparable(left) & comparable(right)
    if not torch.equal(comparable(left), comparable(right)):
        return math.inf
    return float((left - right)[both].abs().max()) if both.any() else 0.0


def spread(logits: Tensor) -> float:
    """Standard deviation of the comparable logits."""
    return float(logits[comparable(logits)].std())


def has_experts(model: nn.Module) -> bool:
    return any("Expert" in type(module).__name__ or "Router" in type(module).__name__ for module in model.modules())


def prove_isolation(model: PreTrainedModel, references: list[list[Tensor]], probe: Probe) -> None:
    """Raise ModelNotSupportedError unless packed documents are apart, and as in one of the references.

    Args:
        model: patched.
        references: logits of each of the probe's documents, alone in the unpatched model, under one attention or more.
        probe: made from the model.
    """
    name = type(model).__name__
    leak, scale = probe.largest_leak()
    if not leak <= probe.leak_tolerance * scale:
        raise ModelNotSupportedError(
            f"{name}: changing one packed document changes the logits of another by {leak:.2g}; {why_it_leaks(model)}"
        )
    if not probe.sees_leaks():
        raise ModelNotSupportedError(
            f"{name}: no leak can be seen even with the borders taken away, so nothing is proven"
        )
    packed = probe.packed(probe.documents)
    if difference := min(probe.difference(packed, alone) for alone in references):
        raise ModelNotSupportedError(f"{name}: a document's logits differ by {difference:.2g} between packed and alone")


STATEFUL = (
    "Mixer",
    "Conv",
    "Conv1d",
    "DeltaNet",
    "DeltaAttention",
    "LightningAttention",
    "RecurrentBlock",
    "LSTMBlock",
)
"""How class names of modules end that work along the row; for the message only."""


def why_it_leaks(model: nn.Module) -> str:
    mixers = sorted({type(module).__name__ for module in model.modules() if type(module).__name__.endswith(STATEFUL)})
    if mixers:
        return f"{', '.join(mixers)} carry a state or a convolution across borders"
    return "something beside its attention function crosses borders"
