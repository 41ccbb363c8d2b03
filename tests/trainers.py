"""Trainers on small documents, for the tests of what attach makes of them."""

import copy
from functools import cache

import torch
from tiny_models import build
from training_process import documents, tokenizer
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp


def arguments(folder, kind=TrainingArguments, **changes):
    known = {
        "output_dir": str(folder),
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return kind(**known | ({"max_length": None} if kind is SFTConfig else {}) | changes)


@cache
def patched_once(name, **changes):
    return hfp.patch_model(build(name, **changes))


def patched(name="Llama", **changes):
    """A patched model, which attach leaves as it is: its isolation is proven once for all tests."""
    torch.manual_seed(0)  # as build does
    return copy.deepcopy(patched_once(name, **changes))


def trainer_of(folder, kind=Trainer, model=None, data=None, **changes):
    config = SFTConfig if issubclass(kind, SFTTrainer) else TrainingArguments
    more = {"processing_class": tokenizer()} if issubclass(kind, SFTTrainer) else {}
    data = documents(45) if data is None else data
    return kind(model or patched(), arguments(folder, config, **changes), train_dataset=data, **more)


def logged(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
