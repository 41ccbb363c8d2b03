"""Open the datasets that a training or an evaluation reads: packed rows, documents, trees of documents, and streams.

A source reads the sizes of a dataset or opens its logical streams, says what all ranks have to agree on, and makes the
loader of this rank. Trainers whose rows stay whole read WholeRows of `whole_rows.py`.

Columns with one number for each token, such as weights, are passed on if the model's forward takes them, as Trainer
keeps them, or all of them with remove_unused_columns=False.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import datasets
from accelerate import Accelerator
from torch import nn
from transformers import Trainer

from hf_packing.attention import inner_model, takes_argument
from hf_packing.batch.collate import PackingCollator, numbers_in
from hf_packing.columns import (
    COMPLETION_MASK,
    INPUT_IDS,
    KNOWN_COLUMNS,
    LABELS,
    LOSS_WEIGHTS,
    SEGMENT_COLUMNS,
    TOKEN_TYPE_IDS,
    TREE_COLUMNS,
)
from hf_packing.errors import PackingError
from hf_packing.planning.permutation import shuffles_of_numpy
from hf_packing.rows.changes import LabelCounts
from hf_packing.rows.token_columns import is_number, is_token_type, shows_table, visible_columns
from hf_packing.sampling.batching import Batching
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import Row, SampledRows, TreesOfDocuments, kept_labels, rows_by_number
from hf_packing.sampling.sampler import EpochSummary, RankBatchSampler
from hf_packing.sampling.sizes import check_map_style, rows_to_sample, sizes_of
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.checks import masks_tokens, sft_trainer_of
from hf_packing.training.kinds.split import PartCollator, RowsOnRanks, ranks_of
from hf_packing.training.loader import LoopSteps, PackedLoader, batches_loader, on_device
from hf_packing.training.losses import Batch, Loss
from hf_packing.training.masking import EpochSampler, MaskedRows, Masking
from hf_packing.training.ranks import PlannedFrom, data_rank
from hf_packing.training.streams import StreamedRows, training_stream
from hf_packing.upstream.transformers import columns_taken

Takes = Callable[[str], bool]
"""A function that tells whether a column of this name is passed on."""


@dataclass(frozen=True)
class Reading:
    """The options with which the rows of datasets are read."""

    takes: Takes
    """Which columns with one number for each token reach the model or the loss."""
    unread: tuple[str, ...] = ()
    """Names of columns to leave out of the rows."""
    apply_masks: bool = True
    """True to make labels from loss masks for rows without labels; if False, the collator refuses such rows."""
    masking: Masking | None = None
    """How tokens are masked, anew in every epoch; None if the rows have their labels."""

    @classmethod
    def of_model(cls, model: nn.Module | None) -> "Reading":
        """Return how rows are read for a model; None stands for any model that predicts the next token."""
        taken = () if model is None else inspect.signature(inner_model(model).forward).parameters
        return cls(taken.__contains__, _unread_by(model))

    @classmethod
    def of_trainer(cls, trainer: Trainer) -> "Reading":
        """Return how rows are read for a trainer, with the labels that its own collator would make."""
        args, collator, masking = trainer.args, trainer.data_collator, None
        if masks_tokens(collator):
            seeds = (getattr(collator, "seed", None), args.data_seed, args.seed)
            masking = Masking(collator, next(seed for seed in seeds if seed is not None))
        takes: Takes = lambda _: True  # noqa: E731
        if args.remove_unused_columns:
            # Trainer always adds the names of labels, also for a forward without them
            takes = ({*columns_taken(trainer)} - {"label", "label_ids"}).__contains__
        applies_masks, unread = sft_trainer_of(trainer) is not None, _unread_by(trainer.model)
        if applies_masks and not trainer.completion_only_loss:  # it trains on prompts, too
            unread = (*unread, COMPLETION_MASK)
        return cls(takes, unread, applies_masks, masking)


def _unread_by(model: nn.Module | None) -> tuple[str, ...]:
    """Return token_type_ids if a model takes none, or has pictures, of which it says where they are."""
    if model is None:
        return ()
    inner = inner_model(model)
    is_of_text = inner.config.get_text_config() is inner.config
    return () if is_of_text and takes_argument(inner, TOKEN_TYPE_IDS) else (TOKEN_TYPE_IDS,)


@dataclass
class PackedRows:
    """A map-style dataset of packed rows, documents or rows of trees, planned for this rank."""

    dataset: Any
    """The dataset, or the trees of its documents."""
    rows: SampledRows
    """The rows of the micro-batches of this rank."""
    reading: Reading
    """How rows are read."""
    loss: Loss = "token"
    labels: LabelCounts | None = None
    """The labels that are left after documents were cut or dropped; None if they were not counted."""

    @property
    def sampler(self) -> RankBatchSampler:
        """The sampler of this rank."""
        return self.rows.sampler

    @property
    def shares_prefixes(self) -> bool:
        """True if rows are rows of trees."""
        return self.sampler.sizes.trees is not None

    @property
    def is_weighted(self) -> bool:
        """True if labels may have weights."""
        return any(LOSS_WEIGHTS in row for row in self.first_rows(1))

    def first_rows(self, count: int) -> list[Row]:
        """Return a few rows with their labels; none if a collator masks tokens."""
        if self.reading.masking is not None:
            return []
        return self.rows.__getitems__([(number, False) for number in rows_to_sample(len(self.rows), count)])

    def count_labels(self, collator: PackingCollator) -> None:
        """Count the labels that are left for training, where they are known before.

        Raises:
            PackingError: the dataset has labels, but none are left.
        """
        reading, keep_first = self.reading, collator.keep_first_labels
        if reading.masking is None:
            self.labels = kept_labels(self.dataset, self.sampler, reading.unread, reading.apply_masks, keep_first)
        if self.labels is not None:
            self.labels.check_some_left("batching", self.sampler.batching)

    def summary(self, unpacked: int, isolation: object) -> EpochSummary:
        """Return the summary of the current epoch; see `RankBatchSampler.summary`."""
        return self.sampler.summary(unpacked, isolation, self.labels)

    @property
    def lost(self) -> dict[str, int]:
        """The numbers of documents that are left out, and of tokens that are lost, without those that are 0."""
        summary = self.summary(1, None)
        found = {"left_out": summary.left_out, "lost_tokens": summary.lost_tokens}
        return {name: number for name, number in found.items() if number}

    def collator(self, collate: PackingCollator, evenly: bool = False) -> Callable[[Sequence[Row]], Batch]:
        """Return the collator of this rank, which has a part of each row if it is on several ranks."""
        if (on := self.sampler.on_ranks) is None:
            return collate
        return PartCollator(collate, replace(on, budget=None) if evenly else on, self.loss)

    def next_rows(self, count: int) -> Iterator[Row]:
        """Yield rows of this rank's next micro-batches, as training reads them."""
        for row in islice(chain.from_iterable(self.sampler), count):
            yield self.rows.__getitems__([row])[0]

    def documents_beside(self, raw: Any, count: int) -> Iterator[tuple[int, Any, Row]]:
        """Yield a few documents, none of them cut: the number of each, its row in `raw`, which is the dataset as the
        trainer reads it, and the document; nothing if rows are no documents, or if a collator masks tokens."""
        if not self.sampler.sizes.packed and not self.shares_prefixes and self.reading.masking is None:
            for number in rows_to_sample(len(self.rows.dataset), count).tolist():
                (row,) = rows_by_number(raw, [number])
                yield number, row, self.rows.document(number, row)

    def loader(
        self, accelerator: Accelerator, collate: PackingCollator, loop: LoopSteps | None = None, **options: Any
    ) -> Any:
        """Return the loader of this rank, which puts micro-batches on the device.

        Args:
            accelerator: the accelerator.
            collate: the collator.
            loop: what your own training loop needs, for a PackedLoader; None for a DataLoader.
            options: further arguments of DataLoader.
        """
        batches = batches_loader(self.rows, self.collator(collate), **options)
        return on_device(batches, accelerator) if loop is None else PackedLoader(batches, loop, self.labels)


