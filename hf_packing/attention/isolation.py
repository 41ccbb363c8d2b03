"""check_isolation: whether packed documents notice each other in a model, in logits or in gradients."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from transformers import PreTrainedModel

from hf_packing.arrow.loss_masks import IGNORED_LABEL
from hf_packing.attention.inspect_model import inner_model
from hf_packing.attention.probe import GRADIENT_LEAK_TOLERANCE, Probe, Tokens, unmistakable_lengths
from hf_packing.attention.proof import CHANCE, EACH_TIME, largest_gradient_leak, through
from hf_packing.attention.route import Route, route_of
from hf_packing.attention.tolerance import what_is_missing
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
    modes: tuple[str, ...] = ("evaluation",)
    """In which of "evaluation" and "training" mode this was seen."""
    unproven: str = ""
    """Why it was not looked at in training mode, or not at all of it."""

    def __str__(self) -> str:
        lines = [f"isolated: {'yes' if self.isolated else 'no'}, {self.reason}"]
        lines.append(f"seen in {' and '.join(self.modes)} mode, with dropout off")
        if self.unproven and not (self.route and self.route.unproven):
            lines.append(f"training mode not proven: {self.unproven}")
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
    (its `use_cache` among it), in evaluation and in training mode, dropout, noise and layer dropping off. Then one
    document at a time is replaced, and the logits of the others are compared; and gradients of one document's logits
    are looked for in the others. The model's modes, buffers and the random state are put back.

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
        PackingError: not a PreTrainedModel, one whose output has no logits for each token, or a collator that cuts
            documents or fails; and what a patched model refuses of a batch.

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
    route = route_of(model)
    probe = probe_of_a_setup(model, collator, rows, seed)
    with probe.quiet(), suppress(Exception):  # what cannot be called on them is judged by what is always allowed
        probe.measure_rounding(probe.alone())
    report = seen(probe, route)
    if not report.isolated:
        return report
    rounding, probe = probe.rounding, probe_of_a_setup(model, collator, rows, seed, training=True)
    probe.rounding = rounding
    try:
        with probe.quiet():
            drawn = probe.draws_at_random(lambda: probe.packed(probe.documents))
    except Exception as error:  # whatever a stranger's model raises
        return replace(report, unproven=f"it cannot be called there: {error}")
    if drawn is None:
        return replace(report, unproven=EACH_TIME)
    unproven = CHANCE if drawn else (route.unproven if route else "")
    training = seen(probe, route)
    return replace(
        training,
        max_leak=max(report.max_leak, training.max_leak),
        max_gradient_leak=max(report.max_gradient_leak, training.max_gradient_leak),
        modes=("evaluation", "training") if training.isolated else ("training",),
        unproven=unproven,
    )


def seen(probe: Probe, route: Route | None) -> IsolationReport:
    """In one mode."""
    with probe.quiet():
        try:
            leak, scale = probe.largest_leak()
            memory = probe.remembers() if probe.training else None
        except PackingError:
            raise
        except Exception as error:  # whatever a stranger's model raises is the finding
            reason = f"{probe.mode}the model cannot be called on a packed row: {error}{what_is_missing(probe.model)}"
            return IsolationReport(False, float("nan"), reason, route=route)
        try:
            gradient_leak = largest_gradient_leak(probe.packed_gradients())
        except (RuntimeError, AssertionError):  # a model for inference only
            gradient_leak = float("nan")
        leaks, reaches = leak > probe.tolerance.leak * scale, gradient_leak > GRADIENT_LEAK_TOLERANCE
        if not leaks and not reaches and memory is None:
            return IsolationReport(True, leak, "changing one document changed no other", gradient_leak, route)
        return IsolationReport(False, leak, reason_of(probe, leak, leaks, gradient_leak, memory), gradient_leak, route)


def reason_of(probe: Probe, leak: float, leaks: bool, gradient_leak: float, memory: list[str] | None) -> str:
    if leaks:
        reason = f"changing one document changed the logits of another by up to {leak:.2g}"
    elif memory is not None:
        return f"{probe.mode}a document's logits depend on earlier ones{through(memory)}"
    else:
        reason = f"gradients of one document reach another, up to {gradient_leak:.2g} of its own"
    if not probe.training and probe.leaks_only_through_cache():
        reason += "; with use_cache=False it does not: transformers looks for packed rows only where there is no cache"
    else:
        reason += f", with attention {probe.model.config._attn_implementation!r}"
    return f"{probe.mode}{reason}. hf_packing.patch_model(model) keeps documents apart, or says why not"


def probe_of_a_setup(
    model: PreTrainedModel, collator: Collator | None, rows: int, seed: int, training: bool = False
) -> Probe:
    """Three documents in each row; every row begins with another one of them, and all have as many tokens."""
    if collator is None and rows == 1:
        return Probe(model, seed, training=training)
    lengths = [length for row in range(rows) for length in rotated(unmistakable_lengths(model), row)]

    def make_batch(documents: Tokens) -> Mapping[str, Any]:
        packed = [packed_row(documents[start : start + 3]) for start in range(0, len(documents), 3)]
        try:
            return (collator or PackingCollator())(packed)
        except Exception as error:
            raise PackingError(
                f"collator: expected one that takes packed rows, {type(error).__name__}: {error}"
            ) from error

    return Probe(model, seed, lengths, make_batch, training)


def rotated(lengths: list[int], by: int) -> list[int]:
    return lengths[by % len(lengths) :] + lengths[: by % len(lengths)]


def packed_row(documents: Tokens) -> dict[str, list[int]]:
    """As `pack` makes them."""
    tokens = [token for document in documents for token in document]
    labels = [label for document in documents for label in (IGNORED_LABEL, *document[1:])]
    positions = [position for document in documents for position in range(len(document))]
    lengths = [len(document) for document in documents]
    return {"input_ids": tokens, "labels": labels, "position_ids": positions, "seq_lengths": lengths}
