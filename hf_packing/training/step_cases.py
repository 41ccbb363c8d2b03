"""The ways in which trainers and loops make a step: of packed documents, of whole rows, and of a padded batch."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer

from hf_packing.attention import (
    StepRunner,
    check_patched,
    has_local_weights,
    in_mode,
    inner_model,
    input_device,
    pad_token_of,
    temporarily,
)
from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import expect
from hf_packing.columns import (
    ATTENTION_MASK,
    COMPLETION_MASK,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    LOSS_WEIGHTS,
    POSITION_IDS,
)
from hf_packing.errors import PackingError
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.kinds import labels_of
from hf_packing.training.kinds.packed import Document, is_of
from hf_packing.training.kinds.split import ranks_of
from hf_packing.training.loss_unit import CheckedRows
from hf_packing.training.losses import COUNTS, Batch, Loss, TokenMean
from hf_packing.training.model_loss import WholeStep, predicts_next
from hf_packing.training.models import has_own_code, models_of, prepared_model
from hf_packing.training.ranks import on_all_ranks
from hf_packing.training.sources import PackedRows
from hf_packing.training.step import StepCase, StepReport, prove_step
from hf_packing.training.step_counts import StepCounts


def _length(document: Document) -> int:
    return document[INPUT_IDS].shape[1]


_SHARE, _FEW_TOKENS = 8, 64
"""A step has at most one in this number of a batch's tokens, padding included, or so many tokens."""

_FEWEST, _MOST = 3, 8
"""Numbers of documents."""

_READ = 64
"""The most rows that documents are chosen from."""


