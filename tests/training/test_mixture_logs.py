"""The logs of the sources of a mixture: shares, tokens, documents, epochs and losses of what was trained on."""

import json
import os
import signal
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from chunks import chunks_of
from document_streams import generated
from patched_models import patched
from processes import on_ranks, read
from tiers import fast_only
from tiny_models import build
from torch.nn import functional as F
from trainers import trainer_of as plain_trainer_of
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTTrainer

import hf_packing as hfp

CAPACITY, MOST = 48, 12
SHARES = {"web": 0.5, "code": 0.3, "books": 0.2}
LENGTHS, SIZES = {"web": (4, 16), "code": (2, 7), "books": (8, 40)}, {"web": 60, "code": 20, "books": 12}
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
        self.model = build("Llama", torch.float64)
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


def trainer_of(folder, stream, kind=Trainer, callbacks=(), loss="token", shapes=None, budget=CAPACITY, **settings):
    """An attached trainer, which notes in `seen` the documents, and sums in `by_hand`, unless it is None."""

    class Noting(kind):
        def training_step(self, model, inputs, *others):
            assert "source" not in inputs
            self.seen.append(documents_in(inputs))
            if self.by_hand is not None:
                self.by_hand.add(self.accelerator.unwrap_model(model), self.seen[-1])
            return super().training_step(model, inputs, *others)

    known = {"logging_steps": 2, "learning_rate": 1e-2, "callbacks": [*callbacks], **settings}
    known |= {"dataset_kwargs": {"skip_prepare_dataset": True}} if kind is SFTTrainer else {}
    trainer = plain_trainer_of(folder, Noting, patched("Llama", torch.float64), stream, **known)
    hfp.attach(trainer, hfp.TokenBudget(budget), loss=loss, **(shapes or {}))
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


class Compares(TrainerCallback):
    """Compares what is logged of the sources with what was trained on, as summed by hand."""

    def __init__(self, losses=True):
        self.losses, self.logs, self.trainer = losses, 0, None
        self.before = {name: np.zeros(4) for name in SHARES}

    def on_log(self, args, state, control, logs, **known):  # noqa: ARG002
        if "loss" not in logs:
            return
        now = {name: sums.copy() for name, sums in self.trainer.by_hand.sums.items()}
        since = {name: now[name] - self.before[name] for name in SHARES}
        tokens, _, losses, labels = np.array(list(since.values())).T
        for number, name in enumerate(SHARES):
            assert logs[f"source_{name}"] == tokens[number] / tokens.sum()
            assert logs[f"source_{name}_tokens"] == now[name][0]
            assert logs[f"source_{name}_documents"] == now[name][1]
            assert (f"source_{name}_loss" in logs) == (self.losses and labels[number] > 0)
            assert (f"source_{name}_epoch" in logs) == (now[name][1] > self.before[name][1])
            if f"source_{name}_loss" in logs:
                assert logs[f"source_{name}_loss"] == pytest.approx(losses[number] / labels[number], rel=1e-9)
        self.before, self.logs = now, self.logs + 1


def run(folder, losses=True, stream=None, steps=8, **settings):
    """Train, compare all logs with sums by hand, and return the trainer."""
    compares = Compares(losses)
    trainer = trainer_of(folder, stream or packed(mixture()), callbacks=[compares], max_steps=steps, **settings)
    compares.trainer, trainer.by_hand = trainer, ByHand()
    trainer.train()
    assert compares.logs == steps // trainer.args.logging_steps
    return trainer


@pytest.mark.usefixtures("exact_log_probs")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["whole logits", "chunks, fixed shapes", "sequences", "SFTTrainer"])
def test_losses_and_counts_are_those_of_the_documents(tmp_path, how):
    settings = {
        "whole logits": {"gradient_accumulation_steps": 2, "steps": 4},
        "chunks, fixed shapes": {"shapes": {"tokens": CAPACITY + 5, "max_segments": MOST + 1}},
        "sequences": {"loss": "sequence"},
        "SFTTrainer": {"kind": SFTTrainer, "loss": "sequence"},
    }[how]
    chunked = how.startswith("chunks")
    with chunks_of(5, build("Llama")) if chunked else nullcontext() as sums:
        trainer = run(tmp_path, **settings)
    assert not chunked or len([size for _, size in sums if size == 5]) >= 6
    assert any(len({document[0] for document in each}) == 3 for each in trainer.seen)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", fast_only([Trainer, SFTTrainer], Trainer))
