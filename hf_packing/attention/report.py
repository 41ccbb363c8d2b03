"""Check whether packed documents affect each other's logits or gradients in a model, and report it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.cases import Alone, DocumentTokens, RowCase
from hf_packing.attention.kinds import prove_on_batch
from hf_packing.attention.kinds.padded import examined_padded_rows
from hf_packing.attention.model import (
    distinctive_lengths,
    embedding_of,
    has_local_weights,
    has_vocabulary,
    inner_model,
    weights_location,
)
from hf_packing.attention.proof import Proof, prove
from hf_packing.attention.route import Route, route_of
from hf_packing.attention.runs import NoLanguageModelError, NotCallableError, Runner
from hf_packing.batch.collate import PackingCollator
from hf_packing.batch.segments import part_in
from hf_packing.columns import rows_of
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.strategies.sequential import FixedLength
from hf_packing.upstream.transformers import attention_name


@dataclass(frozen=True)
class IsolationReport:
    """A report on whether packed documents affect each other in a model. `check_isolation` returns the report."""

    isolated: bool
    max_leak: float
    """The largest change of a logit in one document after another document was replaced; nan if the model cannot be
    called on a packed row."""
    reason: str
    """A text with the observation on which `isolated` is based."""
    max_gradient_leak: float = nan
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
    checked: str = "packed rows"
    """What the check ran: "packed rows", "packed rows of the backbone" or "padded rows", with a document in each."""

    def __str__(self) -> str:
        lines = [
            f"isolated: {'yes' if self.isolated else 'no'}, {self.reason}",
            f"checked on {self.checked} in {' and '.join(self.modes)} mode, with dropout off",
        ]
        if self.unproven and not (self.route and self.route.unproven):
            lines.append(f"training mode not proven: {self.unproven}")
        measured = {"largest change of a logit": self.max_leak, "gradient leak": self.max_gradient_leak}
        if known := [f"{what} {value:.2g}" for what, value in measured.items() if not isnan(value)]:
            lines.append(", ".join(known))
        lines.append(self.route.describe() if self.route else "route: none, the model is not patched")
        if self.kernel:
            lines.append(f"kernel: {self.kernel}")
        return "\n".join(lines)


Collator = Callable[[list[dict[str, list[int]]]], Mapping[str, Any]]


@torch.inference_mode(False)  # gradients are compared
def check_isolation(
    model: PreTrainedModel,
    *,
    collator: Collator | None = None,
    rows: int = 1,
    seed: int = 0,
    batch: Mapping[str, Any] | None = None,
) -> IsolationReport:
    """Check whether packed documents affect each other in a model.

    Three random documents are packed in each row. The rows are collated, and passed to the model as in a plain training
    loop, but without labels. The model keeps its own configuration, including use_cache. The check replaces one
    document at a time, and compares the logits of the other documents before and after. The check also tests whether
    gradients of one document's logits reach the embeddings of other documents. If documents are isolated in evaluation
    mode, the check is repeated in training mode, but with dropout, noise and layer dropping turned off. Afterwards, the
    training or evaluation mode of all modules, the model's buffers and the random state are restored.

    Of a model that returns outputs for whole rows, such as a classifier, the backbone gets the packed rows. If such a
    model is patched, it takes no packed rows: it gets a padded batch with one document in each row instead, and all of
    its outputs are compared. `report.checked` says what was run.

    With `batch`, the check runs on the documents of this batch, at their lengths, in both modes. Half of the documents
    are replaced at once, then the other half, and some documents are also compared with the same documents run alone,
    for a patched model without the patch. If replaced documents change others, the reason names the module in which
    this begins. If the model is sharded, all ranks have to call `check_isolation` at the same time.

    Args:
        model: a model of transformers with any head, patched or not, on any device. The model may be wrapped by PEFT,
            DDP or torch.compile.
        collator: function that turns a list of packed rows, with the columns input_ids, labels, position_ids and
            seq_lengths, into a batch of tensors; PackingCollator by default.
        rows: number of packed rows in the batch.
        seed: seed of the random tokens.
        batch: a packed batch with several documents, or of trees, as PackingCollator makes it, which replaces the
            random documents.

    Returns:
        A report that says whether documents are isolated, how large the largest leaks are, and which route a patched
        model uses.

    Raises:
        PackingError: `model` is not a PreTrainedModel, or is on the meta device; `rows` is less than 1; the collator
            cuts documents; a patched model refuses the batch; or `batch` has a single document, or is given together
            with another argument.

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
    if weights_location(model) == "on the meta device":
        raise PackingError(
            f"model: expected weights in memory, but the weights of {type(model).__name__} are on the meta device; "
            "call check_isolation after they are loaded"
        )
    if batch is not None:
        if collator is not None or rows != 1:
            raise PackingError("batch: expected no other argument, since collator and rows make another batch")
        return _check_batch(model, batch)
    model = inner_model(model)
    if rows < 1:
        raise PackingError(f"rows: expected an integer of at least 1, got {rows}")
    lengths = distinctive_lengths(model)
    collate, pack = collator or PackingCollator(), FixedLength(sum(lengths), seed=None)
    lengths = [length for row in range(rows) for length in lengths[row % 3 :] + lengths[: row % 3]]

    def make_batch(documents: DocumentTokens) -> Mapping[str, Any]:
        return collate(rows_of(pack({"input_ids": documents})))

    def packed(called: nn.Module) -> RowCase:
        case = RowCase(Runner(model, called), lengths=lengths, make_batch=make_batch, seed=seed)
        case.wants_gradients = True
        return case

    case, checked, route = packed(model), "packed rows", route_of(model)
    try:
        if route is not None and not route.facts.takes_packed_rows:
            raise NoLanguageModelError
        case.examine()
    except NoLanguageModelError:
        if route is not None:  # a patched classifier takes no packed rows
            case, checked = examined_padded_rows(Runner(model), seed), "padded rows"
        else:
            case, checked = packed(model.base_model), "packed rows of the backbone"
            try:
                case.examine()
            except NotCallableError:
                reason = "neither the model nor its backbone can be called on packed rows, so nothing is known of them"
                return IsolationReport(False, nan, reason)
    except NotCallableError:  # it may be callable with what the collator makes
        case.known = [Alone({})]
    return replace(_check_rows(case), checked=checked)