class PackedCase(StepCase):
    """A step of packed documents.

    If they share prefixes in the batch, or are on several ranks, losses of routers are left out.

    Args:
        runner: runs the model.
        collator: the collator of the training.
        batch: a batch, whose documents make the step if there is no source.
        source: the source whose next documents make the step; None if the documents of the source cannot be read
            again.
        is_weighted: whether labels may have weights, on any rank.
    """

    hint = (
        "look for a loss that reads across documents, a mean for each document (take loss='sequence' and no "
        "compute_loss of your own), weights by places in the row or by labels of others (take places from "
        "position_ids, which begin anew in each document), and a model that reads packed rows but is not patched (make "
        "it an attribute of the trainer before attach, or call patch_model(model, padded=True))"
    )
    most_tokens: int | None
    """The number of tokens of a batch; None if it is not known."""
    longest: int | None = None
    """The most tokens of a document; None for no limit."""
    loss: Loss = "token"
    has_own_loss: bool
    """Whether the user's own code has a part in the loss, which may read the places of tokens in the row."""
    weight: float | None
    """The weight of all labels in the packed step, which does not change its loss; None if labels have no weights."""

    def __init__(
        self,
        runner: StepRunner,
        collator: PackingCollator,
        batch: Batch | None,
        source: PackedRows | None,
        is_weighted: bool,
    ) -> None:
        self.runner, self.collator, self._first = runner, collator, int(not collator.keep_first_labels)
        self.collate: Callable[[Any], Batch] = collator
        """Makes the packed batch of rows, or this rank's part of it."""
        if source is not None:
            found, self.collate = source.next_rows(_READ), source.collator(collator, evenly=True)
            read = on_all_ranks(lambda _: [labels_of(collator([row])) for row in found])
            self.kind, self.documents = read[0], [each for row in read for each in row.documents()]
        elif batch is not None:
            self.kind = labels_of(batch)
            self.documents = self.kind.documents()
        self.weight = 0.5 if is_weighted else None
        self.most_documents = collator.max_segments and collator.max_segments - 1
        runner.without_router_losses = self.kind.shares_tokens or runner.ranks_per_row > 1
        self.inner = inner_model(runner.model)
        self.device = input_device(self.inner)

    def choose(self, without_padding: bool) -> list[Document]:
        """Return a few documents: those with labels first, then short ones first, and parts of long ones. Without
        padding, they have equal lengths, and other numbers of labels. Every second one begins right before its first
        label: a loss that looks two tokens ahead of a document reads no label of a prompt."""
        most = max(_FEW_TOKENS, (self.most_tokens or 0) // _SHARE)
        longest = min(self.longest or most, most // _FEWEST)
        taken = [each for each in self.documents if _length(each) > 1] or [*self.documents]
        if not self.kind.shares_tokens:
            parts = [self._part(each, longest) for each in taken]
            taken = sorted(parts, key=lambda each: (not self._items(each), _length(each)))
        taken = taken[: self.most_documents][:_MOST]
        while len(taken) > _FEWEST and len(taken) * max(map(_length, taken)) > most:
            taken.pop()
        if self._first and not self.kind.shares_tokens:
            taken[1::2] = [self._from_label(each) for each in taken[1::2]]
        if without_padding:
            taken = [self._part(each, min(map(_length, taken))) for each in taken]
            taken = [self._with_labels(each, self._items(each) - place) for place, each in enumerate(taken)]
        if self.loss == "sequence":  # the mean over documents is the mean over labels, if all have as many
            taken = [each for each in taken if self._items(each)] or taken[:1]
            taken = [self._with_labels(each, min(map(self._items, taken))) for each in taken]
        return taken

    def _places(self, document: Document) -> Tensor:
        """Return the tokens with a label that is trained on."""
        return (document[LABELS][0, self._first :] != IGNORED_LABEL).nonzero()[:, 0] + self._first

    def _items(self, document: Document) -> int:
        return len(self._places(document))

    def _part(self, document: Document, length: int) -> Document:
        """Return a part of a document of at most so many tokens, around its first label."""
        first = int(self._places(document)[:1].sum())
        begin = max(0, min(first - length // 2, _length(document) - length))
        return {name: each[:, begin : begin + length] for name, each in document.items()}

    def _from_label(self, document: Document) -> Document:
        """Return a document from the token before its first label on; the whole document if it has no label."""
        begin = max(0, int(self._places(document)[:1].sum()) - self._first)
        return {name: each[:, begin:] for name, each in document.items()}

    def _with_labels(self, document: Document, most: int) -> Document:
        """Return a document with its last labels, so many at most, but at least one."""
        left_out = self._places(document)[: -max(1, most)]
        return {**document, LABELS: document[LABELS].index_fill(1, left_out, IGNORED_LABEL)}

    def sizes(self, of: list[Document]) -> tuple[int, int, int]:
        items = [*map(self._items, of)]
        return len(of), sum(map(_length, of)), sum(items) if self.loss == "token" else sum(map(bool, items))

    def whole(self) -> list[Document] | None:
        # FSDP2 leaves weights gathered after a forward alone, which get no gradients
        if not self.has_own_loss or self.runner.without_router_losses or not has_local_weights(self.inner):
            return None
        ends = accumulate(map(_length, self.documents))
        own = [each for each, end in zip(self.documents, ends, strict=True) if end <= (self.most_tokens or 0)]
        return own[: self.most_documents] or None

    def batch_of(self, of: list[Document]) -> Batch:
        """Return the packed batch of some documents."""
        rows = [{name: each[0].cpu().numpy() for name, each in document.items()} for document in of]
        if self.weight is not None:
            rows = [{**row, LOSS_WEIGHTS: np.full(len(row[INPUT_IDS]), self.weight)} for row in rows]
        return send_to_device(self.collate(self.kind.rows_of(rows)), self.device)  # type: ignore[no-any-return]

    def padded(self, of: list[Document], padding: int) -> Batch:
        """Return the documents as rows with padding on the right, of so many tokens more than they need."""
        width = max(map(_length, of)) + padding
        width += -width % self.collator.align_tokens
        full = [{**each, ATTENTION_MASK: torch.ones_like(each[INPUT_IDS])} for each in of]
        rows = [_with_padding(each, width - _length(each), self.inner) for each in full]
        batch = {name: torch.cat([each[name] for each in rows]) for name in rows[0]}
        if check_patched(self.inner).method.positions:  # which a compute_loss may read
            batch[POSITION_IDS] = torch.arange(width).expand(len(of), width)
        return send_to_device(batch, self.device)  # type: ignore[no-any-return]


class TrainerCase(PackedCase):
    """A step of a trainer that trains on packed batches.

    The packed step has its documents twice, in two micro-batches, of which the first one runs: a loss that is divided
    by the items of its own micro-batch alone is twice too large.

    Args:
        trainer: the attached trainer.
        model: the model as it is trained, with the wrappers of accelerate.
        batch: a batch of the trainer; None for documents of the next one in training.
        training: whether the step is one of training.
    """

    def __init__(self, trainer: Any, model: nn.Module, batch: Batch | None, training: bool) -> None:
        state = trainer.attached
        runner = runner_of(trainer, model, ranks_of(state.batching) if training else 1)
        source = state.source if batch is None else None
        super().__init__(runner, state.collator, batch, source, state.source.is_weighted)
        self.trainer, self.model, self.training = trainer, model, training
        self.most_tokens, self.loss = state.max_tokens, state.loss if training else "token"
        self.has_own_loss = has_own_loss(trainer)
        self.longest = longest_segment(state.batching, trainer.state.global_step) if training else None

    def packed(self, of: list[Document]) -> Tensor:
        inputs = self.batch_of(of)
        if not self.training:
            asked = _not_proving(self.trainer, TokenMean(self.device))
            return asked.compute_loss(self.model, asked._prepare_inputs(inputs))  # type: ignore[no-any-return]
        return _loss_of_step(self.trainer, self.runner, [inputs], self.sizes(of)[-1], copies=2)

    def unpacked(self, of: list[Document], padding: int) -> Tensor:
        stock = without_attach(self.trainer)
        if self.runner.without_router_losses:
            stock.aux_loss_enabled = False
        return _stock_loss(stock, self.model, self.padded(of, padding))


class LoopCase(PackedCase):
    """A step of your own training loop.

    Args:
        model: a patched model, with or without wrappers.
        batch: a batch of the loop, whose documents make the step if the source is not one of packed rows.
        collator: the collator of the loop.
        function: computes the loss of a model and a batch; None for `compute_loss`, and the model's own loss unpacked.
        loss: what the loss is a mean over.
        source: where the batches come from, if it is known.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        collator: PackingCollator,
        function: Callable[[nn.Module, Batch], Tensor] | None = None,
        loss: Loss = "token",
        source: Any = None,
    ) -> None:
        runner = StepRunner(model, ranks_per_row=labels_of(batch).ranks)
        is_weighted = LOSS_WEIGHTS in batch if source is None else source.is_weighted
        super().__init__(runner, collator, batch, source if isinstance(source, PackedRows) else None, is_weighted)
        self.model, self.function, self.loss = model, function, loss
        self.has_own_loss = function is not None or has_own_code(model)
        self.most_tokens = batch[INPUT_IDS].shape[1]

    def packed(self, of: list[Document]) -> Tensor:
        inputs = self.batch_of(of)
        if self.function is not None:
            return self.function(self.model, inputs)
        step = WholeStep.of(self.model, inputs, self.loss)
        items = torch.tensor(max(1, self.sizes(of)[-1]) * (self.weight or 1), device=self.device)
        return step.run(self.model)[0] * step.share_of(items)

    def unpacked(self, of: list[Document], padding: int) -> Tensor:
        inputs = self.padded(of, padding)
        return self.model(**inputs).loss if self.function is None else self.function(self.model, inputs)


class RowsCase(StepCase):
    """A step of a trainer whose rows stay whole, in two micro-batches of different rows.

    Args:
        trainer: the attached trainer.
        model: the model as it is trained, with the wrappers of accelerate.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self.trainer, self.model, self.runner = trainer, model, runner_of(trainer, model)
        self.device, self.source = input_device(inner_model(model)), trainer.attached.source

    def choose(self, without_padding: bool) -> CheckedRows | None:
        if not without_padding:
            return self.trainer.attached.checked  # type: ignore[no-any-return]
        checked: CheckedRows | None = self.source.collate_parts(equal=True)
        masks = [each for name, each in checked.whole.items() if name.endswith(ATTENTION_MASK)] if checked else []
        return checked if all(each.all() for each in masks) else None

    def packed(self, of: CheckedRows) -> Tensor:
        batches = send_to_device(self.source.counted(of), self.device)
        return _loss_of_step(self.trainer, self.runner, batches, self.sizes(of)[-1])

    def unpacked(self, of: CheckedRows, padding: int) -> Tensor:
        inputs = send_to_device(_with_padding(of.whole, padding, inner_model(self.model)), self.device)
        return _stock_loss(without_attach(self.trainer), self.model, inputs)

    def sizes(self, of: CheckedRows) -> tuple[int, int, int]:
        counts = torch.stack([each[COUNTS] for each in self.source.counted(of)])
        tokens, rows, _, units = counts.sum(0).tolist()
        return rows, tokens, units


class BatchCase(StepCase):
    """A step of a trainer that keeps its own batches, whose padding is not computed.

    Args:
        trainer: the attached trainer.
        model: the model as it is trained, with the wrappers of accelerate.
        inputs: what the trainer computes the loss of.
        items: the num_items_in_batch with which it does.
    """

    def __init__(self, trainer: Any, model: nn.Module, inputs: Batch, items: Any) -> None:
        self.trainer, self.model, self.runner = trainer, model, runner_of(trainer, model)
        self.inputs, self.items = inputs, items

    def choose(self, without_padding: bool) -> Batch | None:
        return _without_padding(self.inputs) if without_padding else self.inputs

    def packed(self, of: Batch) -> Tensor:
        return self.unpacked(of, 0)

    def unpacked(self, of: Batch, padding: int) -> Tensor:
        inputs = dict(_with_padding(of, padding, inner_model(self.model)))
        stock = without_attach(self.trainer)
        return stock.compute_loss(self.model, inputs, num_items_in_batch=self.items)  # type: ignore[no-any-return]

    def sizes(self, of: Batch) -> tuple[int, int, int]:
        masks = [each for name, each in of.items() if name.endswith((ATTENTION_MASK, "prompt_mask", COMPLETION_MASK))]
        rows = next(len(each) for each in of.values() if isinstance(each, Tensor) and each.ndim)
        return rows, int(sum(each.sum() for each in masks)), rows


def _without_padding(batch: Batch) -> Batch | None:
    """Return a padded batch with only those columns in which every row has a token; None if there are none."""
    masks = [each for name, each in batch.items() if name.endswith("mask") and each.ndim == 2]
    columns = {each.shape: each.bool().all(0) for each in masks}
    if not columns or not all(kept.any() for kept in columns.values()):
        return None
    shapes = {name: getattr(each, "shape", None) for name, each in batch.items()}
    return {name: each[:, columns[shapes[name]]] if shapes[name] in columns else each for name, each in batch.items()}


def _with_padding(batch: Batch, padding: int, model: PreTrainedModel) -> Batch:
    """Return a padded batch with more padding on the right of everything that has a value for each token."""
    shape = getattr(batch.get(ATTENTION_MASK, batch.get(INPUT_IDS)), "shape", None)
    fill = {LABELS: IGNORED_LABEL, INPUT_IDS: pad_token_of(model) or 0}
    return {
        name: F.pad(each, (0, padding), value=fill.get(name, 0)) if is_of(each, shape) else each
        for name, each in batch.items()
    }


def has_own_loss(trainer: Any) -> bool:
    """Return whether code of the user has a part in the loss of an attached trainer, in the trainer or in a model."""
    kind = trainer.attached.kind
    functions = kind.compute_loss, kind.training_step, kind._prepare_inputs, trainer.compute_loss_func
    return has_own_code(trainer.model, *functions)


_UNCHANGED = ("train_dataset", "eval_dataset", "accelerator", "optimizer", "callback_handler", "attached")
"""Attributes of a trainer that `compute_loss` does not change, or that are data."""


def runner_of(trainer: Any, model: nn.Module, ranks_per_row: int = 1) -> StepRunner:
    """Return what runs steps of an attached trainer and leaves nothing of them."""
    _, *others = models_of(trainer).values()
    kind = trainer.attached.kind
    of_classes = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, (list, dict, set))]
    holders = [vars(trainer), kind.compute_loss, *of_classes]
    without = [getattr(trainer, name, None) for name in _UNCHANGED]
    with trainer.accelerator.autocast():  # which wraps the forward of the model alone
        return StepRunner(model, others, ranks_per_row, holders, without)


def _not_proving(trainer: Any, evaluation: TokenMean | None = None) -> Any:
    """Return a shallow copy of an attached trainer that proves nothing, in an evaluation or not."""
    asked = copy.copy(trainer)
    asked.attached = copy.copy(trainer.attached)
    asked.attached.first_batch_proof, asked.attached.evaluation = None, evaluation
    return asked


def _loss_of_step(trainer: Any, runner: StepRunner, batches: Sequence[Batch], own: int, copies: int = 1) -> Tensor:
    """Return the loss of an attached trainer's step, as a mean over the items in the batches of this rank alone.

    Args:
        trainer: the attached trainer.
        runner: has the model.
        batches: the micro-batches of this rank.
        own: the number of items in them.
        copies: how often the step has them; they run once.
    """
    device, processes = input_device(inner_model(runner.model)), trainer.accelerator.num_processes
    items = torch.tensor(own, device=device)
    everywhere = trainer.accelerator.gather(items[None]).sum() / processes / runner.ranks_per_row
    asked = _not_proving(trainer)
    divisor = StepCounts().add(asked.counts_of([*batches] * copies, device))
    losses = [_sent_backward(asked, runner.model, each, divisor) for each in batches]
    return sum(losses) * (copies * everywhere / items.clamp(min=1))  # type: ignore[no-any-return]


def _stock_loss(stock: Any, model: nn.Module, inputs: Batch) -> Tensor:
    """Return the loss of a batch as a trainer computes it without attach, as a step of its own."""
    with as_one_micro_batch(stock):
        _, items = stock.get_batch_samples(iter([inputs]), 1, input_device(inner_model(model)))
        if not model.training:
            inputs = stock._prepare_inputs(dict(inputs))
            return stock.compute_loss(model, inputs, num_items_in_batch=items)  # type: ignore[no-any-return]
        return _sent_backward(stock, model, dict(inputs), items)


def _sent_backward(trainer: Any, model: nn.Module, inputs: Batch, items: Any) -> Tensor:
    """Return the loss that the trainer's own training_step sends backward. Modules keep their mode."""
    losses: list[Tensor] = []
    keeps_mode = temporarily(model, train=lambda _=True: model)
    with keeps_mode, temporarily(trainer.accelerator, backward=lambda loss, **_: losses.append(loss)):
        type(trainer).training_step(trainer, model, inputs, items)  # an attribute of its own would call the original
    (loss,) = losses
    return loss


def without_attach(trainer: Any) -> Any:
    """Return a shallow copy of a trainer, as it was before an earlier attach."""
    plain = copy.copy(trainer)
    if (state := getattr(trainer, "attached", None)) is not None:
        plain.__class__ = state.kind
        if trainer.data_collator is state.collator:
            plain.data_collator = state.own_collator
    return plain


@contextmanager
def as_one_micro_batch(trainer: Trainer) -> Iterator[None]:
    """Context manager: within the block, the trainer takes a micro-batch for the whole optimizer step on all ranks.

    The trainer divides by no other number of micro-batches afterwards; transformers before 5.19 did in any case.
    """
    trainer.current_gradient_accumulation_steps = 1
    # a compute_loss may divide by the steps of the arguments itself
    with temporarily(trainer.args, gradient_accumulation_steps=1, average_tokens_across_devices=False):
        yield


def check_step(
    of: Any, batch: Batch | None = None, *, loss: Callable[[nn.Module, Batch], Tensor] | None = None
) -> StepReport:
    """Check whether a packed step has the loss and the gradients that the same documents have without packing.

    A few documents make one step, packed, and one without packing on the models without their patches. Losses and the
    gradients of all parameters are compared, up to the measured effect of rounding. Dropout is off, nothing is
    stepped, and the models, the trainer and the random states are as before. All ranks call this together. `attach`
    and `prepare_dataloader` with prove="first batch" make this check on the first batch.

    Args:
        of: a trainer after `attach`, whose class computes the loss without packing of what its own collator makes; or
            a patched model.
        batch: of a trainer that keeps its own batches, what it computes the loss of, such as a batch of rollouts; None
            for the next batch of its dataloader. Of a model, a packed batch, as PackingCollator or a loader of
            prepare_dataloader makes it.
        loss: of a model, your own function of the model and a batch, which returns the mean loss of the batch, a
            scalar. It gets packed batches, and padded ones with input_ids, attention_mask and labels. None to compare
            `compute_loss` with the model's own loss.

    Returns:
        A report that says whether the steps are the same and, if not, how they differ and what to look for.

    Raises:
        PackingError: the trainer is not attached, the model is not patched, or a loss cannot be computed.

    Example:
        >>> import hf_packing as hfp, torch, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = hfp.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)))
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 8]}])
        >>> hfp.check_step(model, batch).same
        True
        >>> def two_ahead(model, batch):
        ...     logits = model(**batch).logits[:, :-2].transpose(1, 2)
        ...     return torch.nn.functional.cross_entropy(logits, batch["labels"][:, 2:])
        >>> hfp.check_step(model, batch, loss=two_ahead).same
        False
    """
    if isinstance(of, nn.Module):
        check_patched(of)
        if batch is None:
            raise PackingError("batch: expected a packed batch beside a model, got None")
        return prove_step(LoopCase(of, batch, PackingCollator(not predicts_next(of)), loss))
    state = getattr(of, "attached", None)
    if state is None:
        raise PackingError(f"of: expected a trainer after attach, or a patched model, got {type(of).__name__}")
    expect(None, "beside a trainer, which computes its loss", loss=loss)
    if hasattr(state, "source"):
        expect(None, "for a trainer whose batches attach has planned, whose next rows make the step", batch=batch)
    model = prepared_model(of.accelerator, of.model)
    with of.compute_loss_context_manager(), in_mode(model, training=True):
        return prove_step(of.step_case(model, batch))
