"""Record in checkpoints of a Trainer how batches are planned, so that a resumed run makes the same optimizer steps."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_packing.errors import PackingError
from hf_packing.sampling.sampler import RankBatchSampler


class BatchesOfCheckpoint(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """A Trainer callback that records in checkpoints how batches are planned, and checks this in a resumed run."""

    batches: dict[str, Any] | None = None
    """What decides the batches; None if the number of steps does not tell the position in the epoch."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"batches": self.batches}}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **known: Any,
    ) -> None:
        """If training resumes from a checkpoint, refuse settings that give other optimizer steps than those saved."""
        sampler = getattr(known["train_dataloader"].dataset, "sampler", None)
        if not isinstance(sampler, RankBatchSampler):
            return
        begins_new_epoch = args.ignore_data_skip and state.global_step % sampler.optimizer_steps
        if state.global_step and not args.ignore_data_skip:
            saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("batches")
            if saved is None:
                raise PackingError(
                    "resume_from_checkpoint: expected a checkpoint of an attached trainer whose steps tell the place "
                    "in the epoch, got a checkpoint of another trainer, or of a run that was resumed with "
                    "ignore_data_skip=True in the middle of an epoch; set ignore_data_skip=True to begin a new epoch"
                )
            sampler.check_can_resume(saved)
        self.batches = None if begins_new_epoch else sampler.plan_inputs()
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint of another trainer lacks it