def _check_rows(case: RowCase) -> IsolationReport:
    """Run a case in both modes, without a comparison with documents alone, and return a report."""
    route = route_of(case.model)
    case.known, case.sample = [replace(each, runs={}) for each in case.known], []
    case.wants_gradients = True
    try:
        proofs = [prove(case)]
    except PackingError:
        raise
    except Exception as error:  # custom model code may raise anything; the report contains the error
        reason = f"the model cannot be called on a packed row: {error}"
        return IsolationReport(False, nan, reason, route=route)
    unproven = route.facts.unproven if route else ""
    if not proofs[0].problem:
        try:
            proofs.append(prove(case.in_training()))
        except Exception as error:  # as above
            unproven = f"the model cannot be called in training mode: {error}"
    reason = "changing one document did not change the logits of other documents"
    report = _report(case.model, proofs, reason, unproven)
    if report.isolated or route:
        return report
    config = case.model.config
    reason = (
        f"{report.reason}, with attention {attention_name(config)!r} and "
        f"use_cache={getattr(config, 'use_cache', False)}. hf_packing.patch_model(model) keeps documents apart, or "
        "raises an error"
    )
    return replace(report, reason=reason)


def _report(model: PreTrainedModel, proofs: list[Proof], reason: str, unproven: str = "") -> IsolationReport:
    """Return a report of proofs in different modes, of which only the last one may have a problem."""
    last = proofs[-1]
    return IsolationReport(
        isolated=not last.problem,
        max_leak=max(each.max_leak for each in proofs),
        reason=("in training mode, " if last.mode == "training" else "") + last.problem if last.problem else reason,
        max_gradient_leak=float(np.fmax.reduce([each.max_gradient_leak for each in proofs])),
        route=route_of(model),
        modes=(last.mode,) if last.problem else tuple(each.mode for each in proofs),
        unproven=unproven,
        kernel=last.kernel,
    )


def _check_batch(model: nn.Module, batch: Mapping[str, Any]) -> IsolationReport:
    """Check isolation on a batch in evaluation mode and, if documents are isolated, in training mode."""
    if part_in(batch):
        raise PackingError(
            "batch: expected whole documents, got a part of a row; training proves rows on several ranks"
        )
    proofs = [prove_on_batch(model, batch, training=False)]
    if proofs[0].documents < 2:
        raise PackingError(f"batch: expected several documents, got one document of {proofs[0].longest} tokens")
    if not proofs[0].problem:
        proofs.append(prove_on_batch(model, batch, training=True))
    return _report(inner_model(model), proofs, str(proofs[-1]))


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model is a language model: whether it has an output layer or, if it does not name one, returns
    as many numbers for each token of a document as its vocabulary has."""
    if has_vocabulary(model) or model.config.is_encoder_decoder or not has_local_weights(model):
        return has_vocabulary(model)
    case = RowCase(Runner(model))
    with suppress(ModelNotSupportedError):
        case.examine()
        stated = getattr(model.config.get_text_config(), "vocab_size", None)
        return case.width in (len(embedding_of(model).weight), stated)
    return False
