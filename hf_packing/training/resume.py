"""Checkpoints of a Trainer and of an Accelerator: how batches are planned, and how far loaders and streams have come.

The state of a stream is saved once for the logical streams of all ranks, so a run can go on with another number of
ranks. Of other batches, what decides them is saved, since the number of steps tells how far they have come. States are
loaded with `weights_only=True`, so a file that somebody else wrote runs no code.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from transformers import TrainerCallback

from hf_packing.attention import temporarily
from hf_packing.checks import expect
from hf_packing.errors import PackingError
from hf_packing.training.streams import StreamedRows

STREAM_FILE, ROWS_FILE = "packed_stream.pt", "packed_rows.pt"
"""Files in the folder of a Trainer's checkpoint: the state of the stream, or what decides the batches of other rows."""

_LOADERS: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
"""How many loaders each accelerator saves."""


@contextmanager
def batches_resumed(trainer: Any, folder: Any) -> Iterator[None]:
    """Context manager for a training: it goes on after the batches of the checkpoint in a folder, if there is one.

    Raises:
        PackingError: the checkpoint was saved with other optimizer steps, or does not tell where in the data it was.
    """
    source, ignores = trainer.attached.source, trainer.args.ignore_data_skip
    is_stream = isinstance(source, StreamedRows)
    saved = load_batches(Path(folder) / (STREAM_FILE if is_stream else ROWS_FILE)) if folder and not ignores else None
    if not is_stream:
        if saved is not None:
            source.sampler.check_can_resume(saved)
        yield
        return
    unread = "for a stream, since it saves checkpoints before a step whose rows were already read; use save_steps"
    expect(False, unread, enable_jit_checkpoint=getattr(trainer.args, "enable_jit_checkpoint", False))
    resumed = ResumedStream(saved, ignores)
    trainer.add_callback(resumed)
    try:
        with temporarily(trainer.args, ignore_data_skip=True):  # else, Trainer would read and drop all batches before
            yield
    finally:
        trainer.remove_callback(resumed)


def save_batches(trainer: Any, folder: Path) -> None:
    """Write the state of a training's batches into a checkpoint; all ranks call this together.

    None is written if the number of steps does not tell the place in the epoch.
    """
    state, source, file = trainer.attached, trainer.attached.source, ROWS_FILE
    if isinstance(source, StreamedRows):
        saved, file = trainer.callback_handler.train_dataloader.state_dict(), STREAM_FILE
    elif trainer.args.ignore_data_skip and state.first_step % source.sampler.optimizer_steps:
        saved = None
    else:
        saved = source.sampler.plan_inputs()
    if trainer.args.should_save:
        for name in (ROWS_FILE, STREAM_FILE):  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        if saved is not None:
            save_state(saved, folder / file)


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


def load_batches(file: Path) -> dict[str, Any]:
    """Return the state of the batches in a checkpoint of a Trainer, or raise PackingError if it has none."""
    if not file.is_file():
        raise PackingError(
            f"resume_from_checkpoint: expected a checkpoint of an attached trainer on such data, got {file.parent} "
            f"without {file.name}, of another trainer, or of a run that was resumed with ignore_data_skip=True in the "
            "middle of an epoch; set ignore_data_skip=True to begin a new epoch"
        )
    return load_state(file)
