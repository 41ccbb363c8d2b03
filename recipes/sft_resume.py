"""Checkpoints of sft.py: which one to resume from, and with which flags."""

import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTConfig

LAST = ("true", "last")
NONE = ("false", "none", "no")
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*")
"""Where the optimizer state is: with one process or DDP, FSDP in one file or several, DeepSpeed."""
BROUGHT_ALONG = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args"),
    *("seed", "data_seed"),
)
"""Flags whose values a resumed run takes from the saved optimizer and random states, whatever is given."""


def finished_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, sorted by step; a run killed while saving leaves one without a trainer state."""
    found = [each for each in folder.glob("checkpoint-*") if each.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(
        (each for each in found if (each / TRAINER_STATE_NAME).is_file()), key=lambda each: int(each.name.split("-")[1])
    )


def checkpoint_of(config: SFTConfig) -> str | None:
    """Return the folder to resume from, or None for a new run.

    Exits if the checkpoint does not exist or cannot be resumed, or if a new run would overwrite checkpoints.
    """
    asked = config.resume_from_checkpoint
    word = str(asked).lower()
    found = finished_checkpoints(Path(config.output_dir))
    if asked is None or word in NONE:
        if found:
            sys.exit(
                f"--output_dir: expected a folder without checkpoints, {config.output_dir!r} has {found[-1].name} of "
                "an earlier run, which this one would overwrite; --resume_from_checkpoint last resumes from it"
            )
        return None
    if word in LAST and not found:
        sys.exit(f"--resume_from_checkpoint: expected a checkpoint in {config.output_dir!r}, there is none")
    checkpoint = found[-1] if word in LAST else Path(asked)
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        sys.exit(
            f"--resume_from_checkpoint: expected last, or a folder with {TRAINER_STATE_NAME}, got {str(checkpoint)!r}"
        )
    if not any(any(checkpoint.glob(name)) for name in OPTIMIZERS):
        sys.exit(
            f"--resume_from_checkpoint: expected a checkpoint with the state of its optimizer, {str(checkpoint)!r} has "
            "none, as with --save_only_model; to start from its weights alone, give it as --model"
        )
    return str(checkpoint)


class SameFlags(TrainerCallback, ExportableState):
    """Save flags with the trainer's state, and exit if a resumed run changes one, which would be ignored."""

    def __init__(self, config: SFTConfig) -> None:
        self.flags = {name: plain(getattr(config, name)) for name in BROUGHT_ALONG}

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"flags": self.flags}}

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        for name, value in (saved or {}).get("attributes", {}).get("flags", {}).items():
            if self.flags.get(name, value) != value:
                sys.exit(f"--{name}: expected {value!r}, as in the checkpoint, got {self.flags[name]!r}")
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint from elsewhere has no entry for it


def plain(value: Any) -> Any:
    """Return a value as JSON would load it."""
    return getattr(value, "value", value)
