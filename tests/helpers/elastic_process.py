"""Train on a stream with Trainer or in a loop, on one process or more, and note the documents and the losses."""

import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Features, List, Value, load_dataset
from process_group import end_process_group
from tiny_models import build, exact
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import hf_packing as hfp
from hf_packing.trees.segments import TreeSegments

SETTINGS = {
    "how": "trainer",
    "steps": 8,
    "accumulation": 1,
    "streams": 8,
    "packs": False,
    "shared": None,
    "rows": 1,
    "workers": 0,
    "dispatch": None,
    "save": None,
    "kill": None,
    "resume": False,
    "evaluate": False,
    "unreadable": None,
}
"""The steps to train, and the defaults of all settings. If `packs`, TokenBudget packs the documents. Documents share
prefixes of at least `shared` tokens; None for none. The first rank
kills itself after `kill` steps. A checkpoint is saved every `save` steps. The second rank, or with
`dispatch` the first, reads only so many documents (`unreadable`)."""

CAPACITY = 48


class Notes:
    """What a process writes line by line: the documents of each step, the losses, and the documents that were read."""

    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    def add(self, kind, **line):
        with open(self.folder / f"{kind}-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def documents_of(batch):
    """The documents of a batch that are trained on, or have a single token."""
    if "parents" in batch:
        trees = TreeSegments.from_arrays(batch["segment_lengths"], batch["parents"])
        tokens, trained = batch["input_ids"][0], set(batch["trained"][:, 0].tolist())
        paths = [tokens[trees.path_of(end)].tolist() for end in batch["ends"].tolist()]
        return [path for number, path in enumerate(paths) if number in trained or len(path) == 1]
    borders, tokens = batch["cu_seq_lens_q"].tolist(), batch["input_ids"][0].tolist()
    labels = batch["labels"] if "labels" in batch else batch["targets"]
    return [tokens[a:b] for a, b in pairwise(borders) if b > a and (b - a == 1 or (labels[0, a:b] != -100).any())]


def open_stream(folder, settings, notes):
    features = Features({"input_ids": List(Value("int64"))})
    files = sorted(str(file) for file in (folder.parent / "data").glob("*.parquet"))
    stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
    unreadable = settings["unreadable"] if notes.rank == (0 if settings["dispatch"] else 1) else None
    read = {"file": str(notes.folder / f"read-{notes.rank}.jsonl"), "unreadable": unreadable}
    stream = stream.select_columns(["input_ids"]).map(count_documents, fn_kwargs=read)
    if settings["packs"]:
        return stream.cast(features)
    strategy = hfp.BestFit(CAPACITY, overflow="split")
    shared = settings["shared"] or False
    return hfp.pack(stream.cast(features), strategy, streams=settings["streams"], window_packs=3, share_prefixes=shared)


def whole_stream(folder, settings, notes):
    """The stream to evaluate on, in larger rows."""
    documents = open_stream(folder, settings | {"packs": True}, notes)
    return hfp.pack(documents, hfp.BestFit(64), streams=8, share_prefixes=settings["shared"] or False)


def count_documents(row, file, unreadable):
    if unreadable and Path(file).exists() and len(Path(file).read_text().splitlines()) > unreadable:
        raise ValueError("an unreadable document")
    with open(file, "a") as lines:
        lines.write(json.dumps(row["input_ids"][:2]) + "\n")
    return row


def batching_of(settings):
    if not settings["packs"]:
        return hfp.TokenBudget(CAPACITY * settings["rows"])
    shared = settings["shared"] or False
    return hfp.TokenBudget(CAPACITY * settings["rows"], overflow="split", share_prefixes=shared)


def kill_at(step, rank, settings):
    if settings["kill"] == step and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def train_with_trainer(folder, settings):
    class Noting(Trainer):
        def training_step(self, model, inputs, *others):
            notes.add("seen", step=self.state.global_step, documents=documents_of(inputs))
            return super().training_step(model, inputs, *others)

    class Kills(TrainerCallback):
        def on_step_begin(self, args, state, control, **known):  # noqa: ARG002
            kill_at(state.global_step, args.process_index, settings)

    args = TrainingArguments(
        str(folder.parent / "checkpoints"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="steps" if settings["save"] else "no",
        save_steps=settings["save"] or 500,
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=1e-3,
        max_steps=settings["steps"],
        gradient_accumulation_steps=settings["accumulation"],
        dataloader_num_workers=settings["workers"],
        dataloader_pin_memory=False,
        accelerator_config={"dispatch_batches": settings["dispatch"]},
    )
    notes = Notes(folder, args.process_index)
    stream = open_stream(folder, settings, notes)
    trainer = Noting(exact(build("Llama").double()), args, train_dataset=stream, callbacks=[Kills()])
    summary = hfp.attach(trainer, batching_of(settings))
    assert summary.ranks == args.world_size
    trainer.train(resume_from_checkpoint=settings["resume"] or None)
    for line in trainer.state.log_history:
        if "loss" in line:
            notes.add("losses", step=line["step"], loss=line["loss"], epoch=line["epoch"])
    if settings["evaluate"]:
        notes.add("evaluated", loss=trainer.evaluate(whole_stream(folder, settings, notes))["eval_loss"])
    return trainer.accelerator


def train_in_a_loop(folder, settings):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=settings["accumulation"],
        dataloader_config=DataLoaderConfiguration(dispatch_batches=settings["dispatch"]),
    )
    notes = Notes(folder, accelerator.process_index)
    model = exact(build("Llama").double())
    stream = open_stream(folder, settings, notes)
    loader = hfp.prepare_dataloader(
        accelerator, stream, batching_of(settings), model=model, num_workers=settings["workers"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = 0
    if settings["resume"] and (last := get_last_checkpoint(folder.parent / "checkpoints")):
        accelerator.load_state(last)
        step = int(last.rpartition("-")[2])
    while step < settings["steps"]:
        for number, batch in enumerate(loader):
            if not number % settings["accumulation"]:
                kill_at(step, accelerator.process_index, settings)
                total = 0
            notes.add("seen", step=step, documents=documents_of(batch))
            with accelerator.accumulate(model):
                loss = hfp.compute_loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean") / settings["accumulation"]
            if accelerator.sync_gradients:
                step += 1
                notes.add("losses", step=step, loss=float(total))
                if settings["save"] and not step % settings["save"]:
                    accelerator.save_state(folder.parent / "checkpoints" / f"checkpoint-{step}")
                if step == settings["steps"]:
                    break
    if settings["evaluate"]:
        whole = whole_stream(folder, settings, notes)
        notes.add("evaluated", loss=hfp.evaluation_loss(accelerator, model, whole, rows_per_batch=2))
    return accelerator


def main():
    torch.set_num_threads(1)
    folder, settings = Path(sys.argv[1]), SETTINGS | json.loads(sys.argv[2])
    train = {"trainer": train_with_trainer, "loop": train_in_a_loop}[settings["how"]]
    train(folder, settings).free_memory()
    end_process_group()


if __name__ == "__main__":
    main()
