"""check_isolation: whether packed documents notice each other in a model, in logits or in gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from transformers import PreTrainedModel

from hf_packing.arrow.packed_rows import IGNORED_LABEL
from hf_packing.attention.documents import Tokens, unmistakable_lengths
from hf_packing.attention.inner import inner_model
from hf_packing.attention.probe import GRADIENT_LEAK_TOLERANCE, Probe
from hf_packing.attention.proof import largest_gradient_leak
from hf_packing.attention.route import Route, route_of
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError


@dataclass(frozen=True)
class IsolationReport:
    """Whether packed documents stay apart in a model, as it was called."""

    isolated: bool
    max_leak: float
    """Largest change of a logit of a document when another one was changed; nan where the model cannot be called."""
    reason: str
    """What was seen, in words."""
    max_gradient_leak: float = float("nan")
    """Largest gradient of a document's logits in another's embeddings, as a share of the largest in its own; nan where
    there are no gradients."""
    route: Route | None = None
    """How patch_model keeps documents apart; None for a model that is not patched."""

    def __str__(self) -> str:
        lines = [f"isolated: {'yes' if self.isolated else 'no'}, {self.reason}"]
        lines.append(f"largest change of a logit {self.max_leak:.2g}, gradient leak {self.max_gradient_leak:.2g}")
        return "\n".join(lines + (self.route.lines() if self.route else ["route: none, the model is not patched"]))

    def _repr_html_(self) -> str:
        rows = [line.partition(": ") if ": " in line else ("", "", line) for line in str(self).split("\n")]
        cells = (
            f"<tr><th>{escape(name)}</th><td style=text-align:left>{escape(text)}</td></tr>" for name, _, text in rows
        )
        return f"<table>{''.join(cells)}</table>"


Collator = Callable[[list[dict[str, list[int]]]], Mapping[str, Any]]


def check_isolation(
    model: PreTrainedModel, *, collator: Collator | None = None, rows: int = 1, seed: int = 0
) -> IsolationReport:
    """Whether packed documents read each other in this model, called as a plain training loop would call it.

    Three random documents are packed in a row, collated and given to the model as it is, with its own configuration
    (its `use_cache` among it) and dropout off. Then one document at a time is replaced, and the logits of the others
    are compared; and gradients of one document's logits are looked for in the others.

    Args:
        model: a causal or masked language model of transformers, patched or not, on any device; also as PEFT, DDP or
            torch.compile wrap it.
        collator: yours, from packed rows (input_ids, labels, position_ids, seq_lengths) to a batch of tensors;
            PackingCollator without.
        rows: how many packed rows it is given.
        seed: of the random tokens.

    Returns:
        IsolationReport.

    Raises:
        PackingError: not a PreTrainedModel, one whose output has no logits, or a collator that cuts documents or
            fails; and what a patched model refuses of a batch.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> hfp.check_isolation(model).isolated  # its default use_cache=True switches the detection of packed rows off
        False
        >>> report = hfp.check_isolation(hfp.patch_model(model))
        >>> report.isolated, report.route.name
        (True, 'varlen')
    """
    model = inner_model(model)
    if rows < 1:
        raise PackingError(f"rows: expected at least 1, got {rows}")
    probe = Probe(model, seed) if collator is None and rows == 1 else probe_of_a_setup(model, collator, rows, seed)
    route = route_of(model)
    with probe.quiet():
        try:
            leak, scale = probe.largest_leak()
        except PackingError:
            raise
        except Exception as error:  # whatever a stranger's model raises is the finding
            reason = f"the model cannot be called on a packed row: {error}"
            return IsolationReport(False, float("nan"), reason, route=route)
        try:
            gradient_leak = largest_gradient_leak(probe.packed_gradients())
        except (RuntimeError, AssertionError):  # a model for inference only
            gradient_leak = float("nan")
        leaks, reaches = leak > probe.leak_tolerance * scale, gradient_leak > GRADIENT_LEAK_TOLERANCE
        if not leaks and not reaches:
            return IsolationReport(True, leak, "changing one document changed no other", gradient_leak, route)
        reason = f"changing one document changed the logits of another by up to {leak:.2g}"
        if not leaks:
            reason = f"gradients of one document reach another, up to {gradient_leak:.2g} of its own"
        if probe.leaks_only_through_cache():
            reason += (
                "; with use_cache=False it does not: transformers looks for packed rows only where there is no cache"
            )
        else:
            reason += f", with attention {model.config._attn_implementation!r}"
        reason += ". hf_packing.patch_model(model) keeps documents apart, or says why not"
        return IsolationReport(False, leak, reason, gradient_leak, route)


def probe_of_a_setup(model: PreTrainedModel, collator: Collator | None, rows: int, seed: int) -> Probe:
    """Three documents in each row; every row begins with another one of them, and all have as many tokens."""
    lengths = [length for row in range(rows) for length in rotated(unmistakable_lengths(model), row)]

    def make_batch(documents: Tokens) -> Mapping[str, Any]:
        packed = [packed_row(documents[start : start + 3]) for start in range(0, len(documents), 3)]
        try:
            return (collator or PackingCollator())(packed)
        except Exception as error:
            raise PackingError(
                f"collator: expected one that takes packed rows, {type(error).__name__}: {error}"
            ) from error

    return Probe(model, seed, lengths, make_batch)


def rotated(lengths: list[int], by: int) -> list[int]:
    return lengths[by % len(lengths) :] + lengths[: by % len(lengths)]


def packed_row(documents: Tokens) -> dict[str, list[int]]:
    """As `pack` makes them."""
    tokens = [token for document in documents for token in document]
    labels = [label for document in documents for label in (IGNORED_LABEL, *document[1:])]
    positions = [position for document in documents for position in range(len(document))]
    lengths = [len(document) for document in documents]
    return {"input_ids": tokens, "labels": labels, "position_ids": positions, "seq_lengths": lengths}
