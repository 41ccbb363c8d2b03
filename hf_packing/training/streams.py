"""Train on streams: open the logical streams, yield the micro-batches of one rank, and save how far all ranks are.

Workers read ahead of the training, so a worker sends how far its logical streams have come along with every
micro-batch. One state is saved for the logical streams of all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, get_worker_info

from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import check_type, expect
from hf_packing.columns import (
    COPIED_SEGMENT,
    IGNORED_LABEL,
    INPUT_IDS,
    KNOWN_COLUMNS,
    LABELS,
    LOSS_MASKS,
    LOSS_WEIGHT,
    LOSS_WEIGHTS,
    SEQ_IDX,
    SEQ_LENGTHS,
    TREE_INPUT_IDS,
    spread_weight,
)
from hf_packing.errors import PackingError
from hf_packing.planning.length_schedule import LengthSchedule
from hf_packing.rows.packing import Packing
from hf_packing.sampling.batching import CUT_WHEN_PACKED
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import Row, with_labels
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.strategies.greedy import BestFit
from hf_packing.streams.logical import START, PackedExamples, Position, Turn, check_shares, documents_of_streams
from hf_packing.streams.packed import StreamPacking
from hf_packing.streams.reader import fingerprint_of_files, open_source
from hf_packing.training.loader import LoopSteps, StepLoader
from hf_packing.training.lockstep import Answer, in_lockstep
from hf_packing.training.losses import Batch
from hf_packing.training.ranks import data_rank
from hf_packing.upstream import datasets as upstream

_MASKED_TOKENS = 16
"""The tokens of a batch that stands for rows that do not exist."""

_MICRO_BATCHES_AHEAD = 8
"""The number of micro-batches that a rank reads ahead, or those of one optimizer step if that has more."""


Opened = tuple[PackedExamples, int, int]
"""Logical streams, the number of rows in a micro-batch, and the largest number of tokens in it."""

WINDOW_PACKS = 64
"""The packs of a window, if TokenBudget packs the stream."""

_MOST_STREAMS = 64
"""If TokenBudget packs the stream, the number of logical streams is a power of two: at most this number, and at most
the number of shards, so that every shard is read once."""


def training_stream(
    name: str,
    stream: datasets.IterableDataset,
    batching: Any,
    ranks: int,
    unread: Sequence[str] = (),
    in_order: InOrder | None = None,
) -> Opened:
    """Return what a training or an evaluation reads from a stream.

    Args:
        name: the name of the stream in error messages.
        stream: a stream that `pack` has divided into logical streams, or a stream of documents.
        batching: a TokenBudget. Documents are packed into rows of at most max_length tokens, or max_tokens. Rows are
            joined to micro-batches of at most max_tokens tokens. None for an evaluation on a packed stream.
        ranks: number of ranks.
        unread: names of columns of documents that are not read.
        in_order: how many rows an evaluation has in a micro-batch; None for training.

    Raises:
        PackingError: the stream, or the batching, is not supported.
    """
    accepted = "TokenBudget(max_length) for a stream, also for one that pack(stream, strategy, streams=64) returned"
    check_type("batching", batching, TokenBudget | None, accepted)
    if batching is not None:
        unknown = "for a stream, whose number of documents is unknown"
        expect(None, unknown, match_documents_per_step=batching.match_documents_per_step)
        expect(
            1,
            "for a stream, since only documents of a map-style dataset can be on several ranks",
            max_ranks_per_document=batching.max_ranks_per_document,
        )
    if upstream.is_share_of_node(stream):
        raise PackingError(
            f"{name}: expected a stream that every rank reads whole, got a stream that split_dataset_by_node has "
            "divided; leave split_dataset_by_node out, since hf_packing divides the logical streams among the ranks"
        )
    if place := upstream.position(stream):
        raise PackingError(
            f"{name}: expected a stream at its beginning, got a stream that goes on {place}; resume from a checkpoint "
            "of the trainer or the loop instead, which saves how far the stream is, or open the stream again"
        )
    examples = upstream.examples_of(stream)
    if isinstance(examples, PackedExamples) and examples.streams:
        streams, rows, max_tokens = _of_packed_rows(name, examples, batching if in_order is None else None)
    else:
        streams, rows, max_tokens = _of_documents(name, stream, examples, batching, unread)
    if streams.streams % ranks:
        raise PackingError(
            f"{name}: expected a number of logical streams that is a multiple of the {ranks} ranks, got "
            f"{streams.streams}; pack the stream with a multiple of {ranks}: pack(stream, strategy, streams=...)"
        )
    if in_order is not None and in_order.rows_per_batch is not None:
        rows = in_order.rows_per_batch
        if in_order.max_tokens is not None:
            rows = min(rows, max(1, in_order.max_tokens // max_tokens))
    return streams, rows, max_tokens


def _of_packed_rows(name: str, streams: PackedExamples, batching: TokenBudget | None) -> Opened:
    """Return what a training reads from rows that were packed before; with a batching, several are joined."""
    strategy, fewest_shared = streams.packing.strategy, streams.packing.packing.fewest_shared
    capacity = strategy.largest_capacity
    if streams.owned != tuple(range(streams.streams)):
        raise PackingError(
            f"{name}: expected all logical streams of pack, got {len(streams.owned)} of {streams.streams}; use shard "
            "before pack, not after it"
        )
    if batching is None:
        return streams, 1, capacity
    expect(None, CUT_WHEN_PACKED, max_length=batching.max_length)
    if fewest_shared is not None:
        expect(1, "for rows of trees", align_tokens=batching.align_tokens)
    batching.check_holds("max_tokens", capacity, "the capacity of the packed rows")
    rows = batching.most_tokens // capacity
    most, in_a_row = batching.max_documents, strategy.max_documents
    if most is not None and (in_a_row is None or in_a_row * rows > most):
        raise PackingError(
            f"max_documents: expected None, or rows that were packed with at most {most // rows} documents each, got "
            f"{most} for {rows} rows of {strategy!r} in a micro-batch; pass max_documents to the strategy"
        )
    if batching.fewest_shared not in (None, fewest_shared):
        raise PackingError(
            f"share_prefixes: expected False for rows that are packed already, got {batching.share_prefixes}; call "
            f"pack(stream, strategy, share_prefixes={batching.share_prefixes}, streams=64), or pass a stream of "
            "documents"
        )
    return streams, rows, batching.most_tokens


def _of_documents(
    name: str,
    stream: datasets.IterableDataset,
    examples: upstream.Examples,
    batching: TokenBudget | None,
    unread: Sequence[str],
) -> Opened:
    """Return what a training reads from documents, which are packed in windows."""
    changed = {SEQ_LENGTHS, TREE_INPUT_IDS} & set(upstream.with_known_features(name, stream).features or {})
    if changed or isinstance(examples, PackedExamples):
        raise PackingError(
            f"{name}: expected a stream of documents, or the stream that pack(stream, strategy, streams=64) returned, "
            "got a packed stream without logical streams, which was packed by map, or was changed after pack; use map, "
            "filter and shuffle before pack, and pass skip_prepare_dataset=True to SFTTrainer"
        )
    if batching is None:
        raise PackingError(
            f"{name}: expected a packed stream, got a stream of documents; pass pack(stream, BestFit(max_length), "
            "streams=64)"
        )
    expect(None, "for a stream of text", max_patches=batching.max_patches)
    source = open_source(name, stream, unread)
    strategy = BestFit(
        batching.longest_document,
        overflow=batching.overflow,
        max_documents=batching.max_documents,
        seed=batching.seed,
    )
    packing = Packing.of(strategy, False, batching.share_prefixes, keep_first_labels=not batching.share_prefixes)
    packing.check_names(source.names)
    linear_cost = batching.usual_linear_cost if batching.balance == "attention" else None
    of_windows = StreamPacking(packing, WINDOW_PACKS, source.schema, linear_cost)
    streams = 1 << min(int(source.examples.num_shards), _MOST_STREAMS).bit_length() - 1
    check_shares(source.examples, streams)
    rows = batching.most_tokens // batching.longest_document
    return PackedExamples(source.examples, of_windows, streams), rows, batching.most_tokens


@dataclass(frozen=True)
class StreamedRows:
    """The logical streams that a training reads, and how the micro-batches of this rank are made of their rows."""

    streams: PackedExamples
    rows_per_batch: int
    """Number of rows in a micro-batch."""
    max_tokens: int
    """The largest number of tokens in a micro-batch."""
    dataset: datasets.IterableDataset
    names: Sequence[str]
    """Names of the columns to read."""
    ranks: int
    accumulation: int
    """Number of micro-batches in an optimizer step on a rank."""
    loss: str
    """The loss, which a state has to have been saved with."""
    length_schedule: LengthSchedule | None
    """The length of segments in each step, which the trainer cuts them to."""
    restarts: bool
    """True for evaluation: each iteration begins at the first row of the first epoch."""
    unread: Sequence[str] = ()
    """Names of columns of documents that are not read."""

    def of_epoch(self, epoch: int) -> PackedExamples:
        """Return the logical streams of an epoch. Every epoch after the first reads the shards in another order, unless
        `take` or `skip` fix it, and puts rows in another order."""
        return self.streams if not epoch else self.streams.shuffle_data_sources(np.random.default_rng(epoch))

    @property
    def shares_prefixes(self) -> bool:
        """True if the rows are rows of trees."""
        return self.streams.packing.packing.fewest_shared is not None

    @property
    def is_weighted(self) -> bool:
        """True if labels may have weights."""
        return LOSS_WEIGHTS in self.names

    @property
    def lost(self) -> dict[str, int]:
        """Return no numbers, since what a stream loses is not known before it is read."""
        return {}

    def __str__(self) -> str:
        return (
            f"{self.streams.streams} logical streams of {self.streams.packing}, {self.rows_per_batch} rows a batch, "
            f"from the files {fingerprint_of_files(self.streams.ex_iterable)}"
        )

    def first_rows(self, count: int) -> Any:
        return islice(self.dataset, count)

    def documents_beside(self, _: Any, count: int) -> Iterator[tuple[int, Any, Row]]:
        """Yield the first documents: the number of each, its row in the stream, and the document; nothing if rows are
        packed."""
        if isinstance(upstream.examples_of(self.dataset), PackedExamples):
            return
        names = {*self.names, *LOSS_MASKS, LOSS_WEIGHT}.difference(self.unread)
        for number, row in enumerate(islice(self.dataset, count)):
            yield number, row, with_labels(dict(spread_weight({name: row[name] for name in names & row.keys()})))

    def count_labels(self, collator: PackingCollator) -> None:
        """Do nothing: how many labels a stream has is not known."""

    def summary(self, unpacked: int, isolation: object) -> "StreamSummary":  # noqa: ARG002
        """Return how a training reads the stream; the number of documents in a step without packing is not known."""
        return StreamSummary(self, isolation)

    def loader(
        self, accelerator: Accelerator, collate: PackingCollator, loop: LoopSteps | None = None, **options: Any
    ) -> "StreamLoader":
        """Return the loader of this rank; see `PackedRows.loader`."""
        return StreamLoader(self, accelerator, collate, loop, **options)


@dataclass(frozen=True)
class StreamSummary:
    """The plan of `attach` for a trainer on a stream, which `print` shows."""

    rows: StreamedRows
    isolation: object

    def __str__(self) -> str:
        rows, streams = self.rows, self.rows.streams
        documents = documents_of_streams(streams.ex_iterable, streams.streams)
        of_each = [f"{min(each)} to {max(each)} of {name}" for name, each in documents.items()]
        return (
            f"stream: {streams.streams} logical streams, {streams.streams // rows.ranks} on each of {rows.ranks} ranks"
            + (f"\ndocuments of each logical stream: {', '.join(of_each)}" if of_each else "")
            + f"\nrows: {streams.packing}\n"
            f"step: {rows.ranks * rows.accumulation * rows.rows_per_batch} rows, in {rows.accumulation} micro-batches "
            f"of {rows.rows_per_batch} rows on each rank, of at most {rows.max_tokens:,} tokens\n"
            + (f"length of segments: {rows.length_schedule}\n" if rows.length_schedule is not None else "")
            + (str(self.isolation) if self.isolation is not None else "")
        ).rstrip()


class MicroBatch(NamedTuple):
    """The next rows of a rank, joined to one batch."""

    batch: Batch | None
    """The batch; None if the logical streams of all its turns have ended."""
    positions: dict[int, Position]
    """How far its logical streams have come, by their numbers."""
    ended: list[int]
    """Its logical streams that have ended."""


@dataclass(frozen=True, eq=False)
class RankTurns(torch.utils.data.IterableDataset[MicroBatch]):
    """The micro-batches of one rank: its rows in the order of the turns of all logical streams, without an end.

    After all logical streams of the rank have ended, micro-batches without a row follow.
    """

    streams: PackedExamples
    """The logical streams of this rank."""
    positions: Mapping[int, Position]
    """How far they have come, by their numbers; those without a position have not begun."""
    rows_per_batch: int
    """Number of rows in a micro-batch."""
    collate: Callable[[list[dict[str, Any]]], Batch]
    """Joins rows to a batch."""
    names: Sequence[str]
    """Names of the columns to read."""

    def loader(self, workers: int, seed: int, **options: Any) -> DataLoader[MicroBatch]:
        """Return a DataLoader of the micro-batches. The seeds of workers follow from `seed`, not from torch's own."""
        return DataLoader(
            self,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.usable_workers(workers),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )

    def usable_workers(self, workers: int) -> int:
        """Return how many of some workers can share the logical streams, so that rows keep their order."""
        while workers > 1 and len(self.streams.owned) % (workers * self.rows_per_batch):
            workers -= 1
        return workers

    def __iter__(self) -> Iterator[MicroBatch]:
        streams, size = self.streams, self.rows_per_batch
        if (info := get_worker_info()) is not None and info.num_workers > 1:
            # torch takes micro-batches from the workers in turn, beginning with worker 0
            batches_done = sum(turns for turns, *_ in self.positions.values()) // size
            first = (info.id + batches_done) % info.num_workers
            mine = range(first * size, len(streams.owned), info.num_workers * size)
            streams = streams.changed(owned=tuple(each for at in mine for each in streams.owned[at : at + size]))
        turns = _without_end(streams, {stream: self.positions.get(stream, START) for stream in streams.owned})
        while True:
            yield self._joined(list(islice(turns, size)))

    def _joined(self, turns: Sequence[Turn]) -> MicroBatch:
        """Return the micro-batch of some turns."""
        rows = [turn.values(self.names) for turn in turns if turn.row is not None]
        positions = {turn.stream: turn.position for turn in turns}
        ended = [turn.stream for turn in turns if turn.row is None]
        return MicroBatch(self.collate(rows) if rows else None, positions, ended)


