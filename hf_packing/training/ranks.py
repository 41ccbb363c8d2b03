"""Check that all ranks plan from the same data, and that a resumed run makes the same steps; count tokens for logs.

Batches are a pure function of the data, the settings and the number of ranks, so every rank computes the batches of all
ranks by itself. Ranks with different data would train on some rows twice and on other rows never, or would wait for
each other forever. To detect different data, all ranks plan at the same time and then exchange facts about the data and
settings that they used, even if planning failed on a rank. A checkpoint records how its batches were planned, and a
resumed run must make the same optimizer steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import is_initialized
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_packing.batch.collate import is_tree_batch
from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import DataFacts, RowSizes, data_facts
from hf_packing.training.losses import Loss, documents_in, items_in
from hf_packing.training.tree_batch import trees_of

Result = TypeVar("Result")

LOSS = "loss"

STEPS_AHEAD = "steps_ahead"
"""A checkpoint entry: the number of optimizer steps by which global_step is ahead of the position in the epoch."""

_TOKENS, _DOCUMENTS, _SQUARES, _ITEMS, _FILLERS = range(5)
"""Columns of the result of `micro_batch_counts`. Items are the tokens or documents over which the loss is averaged;
fillers are the tokens of padding and of copies, which the other columns leave out."""


class DataRank(NamedTuple):
    """The rank of a process among the ranks that train on different rows, and the number of such ranks."""

    rank: int
    world_size: int


def data_rank(accelerator: Accelerator) -> DataRank:
    """Return the data rank of this process; processes that share a model by tensor parallelism share one data rank."""
    config = parallelism_of(accelerator)
    together = getattr(config, "tp_size", 1) if config else 1
    return DataRank(accelerator.process_index // together, accelerator.num_processes // together)


def parallelism_of(accelerator: Accelerator) -> Any:
    """Return the accelerator's parallelism_config, or None if the accelerator has none."""
    return getattr(accelerator, "parallelism_config", None)


@dataclass
class PlannedFrom:
    """The data and settings that a rank has used for planning so far, to compare with the other ranks."""

    compared: bool = False
    """True if there are other ranks to compare with; if False, no facts about the data are collected."""
    data: dict[str, DataFacts] = field(default_factory=dict)
    """Facts about each dataset, by the name of the argument, such as "train_dataset"."""
    settings: dict[str, str] = field(default_factory=dict)

    def note_data(self, name: str, dataset: Any, sizes: RowSizes) -> None:
        if self.compared:
            self.data[name] = data_facts(dataset, sizes)

    def note_settings(self, **settings: Any) -> None:
        self.settings.update({name: str(value) for name, value in settings.items()})


def on_all_ranks(act: Callable[[PlannedFrom], Result]) -> Result:
    """Call `act` on this rank, and return the result if `act` used the same data and settings on all ranks.

    All ranks must call this function at the same time. If `act` raises an error on a rank, that rank raises the error.

    Args:
        act: a function that plans batches, and notes the data and settings in its argument, a PlannedFrom. The function
            must not wait for other ranks.

    Raises:
        PackingError: data or settings differ between ranks (raised on every rank), or `act` failed on another rank.
    """
    processes = PartialState().num_processes if is_initialized() else 1
    planned_from = PlannedFrom(compared=processes > 1)
    if processes == 1:
        return act(planned_from)
    failure = None
    try:
        result = act(planned_from)
    except Exception as error:  # the other ranks must learn of any error
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    reports = gather_object([_Report(planned_from, said)])
    try:
        _refuse_differences(reports)
    except PackingError as different:
        raise different from failure
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise PackingError(f"rank {rank} of {processes} raised {report.error}")
    return result


