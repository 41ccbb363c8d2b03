"""Check whether packed documents affect each other's logits or gradients in a model."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.batch_proof import prove_on_batch
from hf_packing.attention.inspect_model import (
    distinctive_lengths,
    has_vocabulary,
    inner_model,
    refuse_meta_device,
    weights_location,
)
from hf_packing.attention.probe import DocumentTokens, Probe
from hf_packing.attention.proof import RANDOM, VARYING
from hf_packing.attention.route import Route, is_patched, route_of
from hf_packing.attention.tolerance import LARGEST_GRADIENT_LEAK, largest_gradient_leak, through, what_is_missing
from hf_packing.attention.tree_proof import prove_trees
from hf_packing.attention.unpadding_proof import RowProbe
from hf_packing.attention.varlen import kernel_of
from hf_packing.batch.collate import PackingCollator
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError, PackingError


@dataclass(frozen=True)
class IsolationReport:
    """A report on whether packed documents affect each other in a model. `check_isolation` returns the report."""

    isolated: bool
    max_leak: float
    """The largest change of a logit in one document after another document was replaced; nan if the model cannot be
    called on a packed row."""
    reason: str
    """A text with the observation on which `isolated` is based."""
    max_gradient_leak: float = float("nan")
    """The largest gradient of one document's logits with respect to another document's embeddings, divided by the
    largest gradient with respect to the document's own embeddings; nan if gradients cannot be computed."""
    route: Route | None = None
    """The route that `patch_model` installed in the model; None for a model that is not patched."""
    modes: tuple[str, ...] = ("evaluation",)
    """The modes of the model for which `isolated` was found: "evaluation", "training" or both."""
    unproven: str = ""
    """The reason why isolation could not be fully checked in training mode; otherwise an empty string."""
    kernel: str = ""
    """The name of the kernel on which the attention of a patched model ran in the check; see `kernel_of`."""

    def __str__(self) -> str:
        lines = [f"isolated: {'yes' if self.isolated else 'no'}, {self.reason}"]
        lines.append(f"checked in {' and '.join(self.modes)} mode, with dropout off")
        if self.unproven and not (self.route and self.route.unproven):
            lines.append(f"training mode not proven: {self.unproven}")
        lines.append(f"largest change of a logit {self.max_leak:.2g}, gradient leak {self.max_gradient_leak:.2g}")
        lines.append(self.route.describe() if self.route else "route: none, the model is not patched")
        if self.kernel:
            lines.append(f"kernel: {self.kernel}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [line.partition(": ") if ": " in line else ("", "", line) for line in str(self).split("\n")]
        cells = (
            f"<tr><th>{escape(name)}</th><td style=text-align:left>{escape(text)}</td></tr>" for name, _, text in rows
        )
        return f"<table>{''.join(cells)}</table>"


Collator = Callable[[list[dict[str, list[int]]]], Mapping[str, Any]]


@torch.inference_mode(False)  # gradients are compared
def check_isolation(
    model: PreTrainedModel,
    *,
    collator: Collator | None = None,
    rows: int = 1,
    seed: int = 0,
    batch: Mapping[str, Any] | None = None,
    trees: bool = False,
) -> IsolationReport:
    """Check whether packed documents affect each other in a model.

    Three random documents are packed in each row. The rows are collated, and passed to the model as in a plain training
    loop, but without labels. The model keeps its own configuration, including use_cache. The check replaces one
    document at a time, and compares the logits of the other documents before and after. The check also tests whether
    gradients of one document's logits reach the embeddings of other documents. If documents are isolated in evaluation
    mode, the check is repeated in training mode, but with dropout, noise and layer dropping turned off. Afterwards, the
    training or evaluation mode of all modules, the model's buffers and the random state are restored.

    A model that returns outputs for whole rows, such as a classifier, gets a padded batch with one document in each row
    instead, and all of its outputs are compared.

    With `batch`, the check runs on the documents of this batch, at their lengths, in both modes. Every second document
    is replaced at once, and some documents are also compared with the same documents run alone, for a patched model
    without the patch. If documents affect each other, the reason names the module in which a difference begins. If the
    model is sharded, all ranks have to call `check_isolation` at the same time.

    With `trees`, the documents share prefixes, and a patched model runs them as a row of trees, in which each shared
    prefix stands once. The check is the proof of `patch_model(model, trees=True)`.

    Args:
        model: a model of transformers with any head, patched or not, on any device. The model may be wrapped by PEFT,
            DDP or torch.compile.
        collator: function that turns a list of packed rows, with the columns input_ids, labels, position_ids and
            seq_lengths, into a batch of tensors; PackingCollator by default.
        rows: number of packed rows in the batch.
        seed: seed of the random tokens.
        batch: a packed batch with several documents, or of trees, as PackingCollator makes it, which replaces the
            random documents.
        trees: whether to check a row of trees, of a patched model.

    Returns:
        A report that says whether documents are isolated, how large the largest leaks are, and which route a patched
        model uses.

    Raises:
        PackingError: `model` is not a PreTrainedModel, is on the meta device, or cannot be called with token ids; its
            logits are not finite,
            are nondeterministic, or do not depend on the tokens; `rows` is less than 1; the collator fails or cuts
            documents; a patched model refuses the batch; `batch` has a single document, or is given together with a
            collator or `rows`; or `trees` is True for a model that is not patched, or together with another argument.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> hfp.check_isolation(model).isolated  # with the default use_cache=True, packed rows are not detected
        False
        >>> report = hfp.check_isolation(hfp.patch_model(model))
        >>> report.isolated, report.route.name
        (True, 'varlen')
    """
    refuse_meta_device()
    if weights_location(model) == "on the meta device":
        raise PackingError(
            f"model: expected weights in memory, but the weights of {type(model).__name__} are on the meta device; "
            "call check_isolation after they are loaded"
        )
    if trees:
        if collator is not None or rows != 1 or batch is not None:
            raise PackingError("trees: expected True without `collator`, `rows` and `batch`, which make other batches")
        return _check_trees(inner_model(model))
    if batch is not None:
        if collator is not None or rows != 1:
            raise PackingError("batch: expected a batch without `collator` and `rows`, which make other batches")
        return _check_batch(model, batch)
    model = inner_model(model)
    if rows < 1:
        raise PackingError(f"rows: expected an integer of at least 1, got {rows}")
    route = route_of(model)
    make_probe = partial(_probe, collator=collator, rows=rows) if _takes_packed_rows(model) else _row_probe
    probe = make_probe(model, seed=seed)
    with probe.undisturbed(), suppress(Exception):  # without measured rounding, fixed limits apply
        probe.measure_rounding(probe.alone())
    report = _check_one_mode(probe, route)
    if not report.isolated:
        return report
    rounding, probe = probe.rounding, make_probe(model, seed=seed, training=True)
    probe.rounding = rounding
    try:
        with probe.undisturbed():
            is_random = probe.is_random(lambda: probe.packed(probe.documents))
    except Exception as error:  # custom model code may raise anything
        return replace(report, unproven=f"the model cannot be called in training mode: {error}")
    if is_random is None:
        return replace(report, unproven=VARYING)
    unproven = RANDOM if is_random else (route.unproven if route else "")
    training = _check_one_mode(probe, route)
    return replace(
        training,
        max_leak=max(report.max_leak, training.max_leak),
        max_gradient_leak=max(report.max_gradient_leak, training.max_gradient_leak),
        modes=("evaluation", "training") if training.isolated else ("training",),
        unproven=unproven,
    )


def _check_trees(model: PreTrainedModel) -> IsolationReport:
    """Prove that a patched model runs rows of trees, and return a report of the proof."""
    if not is_patched(model):
        raise PackingError(f"trees: expected a model patched by patch_model, but {type(model).__name__} is not patched")
    try:
        proof = prove_trees(model)
    except ModelNotSupportedError as error:
        return IsolationReport(False, float("nan"), str(error), route=route_of(model))
    route = route_of(model)
    return IsolationReport(
        isolated=True,
        max_leak=proof.max_leak,
        reason="changing a segment of a tree changed no logits but its own and those below it, and all documents equal "
        "the same documents alone",
        max_gradient_leak=proof.max_gradient_leak,
        route=route,
        modes=("evaluation", "training"),
        unproven=proof.unproven,
        kernel=_kernel_of_route(model, route),
    )


def _takes_packed_rows(model: PreTrainedModel) -> bool:
    """Return whether a model takes packed rows, since it returns logits or hidden states for each token."""
    if (route := route_of(model)) is not None:
        return route.facts.takes_packed_rows
    if has_vocabulary(model):
        return True
    probe = Probe(model)
    with probe.undisturbed(), suppress(Exception):  # custom model code may raise anything
        return len(probe.alone()) > 0
    return False


def _row_probe(model: PreTrainedModel, seed: int, training: bool = False) -> Probe:
    """Return a probe that runs a model on a padded batch with one random document in each row."""
    probe = RowProbe(model, training=training, seed=seed)
    probe.measure_scales()
    return probe


def _check_batch(model: nn.Module, batch: Mapping[str, Any]) -> IsolationReport:
    """Check isolation on a batch in evaluation mode and, if documents are isolated, in training mode."""
    evaluation = prove_on_batch(model, batch, training=False)
    if evaluation.documents < 2:
        raise PackingError(f"batch: expected several documents, got one document of {evaluation.tokens} tokens")
    proofs = [evaluation] if evaluation.problem else [evaluation, prove_on_batch(model, batch, training=True)]
    last = proofs[-1]
    return IsolationReport(
        isolated=not last.problem,
        max_leak=max(proof.max_leak for proof in proofs),
        reason=last.problem or str(last),
        max_gradient_leak=last.max_gradient_leak,
        route=route_of(inner_model(model)),
        kernel=last.kernel,
        modes=("evaluation", "training") if not last.problem else ("training" if last.training else "evaluation",),
    )


def _check_one_mode(probe: Probe, route: Route | None) -> IsolationReport:
    with probe.undisturbed():
        try:
            leak, _, scale = probe.largest_leak()
            memory = probe.memory() if probe.training else None
        except PackingError:
            raise
        except Exception as error:  # custom model code may raise anything; the report contains the error
            reason = f"{probe.mode}the model cannot be called on a packed row: {error}{what_is_missing(probe.model)}"
            return IsolationReport(False, float("nan"), reason, route=route)
        try:
            gradient_leak = largest_gradient_leak(probe.packed_with_gradients()[1])
        except (RuntimeError, AssertionError):  # the model supports only inference
            gradient_leak = float("nan")
        kernel = _kernel_of_route(probe.model, route)
        leaks, reaches = leak > probe.tolerance.leak * scale, gradient_leak > LARGEST_GRADIENT_LEAK
        if not leaks and not reaches and memory is None:
            reason = "changing one document did not change the logits of other documents"
            return IsolationReport(True, leak, reason, gradient_leak, route, kernel=kernel)
        reason = _reason(probe, leak, leaks, gradient_leak, memory)
        return IsolationReport(False, leak, reason, gradient_leak, route, kernel=kernel)


def _kernel_of_route(model: nn.Module, route: Route | None) -> str:
    """Return `kernel_of(model)`, or an empty string if the route leaves attention to the model itself."""
    return kernel_of(model) if route and route.method.attention else ""


def _reason(probe: Probe, leak: float, leaks: bool, gradient_leak: float, memory: list[str] | None) -> str:
    if leaks:
        reason = f"changing one document changed the logits of another document by up to {leak:.2g}"
    elif memory is not None:
        return f"{probe.mode}a document's logits depend on earlier batches{through(memory)}"
    else:
        reason = (
            f"gradients of one document reach another document; the largest such gradient is {gradient_leak:.2g} times "
            "the largest gradient at the document's own tokens"
        )
    if not probe.training and _leaks_only_with_cache(probe):
        reason += "; with use_cache=False there is no leak, since transformers detects packed rows only without a cache"
    else:
        reason += f", with attention {probe.model.config._attn_implementation!r}"
    return f"{probe.mode}{reason}. hf_packing.patch_model(model) keeps documents apart, or raises an error"


def _leaks_only_with_cache(probe: Probe) -> bool:
    try:
        leak, _, scale = probe.largest_leak(use_cache=False)
    except Exception:  # a model that does not take use_cache
        return False
    return leak <= probe.tolerance.leak * scale


def _probe(model: PreTrainedModel, collator: Collator | None, rows: int, seed: int, training: bool = False) -> Probe:
    """Return a probe that runs the model on packed rows of three random documents each. All rows have the same three
    document lengths, rotated by one place from row to row."""
    lengths = [length for row in range(rows) for length in _rotated(distinctive_lengths(model), row)]

    def make_batch(documents: DocumentTokens) -> Mapping[str, Any]:
        packed = [_pack(documents[start : start + 3]) for start in range(0, len(documents), 3)]
        try:
            return (collator or PackingCollator())(packed)
        except Exception as error:
            raise PackingError(
                f"collator: expected a function that makes a batch from a list of packed rows, but the collator raised "
                f"{type(error).__name__}: {error}"
            ) from error

    return Probe(model, seed, lengths, make_batch, training)


def _rotated(lengths: list[int], by: int) -> list[int]:
    return lengths[by % len(lengths) :] + lengths[: by % len(lengths)]


def _pack(documents: DocumentTokens) -> dict[str, list[int]]:
    """Return documents packed in a single row, with the columns that `hf_packing.pack` makes."""
    tokens = [token for document in documents for token in document]
    labels = [label for document in documents for label in (IGNORED_LABEL, *document[1:])]
    positions = [position for document in documents for position in range(len(document))]
    lengths = [len(document) for document in documents]
    return {"input_ids": tokens, "labels": labels, "position_ids": positions, "seq_lengths": lengths}