Source = PackedRows | StreamedRows
"""What a training or an evaluation reads, if its rows are joined."""


def open_source(
    name: str,
    dataset: Any,
    batching: Batching | None,
    accelerator: Accelerator,
    reading: Reading,
    planned_from: PlannedFrom,
    *,
    accumulation: int = 1,
    loss: Loss = "token",
    in_order: InOrder | None = None,
    ranks: int | None = None,
) -> Source:
    """Check and measure a dataset, plan the micro-batches of this rank, and note the data to compare with other ranks.

    Args:
        name: the name of the dataset in error messages.
        dataset: a map-style dataset, or a stream.
        batching: the batching, which also packs the documents of a stream; None for what is read in order, but for a
            stream of documents.
        accelerator: the accelerator.
        reading: how rows are read.
        planned_from: notes the data.
        accumulation: number of micro-batches of each rank in an optimizer step.
        loss: the loss, which a checkpoint has to have been saved with.
        in_order: how micro-batches are made for evaluation; None for training.
        ranks: number of ranks that run a row together; by default, that of the batching.

    Raises:
        PackingError: the dataset is not supported, or does not fit the batching.
    """
    rank, world_size = data_rank(accelerator)
    if in_order is None:
        settings = {"batching": batching, "gradient_accumulation_steps": accumulation, "loss": loss}
        planned_from.note_settings(**settings, shuffles_of_numpy=shuffles_of_numpy())
    is_stream = isinstance(dataset, datasets.IterableDataset)
    if not is_stream:
        check_map_style(name, dataset)
    more = passed_on(dataset, reading.takes)
    if is_stream:
        streams, rows_per_batch, max_tokens = training_stream(
            name, dataset, batching, world_size, reading.unread, in_order
        )
        known = [INPUT_IDS, LABELS, LOSS_WEIGHTS, TOKEN_TYPE_IDS, *SEGMENT_COLUMNS, *TREE_COLUMNS]
        names = [each for each in (*known, *more) if each in streams.features and each not in reading.unread]
        streamed = StreamedRows(
            streams,
            rows_per_batch,
            max_tokens,
            dataset,
            names,
            world_size,
            accumulation,
            loss,
            length_schedule=getattr(batching, "length_schedule", None),
            restarts=in_order is not None,
            unread=reading.unread,
        )
        planned_from.note_settings(**{name: streamed})
        return streamed
    plans = in_order or batching
    assert plans is not None
    on_ranks = None
    if (ranks := ranks_of(batching) if ranks is None else ranks) > 1:
        assert isinstance(batching, TokenBudget | None)
        on_ranks = RowsOnRanks.of(ranks, accelerator, batching)
        rank, world_size = data_rank(accelerator, ranks)
    if plans.fewest_shared is not None:
        assert isinstance(plans, TokenBudget)
        how = plans.most_tokens, plans.fewest_shared, plans.overflow, reading.unread, more, plans.max_length
        dataset = TreesOfDocuments.find(dataset, *how)
    sizes = sizes_of(dataset)
    planned_from.note_data(name, dataset, sizes)
    planned_from.note_settings(data_collator=reading.masking)
    if reading.masking is None:
        sampler = RankBatchSampler(plans, sizes, world_size, rank, accumulation)
        rows = SampledRows(dataset, sampler, reading.unread, reading.apply_masks, more)
    else:
        sampler = EpochSampler(plans, sizes, world_size, rank, accumulation)
        rows = MaskedRows(dataset, sampler, reading.masking, reading.unread, more)
    sampler.more_inputs["loss"], sampler.on_ranks = loss, on_ranks
    return PackedRows(dataset, rows, reading, loss)