def test_training_is_the_same_bit_for_bit_as_without_logs_of_sources(tmp_path, kind):
    rows = packed(mixture().remove_columns("source"))
    with chunks_of(5, build("Llama")):
        settings = {"kind": kind, "max_steps": 3, "logging_steps": 1}
        without = trainer_of(tmp_path, rows, **settings)
        mixed = trainer_of(tmp_path, packed(mixture()), **settings)
        for each in (without, mixed):
            each.train()
    assert without.seen == mixed.seen
    logs = [[line for line in each.state.log_history if "loss" in line] for each in (without, mixed)]
    assert [line["loss"] for line in logs[0]] == [line["loss"] for line in logs[1]]
    assert [line["grad_norm"] for line in logs[0]] == [line["grad_norm"] for line in logs[1]]
    assert sources_in(logs[1][0])
    assert not sources_in(logs[0][0])
    for one, two in zip(without.model.parameters(), mixed.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_cross_entropy_of_the_trainers_own_is_logged_too(tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, num_items_in_batch=None, **_):
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[0, :-1]
            return F.cross_entropy(logits, inputs["labels"][0, 1:], reduction="sum") / num_items_in_batch

    class OfProbabilities(Trainer):
        def compute_loss(self, model, inputs, num_items_in_batch=None, **_):
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[0, :-1]
            losses = -logits.log_softmax(-1).gather(1, inputs["labels"][0, 1:, None].clamp(min=0))
            return (losses[:, 0] * (inputs["labels"][0, 1:] != -100)).sum() / num_items_in_batch

    run(tmp_path, kind=Own, steps=2)
    run(tmp_path, losses=False, kind=OfProbabilities, steps=2)


def test_epochs_are_those_from_which_the_documents_come(tmp_path):
    """In an epoch of the mixture, the passes of a document are 0, 1, 2 and so on; the next epoch goes on from there."""
    stream = packed(mixture(), streams=1)
    most_steps = 2 * (len(list(stream)) // 4 + 1) + 9  # of four rows
    trainer = trainer_of(tmp_path, stream, max_steps=most_steps, logging_steps=1, budget=4 * CAPACITY)
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    epochs = [int(line["epoch"]) for line in logs]
    begun = dict.fromkeys(SHARES, 0)
    for epoch in (0, 1):
        first, end = epochs.index(epoch), epochs.index(epoch + 1)
        seen = Counter(tuple(document) for documents in trainer.seen[first:end] for document in documents)
        for number, name in enumerate(SHARES):
            times = np.array([count for document, count in seen.items() if document[0] == number + 1])
            documents = np.diff(
                [logs[first - 1][f"source_{name}_documents"] if first else 0]
                + [line[f"source_{name}_documents"] for line in logs[first:end]]
            )
            found = np.array([line.get(f"source_{name}_epoch", 0) for line in logs[first:end]])
            expected = begun[name] * times.sum() + (times * (times - 1) // 2).sum()
            assert found @ documents == pytest.approx(expected)
            begun[name] += times.max()
    assert begun["code"] > 4
    assert min(begun.values()) >= 2


def train_on_rank(folder, settings):
    train(folder, folder.parent / "checkpoints", **settings).accelerator.free_memory()


@pytest.mark.slow
def test_logs_do_not_depend_on_ranks_kills_and_resumes(tmp_path):
    """Half of the run on two ranks, of which one is killed, and half on one rank, as the whole run on one rank."""
    settings = {"max_steps": 48, "logging_steps": 1, "save_strategy": "steps", "save_steps": 20}
    (tmp_path / "whole").mkdir()
    (tmp_path / "second").mkdir()
    train(tmp_path / "whole", tmp_path / "others", gradient_accumulation_steps=2, **settings)
    on_two = settings | {"gradient_accumulation_steps": 1, "kill": 43, "dataloader_num_workers": 1}
    on_ranks(train_on_rank, tmp_path / "first", on_two, ranks=2, fails=True)
    train(tmp_path / "second", tmp_path / "checkpoints", gradient_accumulation_steps=2, **settings)
    whole, first, second = (
        {line["step"]: line["logs"] for line in read(tmp_path / name, "sources", 0)}
        for name in ("whole", "first", "second")
    )
    assert (min(first), max(first), min(second), max(second)) == (1, 43, 41, 48)
    assert max(logs["source_web_epoch"] for logs in whole.values() if "source_web_epoch" in logs) >= 1
    assert max(logs["source_code_epoch"] for logs in second.values() if "source_code_epoch" in logs) > 3
    for found in (first, second):
        for step, logs in found.items():
            assert logs == pytest.approx(whole[step], rel=1e-9)
            counts = [name for name in logs if not name.endswith("_loss")]
            assert [logs[name] for name in counts] == [whole[step][name] for name in counts]
