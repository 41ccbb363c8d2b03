"""Runs of the training tests: documents of a seed, trained on with attached or prepared batches.

Each run has a name and settings, those of SETTINGS. Every process writes what it saw into FOLDER/NAME/seen-RANK.jsonl,
one line for each micro-batch, and its losses into FOLDER/NAME/losses-RANK.jsonl, one line for each optimizer step. An
error of a run that expects one goes into FOLDER/NAME/error-RANK.txt. `train` does one run in the process that calls it.
"""

import gc
import json
import os
import signal
from itertools import pairwise

import datasets
import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import GradientState
from chunks import chunks_of
from patched_models import patched
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp
from hf_packing.trees.segments import TreeSegments

SETTINGS = {
    "through": "trainer",
    "loss": "token",
    "documents": 45,
    "samples": 1,
    "share_prefixes": False,
    "packed": 0,
    "max_tokens": 64,
    "match_documents_per_step": None,
    "accumulation": 1,
    "epochs": 3,
    "dtype": "float32",
    "resume": False,
    "stop_at": 0,
    "kill": False,
    "fails": False,
    "save_steps": 0,
    "optimizer": "adamw_torch",
    "eval_batch_sizes": [],
    "in_chunks": False,
    "shapes": {},
}
"""`stop_at`: the step after whose checkpoint the run ends, or with `kill` the process does; `fails`: with an error;
`samples`: documents that share each prompt; `in_chunks`: the loss is computed for at most 10 tokens at a time."""
LEARNING_RATE = 1e-3


class StoppedError(Exception):
    """Ends a run where a killed process would end."""


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


def tokenizer():
    vocabulary = {f"<{i}>": i for i in range(128)}
    known = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="<0>", eos_token="<2>")


def segments(batch):
    """Documents of a micro-batch, as lists of tokens, and whether they are trained on."""
    if "parents" in batch:
        trees = TreeSegments.from_arrays(batch["segment_lengths"], batch["parents"])
        trained = set(batch["trained"][:, 0].tolist())
        paths = [trees.path_of(end) for end in batch["ends"].tolist()]
        return [[batch["input_ids"][0, path].tolist(), each in trained] for each, path in enumerate(paths)]
    borders = batch["cu_seq_lens_q"].tolist()
    labels = batch["labels" if "labels" in batch else "targets"][0]
    ids = batch["input_ids"][0].tolist()
    return [[ids[a:b], bool((labels[a:b] != -100).any())] for a, b in pairwise(borders)]


