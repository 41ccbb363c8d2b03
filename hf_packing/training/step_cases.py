"""The ways in which trainers and loops make a step: of packed documents, of whole rows, and of a padded batch."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer

from hf_packing.attention import StepRunner, inner_model, input_device, pad_token_of
from hf_packing.batch.collate import PackingCollator, is_tree_batch
from hf_packing.columns import (
    ATTENTION_MASK,
    CU_SEQ_LENS,
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    MAX_LENGTHS,
    SEGMENT_COLUMNS,
    SEQ_IDX,
    TREE_COLUMNS,
)
from hf_packing.errors import PackingError
from hf_packing.sampling.rows import trees_of_documents
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.losses import Batch, Loss, documents_and_tokens, trees_of
from hf_packing.training.model_loss import WholeStep
from hf_packing.training.models import models_of
from hf_packing.training.ranks import data_rank, on_all_ranks
from hf_packing.training.step import StepCase
from hf_packing.training.step_counts import StepCounts
from hf_packing.training.whole_rows import collate_rows, read_rows

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


def _padded(documents: Sequence[Document], pad_token: int, more: int = 0) -> Batch:
    """Return the documents as rows with padding on the right, of `more` tokens more than they need."""
    width = max(each[INPUT_IDS].shape[1] for each in documents) + more
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
    documents: Documents, most_tokens: int | None, predicts_next: bool, longest: int | None = None, equal: bool = False
) -> Documents:
    """Return a few documents of a step, those with labels first, then short ones first, and parts of long ones.

    Args:
        documents: the documents to choose from.
        most_tokens: the number of tokens of a batch; None if it is not known.
        predicts_next: whether the first token of a document has no label.
        longest: the most tokens of a document; None for no limit.
        equal: whether all of them have to have the same number of tokens; then, they have other numbers of labels.
    """
    most = max(_FEW_TOKENS, (most_tokens or 0) // _SHARE)
    labels = [each[LABELS][0, int(predicts_next) :] != IGNORED_LABEL for each in documents.packed]
    lengths = [min(length, longest or length, most // _FEWEST) for length in documents.lengths]
    usable = [number for number, length in enumerate(lengths) if length > 1]
    order = sorted(usable, key=lambda number: (not labels[number].any(), lengths[number]))[:_MOST]
    while len(order) > _FEWEST and max(lengths[number] for number in order) * len(order) > most:
        order.pop()
    shortest = min((lengths[number] for number in order), default=0)
    places = []
    for number in order:
        length = shortest if equal else lengths[number]
        first = int(labels[number].int().argmax())  # 0 without labels
        begin = max(0, min(first - length // 2, documents.lengths[number] - length))
        places.append((number, slice(begin, begin + length)))
    taken = documents.taken(places)
    counts = [_items(each, predicts_next) - number for number, each in enumerate(taken.packed)]
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

    def __init__(self, runner: StepRunner, predicts_next: bool) -> None:
        self.runner, self.predicts_next = runner, predicts_next
        self.inner = inner_model(runner.model)
        self.device = input_device(self.inner)

    def choose(self, without_padding: bool) -> Documents:
        taken = chosen(self.documents, self.most_tokens, self.predicts_next, self.longest, without_padding)
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
        return send_to_device(_padded(of.own, pad_token_of(self.inner) or 0, padding), self.device)  # type: ignore[no-any-return]


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
        super().__init__(_runner_of(trainer, model), not state.collator.keep_first_labels)
        self.trainer, self.model, self.training = trainer, model, training
        self.stock = without_attach(trainer)
        self.most_tokens, self.loss = state.max_tokens, state.loss if training else "token"
        self.longest = longest_segment(state.batching, trainer.state.global_step) if training else None
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
        loader, packed, own = _own_loader(self.stock), [], []
        for number, row in source.next_rows(_READ):
            for document in documents_of(collator([row])):
                packed.append(document)
                known = None if number is None else _own_document(loader, number, document, self.predicts_next)
                own.append(document if known is None else known)
        return Documents(packed, own)

    def packed(self, of: Documents) -> Callable[[], Tensor]:
        trainer, state, device = self.trainer, self.trainer.attached, self.device
        batch = state.source.batch_of(_rows_of(of.packed), trainer.accelerator, state.collator)
        inputs = send_to_device(batch, device)
        if not self.training:
            return lambda: copy.copy(trainer).packed_loss(self.model, inputs)
        own = torch.tensor(self.sizes(of)[-1], device=device)
        processes, ranks = trainer.accelerator.num_processes, data_rank(trainer.accelerator).world_size
        everywhere = trainer.accelerator.gather(own[None]).sum() * ranks / processes / state.batching.ranks_per_block

        def loss() -> Tensor:
            asked = copy.copy(trainer)
            divisor = StepCounts().add(asked.counts_of([inputs, inputs], device))
            found: Tensor = asked.packed_loss(self.model, inputs, num_items_in_batch=divisor)
            return found * (2 * everywhere / (own.clamp(min=1) * ranks))

        return loss

    def unpacked(self, of: Documents, padding: int) -> Callable[[], Tensor]:
        return _stock_loss(self.stock, self.model, self.padded(of, padding), self.training)


class LoopCase(PackedCase):
    """A step of your own training loop, of documents of a batch.

    Args:
        model: a patched model, with or without wrappers.
        batch: a packed batch, or one of trees, with labels.
        function: computes the loss of a model and a batch; None for `compute_loss`, and the model's own loss unpacked.
        loss: what the loss is a mean over.
        predicts_next: whether the logits of a token predict the next one.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        function: Callable[[nn.Module, Batch], Tensor] | None,
        loss: Loss,
        predicts_next: bool,
    ) -> None:
        super().__init__(StepRunner(model), predicts_next)
        self.model, self.function, self.loss = model, function, loss
        self.most_tokens, self._makes_trees = batch[INPUT_IDS].shape[1], is_tree_batch(batch)
        documents = documents_of(batch)
        self.documents = Documents(documents, documents)

    def packed(self, of: Documents) -> Callable[[], Tensor]:
        rows = _rows_of(of.packed)
        batch = PackingCollator(not self.predicts_next)(trees_of_documents(rows) if self._makes_trees else rows)
        inputs = send_to_device(batch, self.device)
        if self.function is not None:
            return lambda: self.function(self.model, inputs)
        return lambda: WholeStep.of(self.model, inputs, self.loss).run(self.model)[0]

    def unpacked(self, of: Documents, padding: int) -> Callable[[], Tensor]:
        inputs = self.padded(of, padding)
        if self.function is not None:
            return lambda: self.function(self.model, inputs)
        return lambda: self.model(**inputs).loss


def _runner_of(trainer: Any, model: nn.Module) -> StepRunner:
    return StepRunner(model, [each for name, each in models_of(trainer).items() if name != "model"])


def _stock_loss(stock: Any, model: nn.Module, inputs: Batch, training: bool) -> Callable[[], Tensor]:
    """Return a function that computes the loss of a batch as a trainer does without attach, as a step of its own."""

    def loss() -> Tensor:
        asked = copy.copy(stock)
        if not training:
            return asked.compute_loss(model, dict(inputs))  # type: ignore[no-any-return]
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


def _own_loader(stock: Any) -> Any:
    """Return the loader that a trainer makes without attach, for its dataset and its collator."""
    loaders = stock.accelerator._dataloaders
    number = len(loaders)
    with torch.random.fork_rng():  # making a loader may draw random numbers
        loader = stock.get_train_dataloader()
    del loaders[number:]
    return loader


def _own_document(loader: Any, number: int, document: Document, predicts_next: bool) -> Document:
    """Return what the trainer's own collator makes of a document, alone."""
    batch = collate_rows(loader.collate_fn, read_rows(loader.dataset, [number]))
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
