"""Trainers on small documents, for the tests of what attach makes of them."""

from itertools import pairwise

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from patched_models import patched
from tokenizers import Tokenizer, models, pre_tokenizers
from training_by_hand import gradients_of
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp
from hf_packing.upstream.trl import hides_logits


def documents(number, samples=1):
    """Uneven lengths, the first third of each not trained on; the very last one has nothing to train on. With several
    samples, so many documents begin with each of them, and go on with 1 to 9 tokens of their own."""
    rng = np.random.default_rng(7)
    rows = [rng.integers(3, 99, n).tolist() for n in np.clip(rng.lognormal(2.5, 0.8, number), 2, 48).astype(int)]
    labels = [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in rows]
    labels[-1] = [-100] * len(rows[-1])
    if samples > 1:
        ends = [rng.integers(3, 99, rng.integers(1, 10)).tolist() for _ in range(samples * number)]
        labels = [[*labels[place // samples], *end] for place, end in enumerate(ends)]
        rows = [[*rows[place // samples], *end] for place, end in enumerate(ends)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})


def tokenizer(**more):
    """The words w0, which pads, w1 for all unknown ones, w2, which ends a text, and so on."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(128)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0", unk_token="w1", **more)


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
    args = kind(**known | ({"max_length": None} if kind is SFTConfig else {}) | changes)
    if hides_logits(args):
        args.loss_type = "nll"
    return args


def trainer_of(folder, kind=Trainer, model=None, data=None, callbacks=None, **changes):
    """A trainer; its model is patched already, unless one is given."""
    config = SFTConfig if issubclass(kind, SFTTrainer) else TrainingArguments
    more = {"processing_class": tokenizer()} if issubclass(kind, SFTTrainer) else {}
    data = documents(45) if data is None else data
    args = arguments(folder, config, **changes)
    return kind(model or patched(), args, train_dataset=data, callbacks=callbacks, **more)


def attached(folder, batching=None, how=None, **settings):
    """A trainer that is attached; `how` are further arguments of attach."""
    trainer = trainer_of(folder, **settings)
    hfp.attach(trainer, batching or hfp.TokenBudget(64), **(how or {}))
    return trainer


def loader_of(data=None, batching=None, accumulation=1, **how):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    data = documents(45) if data is None else data
    return hfp.prepare_dataloader(accelerator, data, batching or hfp.TokenBudget(64), **how)


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model=None, **__):
        self.gradients = gradients_of(model)


def on_each_batch(trainer, call):
    step = trainer.training_step

    def noted(model, inputs, *args):
        call(inputs)
        return step(model, inputs, *args)

    trainer.training_step = noted


def documents_in(batch, name="input_ids"):
    """The tokens, or their values in another column, of each document of a packed batch."""
    return [batch[name][0, begin:end].tolist() for begin, end in pairwise(batch["cu_seq_lens_q"].tolist())]


def logged(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Plain(torch.utils.data.Dataset):
    """Map-style, with nothing but what torch asks for."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]
