"""One of the processes of the tests of ranks that bring different data: many cases, one after the other.

    torchrun --nproc-per-node 2 ranks_process.py FOLDER

Every process writes into FOLDER/ranks-RANK.json, for each case, what it was told, and how many steps it had trained
before. The last case is not caught, so that every process ends with an error.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import torch
from accelerate import Accelerator, PartialState
from tiny_models import build
from trainers import trainer_of
from training_process import documents
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

import hf_packing as hfp

DATA = documents(64)


class Rows(torch.utils.data.Dataset):
    """Rows of one length, made as they are read."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"input_ids": [self.numbers[index] % 90 + 3] * 12}


def masked_at_random(batch):
    labels = [[token if np.random.random() < 0.5 else -100 for token in row] for row in batch["input_ids"]]
    return {"input_ids": batch["input_ids"], "labels": labels}


def longer(data):
    return datasets.Dataset.from_dict({"input_ids": [*data["input_ids"][:-1], list(range(65))]})


def other(column):
    return lambda row: {column: [token if token == -100 else token + 1 for token in row[column]]}


class Rank:
    """What one of several ranks brings along."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.last = rank == ranks - 1

    def shifted(self, column):
        return DATA.map(other(column), load_from_cache_file=False) if self.last else DATA

    def data(self):
        """By case, a function that makes the data of this rank, which others have in part or not at all."""
        rank, ranks, last = self.rank, self.ranks, self.last
        return {
            "shard": lambda: DATA.shard(ranks, rank),
            "shuffle": lambda: DATA.shuffle(seed=rank),
            "40 against 48": lambda: documents(40 + 8 * last),
            "12 against 64": lambda: documents(64 if last else 12),
            "fewer rows than ranks": lambda: documents(64 if last else 1),
            "a row too long": lambda: longer(DATA) if last else DATA,
            "other tokens": lambda: self.shifted("input_ids"),
            "other labels": lambda: self.shifted("labels"),
            "list": lambda: DATA.to_list()[rank::ranks],
            "list of other labels": lambda: self.shifted("labels").to_list(),
            "torch dataset": lambda: Rows(range(rank, 64, ranks)),
            "torch dataset of as many rows": lambda: Rows(range(rank * 32, rank * 32 + 32)),
            "random transform": lambda: DATA.shuffle(seed=rank).with_transform(masked_at_random),
            "packed": lambda: hfp.pack(DATA.shard(ranks, rank), hfp.BestFit(48), load_from_cache_file=False),
        }

    def batching(self):
        """By case, the batching of this rank and further settings."""
        last = self.last
        return {
            "seed": (hfp.TokenBudget(64, seed=self.rank), {}),
            "max_tokens": (hfp.TokenBudget(64 + 8 * last), {}),
            "a budget too small": (hfp.TokenBudget(8 if last else 64), {}),
            "overflow": (hfp.TokenBudget(64, overflow="drop" if last else "error"), {}),
            "tokens": (hfp.TokenBudget(64), {"tokens": 64 + 8 * last, "max_segments": 9}),
            "max_segments": (hfp.TokenBudget(64, max_documents=7), {"tokens": 64, "max_segments": 8 + last}),
            "no batching": (64 if last else hfp.TokenBudget(64), {}),
            "loss": (hfp.TokenBudget(64), {"loss": "sequence" if last else "token"}),
            "no loss": (hfp.TokenBudget(64), {"loss": "mean" if last else "token"}),
        }


SAME = {
    "table": lambda: DATA,
    "list": lambda: DATA.to_list(),
    "torch dataset": lambda: Rows(range(64)),
    "random transform": lambda: DATA.with_transform(masked_at_random),
}
"""Data that all ranks have, which they train on: none of these is refused."""


class Steps(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_begin(self, *_, **__):
        self.steps += 1


class Log:
    """What this process was told in each case."""

    def __init__(self, folder, rank):
        self.file = folder / f"ranks-{rank}.json"
        self.told = {}

    def told_of(self, name, act, steps=None):
        failure = None
        try:
            act()
        except Exception as error:  # that is what is written down
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        self.told[name] = {"message": message, "steps": 0 if steps is None else steps.steps}
        self.file.write_text(json.dumps(self.told))
        return failure


def trainer(folder, kind, data=None, steps=None, **changes):
    made = trainer_of(folder, kind, data=data, max_steps=1, **changes)
    if steps is not None:
        made.add_callback(steps)
    return made


def attach_and_train(made, batching=None, **settings):
    hfp.attach(made, hfp.TokenBudget(64) if batching is None else batching, **settings)
    made.train()


def through_trainer(log, folder, kind, own):
    for name in ("shard", "shuffle", "40 against 48", "12 against 64", "other tokens"):
        steps = Steps()
        made = trainer(folder, kind, own.data()[name](), steps)
        log.told_of(f"{kind.__name__}: data: {name}", lambda made=made: attach_and_train(made), steps)
    steps = Steps()
    made = trainer(folder, kind, DATA, steps, gradient_accumulation_steps=1 + own.last)
    log.told_of(f"{kind.__name__}: batching: accumulation", lambda: attach_and_train(made), steps)
    for name, (given, settings) in own.batching().items():
        made = trainer(folder, kind, DATA)
        log.told_of(
            f"{kind.__name__}: batching: {name}",
            lambda made=made, given=given, settings=settings: hfp.attach(made, given, **settings),
        )


def evaluations(log, folder, kind, own):
    for name, evaluated in {
        "eval_dataset": DATA.shard(own.ranks, own.rank),
        "one of several": {"all": DATA, "some": DATA.shard(own.ranks, own.rank)},
        "no eval_dataset": None if own.last else DATA,
    }.items():
        made = trainer(folder, kind, DATA)
        made.eval_dataset = evaluated
        log.told_of(f"{kind.__name__}: evaluation: {name}", lambda made=made: hfp.attach(made, hfp.TokenBudget(64)))
    made = trainer(folder, kind, DATA)
    hfp.attach(made, hfp.TokenBudget(64))
    for method in ("evaluate", "predict"):
        call = getattr(made, method)
        log.told_of(f"{kind.__name__}: same: {method}", lambda call=call: call(documents(9)))
        log.told_of(f"{kind.__name__}: evaluation: {method}", lambda call=call: call(DATA.shuffle(seed=own.rank)))
        if kind is Trainer:  # SFTTrainer prepares what it evaluates, and other ranks wait for that
            log.told_of(f"Trainer: evaluation: {method} nothing", lambda call=call: call([] if own.last else DATA))
    made.train_dataset = documents(50) if own.last else DATA
    log.told_of(f"{kind.__name__}: later: another train_dataset", made.train)
    made.train_dataset = DATA
    made.data_collator = None if own.last else made.data_collator
    log.told_of(f"{kind.__name__}: later: another collator on one rank", made.train)
    made.data_collator = made.planned_batches.collator
    if own.rank == 0:
        assert next(iter(made.get_train_dataloader()))["input_ids"].shape[0] == 1  # no other rank waits for it
    log.told_of(f"{kind.__name__}: same: after all that", made.train)


def loop(data, batching=None, **settings):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=settings.pop("accumulation", 1))
    for _ in hfp.prepare_dataloader(accelerator, data, batching or hfp.TokenBudget(64), **settings):
        pass


def loops(log, own):
    for name, data in own.data().items():
        log.told_of(f"loop: data: {name}", lambda data=data: loop(data()))
    for name, data in SAME.items():
        log.told_of(f"loop: same: {name}", lambda data=data: loop(data()))
    for name, (given, settings) in own.batching().items():
        given = 64 if given is None else given
        log.told_of(f"loop: batching: {name}", lambda given=given, settings=settings: loop(DATA, given, **settings))
    log.told_of("loop: batching: accumulation", lambda: loop(DATA, accumulation=1 + own.last))
    model, other_model = build("Llama"), build("Llama", intermediate_size=96 + 32 * own.last)
    log.told_of("loop: batching: model", lambda: loop(DATA, model=other_model))
    accelerator, shard = Accelerator(cpu=True), DATA.shard(own.ranks, own.rank)
    hfp.patch_model(model)
    log.told_of("loop: evaluation: shard", lambda: hfp.evaluation_loss(accelerator, model, shard))
    rows = DATA.to_list()
    loader = hfp.prepare_dataloader(accelerator, rows, hfp.TokenBudget(64))
    rows.extend(rows[:9] if own.last else [])
    log.told_of("loop: later: rows on one rank", lambda: next(iter(loader)))
    log.told_of("loop: same: evaluation", lambda: hfp.evaluation_loss(accelerator, model, documents(9)))

    def shared(data):
        assert len(list(hfp.prepare_dataloader(accelerator, data, hfp.TokenBudget(64)).plan.micro_batches(0))) == 13

    accelerator.state.parallelism_config = SimpleNamespace(tp_size=own.ranks, cp_size=1, sp_size=1)
    log.told_of("tensor parallel ranks: data: shard", lambda: shared(shard))
    log.told_of("tensor parallel ranks: same: table", lambda: shared(DATA))
    accelerator.state.parallelism_config = None


def main():
    folder, state = Path(sys.argv[1]), PartialState(cpu=True, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    own = Rank(state.process_index, state.num_processes)
    log = Log(folder, own.rank)
    for kind in (Trainer, SFTTrainer):
        through_trainer(log, folder, kind, own)
        evaluations(log, folder, kind, own)
    for name, data in SAME.items():
        steps = Steps()
        made = trainer(folder, Trainer, data(), steps)
        log.told_of(f"Trainer: trained: {name}", lambda made=made: attach_and_train(made), steps)
    loops(log, own)
    accelerator, shard = Accelerator(cpu=True), DATA.shard(own.ranks, own.rank)
    end = log.told_of("loop: end: shard", lambda: hfp.prepare_dataloader(accelerator, shard, hfp.TokenBudget(64)))
    state.wait_for_everyone()  # the first process that ends takes the others with it
    raise end


if __name__ == "__main__":
    main()
