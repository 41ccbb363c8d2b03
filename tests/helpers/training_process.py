"""Runs of the training tests, by name: documents of a seed, trained on with attached or prepared batches.

Every process writes what it saw into FOLDER/NAME/seen-RANK.jsonl, one line for each micro-batch, its losses into
losses-RANK.jsonl, one for each optimizer step, and an error that a run expects into error-RANK.txt.
"""

import gc
import json
import os
import signal
from functools import partial
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import GradientState
from chunks import chunks_of
from patched_models import patched
from trainers import documents, documents_in, on_each_batch, trainer_of
from training_by_hand import gradients_of
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

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
    "max_ranks": 1,
    "match_documents_per_step": None,
    "accumulation": 1,
    "epochs": 3,
    "dtype": "float32",
    "resume": False,
    "stop_at": None,
    "kill": False,
    "fails": False,
    "save_steps": 0,
    "optimizer": "adamw_torch",
    "eval_batch_sizes": [],
    "in_chunks": False,
    "shapes": {},
    "files": None,
    "streams": 8,
    "steps": -1,
    "workers": 0,
    "readable": None,
}
"""`stop_at`: the step after which the run ends, or with `kill` the process does; `fails`: with an error; `samples`:
documents that share each prompt; `packed`: the capacity of rows that `pack` makes before; `in_chunks`: the loss is
computed for at most 10 tokens at a time; `files`: a folder with parquet files to read as a stream; `steps`: how many
are trained, instead of epochs; `readable`: how many documents of the stream the last rank can read."""
LEARNING_RATE = 1e-3


class StoppedError(Exception):
    """Ends a run where a killed process would end."""


def segments(batch):
    """Documents of a micro-batch, as lists of tokens, and whether they are trained on."""
    if "parents" in batch:
        trees = TreeSegments.from_arrays(batch["segment_lengths"], batch["parents"])
        trained = set(batch["trained"][:, 0].tolist())
        paths = [trees.path_of(end) for end in batch["ends"].tolist()]
        return [[batch["input_ids"][0, path].tolist(), each in trained] for each, path in enumerate(paths)]
    labels = documents_in(batch, "labels" if "labels" in batch else "packed_targets")
    return [[ids, bool(set(own) - {-100})] for ids, own in zip(documents_in(batch), labels, strict=True)]


