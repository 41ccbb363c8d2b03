"""The ways in which trainers and loops make a step: of packed documents, of whole rows, and of a padded batch."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

from hf_packing.attention import StepRunner, check_patched, in_mode, inner_model, input_device, pad_token_of
from hf_packing.batch.collate import PackingCollator, is_tree_batch
from hf_packing.columns import (
    ATTENTION_MASK,
    CU_SEQ_LENS,
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    MAX_LENGTHS,
    POSITION_IDS,
    SEGMENT_COLUMNS,
    SEQ_IDX,
    TREE_COLUMNS,
)
from hf_packing.errors import PackingError
from hf_packing.sampling.rows import trees_of_documents
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.losses import (
    COUNTS,
    Batch,
    Loss,
    TokenMean,
    documents_and_tokens,
    labels_key,
    part_of_row,
    trees_of,
)
from hf_packing.training.model_loss import WholeStep, predicts_next
from hf_packing.training.models import models_of, prepared_model
from hf_packing.training.ranks import data_rank, on_all_ranks
from hf_packing.training.sources import PackedRows, Source
from hf_packing.training.step import StepCase, StepReport, prove_step
from hf_packing.training.step_counts import StepCounts
from hf_packing.training.whole_rows import CheckedRows, collate_rows, read_rows

Document = dict[str, Tensor]
"""The columns of a document, each [1, tokens]."""


class Documents(NamedTuple):
    """The documents of a step, on two ways."""

    packed: list[Document]
    """As training reads them."""
    own: list[Document]
    """As the trainer's own collator makes them, each alone."""

    def taken(self, places: Sequence[tuple[int, slice]]) -> "Documents":
        """Return parts of some of the documents, given their indices and their tokens."""
        return Documents(*([_part_of(side[number], part) for number, part in places] for side in self))

    def with_labels(self, counts: Sequence[int], predicts_next: bool) -> "Documents":
        """Return the documents with so many labels of each at most: the last ones."""
        return Documents(
            *(
                [_with_labels(each, most, predicts_next) for each, most in zip(side, counts, strict=True)]
                for side in self
            )
        )

    @property
    def lengths(self) -> list[int]:
        return [each[INPUT_IDS].shape[1] for each in self.packed]


def _part_of(document: Document, part: slice) -> Document:
    return {name: each[:, part] for name, each in document.items()}


def _with_labels(document: Document, most: int, predicts_next: bool) -> Document:
    places = (document[LABELS][0] != IGNORED_LABEL).nonzero()[
        int(predicts_next and document[LABELS][0, 0] != -100) :, 0
    ]
    labels = document[LABELS].clone()
    labels[:, places[:-most]] = IGNORED_LABEL
    return {**document, LABELS: labels}


_NOT_OF_TOKENS = {*SEGMENT_COLUMNS, *MAX_LENGTHS, *TREE_COLUMNS}
"""Columns that say where documents are."""


def documents_of(batch: Batch) -> list[Document]:
    """Return the documents of a packed batch or a batch of trees, without copies and filled tokens."""
    columns = {
        name: each
        for name, each in batch.items()
        if name not in _NOT_OF_TOKENS and isinstance(each, Tensor) and each.shape == batch[INPUT_IDS].shape
    }
    if is_tree_batch(batch):
        trees, labels = trees_of(batch), batch["tree_labels"]
        places = [torch.from_numpy(trees.path_of(end)) for end in batch[ENDS].tolist()]
        trained = torch.from_numpy(documents_and_tokens(batch)[0]), torch.from_numpy(documents_and_tokens(batch)[1])
        documents = []
        for number, own in enumerate(places):
            is_trained = torch.isin(own, trained[1][trained[0] == number]).to(labels.device)
            document = {name: each[:, own] for name, each in columns.items()}
            documents.append({**document, LABELS: labels[:, own].where(is_trained, IGNORED_LABEL)})
        return documents
    is_own, documents = batch[SEQ_IDX][0] >= 0, []
    for begin, end in pairwise(batch[CU_SEQ_LENS[0]].tolist()):
        own = is_own[begin:end]
        if own.any():
            documents.append({name: each[:, begin:end][:, own] for name, each in columns.items()})
    return documents