class CollectiveCall:
    """A flag that is on from the start of a method that all ranks run, such as train(), until a loader is made.

    While the flag is on, the ranks compare the data and settings of a new loader. While the flag is off, a loader may
    be made on a single rank only, so nothing is compared.
    """

    def __init__(self) -> None:
        self._is_to_plan = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager: the flag is on from the beginning of the block until the first call of `runner`."""
        self._is_to_plan = True
        try:
            yield
        finally:
            self._is_to_plan = False

    def runner(self) -> Callable[[Callable[[PlannedFrom], Result]], Result]:
        """Return `on_all_ranks` if the flag is on, else a function that plans on this rank only; turn the flag off."""
        is_to_plan, self._is_to_plan = self._is_to_plan, False
        return on_all_ranks if is_to_plan else lambda act: act(PlannedFrom())


@dataclass(frozen=True)
class _Report:
    """The report that a rank sends to all other ranks after planning; `error` is None if planning succeeded."""

    planned_from: PlannedFrom
    error: str | None


def _refuse_differences(reports: list[_Report]) -> None:
    complete = all(report.error is None for report in reports)
    _refuse_different_settings(reports, complete=False)
    first = reports[0].planned_from
    for rank, report in enumerate(reports[1:], start=1):
        other = report.planned_from
        for name in _names_to_compare(first.data, other.data, complete):
            if name not in first.data or name not in other.data:
                has, lacks = (0, rank) if name in first.data else (rank, 0)
                raise PackingError(
                    f"{name}: expected a dataset on all ranks, but rank {has} has a dataset and rank {lacks} has none"
                )
            if differ := first.data[name].difference(other.data[name], rank):
                raise PackingError(
                    f"{name}: expected the same rows on all ranks; {differ}. Give every rank the whole dataset, "
                    "without .shard(), split_dataset_by_node() or shuffle(seed=rank), since hf_packing divides the "
                    "rows among the ranks"
                )
    _refuse_different_settings(reports, complete)


def _refuse_different_settings(reports: list[_Report], complete: bool) -> None:
    first = reports[0].planned_from
    for rank, report in enumerate(reports[1:], start=1):
        other = report.planned_from
        for name in _names_to_compare(first.settings, other.settings, complete):
            here, there = first.settings.get(name), other.settings.get(name)
            if here != there:
                raise PackingError(
                    f"{name}: expected the same value on all ranks; rank 0 has {here}, rank {rank} has {there}. Every "
                    "rank plans the batches of all ranks, so settings must not differ"
                )


def _names_to_compare(first: Mapping[str, Any], other: Mapping[str, Any], complete: bool) -> list[str]:
    """Return the names of the data, or of the settings, to compare between two ranks.

    If planning succeeded on all ranks (`complete`), the result has all names in `first` or `other`. Otherwise, the
    result has only names in both, since a rank may have failed before it noted all names.
    """
    return [name for name in {**first, **other} if complete or (name in first and name in other)]


def check_same_loss(saved: dict[str, Any], loss: str) -> None:
    """Raise PackingError if a checkpoint was saved by training with a different `loss` argument.

    Args:
        saved: the state in the checkpoint.
        loss: the `loss` argument of the resumed run.
    """
    if saved.get(LOSS) != loss:
        raise PackingError(f"loss: expected {saved.get(LOSS)!r}, as when the checkpoint was saved, got {loss!r}")


class BatchesOfCheckpoint(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """A Trainer callback that records in checkpoints how batches are planned, and checks this in a resumed run."""

    def __init__(self, loss: str = "token") -> None:
        self.loss = loss
        self.batches: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {"loss": self.loss}, "attributes": {"batches": self.batches}}

    @classmethod
    def saved_in(cls, state: TrainerState) -> dict[str, Any] | None:
        """Return how the batches of a checkpoint were planned, or None if the checkpoint does not tell."""
        saved = state.stateful_callbacks.get(cls.__name__, {}).get("attributes", {})
        batches: dict[str, Any] | None = saved.get("batches")
        return batches

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **known: Any,
    ) -> None:
        """If training resumes from a checkpoint, refuse settings that give other optimizer steps than those saved."""
        rows = known["train_dataloader"].dataset
        if not isinstance(getattr(rows, "sampler", None), RankBatchSampler):
            return
        steps_ahead = 0
        if state.global_step and args.ignore_data_skip:
            steps_ahead = state.global_step % rows.sampler.optimizer_steps
        elif state.global_step:
            saved = self.saved_in(state)
            if saved is None:
                raise PackingError(
                    "resume_from_checkpoint: expected a checkpoint of an attached trainer, got a checkpoint "
                    "without a record of its batches; to begin a new epoch instead, set ignore_data_skip=True"
                )
            rows.sampler.check_can_resume(saved)
            check_same_loss(saved, self.loss)
            if saved.get(STEPS_AHEAD):
                raise PackingError(
                    "ignore_data_skip: expected True, got False. The run that saved the checkpoint was itself resumed "
                    f"with ignore_data_skip=True, {saved[STEPS_AHEAD]} steps into an epoch, and then began a new "
                    "epoch. So global_step does not give the position in the epoch: the resumed run would train on "
                    "some rows twice and on other rows not at all"
                )
        self.batches = {**rows.sampler.plan_inputs(), LOSS: self.loss, STEPS_AHEAD: steps_ahead}
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint of another trainer lacks it


def micro_batch_counts(batches: Sequence[Mapping[str, Any]], loss: Loss) -> Tensor:
    """Count the tokens, documents, attention cost, items of the loss and filling tokens of each batch.

    Returns:
        int64 [batches, 5], on the batches' device. Attention cost is the sum of squared segment lengths or, for trees,
        `TreeSegments.attention_cost`. Items are the tokens or documents over which the loss is averaged.
    """
    rows = []
    for batch in batches:
        if is_tree_batch(batch):
            trees = trees_of(batch)
            known = [trees.tokens, int(documents_in(batch)), trees.attention_cost, int(items_in(batch, loss)), 0]
            rows.append(torch.tensor(known, device=batch["input_ids"].device))
            continue
        borders, own = batch["cu_seq_lens_q"].long(), own_tokens(batch)[0]
        lengths = F.pad(own.long().cumsum(0), (1, 0))[borders].diff()  # 0 for segments that only fill the batch
        counted = [lengths.sum(), (lengths > 0).sum(), lengths.square().sum(), items_in(batch, loss), (~own).sum()]
        rows.append(torch.stack([each.to(borders.device) for each in counted]))
    return torch.stack(rows)


def own_tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return which tokens of a batch are of its dataset, bool [1, tokens]: those of neither padding nor copies."""
    return torch.ones_like(batch["input_ids"], dtype=torch.bool) if is_tree_batch(batch) else batch["seq_idx"] >= 0