def _without_end(streams: PackedExamples, positions: dict[int, Position]) -> Iterator[Turn]:
    """Yield turns from some positions on, and then turns of ended logical streams, without an end."""
    yield from streams.turns(positions)
    for stream in cycle(streams.owned):
        turns_so_far, window, rows_out = positions[stream]
        positions[stream] = turns_so_far + 1, window, rows_out
        yield Turn(stream, None, positions[stream])


def _as_it_is(micro_batch: Any) -> Any:
    return micro_batch


class StreamLoader(StepLoader):
    """The micro-batches of this rank, in optimizer steps that are the same for any number of ranks.

    Each iteration goes on where the last one has stopped, up to the end of the epoch, which all ranks reach in the same
    step. A rank whose logical streams have ended yields batches without labels until then. `state_dict` and iterations
    have to be called on all ranks together; a state can be loaded on another number of ranks.

    Args:
        rows: the stream.
        accelerator: the accelerator, which knows the rank and the device.
        collate: the collator.
        loop: what your own training loop needs; None for a Trainer, and for evaluation.
        num_workers: number of DataLoader workers.
        options: further arguments of DataLoader.
    """

    def __init__(
        self,
        rows: StreamedRows,
        accelerator: Accelerator,
        collate: PackingCollator,
        loop: LoopSteps | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(accelerator, rows.accumulation, loop)
        self.dataset = rows
        """What the loader reads. Trainer asks every loader for its dataset."""
        self._rank, self._ranks = data_rank(accelerator)
        self._collate, self._workers, self._options = collate, num_workers, options
        self._positions: dict[int, Position] = {}
        """How far the logical streams of this rank have come."""
        self._step: list[MicroBatch] = []
        """The current optimizer step."""

    @property
    def summary(self) -> StreamSummary:
        """Description of how the stream is read, for `print`. A stream has no numbers of steps, documents or labels."""
        return StreamSummary(self.dataset, self.first_batch_proof)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader counts epochs by itself, since a resumed Trainer counts them from 0 again."""

    def _steps(self) -> Iterator[list[Batch]]:
        if self.dataset.restarts:
            self._begin_at_epoch(0)
        goes_on, before = bool(self._positions), self.optimizer_steps
        self.micro_batches_done = self.steps_done * self.accumulation  # a step that was broken off begins again
        yield from self._rest_of_epoch()
        if goes_on and self.optimizer_steps == before:  # the last step of the epoch was its last row
            yield from self._rest_of_epoch()
        if self.optimizer_steps == before:
            raise PackingError("dataset: expected a stream with at least one document, got a stream without")

    def _rest_of_epoch(self) -> Iterator[list[Batch]]:
        """Yield the steps up to the end of the epoch, in lockstep with the other ranks."""
        rows, streams = self.dataset, self.dataset.of_epoch(self.epoch)
        own = streams.changed(owned=streams.owned[self._rank :: self._ranks])
        turns = RankTurns(own, dict(self._positions), rows.rows_per_batch, self._collate, rows.names)
        loader = turns.loader(self._workers, seed=self.epoch * self._ranks + self._rank, **self._options)
        micro_batches = iter(loader)
        left = set(own.owned)

        def read() -> tuple[list[MicroBatch], Answer]:
            step = list(islice(micro_batches, self.accumulation))
            left.difference_update(*(each.ended for each in step))
            if any(each.batch is not None for each in step):
                return step, Answer.ROW
            return step, Answer.NO_ROW if left else Answer.ENDED

        accelerator, most_ahead = self._accelerator, max(_MICRO_BATCHES_AHEAD // self.accumulation, 1)
        for step, is_run in in_lockstep(read, accelerator.num_processes, accelerator.device, most_ahead):
            if is_run:
                self._step = step
                yield [self._masked() if each.batch is None else each.batch for each in step]
            else:
                self._move(step)
        self._begin_at_epoch(self.epoch + 1)

    def _end_step(self) -> None:
        super()._end_step()
        self._move(self._step)

    def _move(self, step: list[MicroBatch]) -> None:
        """Note that a step was run, or passed over."""
        for micro_batch in step:
            self._positions.update(micro_batch.positions)

    def _masked(self) -> Batch:
        """Return a batch without labels, for a rank that has no row while other ranks have one.

        It is always the same batch, since a model draws as much dropout for a batch as the batch has tokens.
        """
        tokens = np.zeros(_MASKED_TOKENS, dtype=np.int64)
        row = {
            INPUT_IDS: tokens,
            LABELS: np.full_like(tokens, IGNORED_LABEL),
            SEQ_IDX: np.full_like(tokens, COPIED_SEGMENT),
        }
        features = self.dataset.streams.features
        for name in self.dataset.names:
            if name not in KNOWN_COLUMNS:
                row[name] = tokens.astype(features[name].feature.dtype)
        return self._collate([row])

    def _begin_at_epoch(self, epoch: int) -> None:
        """Make the next iteration begin with the first row of an epoch."""
        self.epoch = epoch
        self._positions, self.micro_batches_done = {}, 0

    def state_dict(self) -> dict[str, Any]:
        """Return how far the logical streams of all ranks are; all ranks have to call this method together.

        Raises:
            PackingError: the loader is in the middle of an optimizer step, so a checkpoint would lack the gradients
                that were accumulated so far.
        """
        self._check_between_steps()
        positions = {stream: at for of_rank in gather_object([self._positions]) for stream, at in of_rank.items()}
        return {
            "epoch": self.epoch,
            "steps": self.steps_done,
            "optimizer_steps": self.optimizer_steps,
            "loss": self.dataset.loss,
            "streams": self.dataset.of_epoch(self.epoch).state_at(positions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on at a state that `state_dict` has returned on any number of ranks.

        Raises:
            PackingError: the state is of another stream or another loss; or the rows that were read cannot be divided
                among the ranks.
        """
        if state.get("loss") != self.dataset.loss:
            raise PackingError(
                f"loss: expected {state.get('loss')!r}, as when the state was saved, got {self.dataset.loss!r}"
            )
        rows = self.dataset.rows_per_batch
        positions = self.dataset.of_epoch(state["epoch"]).positions_in(state["streams"])
        turns = sum(turns for turns, *_ in positions.values())
        if turns % (self._ranks * rows):
            raise PackingError(
                f"gradient_accumulation_steps: expected as many rows in an optimizer step as when the state was saved, "
                f"but the {turns} rows that were read cannot be divided among {self._ranks} ranks with {rows} rows in "
                "a micro-batch; choose ranks x gradient_accumulation_steps as before"
            )
        self._begin_at_epoch(state["epoch"])
        self.micro_batches_done, self.optimizer_steps = state["steps"] * self.accumulation, state["optimizer_steps"]
        self._positions = {each: at for each, at in positions.items() if each % self._ranks == self._rank}
