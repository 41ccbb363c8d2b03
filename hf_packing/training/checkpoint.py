"""What a checkpoint of a trainer says about the batches it was saved after, and refusing to go on with other ones."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_packing.errors import PackingError
from hf_packing.sampling.sampled_rows import SampledRows
from hf_packing.training.losses import Loss

LOSS = "loss"
_STEPS_AHEAD = "steps_ahead"
"""By how many optimizer steps global_step is ahead of the place in the epoch."""


def check_same_loss(saved: dict[str, Any], loss: Loss) -> None:
    """Raise PackingError for a state that was saved with another loss."""
    if saved.get(LOSS) != loss:
        raise PackingError(f"loss: expected {saved.get(LOSS)!r}, as when the checkpoint was saved, got {loss!r}")


class BatchesOfCheckpoint(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """Saves everything that decides which batches and losses follow, with the state of the trainer."""

    def __init__(self, loss: Loss = "token") -> None:
        self.loss = loss
        self.batches: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {"loss": self.loss}, "attributes": {"batches": self.batches}}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **known: Any,
    ) -> None:
        """Compare the batches with those of the checkpoint that is resumed, if there is one."""
        rows = known["train_dataloader"].dataset
        if not isinstance(rows, SampledRows):
            return
        steps_ahead = 0
        if state.global_step and args.ignore_data_skip:
            steps_ahead = state.global_step % -(-len(rows.sampler) // rows.sampler.accumulation)
        elif state.global_step:
            saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("batches")
            if saved is None:
                raise PackingError(
                    "resume_from_checkpoint: expected a checkpoint of a trainer with attached batches, this one does "
                    "not say which batches it was trained on; ignore_data_skip=True begins with a whole epoch"
                )
            rows.sampler.check_can_resume(saved)
            check_same_loss(saved, self.loss)
            if saved.get(_STEPS_AHEAD):
                raise PackingError(
                    "ignore_data_skip: expected True, since the run that saved the checkpoint was itself resumed with "
                    f"it, {saved[_STEPS_AHEAD]} steps into an epoch, and then began a whole epoch; got False, but its "
                    "steps no longer say which rows come next, so some would be trained on twice and others not at all"
                )
        self.batches = {**rows.sampler.plan_inputs(), LOSS: self.loss, _STEPS_AHEAD: steps_ahead}
        state.stateful_callbacks[type(self).__name__] = self.state()  # the checkpoint of another trainer has no entry
