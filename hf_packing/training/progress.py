"""What a checkpoint says of the batches it came from, and refusing to go on with others."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_packing.errors import PackingError
from hf_packing.sampling.sampled_rows import SampledRows
from hf_packing.training.losses import Loss

LOSS = "loss"
STEPS_AHEAD = "steps_ahead"
"""By how many steps of the optimiser the steps of a run are ahead of its place in an epoch."""


def check_same_loss(saved: dict[str, Any], loss: Loss) -> None:
    if saved.get(LOSS) != loss:
        raise PackingError(f"loss: expected {saved.get(LOSS)!r}, as when the checkpoint was saved, got {loss!r}")


class BatchesOfCheckpoint(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """Saved with a trainer's state: everything that decides which batches follow, and their losses."""

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
        """Compare with the checkpoint that is resumed, if one is."""
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
                    "resume_from_checkpoint: expected a checkpoint of a trainer with attached batches, this one knows "
                    "nothing of them; ignore_data_skip=True begins with a whole epoch"
                )
            rows.sampler.check_can_resume(saved)
            check_same_loss(saved, self.loss)
            if saved.get(STEPS_AHEAD):
                raise PackingError(
                    "ignore_data_skip: expected True, as when the run that saved the checkpoint was resumed itself, "
                    f"{saved[STEPS_AHEAD]} steps into an epoch, with a whole epoch; got False, but its steps no longer "
                    "say which rows come next, and some would be trained on twice and others not at all"
                )
        self.batches = {**rows.sampler.plan_inputs(), LOSS: self.loss, STEPS_AHEAD: steps_ahead}
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint of others has no place for it