def check_accumulation(trainer: Trainer, planned: int) -> None:
    """Refuse a value of gradient_accumulation_steps that was changed during training, for example by a callback.

    Args:
        trainer: the attached trainer.
        planned: the value for which the training batches were planned.

    Raises:
        PackingError: gradient_accumulation_steps is not the value for which the batches were planned.
    """
    if (accumulation := trainer.args.gradient_accumulation_steps) != planned:
        raise PackingError(
            f"gradient_accumulation_steps: expected {planned}, as when train() was called, got {accumulation}; change "
            "the value before train()"
        )


def fillers_counted(counts: Tensor) -> int:
    """Return the number of tokens in an optimizer step that only fill batches, given the counts of all ranks."""
    return int(counts[..., _FILLERS].sum())


def items_counted(counts: Tensor) -> Tensor:
    """Return the number of items over which the loss of an optimizer step is averaged, an int64 scalar of at least 1.

    Args:
        counts: int64 [ranks, batches, 5], the result of `micro_batch_counts` on each rank.
    """
    return counts[..., _ITEMS].sum().clamp(min=1)


class StepCounts:
    """Counts of tokens, documents and attention cost in the optimizer steps since the trainer last logged.

    The counts stay on the device until they are logged.
    """

    def __init__(self) -> None:
        self._steps: list[Tensor] = []
        self._documents: Tensor | int = 0
        """The number of documents in all steps."""

    def add(self, counts: Tensor) -> None:
        """Add the counts of an optimizer step, int64 [ranks, batches, 4 or 5], as of `micro_batch_counts`."""
        self._steps.append(counts.detach())
        self._documents = self._documents + counts[..., _DOCUMENTS].sum()

    def correct_speed(self, logs: dict[str, float]) -> None:
        """Make the samples per second at the end of a training those documents that were trained on.

        Trainer multiplies max_steps by per_device_train_batch_size, which does not decide how large a step is.
        """
        if (name := "train_samples_per_second") in logs:
            logs[name] = round(int(self._documents) / logs["train_runtime"], 3)

    def take(self, max_tokens: int | None) -> dict[str, float]:
        """Return packing metrics of the optimizer steps since the last call, by their names in the logs.

        Args:
            max_tokens: the largest number of tokens that a micro-batch may have; None if there is none.
        """
        if not self._steps:
            return {}
        steps = len(self._steps)
        together = torch.cat(self._steps, dim=1).double().cpu()
        self._steps.clear()
        tokens, squares = together[..., _TOKENS], together[..., _SQUARES]
        taken = {} if max_tokens is None else {"packing_efficiency": float(tokens.mean()) / max_tokens}
        taken["documents_per_step"] = float(together[..., _DOCUMENTS].sum()) / steps
        taken["tokens_per_step"] = float(tokens.sum()) / steps
        if len(together) > 1:  # one rank waits for no other
            taken["token_utilization"] = _utilization(tokens)
            taken["attention_utilization"] = _utilization(squares)
        return taken


