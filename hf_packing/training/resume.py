"""Checkpoints of a Trainer and of an Accelerator: how batches are planned, and how far loaders and streams have come.

The state of a stream is saved once for the logical streams of all ranks, so a run can go on with another number of
ranks. States are loaded with `weights_only=True`, so a file that somebody else wrote runs no code.
"""

import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_packing.errors import PackingError

STATE_FILE = "packed_stream.pt"
"""The file in the folder of a checkpoint with the state of the training's stream."""

_LOADERS: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
"""How many loaders each accelerator saves."""


class BatchesOfCheckpoint(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """A Trainer callback that records in checkpoints how batches are planned, and checks this in a resumed run."""

    batches: dict[str, Any] | None = None
    """What decides the batches; None if the number of steps does not tell the position in the epoch."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"batches": self.batches}}

    def on_train_begin(self, args: Any, state: Any, *_: Any, **known: Any) -> None:
        """If training resumes from a checkpoint, refuse settings that give other optimizer steps than those saved."""
        sampler = known["train_dataloader"].dataset.sampler
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


class ResumedStream(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Lets a training go on at a state of its stream, and counts epochs, which Trainer would count from 0 again."""

    def __init__(self, state: dict[str, Any] | None, ignore_data_skip: bool) -> None:
        self._state, self._ignore_data_skip = state, ignore_data_skip

    def on_train_begin(self, args: Any, *_: Any, **known: Any) -> None:
        args.ignore_data_skip = self._ignore_data_skip  # Trainer has read it, and saves it with every checkpoint
        if self._state is not None:
            known["train_dataloader"].load_state_dict(self._state)

    def on_step_end(self, args: Any, state: Any, *_: Any, **known: Any) -> None:  # noqa: ARG002
        loader = known["train_dataloader"]
        state.epoch = loader.epoch + loader.steps_done / state.max_steps


def save_with(accelerator: Accelerator, loader: Any) -> None:
    """Let `save_state` and `load_state` of an accelerator save and load the state of a loader.

    `register_for_checkpointing` does not serve: accelerate loads what it has saved as a pickle that may run code.
    """
    _LOADERS[accelerator] = number = _LOADERS.get(accelerator, 0) + 1
    name = f"packed_loader_{number}.pt"

    def save(models: Any, weights: Any, folder: str) -> None:  # noqa: ARG001
        state = loader.state_dict()  # on all ranks, which exchange the states of their streams
        each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if each_node else accelerator.is_main_process:
            save_state(state, Path(folder) / name)

    def load(models: Any, folder: str) -> None:  # noqa: ARG001
        saved, loaders = len([*Path(folder).glob("packed_loader_*.pt")]), _LOADERS[accelerator]
        if saved != loaders:
            raise PackingError(
                "input_dir: expected a checkpoint of an accelerator with as many loaders of prepare_dataloader as "
                f"this one, {loaders}, got {saved} in {folder}; make all loaders before save_state and load_state"
            )
        loader.load_state_dict(load_state(Path(folder) / name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def save_state(state: dict[str, Any], file: Path) -> None:
    """Write the state of a loader, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".tmp"))
    os.replace(file.with_suffix(".tmp"), file)


def load_state(file: Path) -> dict[str, Any]:
    """Return the state of a loader. Raise pickle.UnpicklingError if the file has anything but plain values."""
    with torch.serialization.safe_globals([bytes]):  # of which torch only loads those that are not empty
        state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def load_stream(folder: Any) -> dict[str, Any]:
    """Return the state of the stream in a checkpoint of a Trainer, or raise PackingError if it has none."""
    file = Path(folder) / STATE_FILE
    if not file.is_file():
        raise PackingError(
            f"resume_from_checkpoint: expected a checkpoint of a trainer attached to a stream, got {folder} without "
            f"{STATE_FILE}; to begin with the first row of the stream instead, set ignore_data_skip=True"
        )
    return load_state(file)
