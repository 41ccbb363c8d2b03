"""Train on a mixture of three sources with Trainer, on one process or more, and note what is logged of the sources."""

import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import torch
from document_streams import generated
from process_group import end_process_group
from tiny_models import build, exact
from torch.nn import functional as F
from training_process import tokenizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp

CAPACITY, MOST = 48, 12
SHARES = {"web": 0.5, "code": 0.3, "books": 0.2}
LENGTHS, SIZES = {"web": (4, 16), "code": (2, 7), "books": (8, 40)}, {"web": 120, "code": 40, "books": 24}
SHARDS = 4


def documents_of(name):
    """Documents that begin with the number of the source and their own number; no two are equal."""
    number = list(SHARES).index(name)
    rng = np.random.default_rng(number)
    lengths = rng.integers(*LENGTHS[name], SIZES[name])
    return [[number + 1, each + 4, *rng.integers(4, 120, length).tolist()] for each, length in enumerate(lengths)]


def mixture(**more):
    sources = {name: generated([documents_of(name)[shard::SHARDS] for shard in range(SHARDS)]) for name in SHARES}
    return hfp.mix(sources, SHARES, **{"stopping_strategy": "all_exhausted", **more})


def packed(documents, streams=4):
    return hfp.pack(documents, hfp.BestFit(CAPACITY, max_documents=MOST), streams=streams, window_packs=2)


def source_of(document):
    return list(SHARES)[document[0] - 1]


def documents_in(batch):
    """The documents of a batch; those of a rank without a row, and what only fills a batch, have no labels."""
    borders, tokens = batch["cu_seq_lens_q"].tolist(), batch["input_ids"][0].tolist()
    return [tokens[a:b] for a, b in pairwise(borders) if b > a and (batch["labels"][0, a:b] != -100).any()]


class ByHand:
    """Sums over the documents of each source: tokens, documents, losses and labels; losses by an unpacked model."""

    def __init__(self):
        self.model = exact(build("Llama").double())
        self.sums = {name: np.zeros(4) for name in SHARES}

    @torch.no_grad()
    def add(self, model, documents):
        self.model.load_state_dict(model.state_dict())
        for document in documents:
            row = torch.tensor([document])
            losses = F.cross_entropy(self.model(row).logits[0, :-1], row[0, 1:], reduction="none")
            self.sums[source_of(document)] += [len(document), 1, float(losses.sum()), len(losses)]


class Notes(TrainerCallback):
    """Writes everything that is logged of the sources, line by line, and ends the first rank after so many steps."""

    def __init__(self, file, kill=None):
        self.file, self.kill = file, kill

    def on_log(self, args, state, control, logs, **known):  # noqa: ARG002
        if "source_web" in logs:
            with open(f"{self.file}-{args.process_index}.jsonl", "a") as lines:
                lines.write(json.dumps({"step": state.global_step, "logs": sources_in(logs)}) + "\n")

    def on_step_begin(self, args, state, control, **known):  # noqa: ARG002
        if state.global_step == self.kill and args.process_index == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def sources_in(logs):
    return {name: value for name, value in logs.items() if name.startswith("source_")}


def trainer_of(folder, stream, kind=Trainer, callbacks=(), loss="token", shapes=None, **settings):
    """An attached trainer, which notes in `seen` the documents, and sums in `by_hand`, unless it is None."""

    class Noting(kind):
        def training_step(self, model, inputs, *others):
            assert "source" not in inputs
            self.seen.append(documents_in(inputs))
            if self.by_hand is not None:
                self.by_hand.add(self.accelerator.unwrap_model(model), self.seen[-1])
            return super().training_step(model, inputs, *others)

    known = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "dataloader_pin_memory": False,
    }
    more = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}} if kind is SFTTrainer else {}
    config = SFTConfig if kind is SFTTrainer else TrainingArguments
    args = config(str(folder), **known | more | settings)
    more = {"processing_class": tokenizer()} if kind is SFTTrainer else {}
    trainer = Noting(exact(build("Llama").double()), args, train_dataset=stream, callbacks=list(callbacks), **more)
    hfp.attach(trainer, hfp.TokenBudget(CAPACITY), loss=loss, **(shapes or {}))
    trainer.seen, trainer.by_hand = [], None
    return trainer


class LogsOnOneRank(TrainerCallback):
    """Logs a loss on the first rank alone, as a callback of a user may do."""

    trainer = None

    def on_pre_optimizer_step(self, args, state, control, **known):  # noqa: ARG002
        if args.process_index == 0:
            self.trainer.log({"loss": 0.0})


def train(folder, checkpoints, kill=None, **settings):
    logging = LogsOnOneRank()
    trainer = trainer_of(
        checkpoints, packed(mixture()), callbacks=[Notes(folder / "sources", kill), logging], **settings
    )
    logging.trainer = trainer
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints) if Path(checkpoints).exists() else None)
    return trainer


def main():
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    folder = Path(sys.argv[1])
    trainer = train(folder, folder.parent / "checkpoints", **json.loads(sys.argv[2]))
    trainer.accelerator.free_memory()
    end_process_group()


if __name__ == "__main__":
    main()