class Log:
    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    def write(self, kind, **line):
        with (self.folder / f"{kind}-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()


class Recorder(TrainerCallback):
    def __init__(self, log, folder, settings):
        self.log, self.folder, self.settings = log, folder, settings

    def on_log(self, _, state, __, logs=None, **___):
        if "loss" in logs:
            self.log.write("losses", step=state.global_step, loss=logs["loss"])
            self.log.write("logged", step=state.global_step, **logs)

    def on_pre_optimizer_step(self, _, state, __, model=None, **___):
        if state.global_step == 0 and self.settings["optimizer"] == "sgd":
            save_gradients(model, self.folder)

    def on_save(self, _, state, __, **___):
        if state.global_step == self.settings["stop_at"]:
            PartialState().wait_for_everyone()  # the first rank still writes the checkpoint
            stop(self.settings)


def stop(settings):
    if settings["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    raise StoppedError


def save_gradients(model, folder):
    torch.save({name: p.grad.clone() for name, p in model.named_parameters()}, folder / "gradients.pt")


def through_trainer(settings, folder, data, model):
    kind, arguments = (SFTTrainer, SFTConfig) if settings["through"] == "sft" else (Trainer, TrainingArguments)
    more = {"processing_class": tokenizer()} if kind is SFTTrainer else {}
    args = arguments(
        output_dir=str(folder / "checkpoints"),
        num_train_epochs=settings["epochs"],
        gradient_accumulation_steps=settings["accumulation"],
        learning_rate=LEARNING_RATE,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="steps" if settings["save_steps"] else "no",
        save_steps=settings["save_steps"] or 500,
        optim=settings["optimizer"],
        report_to="none",
        use_cpu=True,
        bf16=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=3,
        **({"max_length": None} if kind is SFTTrainer else {}),
    )
    trainer = kind(model, args, train_dataset=data, **more)
    log = Log(folder, trainer.args.process_index)
    trainer.add_callback(Recorder(log, folder, settings))
    hfp.attach(
        trainer,
        hfp.TokenBudget(settings["max_tokens"], share_prefixes=settings["share_prefixes"]),
        loss=settings["loss"],
        match_documents_per_step=settings["match_documents_per_step"],
        **settings["shapes"],
    )
    step = trainer.training_step

    def recorded(model, inputs, *args):
        state = trainer.state
        log.write("seen", epoch=int(state.epoch or 0), step=state.global_step, documents=segments(inputs))
        return step(model, inputs, *args)

    trainer.training_step = recorded
    trainer.train(resume_from_checkpoint=settings["resume"] or None)
    state, rate = trainer.state, trainer.lr_scheduler.get_last_lr()[0]
    log.write("ended", step=state.global_step, max_steps=state.max_steps, epoch=state.epoch, rate=rate)
    for size in settings["eval_batch_sizes"]:
        trainer.args.per_device_eval_batch_size = size
        log.write("evaluated", rows=size, loss=trainer.evaluate(data)["eval_loss"])


def through_loop(settings, folder, data, model):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings["accumulation"])
    log = Log(folder, accelerator.process_index)
    budget = hfp.TokenBudget(
        settings["max_tokens"],
        match_documents_per_step=settings["match_documents_per_step"],
        share_prefixes=settings["share_prefixes"],
    )
    how = {"loss": settings["loss"], "model": model, **settings["shapes"]}
    loader = hfp.prepare_dataloader(accelerator, data, budget, **how)
    kind = torch.optim.SGD if settings["optimizer"] == "sgd" else torch.optim.AdamW
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=LEARNING_RATE))
    step = 0
    if settings["resume"]:
        accelerator.load_state(str(folder / "state"))
        step = int((folder / "state" / "step").read_text())
    for epoch in range(loader.epoch, settings["epochs"]):
        total = 0.0
        for batch in loader:
            log.write("seen", epoch=epoch, step=step, documents=segments(batch))
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                total += accelerator.reduce(loss.detach(), reduction="mean").item() / settings["accumulation"]
                if accelerator.sync_gradients:
                    if step == 0 and settings["optimizer"] == "sgd":
                        save_gradients(accelerator.unwrap_model(model), folder)
                    step += 1
                    log.write("losses", step=step, loss=total)
                    total = 0.0
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and settings["save_steps"] and step % settings["save_steps"] == 0:
                accelerator.save_state(str(folder / "state"))
                (folder / "state" / "step").write_text(str(step))
                accelerator.wait_for_everyone()
                if step == settings["stop_at"]:
                    stop(settings)
    for size in settings["eval_batch_sizes"]:
        loss = hfp.evaluation_loss(accelerator, model, data, rows_per_batch=size)
        log.write("evaluated", rows=size, loss=loss)


def train(folder, **changes):
    """Do one run in this process; the folder is made where it does not exist."""
    assert changes.keys() <= SETTINGS.keys(), changes.keys() - SETTINGS.keys()
    settings = SETTINGS | changes
    folder.mkdir(exist_ok=True)
    data = documents(settings["documents"], settings["samples"])
    if settings["packed"]:
        data = hfp.pack(data, hfp.BestFit(settings["packed"]), load_from_cache_file=False)
    model = patched("Llama", getattr(torch, settings["dtype"]))
    tokens = 10 if settings["in_chunks"] else 10_000
    try:
        with chunks_of(tokens, model) as chunks:
            (through_loop if settings["through"] == "loop" else through_trainer)(settings, folder, data, model)
        assert {size for _, size in chunks} <= {tokens}
        assert chunks or settings["through"] == "sft", "TRL has a head of its own"
    except StoppedError:
        GradientState._reset_state()  # else the loader that was broken off stays the active one
    except hfp.PackingError as error:
        if not settings["fails"]:
            raise
        rank = PartialState().process_index
        (folder / f"error-{rank}.txt").write_text(str(error))


def train_all(folder, runs):
    """Do runs in this process, which is one of several."""
    state = PartialState(cpu=True)
    for name, settings in runs.items():
        train(folder / name, **settings)
        gc.collect()
        state.wait_for_everyone()
