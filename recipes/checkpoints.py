"""Checkpoints of recipes: save them, find them, resume with the same flags or refuse."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.trainer_utils import get_last_checkpoint

LAST = "last"
NEWEST_FIRST = ("state", "before")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer from 1, got {text!r}")
    return int(text)


def add_checkpoints(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--save-every", type=positive, default=50, help="optimizer steps between checkpoints")
    parser.add_argument("--output", type=Path, default=Path(output), help="folder of the checkpoints and the model")
    parser.add_argument(
        *("--resume-from-checkpoint", "--resume_from_checkpoint", "--resume"),
        nargs="?",
        const=LAST,
        metavar="FOLDER",
        help="resume from the last checkpoint in --output, or from the one in FOLDER",
    )


def checkpoint_of(arguments: argparse.Namespace) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run, which must not overwrite another run's."""
    kept = next((arguments.output / name for name in NEWEST_FIRST if (arguments.output / name).exists()), None)
    asked = arguments.resume_from_checkpoint
    if asked is None:
        if kept is not None:
            raise SystemExit(
                f"--output: expected a folder without a checkpoint, {str(arguments.output)!r} has one of an earlier "
                "run, which this one would overwrite; --resume-from-checkpoint resumes from it"
            )
        return None
    if asked == LAST:
        if kept is None:
            raise SystemExit(f"--resume-from-checkpoint: expected a checkpoint in {arguments.output}, there is none")
        return kept
    if not (Path(asked) / "random_states_0.pkl").is_file():
        raise SystemExit(f"--resume-from-checkpoint: expected {LAST}, or a folder with a checkpoint, got {asked!r}")
    return Path(asked)


def checkpoint_of_trainer(output: str, resume: bool) -> str | None:
    """Return the last checkpoint of a Trainer to resume from, or None for a new run, which must not overwrite one."""
    last: str | None = get_last_checkpoint(output) if Path(output).is_dir() else None
    if resume and last is None:
        raise SystemExit(f"--resume_from_checkpoint: expected a checkpoint in {output}, there is none")
    if last is not None and not resume:
        raise SystemExit(
            f"--output_dir: expected a folder without a checkpoint, {output!r} has one of an earlier run, which this "
            "one would overwrite; --resume_from_checkpoint resumes from it"
        )
    return last


def save(accelerator: Accelerator, output: Path) -> None:
    """Save to a temporary folder and rename it once complete, so that a kill while saving loses one checkpoint only."""
    accelerator.save_state(output / "unfinished")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        newest, before = (output / name for name in NEWEST_FIRST)
        shutil.rmtree(before, ignore_errors=True)
        if newest.exists():
            newest.rename(before)
        (output / "unfinished").rename(newest)
    accelerator.wait_for_everyone()


class Progress:
    """Optimizer steps so far, and flags that a resumed run would ignore; saved with each checkpoint."""

    def __init__(self, arguments: argparse.Namespace, flags: Sequence[str]) -> None:
        self.steps = 0
        self.flags = {name: getattr(arguments, name) for name in flags}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "flags": self.flags}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, saved in state["flags"].items():
            if self.flags[name] != saved:
                flag = name.replace("_", "-")
                raise SystemExit(f"--{flag}: expected {saved!r}, as in the checkpoint, got {self.flags[name]!r}")
        self.steps = state["steps"]