def write(folder, rank, kind, **line):
    with (folder / f"{kind}-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


class Recorder(TrainerCallback):
    def __init__(self, log, folder, settings):
        self.log, self.folder, self.settings = log, folder, settings

    def on_log(self, _, state, __, logs=None, **___):
        if "loss" in logs:
            self.log("losses", step=state.global_step, loss=logs["loss"])
            self.log("logged", step=state.global_step, **logs)

    def on_pre_optimizer_step(self, _, state, __, model=None, **___):
        if state.global_step == 0 and self.settings["optimizer"] == "sgd":
            save_gradients(model, self.folder)

    def on_step_begin(self, _, state, __, **___):
        stop_after(state.global_step, self.settings)


def stop_after(step, settings):
    if step == settings["stop_at"]:
        PartialState().wait_for_everyone()  # the first rank may still write a checkpoint
        if settings["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        raise StoppedError


def save_gradients(model, folder):
    torch.save(gradients_of(model), folder / "gradients.pt")


def noted(row, file, readable):
    if readable and Path(file).exists() and len(Path(file).read_text().splitlines()) > readable:
        raise ValueError("an unreadable document")
    with open(file, "a") as lines:
        lines.write("read\n")
    return row


def data_of(folder, settings):
    packed, files = settings["packed"], settings["files"]
    if not files:
        data = documents(settings["documents"], settings["samples"])
        return hfp.pack(data, hfp.BestFit(packed), load_from_cache_file=False) if packed else data
    state = PartialState()
    readable = settings["readable"] if state.process_index == state.num_processes - 1 else None
    how = {"file": str(folder / f"read-{state.process_index}"), "readable": readable}
    files = sorted(map(str, Path(files).glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.select_columns(["input_ids"]).map(noted, fn_kwargs=how)
    data = data.cast(datasets.Features({"input_ids": datasets.List(datasets.Value("int64"))}))
    if not packed:
        return data
    shared = {"share_prefixes": settings["share_prefixes"]}
    return hfp.pack(data, hfp.BestFit(packed), streams=settings["streams"], window_packs=3, **shared)


def budget_of(settings):
    shared = settings["share_prefixes"] and not settings["packed"]
    known = {"match_documents_per_step": settings["match_documents_per_step"], "share_prefixes": shared}
    known["max_ranks_per_document"] = settings["max_ranks"]
    return hfp.TokenBudget(settings["max_tokens"], **known)


def through_trainer(settings, folder, data, model):
    trainer = trainer_of(
        folder / "checkpoints",
        SFTTrainer if settings["through"] == "sft" else Trainer,
        model,
        data,
        max_steps=settings["steps"],
        num_train_epochs=settings["epochs"],
        gradient_accumulation_steps=settings["accumulation"],
        learning_rate=LEARNING_RATE,
        max_grad_norm=0.0,
        save_strategy="steps" if settings["save_steps"] else "no",
        save_steps=settings["save_steps"] or 500,
        optim=settings["optimizer"],
        seed=3,
        dataloader_num_workers=settings["workers"],
    )
    log = partial(write, folder, trainer.args.process_index)
    trainer.add_callback(Recorder(log, folder, settings))
    hfp.attach(trainer, budget_of(settings), loss=settings["loss"], **settings["shapes"])

    def see(batch):
        state = trainer.state
        log("seen", epoch=int(state.epoch or 0), step=state.global_step, documents=segments(batch))

    on_each_batch(trainer, see)
    trainer.train(resume_from_checkpoint=settings["resume"] or None)
    for size in settings["eval_batch_sizes"]:
        trainer.args.per_device_eval_batch_size = size
        log("evaluated", rows=size, loss=trainer.evaluate(data_of(folder, settings))["eval_loss"])


def through_loop(settings, folder, data, model):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings["accumulation"])
    log = partial(write, folder, accelerator.process_index)
    how = {"loss": settings["loss"], "model": model, "num_workers": settings["workers"], **settings["shapes"]}
    loader = hfp.prepare_dataloader(accelerator, data, budget_of(settings), **how)
    kind = torch.optim.SGD if settings["optimizer"] == "sgd" else torch.optim.AdamW
    model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=LEARNING_RATE))
    step = 0
    if settings["resume"]:
        accelerator.load_state(str(folder / "state"))
        step = int((folder / "state" / "step").read_text())
    while step != settings["steps"] and (loader.epoch < settings["epochs"] or settings["steps"] > 0):
        epoch, total = loader.epoch, 0.0
        for batch in loader:
            log("seen", epoch=epoch, step=step, documents=segments(batch))
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                total += accelerator.reduce(loss.detach(), reduction="mean").item() / settings["accumulation"]
                if accelerator.sync_gradients:
                    if step == 0 and settings["optimizer"] == "sgd":
                        save_gradients(accelerator.unwrap_model(model), folder)
                    step += 1
                    log("losses", step=step, loss=total)
                    total = 0.0
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if settings["save_steps"] and step % settings["save_steps"] == 0:
                    accelerator.save_state(str(folder / "state"))
                    (folder / "state" / "step").write_text(str(step))
                stop_after(step, settings)
                if step == settings["steps"]:
                    break
    for size in settings["eval_batch_sizes"]:
        loss = hfp.evaluation_loss(accelerator, model, data_of(folder, settings), rows_per_batch=size)
        log("evaluated", rows=size, loss=loss)


def train(folder, **changes):
    assert changes.keys() <= SETTINGS.keys(), changes.keys() - SETTINGS.keys()
    settings = SETTINGS | changes
    folder.mkdir(exist_ok=True)
    data = data_of(folder, settings)
    model = patched("Llama", getattr(torch, settings["dtype"]), trees=bool(settings["share_prefixes"]))
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
    state = PartialState(cpu=True)
    for name, settings in runs.items():
        train(folder / name, **settings)
        gc.collect()
        state.wait_for_everyone()