class Predictions:
    """The predictions of all ranks in an evaluation, without the copies of rows that some of them had to run.

    Args:
        accelerator: the accelerator of the trainer.
        prefix: the prefix of the names of metrics.
    """

    def __init__(self, accelerator: Accelerator, prefix: str) -> None:
        self._accelerator, self._prefix = accelerator, prefix
        self._documents: Tensor | int = 0
        self._batches = 0
        self._counted: list[bool] = []
        """For each process: whether its current micro-batch has rows that are not copies."""

    @property
    def documents(self) -> int:
        """The number of documents, over all ranks."""
        return int(self._documents)

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Note the micro-batch that this rank is about to run; all ranks call this together."""
        documents = self._accelerator.gather(micro_batch_counts([batch], "token")[:, _DOCUMENTS])
        self._documents, self._batches = self._documents + documents.sum(), self._batches + 1
        self._counted = [True] if len(documents) == 1 else (documents > 0).tolist()

    def gathered(self, gather: Callable[[Any], Any], data: Any) -> Any:
        """Return what `gather` returns for the results of a micro-batch, without those of ranks that ran a copy."""
        found = gather(data)
        if all(self._counted):
            return found
        if isinstance(found, list) and not isinstance(data, list):  # of eval_use_gather_object
            size = len(found) // len(self._counted)
            return [each for number, each in enumerate(found) if self._counted[number // size]]
        return recursively_apply(self._without_copies, found)

    def _without_copies(self, of_ranks: Tensor) -> Tensor:
        of_each = zip(of_ranks.chunk(len(self._counted)), self._counted, strict=True)
        return torch.cat([results for results, counts in of_each if counts])

    def correct_speed(self, metrics: dict[str, float]) -> None:
        """Make the steps per second those micro-batches that each rank has run, instead of a number that rows give."""
        if (name := f"{self._prefix}_steps_per_second") in metrics:
            metrics[name] = round(self._batches / metrics[f"{self._prefix}_runtime"], 3)


def _utilization(work: Tensor) -> float:
    """Return how evenly the ranks share the work: mean / maximum over ranks, averaged over micro-batches.

    Args:
        work: float64 [ranks, micro-batches]: the tokens, or the attention cost, of each micro-batch.
    """
    most = work.amax(dim=0)
    return float((work.mean(dim=0) / most)[most > 0].mean())
