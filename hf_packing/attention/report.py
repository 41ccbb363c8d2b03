"""Check whether packed documents affect each other's logits or gradients in a model, and report it."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention.cases import VARYING, BatchCase, DocumentTokens, PaddedCase, RowCase
from hf_packing.attention.inspect_model import (
    distinctive_lengths,
    embedding_of,
    has_local_weights,
    has_vocabulary,
    inner_model,
    refuse_meta_device,
    weights_location,
)
from hf_packing.attention.kernels import kernel_of
from hf_packing.attention.locate import locate_leak
from hf_packing.attention.proof import Problem, prove
from hf_packing.attention.route import Route, is_patched, route_of
from hf_packing.attention.runs import NotCallableError, Runner, what_is_missing
from hf_packing.attention.tree_proof import prove_trees
from hf_packing.batch.collate import PackingCollator
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError, PackingError


@dataclass(frozen=True)
class BatchProof:
    """The result of a proof on a training batch."""

    tokens: int
    documents: int
    """Number of documents; a piece of a document that was cut counts as a document."""
    longest: int
    """Number of tokens in the longest document."""
    training: bool
    dtype: torch.dtype
    alone: int
    """Number of documents that were compared with the same documents run alone."""
    gradients: bool
    """True if gradients were compared, too."""
    is_compiled: bool
    kernel: str
    """The kernel on which the attention of a patched model ran; empty if the model computes attention itself."""
    problem: str = ""
    """The reason why isolation is not proven; empty if it is proven."""
    max_leak: float = 0.0
    """The largest change of an output in documents that were not replaced."""
    max_gradient_leak: float = float("nan")
    """The largest gradient of a document's outputs at another document, divided by the largest gradient at the document
    itself; nan if gradients were not computed."""

    @property
    def where(self) -> str:
        mode = "training" if self.training else "evaluation"
        return (
            f"a batch of {self.tokens:,} tokens with {self.documents:,} documents of up to {self.longest:,} tokens, in "
            f"{mode} mode and {str(self.dtype).removeprefix('torch.')}"
        )

    def __str__(self) -> str:
        if self.problem:
            return f"not isolated on {self.where}: {self.problem}"
        compared = "logits or gradients" if self.gradients else "logits"
        kernel = f"; kernel: {self.kernel}" if self.kernel else ""
        return (
            f"{self.documents:,} documents of up to {self.longest:,} tokens, {self.tokens:,} in all, in "
            f"{str(self.dtype).removeprefix('torch.')}; no document changes the {compared} of another (largest change "
            f"{self.max_leak:.2g}); alone they are the same ({self.alone} compared){kernel}"
        )


@torch.inference_mode(False)  # gradients are compared
def prove_on_batch(model: nn.Module, batch: Mapping[str, Any], training: bool = True) -> BatchProof:
    """Prove isolation on a training batch, and return what was proven. See `BatchCase` for the calls of the model.

    All ranks that shard a model have to call this function at the same time; all of them make the same calls.

    Args:
        model: a model as a training loop calls it, patched or not, with or without wrappers.
        batch: a packed batch, or one of trees, as PackingCollator makes it. Labels are ignored.
        training: whether to run the model in training mode.
    """
    case = BatchCase(model, batch, training)
    proof = prove(case)
    problem = proof.problem
    if case.on_any_rank(problem is not None):
        problem = _with_place(case, problem)
    return BatchProof(
        tokens=case.trees.tokens,
        documents=len(case.paths),
        longest=max(case.lengths),
        training=training,
        dtype=case.runner.dtype,
        alone=len(proof.alone[0].outputs),
        gradients=bool(proof.packed.gradients),
        is_compiled=case.runner.is_compiled,
        kernel=_kernel_of(case.model),
        problem="" if problem is None else problem.text,
        max_leak=proof.max_leak,
        max_gradient_leak=proof.max_gradient_leak,
    )


def _with_place(case: BatchCase, problem: Problem | None) -> Problem | None:
    """Return the problem with the name of the module in which the difference begins.

    If ranks share the model's weights, all of them make the same calls, also those without a problem.
    """
    together = torch.distributed.is_initialized() and not has_local_weights(case.model)
    for compared in ("replaced", "alone"):
        if together or (problem is not None and problem.compared == compared):
            place = locate_leak(case, compared)
            if place and problem is not None and problem.compared == compared:
                problem = replace(problem, text=f"{problem.text}; the difference begins in {place}")
    return problem


def _kernel_of(model: PreTrainedModel) -> str:
    """Return `kernel_of(model)`, or an empty string if attention is left to the model itself."""
    route = route_of(model)
    return kernel_of(model) if route is not None and route.method.attention else ""


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
    runner = Runner(model)
    case: RowCase = PaddedCase(runner, seed)
    if _takes_packed_rows(runner):
        lengths = [length for row in range(rows) for length in _rotated(distinctive_lengths(model), row)]
        case = RowCase(runner, lengths=lengths, make_batch=partial(_collate, collator), seed=seed)
    with suppress(NotCallableError):  # without measured rounding, fixed limits apply
        case.examine()
    report = _check(case)
    if not report.isolated:
        return report
    training = case.in_training()
    try:
        with training.undisturbed():
            unproven = training.randomness(lambda: training.run().outputs)
    except Exception as error:  # custom model code may raise anything
        return replace(report, unproven=f"the model cannot be called in training mode: {error}")
    if unproven == VARYING:
        return replace(report, unproven=VARYING)
    found = _check(training)
    return replace(
        found,
        max_leak=max(report.max_leak, found.max_leak),
        max_gradient_leak=max(report.max_gradient_leak, found.max_gradient_leak),
        modes=("evaluation", "training") if found.isolated else ("training",),
        unproven=unproven or (report.route.unproven if report.route else ""),
    )


def _check(case: RowCase) -> IsolationReport:
    """Run a case without a comparison with documents alone, and return a report."""
    model, route = case.model, route_of(case.model)
    case.compares, case.wants_gradients = False, True
    try:
        proof = prove(case)
    except PackingError:
        raise
    except Exception as error:  # custom model code may raise anything; the report contains the error
        reason = f"{case.mode}the model cannot be called on a packed row: {error}{what_is_missing(model)}"
        return IsolationReport(False, float("nan"), reason, route=route)
    reason = "changing one document did not change the logits of other documents"
    if proof.problem is not None:
        if proof.problem.compared == "model":
            raise PackingError(proof.problem.text)
        reason = case.mode + proof.problem.text
        if proof.problem.compared != "memory":
            reason += _hint(case)
    kernel = _kernel_of(model)
    return IsolationReport(proof.problem is None, proof.max_leak, reason, proof.max_gradient_leak, route, kernel=kernel)


def _hint(case: RowCase) -> str:
    """Return the end of a reason, which says what to do."""
    hint = f", with attention {case.model.config._attn_implementation!r}"
    with suppress(Exception):  # a model that does not take use_cache
        case.options, case.wants_gradients = {"use_cache": False}, False
        if not case.training and prove(case).problem is None:
            hint = (
                "; with use_cache=False there is no leak, since transformers detects packed rows only without a cache"
            )
    return f"{hint}. hf_packing.patch_model(model) keeps documents apart, or raises an error"


def _check_trees(model: PreTrainedModel) -> IsolationReport:
    """Prove that a patched model runs rows of trees, and return a report of the proof."""
    if not is_patched(model):
        raise PackingError(f"trees: expected a model patched by patch_model, but {type(model).__name__} is not patched")
    try:
        proof = prove_trees(model)
    except ModelNotSupportedError as error:
        return IsolationReport(False, float("nan"), str(error), route=route_of(model))
    return IsolationReport(
        isolated=True,
        max_leak=proof.max_leak,
        reason="changing a segment of a tree changed no logits but its own and those below it, and all documents equal "
        "the same documents alone",
        max_gradient_leak=proof.max_gradient_leak,
        route=route_of(model),
        modes=("evaluation", "training"),
        unproven=proof.unproven,
        kernel=_kernel_of(model),
    )


def _takes_packed_rows(runner: Runner) -> bool:
    """Return whether a model takes packed rows, since it returns logits or hidden states for each token."""
    if (route := route_of(runner.model)) is not None:
        return route.facts.takes_packed_rows
    return has_vocabulary(runner.model) or _width(runner) is not None


def _width(runner: Runner) -> int | None:
    """Return how many numbers a model returns for each token of a document; None if it returns none."""
    with suppress(Exception):  # custom model code may raise anything
        case = RowCase(runner)
        case.examine()
        return case.known[0].outputs[0].shape[-1]
    return None


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model is a language model: whether it has an output layer or, if it does not name one, returns
    as many numbers for each token of a document as its vocabulary has."""
    if has_vocabulary(model) or model.config.is_encoder_decoder or not has_local_weights(model):
        return has_vocabulary(model)
    return _width(Runner(model)) in (len(embedding_of(model).weight), model.config.get_text_config().vocab_size)


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


def _rotated(lengths: list[int], by: int) -> list[int]:
    return lengths[by % len(lengths) :] + lengths[: by % len(lengths)]


def _collate(collator: Collator | None, documents: DocumentTokens) -> Mapping[str, Any]:
    """Return a batch of packed rows of three documents each."""
    packed = [_pack(documents[start : start + 3]) for start in range(0, len(documents), 3)]
    try:
        return (collator or PackingCollator())(packed)
    except Exception as error:
        raise PackingError(
            f"collator: expected a function that makes a batch from a list of packed rows, but the collator raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _pack(documents: DocumentTokens) -> dict[str, list[int]]:
    """Return documents packed in a single row, with the columns that `hf_packing.pack` makes."""
    tokens = [token for document in documents for token in document]
    labels = [label for document in documents for label in (IGNORED_LABEL, *document[1:])]
    positions = [position for document in documents for position in range(len(document))]
    lengths = [len(document) for document in documents]
    return {"input_ids": tokens, "labels": labels, "position_ids": positions, "seq_lengths": lengths}
