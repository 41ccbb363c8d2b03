"""Yield the micro-batches of one rank from logical streams, and save how far the logical streams of all ranks are."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import gather_object, send_to_device

from hf_packing.batch.collate import PackingCollator
from hf_packing.checks import check_whole_number
from hf_packing.columns import (
    COPIED_SEGMENT,
    ENDS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    PARENTS,
    SEGMENT_LENGTHS,
    SEQ_IDX,
    TRAINED,
    TREE_INPUT_IDS,
    TREE_LABELS,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.streams.logical import Position
from hf_packing.training.ranks import data_rank
from hf_packing.training.streams.dispatch import Dispatched
from hf_packing.training.streams.lockstep import Answer, in_lockstep
from hf_packing.training.streams.rank_turns import MicroBatch, RankTurns, moved, turns_loader
from hf_packing.training.streams.source_logs import SourceCounts
from hf_packing.training.streams.training_stream import TrainingStream

Batch = dict[str, Any]

_MASKED_TOKENS = 16
"""The tokens of a batch that stands for rows that do not exist."""

_MICRO_BATCHES_AHEAD = 8
"""The number of micro-batches that a rank reads ahead, or those of one optimizer step if that has more."""

_FORMAT = 1
"""The version of the layout of saved states. A state of another version is refused."""


class StreamLoader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate has no types
    """The micro-batches of this rank, in optimizer steps that are the same for any number of ranks.

    Each iteration goes on where the last one has stopped, up to the end of the epoch, which all ranks reach in the same
    step. A rank whose logical streams have ended yields batches without labels until then. `state_dict` and iterations
    have to be called on all ranks together.

    Args:
        stream: the logical streams to read.
        accelerator: the accelerator, which knows the rank and the device.
        collate: the collator.
        accumulation: number of micro-batches in an optimizer step on this rank.
        token_types: whether the model takes `token_type_ids`.
        more: names of further columns with one number for each token to read.
        restarts: True for evaluation: each iteration begins at the first row of the first epoch.
        workers: number of DataLoader workers.
        options: further arguments of DataLoader.
    """

    def __init__(
        self,
        stream: TrainingStream,
        accelerator: Accelerator,
        collate: PackingCollator,
        *,
        accumulation: int = 1,
        token_types: bool = True,
        more: Sequence[str] = (),
        restarts: bool = False,
        workers: int = 0,
        **options: Any,
    ) -> None:
        self.stream = stream
        self.gradient_state = GradientState()
        self.accumulation = accumulation
        self.epoch = 0
        """The epoch of the next row, from 0."""
        self.steps_done = 0
        """The number of optimizer steps of this epoch whose micro-batches were yielded."""
        self.optimizer_steps = 0
        """The number of optimizer steps of all epochs whose micro-batches were yielded."""
        self.without_rows: list[bool] = []
        """For each micro-batch of the current optimizer step: whether it has no row, since its streams have ended."""
        self.documents: list[IntArray | None] = []
        """For each micro-batch of the current optimizer step: `MicroBatch.documents`."""
        self._accelerator = accelerator
        self._rank, self._ranks = data_rank(accelerator)
        self.counts = SourceCounts(stream.sources, stream.streams.streams)
        """What was yielded of each source of a mixture."""
        self._collate, self._token_types, self._restarts = collate, token_types, restarts
        self._more = more
        self._workers, self._options = workers, options
        self._dispatches = bool(accelerator.dispatch_batches) and accelerator.num_processes > 1
        self._positions: dict[int, Position] = {}
        """How far the logical streams of this rank have come."""
        self._left_of_step = 0

    @property
    def dataset(self) -> TrainingStream:
        """The stream that the loader reads. Trainer asks every loader for its dataset."""
        return self.stream

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the loader counts epochs by itself, since a resumed Trainer counts them from 0 again."""

    def __iter__(self) -> Iterator[Batch]:
        if self._restarts:
            self.begin_at_epoch(0)
        if self._left_of_step:
            raise PackingError(
                f"loader: expected all {self.accumulation} micro-batches of an optimizer step to be read before the "
                f"next iteration, got one that stopped {self._left_of_step} before the end of a step; stop after an "
                "optimizer step, or load a state"
            )
        self.begin()
        try:
            has_begun = bool(self._positions)
            ran = yield from self._rest_of_epoch()
            if has_begun and not ran:  # the state was saved after the last step of an epoch
                ran = yield from self._rest_of_epoch()
            if not ran:
                raise PackingError("dataset: expected a stream with at least one document, got a stream without")
        finally:
            self.end()

    def begin_at_epoch(self, epoch: int) -> None:
        """Make the next iteration begin with the first row of an epoch."""
        self.epoch = check_whole_number("epoch", epoch, minimum=0)
        self._positions, self.steps_done, self._left_of_step = {}, 0, 0

    def _rest_of_epoch(self) -> Generator[Batch, None, bool]:
        """Yield the micro-batches up to the end of the epoch; return whether there were any."""
        steps = self._dispatched_steps() if self._dispatches else self._steps_of(self._rank, self._positions)
        left = set(self.stream.streams.owned[self._rank :: self._ranks])

        def read() -> tuple[list[MicroBatch], Answer]:
            step = next(steps)
            left.difference_update(move.stream for each in step for move in each.moves if move.ended)
            if any(each.batch is not None for each in step):
                return step, Answer.ROW
            return step, Answer.NO_ROW if left else Answer.ENDED

        ran = False
        ranks, device = self._accelerator.num_processes, self._accelerator.device
        for step, is_run in in_lockstep(read, ranks, device, max(_MICRO_BATCHES_AHEAD // self.accumulation, 1)):
            if is_run:
                ran = True
                yield from self._run(step)
            else:
                self._move(step)
        self.counts.end_epoch()
        self.begin_at_epoch(self.epoch + 1)
        return ran

    def _run(self, step: list[MicroBatch]) -> Iterator[Batch]:
        """Yield the batches of an optimizer step."""
        batches = self.prepared([send_to_device(self._batch(each), self._accelerator.device) for each in step])
        self._left_of_step = len(batches)
        self.without_rows = [each.batch is None for each in step]
        self.documents = [each.documents for each in step]
        for batch in batches:
            self._left_of_step -= 1
            if not self._left_of_step:  # before the last batch, since a state is saved after it
                self._move(step)
                self.steps_done += 1
                self.optimizer_steps += 1
            yield batch

    def prepared(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of an optimizer step on this rank, as they are yielded."""
        return batches

    def _batch(self, micro_batch: MicroBatch) -> Batch:
        if micro_batch.batch is not None:
            return micro_batch.batch
        kinds = {name: self.stream.streams.features[name].feature.dtype for name in self._more}
        return _masked(self._collate, self.stream.shares_prefixes, kinds)

    def _move(self, step: list[MicroBatch]) -> None:
        """Note that a step was run, or passed over."""
        for each in step:
            for move in each.moves:
                self._positions[move.stream] = moved(self._positions.get(move.stream), move)
            if each.documents is not None:
                self.counts.add(each.documents)

    def _steps_of(self, rank: int, positions: dict[int, Position]) -> Iterator[list[MicroBatch]]:
        """Return an iterator over the steps of a rank, from the positions of its logical streams on, without an end."""
        reader, seed = self._reader(rank, positions), self.epoch * self._ranks + rank
        micro_batches = iter(turns_loader(reader, self._workers, seed, **self._options))
        while True:
            yield list(islice(micro_batches, self.accumulation))

    def _reader(self, rank: int, positions: dict[int, Position]) -> RankTurns:
        streams = self.stream.of_epoch(self.epoch)
        own = {stream: at for stream, at in positions.items() if stream % self._ranks == rank}
        turns = sum(turns for turns, *_ in own.values())
        return RankTurns(
            streams,
            rank,
            self._ranks,
            self.stream.rows_per_batch,
            self._collate,
            streams.state_at(own) if own else None,
            turns // self.stream.rows_per_batch,
            self._token_types,
            self._more,
        )

    def _dispatched_steps(self) -> Iterator[list[MicroBatch]]:
        """Return an iterator over the steps of this rank, which the main process reads."""
        (positions,) = self._everywhere((self._positions,))
        of_ranks = range(self._ranks if self._accelerator.is_main_process else 0)
        read = [self._steps_of(rank, positions) for rank in of_ranks]
        processes = self._accelerator.num_processes
        return Dispatched(self._accelerator, read, lambda process: process * self._ranks // processes)

    def _everywhere(self, facts: tuple[dict[int, Any], ...]) -> tuple[dict[int, Any], ...]:
        """Return dicts with the entries that they have on any rank; all ranks have to call this method together."""
        if self._accelerator.num_processes == 1:
            return facts
        of_ranks = gather_object([facts])
        return tuple(reduce(dict.__or__, each) for each in zip(*of_ranks, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return how far the logical streams of all ranks are; all ranks have to call this method together.

        Raises:
            PackingError: the loader is in the middle of an optimizer step, so a checkpoint would lack the gradients
                that were accumulated so far.
        """
        if self._left_of_step:
            raise PackingError(
                f"state: expected a checkpoint after an optimizer step of {self.accumulation} micro-batches, got a "
                f"checkpoint {self._left_of_step} micro-batches before its end, which would lack the accumulated "
                "gradients"
            )
        positions, counted = self._everywhere((self._positions, {self._rank: self.counts}))
        return {
            "format": _FORMAT,
            "epoch": self.epoch,
            "steps": self.steps_done,
            "optimizer_steps": self.optimizer_steps,
            "rows_per_batch": self.stream.rows_per_batch,
            "streams": self.stream.of_epoch(self.epoch).state_at(positions),
            "sources": self.counts.saved(counted),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration go on at a state that `state_dict` has returned on any number of ranks.

        Raises:
            PackingError: the state is of another stream, or of another number of rows in a micro-batch; or the rows
                that were read cannot be divided among the ranks.
        """
        if (version := state.get("format")) != _FORMAT:
            raise PackingError(
                f"state_dict: expected the state of a stream in format {_FORMAT}, got format {version!r}; go on with "
                "the version of hf_packing that saved the state, or start the stream again without the state"
            )
        rows, epoch = self.stream.rows_per_batch, state["epoch"]
        if state["rows_per_batch"] != rows:
            raise PackingError(
                f"max_tokens: expected as many tokens as when the state was saved, for {state['rows_per_batch']} rows "
                f"in a micro-batch, got {self.stream.max_tokens} tokens for {rows}"
            )
        positions = self.stream.of_epoch(epoch).positions_in(state["streams"])
        turns = sum(turns for turns, *_ in positions.values())
        if turns % (self._ranks * rows):
            raise PackingError(
                f"gradient_accumulation_steps: expected as many rows in an optimizer step as when the state was saved, "
                f"but the {turns} rows that were read cannot be divided among {self._ranks} ranks with {rows} rows in "
                "a micro-batch; choose ranks x gradient_accumulation_steps as before"
            )
        self.begin_at_epoch(epoch)
        self.steps_done = state["steps"]
        self.optimizer_steps = state.get("optimizer_steps", self.steps_done)
        self._positions = {each: at for each, at in positions.items() if each % self._ranks == self._rank}
        self.counts.load(state.get("sources"))  # a state of an older version has no counts


def _masked(collate: Callable[..., Batch], as_tree: bool, more: Mapping[str, str]) -> Batch:
    """Return a batch without labels, for a rank that has no row while other ranks have one.

    It is always the same batch, since a model draws as much dropout for a batch as the batch has tokens.

    Args:
        collate: the collator.
        as_tree: whether other batches are made of rows of trees.
        more: the dtypes of the columns that are passed on, by name.
    """
    tokens = np.zeros(_MASKED_TOKENS, dtype=np.int64)
    labels = np.full_like(tokens, IGNORED_LABEL)
    zeros = {name: tokens.astype(dtype) for name, dtype in more.items()}
    if not as_tree:
        return collate([{INPUT_IDS: tokens, LABELS: labels, SEQ_IDX: np.full_like(tokens, COPIED_SEGMENT), **zeros}])
    segments = {SEGMENT_LENGTHS: [_MASKED_TOKENS], PARENTS: [-1], ENDS: [0], TRAINED: []}
    return collate([{TREE_INPUT_IDS: tokens, TREE_LABELS: labels, **segments, **zeros}])
