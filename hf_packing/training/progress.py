"""What a checkpoint says of the batches it came from, and refusing to go on with others."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_packing.errors import PackingError
from hf_packing.sampling.rows import SampledRows
from hf_packing.training.losses import Loss

LOSS = "loss"


def check_same_loss(saved: dict[str, Any], loss: Loss) -> None:
    if saved.get(LOSS) != loss:
        raise PackingError(f"loss: expected {saved.get(LOSS)!r}, as when the checkpoint was saved, got {loss!r}")


class BatchesOfCheckpoint(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """Saved with a trainer's state: everything that decides which batches follow, and their losses."""

    def __init__(self, loss: Loss = "token") -> None:
        self.loss = loss
        self.batches: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"batches": self.batches}}

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
        if state.global_step and not args.ignore_data_skip:
            saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("batches")
            if saved is None:
                raise PackingError(
                    "resume_from_checkpoint: expected a checkpoint of a trainer with attached batches, this one knows "
                    "nothing of them; ignore_data_skip=True begins with a whole epoch"
                )
            rows.sampler.check_same(saved)
            check_same_loss(saved, self.loss)
        self.batches = {**rows.sampler.what_decides(), LOSS: self.loss}
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint of others has no place for it
