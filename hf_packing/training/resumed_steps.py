"""ResumedSteps: a trainer goes on from a checkpoint whose optimizer steps had another number of micro-batches.

Trainer finds the epoch of a checkpoint, the place in the epoch, and the number of steps that are left by dividing
global_step by the steps of an epoch. This is right only if the steps have always been of one size. In a run that
changes `ranks x gradient_accumulation_steps`, the rest of the epoch is planned anew, and has its own number of steps.
"""

import os
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from hf_packing.sampling.sampler import SLOTS, STEPS, RankBatchSampler
from hf_packing.sampling.steps_of_epochs import StepsOfEpochs
from hf_packing.training.ranks import STEPS_AHEAD, BatchesOfCheckpoint, PlannedFrom


class ResumedSteps:
    """The place in the data at which a call of train() begins, unless Trainer finds this place by itself.

    Args:
        checkpoint: the argument resume_from_checkpoint of train().
    """

    def __init__(self, checkpoint: str | os.PathLike[str] | bool | None) -> None:
        self._checkpoint = checkpoint
        self._step = 0
        self._steps: StepsOfEpochs | None = None
        """The steps of the run's epochs; None if Trainer finds the place by itself."""
        self._sampler: RankBatchSampler | None = None

    def plan(self, trainer: Trainer, sampler: RankBatchSampler, planned_from: PlannedFrom) -> None:
        """Plan what is left of the epoch in which the checkpoint was saved; no effect after `begin`.

        Nothing is planned, and the callback `BatchesOfCheckpoint` decides whether training may go on, if Trainer finds
        the place by itself, or if the checkpoint does not tell the place.

        Args:
            trainer: the attached trainer.
            sampler: the sampler of the training rows; it goes to the epoch of the checkpoint.
            planned_from: gets the step of the checkpoint, to compare with the other ranks.

        Raises:
            PackingError: the checkpoint was saved with a different dataset or batching.
        """
        state = None if trainer.args.ignore_data_skip else _state_in(trainer, self._checkpoint)
        saved = BatchesOfCheckpoint.saved_in(state) if state is not None else None
        if state is None or saved is None or STEPS not in saved or saved.get(STEPS_AHEAD):
            return
        before, slots, step = StepsOfEpochs.from_saved(saved[STEPS]), saved[SLOTS], state.global_step
        if slots == sampler.epoch.slots and before.counts_from_zero:
            return
        planned_from.note_settings(resume_from_checkpoint=f"step {step} of {before}")
        sampler.check_can_resume(saved, any_slots=True)
        epoch, done, _ = before.place(step)
        trained = before.trained_in(epoch)
        if slots == sampler.epoch.slots:
            sampler.plan_rest(epoch, trained)
            steps = before
        else:
            sampler.plan_rest(epoch, (*trained, (slots, done)) if done else trained)
            share, rest = before.epochs_at(step) - epoch, sampler.optimizer_steps
            steps = StepsOfEpochs(sampler.steps.steps, rest, epoch, step, share, sampler.epoch.trained)
        self._step, self._steps, self._sampler = step, steps, sampler

    def initial_values(self, args: TrainingArguments, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result of Trainer.set_initial_training_values, with the epochs and steps of this run.

        If the user has not set max_steps, training ends when num_train_epochs are done.
        """
        if self._steps is None:
            return values
        _, _, examples, samples, batch_size, _, _ = values
        max_steps = args.max_steps if args.max_steps >= 0 else self._steps.until(args.num_train_epochs)
        epochs = self._steps.place(self._step).epoch
        if max_steps > self._step:
            epochs = self._steps.place(max_steps - 1).epoch + 1
        most = max(self._steps.steps, self._steps.rest)
        return epochs, most, examples, samples, batch_size, most * args.gradient_accumulation_steps, max_steps

    def begin(self) -> int | None:
        """Go to the place, and return the number of its epoch; return None if Trainer finds the place by itself."""
        self._checkpoint = None  # callbacks may ask for further loaders, which begin with the first epoch
        if self._steps is None or self._sampler is None:
            return None
        self._sampler.go_on(self._steps, self._step)
        return self._sampler.epoch.number


class EpochOfSteps(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Sets the epoch in the logs, and ends epochs, in a run whose epochs have different numbers of optimizer steps."""

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,
        **known: Any,
    ) -> None:
        sampler = known["train_dataloader"].dataset.sampler
        if sampler.goes_on:
            state.epoch = sampler.steps.epochs_at(state.global_step)
            control.should_epoch_stop |= not sampler.steps.place(state.global_step).done


def _state_in(trainer: Trainer, checkpoint: str | os.PathLike[str] | bool | None) -> TrainerState | None:
    """Return the state of the trainer in a checkpoint; None if there is none."""
    folder = get_last_checkpoint(trainer.args.output_dir) if checkpoint is True else checkpoint
    if not folder or not (file := Path(folder) / TRAINER_STATE_NAME).is_file():
        return None
    return TrainerState.load_from_json(str(file))