def _padded(documents: Sequence[Document], pad_token: int, more: int, multiple: int) -> Batch:
    """Return the documents as rows with padding on the right, of `more` tokens more than they need."""
    width = max(each[INPUT_IDS].shape[1] for each in documents) + more
    width += -width % multiple
    fill = {LABELS: IGNORED_LABEL, INPUT_IDS: pad_token}
    masked = [{ATTENTION_MASK: torch.ones_like(each[INPUT_IDS]), **each} for each in documents]
    return {
        name: torch.cat(
            [F.pad(each[name], (0, width - each[name].shape[1]), value=fill.get(name, 0)) for each in masked]
        )
        for name in masked[0]
    }


_SHARE = 8
"""A step has at most one in this number of a batch's tokens, padding included."""

_FEWEST, _MOST = 3, 8
"""Numbers of documents."""

_FEW_TOKENS = 64
"""So many tokens are always allowed."""


def chosen(
    documents: Documents,
    most_tokens: int | None,
    predicts_next: bool,
    longest: int | None = None,
    number: int | None = None,
    equal: bool = False,
) -> Documents:
    """Return a few documents of a step, those with labels first, then short ones first, and parts of long ones.

    Args:
        documents: the documents to choose from.
        most_tokens: the number of tokens of a batch; None if it is not known.
        predicts_next: whether the first token of a document has no label.
        longest: the most tokens of a document; None for no limit.
        number: the most documents; None for no limit.
        equal: whether all of them have to have the same number of tokens; then, they have other numbers of labels.
    """
    most = max(_FEW_TOKENS, (most_tokens or 0) // _SHARE)
    labels = [each[LABELS][0, int(predicts_next) :] != IGNORED_LABEL for each in documents.packed]
    lengths = [min(length, longest or length, most // _FEWEST) for length in documents.lengths]
    usable = [each for each, length in enumerate(lengths) if length > 1]
    order = sorted(usable, key=lambda each: (not labels[each].any(), lengths[each]))[: min(_MOST, number or _MOST)]
    while len(order) > _FEWEST and max(lengths[each] for each in order) * len(order) > most:
        order.pop()
    shortest = min((lengths[each] for each in order), default=0)
    places = []
    for each in order:
        length = shortest if equal else lengths[each]
        first = int(labels[each].int().argmax())  # 0 without labels
        begin = max(0, min(first - length // 2, documents.lengths[each] - length))
        places.append((each, slice(begin, begin + length)))
    taken = documents.taken(places)
    counts = [_items(each, predicts_next) - place for place, each in enumerate(taken.packed)]
    return taken.with_labels([max(1, each) for each in counts], predicts_next) if equal else taken


def _items(document: Document, predicts_next: bool) -> int:
    """Return the number of labels that a document is trained on."""
    return int((document[LABELS][:, int(predicts_next) :] != IGNORED_LABEL).sum())


class PackedCase(StepCase):
    """A step of packed documents."""

    documents: Documents
    most_tokens: int | None
    """The number of tokens of a batch; None if it is not known."""
    longest: int | None = None
    """The most tokens of a document; None for no limit."""
    loss: Loss = "token"

    def __init__(self, runner: StepRunner, collator: PackingCollator) -> None:
        self.runner, self.predicts_next = runner, not collator.keep_first_labels
        self.number = None if collator.max_segments is None else collator.max_segments - 1
        """The most documents; None for no limit."""
        self.multiple = lcm(collator.align_documents, collator.align_tokens)
        """The width of padded rows is a multiple of this number of tokens."""
        self.inner = inner_model(runner.model)
        self.device = input_device(self.inner)

    def choose(self, without_padding: bool) -> Documents:
        taken = chosen(self.documents, self.most_tokens, self.predicts_next, self.longest, self.number, without_padding)
        if self.loss == "token":
            return taken
        # the mean over documents is the mean over labels, if all have as many
        trained = [(number, slice(None)) for number, each in enumerate(taken.packed) if self._items(each)]
        taken = taken.taken(trained or [(0, slice(None))])
        fewest = min(map(self._items, taken.packed))
        return taken.with_labels([max(1, fewest)] * len(taken.packed), self.predicts_next)

    def _items(self, document: Document) -> int:
        return _items(document, self.predicts_next)

    def sizes(self, of: Documents) -> tuple[int, int, int]:
        items = [self._items(each) for each in of.packed]
        return len(of.packed), sum(of.lengths), sum(items) if self.loss == "token" else sum(map(bool, items))

    def replaced(self, of: Documents, document: int) -> Documents | None:
        if len(of.packed) < 2:
            return None
        packed = [*of.packed]
        packed[document] = {**packed[document], INPUT_IDS: packed[document][INPUT_IDS].roll(1, dims=1)}
        return Documents(packed, of.own)

    def padded(self, of: Documents, padding: int) -> Batch:
        """Return the documents as rows with padding on the right, on the device of the model."""
        batch = _padded(of.own, pad_token_of(self.inner) or 0, padding, self.multiple)
        if check_patched(self.inner).method.positions:  # which a compute_loss may read
            batch = {**batch, POSITION_IDS: torch.arange(batch[INPUT_IDS].shape[1]).expand_as(batch[INPUT_IDS])}
        return send_to_device(batch, self.device)  # type: ignore[no-any-return]


def _rows_of(documents: Sequence[Document]) -> list[dict[str, Any]]:
    return [{name: each[0].cpu().numpy() for name, each in document.items()} for document in documents]


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
        ranks = state.batching.ranks_per_block
        super().__init__(_runner_of(trainer, model, ranks), state.collator)
        self.trainer, self.model, self.training = trainer, model, training
        self.stock = without_attach(trainer)
        self.most_tokens, self.loss = state.max_tokens, state.loss if training else "token"
        self.longest = longest_segment(state.batching, trainer.state.global_step) if training else None
        if state.source.shares_prefixes:
            self.runner.without_router_losses, self.stock.aux_loss_enabled = True, False
        self.documents = on_all_ranks(lambda _: self._documents(batch))

    def _documents(self, batch: Batch | None) -> Documents:
        """Return documents to choose from.

        Raises:
            PackingError: the trainer's own collator makes other tokens or labels of a document.
        """
        source, collator = self.trainer.attached.source, self.trainer.attached.collator
        if batch is not None:
            documents = documents_of(batch)
            return Documents(documents, documents)
        rows = [*source.next_rows(_READ)]
        collate = _own_collate(self.stock) if any(number is not None for number, _ in rows) else None
        packed, own = [], []
        for number, row in rows:
            for document in documents_of(collator([row])):
                packed.append(document)
                batch = None if collate is None or number is None else collate(number)
                own.append(document if batch is None else _own_document(batch, number, document, self.predicts_next))
        return Documents(packed, own)

    def packed(self, of: Documents) -> Callable[[], Tensor]:
        trainer, state, device = self.trainer, self.trainer.attached, self.device
        batch = state.source.batch_of(_rows_of(of.packed), trainer.accelerator, state.collator)
        inputs = send_to_device(batch, device)
        if not self.training:
            return lambda: _evaluated(copy.copy(trainer), self.model, inputs)
        own = torch.tensor(self.sizes(of)[-1], device=device)
        processes, ranks = trainer.accelerator.num_processes, data_rank(trainer.accelerator).world_size
        everywhere = trainer.accelerator.gather(own[None]).sum() * ranks / processes / state.batching.ranks_per_block

        def loss() -> Tensor:
            asked = copy.copy(trainer)
            divisor = StepCounts().add(asked.counts_of([inputs, inputs], device))
            found = asked.packed_loss(self.model, inputs, num_items_in_batch=divisor)
            return found * (2 * everywhere / (own.clamp(min=1) * ranks))  # type: ignore[no-any-return]

        return loss

    def unpacked(self, of: Documents, padding: int) -> Callable[[], Tensor]:
        return _stock_loss(self.stock, self.model, self.padded(of, padding))


class LoopCase(PackedCase):
    """A step of your own training loop.

    Args:
        model: a patched model, with or without wrappers.
        documents: the documents to choose from.
        collator: the collator of the loop.
        collate: makes a packed batch of documents with it.
        function: computes the loss of a model and a batch; None for `compute_loss`, and the model's own loss unpacked.
        loss: what the loss is a mean over.
        most_tokens: the number of tokens of a batch.
        ranks: number of ranks that run a row together.
        makes_trees: whether documents share prefixes in the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        documents: Sequence[Document],
        collator: PackingCollator,
        collate: Callable[[Sequence[Any]], Batch],
        function: Callable[[nn.Module, Batch], Tensor] | None,
        loss: Loss,
        most_tokens: int | None,
        ranks: int = 1,
        makes_trees: bool = False,
    ) -> None:
        super().__init__(StepRunner(model, ranks_per_row=ranks), collator)
        self.model, self.collate, self.function, self.loss, self.most_tokens = (
            model,
            collate,
            function,
            loss,
            most_tokens,
        )
        self.documents, self.runner.without_router_losses = Documents([*documents], [*documents]), makes_trees

    def packed(self, of: Documents) -> Callable[[], Tensor]:
        inputs, items = send_to_device(self.collate(_rows_of(of.packed)), self.device), self.sizes(of)[-1]
        if (function := self.function) is not None:
            return lambda: function(self.model, inputs)

        def loss() -> Tensor:
            step = WholeStep.of(self.model, inputs, self.loss)
            return step.run(self.model)[0] * step.share_of(torch.tensor(max(1, items)))

        return loss

    def unpacked(self, of: Documents, padding: int) -> Callable[[], Tensor]:
        inputs = self.padded(of, padding)
        if (function := self.function) is not None:
            return lambda: function(self.model, inputs)
        return lambda: self.model(**inputs).loss


def case_of_loop(
    source: Source, accelerator: Accelerator, collator: PackingCollator, loss: Loss, model: nn.Module, batch: Batch
) -> LoopCase:
    """Return the case of a proof of the step of a loop that reads a source, and of which this is the first batch."""
    batches = (collator([row]) for _, row in source.next_rows(_READ)) if isinstance(source, PackedRows) else [batch]
    documents = [document for each in batches for document in documents_of(each)]

    def collate(rows: Sequence[Any]) -> Batch:
        return source.batch_of(rows, accelerator, collator)

    part = part_of_row(batch)
    ranks = part.layout.num_ranks if part else 1
    return LoopCase(
        model, documents, collator, collate, None, loss, batch[INPUT_IDS].shape[1], ranks, source.shares_prefixes
    )


class RowsCase(StepCase):
    """A step of a trainer whose rows stay whole, in two micro-batches of different rows.

    Args:
        trainer: the attached trainer.
        model: the model as it is trained, with the wrappers of accelerate.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        self.trainer, self.model, self.runner = trainer, model, _runner_of(trainer, model)
        self.device = input_device(inner_model(model))
        self.source = trainer.attached.source

    def choose(self, without_padding: bool) -> CheckedRows | None:
        state = self.trainer.attached
        checked: CheckedRows | None = self.source.collate_parts(equal=True) if without_padding else state.checked
        return checked

    def packed(self, of: CheckedRows) -> Callable[[], Tensor]:
        trainer, device = self.trainer, self.device
        inputs = send_to_device(self.source.counted(of), device)
        own, ranks = sum(each[COUNTS][-1] for each in inputs), data_rank(trainer.accelerator).world_size

        def loss() -> Tensor:
            asked = copy.copy(trainer)
            items = StepCounts().add(asked.counts_of(inputs, device))
            losses = [asked.weighted_loss(self.model, each, num_items_in_batch=items) for each in inputs]
            return sum(losses) * (items / (own * ranks))  # type: ignore[no-any-return]

        return loss

    def unpacked(self, of: CheckedRows, padding: int) -> Callable[[], Tensor]:
        inputs = send_to_device(_with_padding(of.whole, padding), self.device)
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
        options: further arguments of `compute_loss`.
    """

    def __init__(self, trainer: Any, model: nn.Module, inputs: Batch, options: dict[str, Any]) -> None:
        self.stock, self.model, self.runner = without_attach(trainer), model, _runner_of(trainer, model)
        self.inputs, self.options = inputs, options

    def choose(self, without_padding: bool) -> Batch | None:
        return _without_padding(self.inputs) if without_padding else self.inputs

    def packed(self, of: Any) -> Callable[[], Tensor]:
        return self.unpacked(of, 0)

    def unpacked(self, of: Any, padding: int) -> Callable[[], Tensor]:
        inputs = _with_padding(of, padding)
        return lambda: copy.copy(self.stock).compute_loss(self.model, dict(inputs), **self.options)

    def sizes(self, of: Any) -> tuple[int, int, int]:
        masks = [each for name, each in of.items() if name.endswith(ATTENTION_MASK)]
        rows = next(len(each) for each in of.values() if isinstance(each, Tensor) and each.ndim)
        return rows, int(sum(each.sum() for each in masks)), rows


def _without_padding(batch: Batch) -> Batch | None:
    """Return a padded batch with only those columns in which every row has a token; None if there are none."""
    shapes = {
        each.shape: each.bool().all(0) for name, each in batch.items() if name.endswith("mask") and each.ndim == 2
    }
    if not shapes or not all(kept.any() for kept in shapes.values()):
        return None
    kept = ((name, each, shapes.get(getattr(each, "shape", None))) for name, each in batch.items())
    return {name: each if columns is None else each[:, columns] for name, each, columns in kept}


def _with_padding(batch: Batch, padding: int) -> Batch:
    """Return a padded batch with more padding on the right of everything that has a value for each token."""
    mask = batch.get(ATTENTION_MASK, batch.get(INPUT_IDS))
    if not padding or not isinstance(mask, Tensor):
        return batch
    fill = {LABELS: IGNORED_LABEL}
    return {
        name: F.pad(each, (0, padding), value=fill.get(name, 0))
        if isinstance(each, Tensor) and each.shape == mask.shape
        else each
        for name, each in batch.items()
    }


_UNCHANGED = ("train_dataset", "eval_dataset", "accelerator", "optimizer", "callback_handler", "attached")
"""Attributes of a trainer that `compute_loss` does not change, or that are data."""


def _runner_of(trainer: Any, model: nn.Module, ranks_per_row: int = 1) -> StepRunner:
    others = [each for name, each in models_of(trainer).items() if name != "model"]
    kind = trainer.attached.kind
    of_classes = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, (list, dict, set))]
    holders = [vars(trainer), kind.compute_loss, *of_classes]
    without = [getattr(trainer, name, None) for name in _UNCHANGED]
    with trainer.accelerator.autocast():  # which wraps the forward of the model alone
        return StepRunner(model, others, ranks_per_row, holders, without)


def _evaluated(trainer: Any, model: nn.Module, inputs: Batch) -> Tensor:
    """Return the loss of a batch in an evaluation, without adding it to the one that is running."""
    state = trainer.attached
    running, state.evaluation = state.evaluation, TokenMean(trainer.args.device)
    try:
        return trainer.packed_loss(model, inputs)  # type: ignore[no-any-return]
    finally:
        state.evaluation = running


def _stock_loss(stock: Any, model: nn.Module, inputs: Batch) -> Callable[[], Tensor]:
    """Return a function that computes the loss of a batch as a trainer does without attach, as a step of its own."""

    def loss() -> Tensor:
        asked = copy.copy(stock)
        with as_one_micro_batch(asked):
            _, items = asked.get_batch_samples(iter([inputs]), 1, input_device(inner_model(model)))
            return asked.compute_loss(model, dict(inputs), num_items_in_batch=items)  # type: ignore[no-any-return]

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
    args = trainer.args  # a compute_loss may divide by these steps itself
    before = args.gradient_accumulation_steps, args.average_tokens_across_devices
    trainer.current_gradient_accumulation_steps = 1
    args.gradient_accumulation_steps, args.average_tokens_across_devices = 1, False
    try:
        yield
    finally:
        args.gradient_accumulation_steps, args.average_tokens_across_devices = before


_READ = 64
"""The most rows that documents are chosen from."""


def _own_collate(stock: Any) -> Callable[[int], Batch | None]:
    """Return a function that returns what a trainer's own collator makes of a row of its dataset, alone, or None if it
    makes no labels or cannot read the row, so that only attach can train on it."""
    loaders = stock.accelerator._dataloaders
    number = len(loaders)
    try:
        with torch.random.fork_rng():  # making a loader may draw random numbers
            loader = stock.get_train_dataloader()
    except Exception:  # the trainer cannot read the dataset by itself
        return lambda _: None
    finally:
        del loaders[number:]

    def collate(row: int) -> Batch | None:
        with suppress(Exception):  # a collator may raise anything
            batch: Batch = collate_rows(loader.collate_fn, read_rows(loader.dataset, [row]))
            return batch if LABELS in batch else None
        return None

    return collate


def _own_document(batch: Batch, number: int | None, document: Document, predicts_next: bool) -> Document:
    """Return the document in a batch that has no other, without padding.

    Raises:
        PackingError: it has other tokens or labels than those that attach reads.
    """
    ids = batch[INPUT_IDS]
    kept = batch[ATTENTION_MASK][0].bool() if ATTENTION_MASK in batch else torch.ones(ids.shape[1], dtype=torch.bool)
    own = {
        name: each[:, kept]
        for name, each in batch.items()
        if name not in _NOT_OF_TOKENS and isinstance(each, Tensor) and each.shape == ids.shape
    }
    for name in (INPUT_IDS, LABELS):
        found, expected = document[name], own.get(name, document[name])
        if predicts_next and name == LABELS:
            found, expected = found[:, 1:], expected[:, 1:]
        if not torch.equal(found, expected):
            raise PackingError(
                f"{name}: expected those of the trainer's own collator, which makes {_first(expected, found)} of row "
                f"{number}, got {_first(found, expected)}. attach reads the columns of the dataset: give it the "
                f"{name} that you want to train on"
            )
    return own


def _first(values: Tensor, others: Tensor) -> str:
    """Return a text of some values, from the first that differs from others."""
    if values.shape != others.shape:
        return f"{values.shape[1]} values"
    place = int((values != others)[0].int().argmax())
    return f"{values[0, place : place + 4].tolist()} at token {place}"


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
        A report that says whether the steps are the same and, if not, how they differ and what is known of the cause.

    Raises:
        PackingError: the trainer is not attached, the model is not patched, or a loss cannot be computed.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = hfp.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)))
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 8]}])
        >>> hfp.check_step(model, batch).same
        True
        >>> two_ahead = lambda model, batch: torch.nn.functional.cross_entropy(
        ...     model(**batch).logits[:, :-2].transpose(1, 2), batch["labels"][:, 2:]
        ... )
        >>> import torch
        >>> print(hfp.check_step(model, batch, loss=two_ahead).problem.rpartition("; ")[2])
        the packed loss reads across documents: replacing one changes the loss of another
    """
    if isinstance(of, nn.Module):
        check_patched(of)
        if batch is None:
            raise PackingError("batch: expected a packed batch beside a model, got None")
        makes_trees, collator = is_tree_batch(batch), PackingCollator(not predicts_next(of))
        documents = documents_of(batch if makes_trees else {**batch, LABELS: batch[labels_key(batch)]})

        def collate(rows: Sequence[Any]) -> Batch:
            return collator(trees_of_documents(rows) if makes_trees else rows)

        return prove_step(
            LoopCase(of, documents, collator, collate, loss, "token", batch[INPUT_IDS].shape[1], 1, makes_trees)
        )
    state = getattr(of, "attached", None)
    if state is None or loss is not None:
        what = "a trainer after attach" if state is None else "no function beside a trainer, which computes its loss"
        raise PackingError(f"{'of' if state is None else 'loss'}: expected {what}, got {type(of).__name__}")
    model = prepared_model(of.accelerator, of.model)
    with of.compute_loss_context_manager(), in_mode(model, training=True):
        return prove_step(of.step_case(model, batch))
