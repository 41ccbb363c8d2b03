"""Flags of every recipe that trains with a Trainer of its own, and the training arguments that follow from them."""

import argparse
from typing import Any

import torch
from checkpoints import positive


def add_training(
    parser: argparse.ArgumentParser, output: str, learning_rate: float | None, rates: str = "default: %(default)s"
) -> None:
    parser.add_argument("--tokenizer", help="name or folder; default: that of --model, or one trained on the texts")
    parser.add_argument("--gradient_accumulation_steps", type=positive, default=1)
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--max_steps", type=positive, help="optimizer steps, instead of --epochs")
    parser.add_argument("--learning_rate", type=float, default=learning_rate, help=rates)
    parser.add_argument("--save_steps", type=positive, default=500, help="optimizer steps between checkpoints")
    parser.add_argument("--output_dir", default=output)
    parser.add_argument("--resume_from_checkpoint", action="store_true", help="resume from the last one")


def on_cpu() -> bool:
    return not torch.accelerator.is_available()


def training_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of TrainingArguments, or of a class derived from it, for these flags."""
    return {
        "output_dir": given.output_dir,
        "num_train_epochs": given.epochs,
        "max_steps": given.max_steps or -1,
        "learning_rate": given.learning_rate,
        "gradient_accumulation_steps": given.gradient_accumulation_steps,
        "use_cpu": on_cpu(),
        "save_steps": given.save_steps,
        "report_to": "none",
        "logging_steps": 10,
    }
