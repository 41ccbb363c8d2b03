"""Trainers on small documents, for the tests of what attach makes of them."""

from patched_models import patched
from training_process import documents, tokenizer
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer


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


def trainer_of(folder, kind=Trainer, model=None, data=None, callbacks=None, **changes):
    """A trainer; its model is patched already, unless one is given."""
    config = SFTConfig if issubclass(kind, SFTTrainer) else TrainingArguments
    more = {"processing_class": tokenizer()} if issubclass(kind, SFTTrainer) else {}
    data = documents(45) if data is None else data
    args = arguments(folder, config, **changes)
    return kind(model or patched(), args, train_dataset=data, callbacks=callbacks, **more)


def logged(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
