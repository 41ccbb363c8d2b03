"""The methods of a trainer that is attached to a stream: its checkpoints say how far the stream has come.

The state is saved once for the logical streams of all ranks, so a run can go on with another number of ranks.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from hf_packing.errors import PackingError
from hf_packing.training.streams.stream_loader import StreamLoader
from hf_packing.training.trainer import PackedTrainer

STATE_FILE = "packed_stream.pt"
"""The file in the folder of a checkpoint with the state of the training's stream."""


class StreamTrainer(PackedTrainer):
    """A Trainer that trains on a stream, and saves with every checkpoint how far the stream has come."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        if getattr(self.args, "enable_jit_checkpoint", False):
            raise PackingError(
                "enable_jit_checkpoint: expected False for a stream, got True, which saves checkpoints before an "
                "optimizer step whose rows were already read; use save_steps"
            )
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        given = self.args.ignore_data_skip
        resumed = ResumedStream(_load(folder) if folder and not given else None, given)
        self.add_callback(resumed)
        self.args.ignore_data_skip = True  # otherwise, Trainer would read and drop all batches before
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.ignore_data_skip = given
            self.remove_callback(resumed)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        loader = self.callback_handler.train_dataloader
        if _internal_call and output_dir is not None and isinstance(loader, StreamLoader):  # a checkpoint
            state = loader.state_dict()
            if self.args.should_save:
                file = Path(output_dir) / STATE_FILE
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, file.with_suffix(".tmp"))
                os.replace(file.with_suffix(".tmp"), file)


class ResumedStream(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Lets a training go on at a state of its stream, and counts epochs, which Trainer would count from 0 again."""

    def __init__(self, state: dict[str, Any] | None, ignore_data_skip: bool) -> None:
        self._state, self._ignore_data_skip = state, ignore_data_skip

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **known: Any,
    ) -> None:
        args.ignore_data_skip = self._ignore_data_skip  # Trainer has read it, and saves it with every checkpoint
        if self._state is not None:
            known["train_dataloader"].load_state_dict(self._state)

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **known: Any,
    ) -> None:
        loader = known["train_dataloader"]
        state.epoch = loader.epoch + loader.steps_done / state.max_steps


def _load(folder: Any) -> dict[str, Any]:
    """Return the state of the stream in a checkpoint, or raise PackingError if it has none."""
    file = Path(folder) / STATE_FILE
    if not file.is_file():
        raise PackingError(
            f"resume_from_checkpoint: expected a checkpoint of a trainer attached to a stream, got {folder} without "
            f"{STATE_FILE}; to begin with the first row of the stream instead, set ignore_data_skip=True"
        )
    with torch.serialization.safe_globals([bytes]):  # of which torch only loads those that are not empty
        state: dict[str, Any] = torch.load(file, weights_only=True)
    return state
