"""Checkpoints of sft.py: which one to go on from, and with which flags."""

import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import SFTConfig

LAST = ("true", "last")
NONE = ("false", "none", "no")
OPTIMISERS = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step*")
"""Of one process or DDP, of FSDP in one file or several, of DeepSpeed."""
BROUGHT_ALONG = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args"),
    *("seed", "data_seed"),
)
"""Flags that a resumed run takes from the states of the optimiser and of random numbers."""


def finished_checkpoints(folder: Path) -> list[Path]:
    """By step; one that was killed while it was saved has no state."""
    found = [each for each in folder.glob("checkpoint-*") if each.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(
        (each for each in found if (each / TRAINER_STATE_NAME).is_file()), key=lambda each: int(each.name.split("-")[1])
    )


def checkpoint_of(config: SFTConfig) -> str | None:
    """The folder to go on from; None for a run that begins.

    Exits where there is none, where it cannot be resumed, and where a run that begins would overwrite it.
    """
    asked = config.resume_from_checkpoint
    word = str(asked).lower()
    found = finished_checkpoints(Path(config.output_dir))
    if asked is None or word in NONE:
        if found:
            sys.exit(
                f"--output_dir: expected a folder without checkpoints, {config.output_dir!r} has {found[-1].name} of "
                "an earlier run, which this one would overwrite; --resume_from_checkpoint last goes on from it"
            )
        return None
    if word in LAST and not found:
        sys.exit(f"--resume_from_checkpoint: expected a checkpoint in {config.output_dir!r}, there is none")
    checkpoint = found[-1] if word in LAST else Path(asked)
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        sys.exit(
            f"--resume_from_checkpoint: expected last, or a folder with {TRAINER_STATE_NAME}, got {str(checkpoint)!r}"
        )
    if not any(any(checkpoint.glob(name)) for name in OPTIMISERS):
        sys.exit(
            f"--resume_from_checkpoint: expected a checkpoint with the state of its optimiser, {str(checkpoint)!r} has "
            "none, as with --save_only_model; --model takes its weights alone"
        )
    return str(checkpoint)


class SameFlags(TrainerCallback, ExportableState):
    """Saved with the trainer's state: flags that would be ignored if they were changed for a resumed run."""

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
        state.stateful_callbacks[type(self).__name__] = self.state()  # a checkpoint of others has no place for it


def plain(value: Any) -> Any:
    """As JSON gives it back."""
    return getattr(value, "value", value)