def passed_on(data: Any, takes: Takes) -> list[str]:
    """Return the names of the columns of a dataset that packing does not know and that are passed on.

    Raises:
        PackingError: a column has one number for each document, and the model or the loss takes it.
    """
    if isinstance(data, datasets.IterableDataset):
        data = data.features or data
    elif shows_table(data):
        data = datasets.Features({name: data.features[name] for name in visible_columns(data)})
    if isinstance(data, datasets.Features):
        found = [(each.name, is_token_type(each.type), is_number(each.type)) for each in data.arrow_schema]
    else:
        row: Any = next(iter(data), {})
        values = row.items() if isinstance(row, Mapping) else ()
        found = [(name, numbers_in(value) is not None, _is_one_number(value)) for name, value in values]
    taken = [each for each in found if each[0] not in KNOWN_COLUMNS and takes(each[0])]
    for name in (name for name, _, is_of_documents in taken if is_of_documents):
        raise PackingError(
            f"column {name!r}: expected a number for each token, since the model's forward or compute_loss takes "
            "this column, got one for each document, which has no place in a packed row. Repeat it, as in "
            f"dataset.map(lambda row: {{{name!r}: [row[{name!r}]] * len(row['input_ids'])}}), or remove it"
        )
    return [name for name, is_of_tokens, _ in taken if is_of_tokens]


def _is_one_number(value: Any) -> bool:
    """Return whether a value is a number, or an array or a tensor without axes."""
    return isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0
