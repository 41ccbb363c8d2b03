"""Documents on several ranks: steps, logs and checkpoints are those of one process that has room for all."""

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from processes import on_ranks
from tiny_models import build
from torch.distributed.fsdp import fully_shard
from trainers import logged, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp

MICRO_BATCHES = 4
LENGTHS = [70, 5, 9, 30, 3, 12, 25, 1, 8, 44, 6, 7, 61, 2, 10, 20] * 4
ROW = 96


def documents(lengths=LENGTHS):
    generator = np.random.default_rng(0)
    rows = []
    for length in lengths:
        ids = generator.integers(8, 100, length)
        rows.append({"input_ids": ids, "labels": np.where(generator.random(length) < 0.3, -100, ids)})
    return datasets.Dataset.from_list(rows)


def budget(ranks):
    return hfp.TokenBudget(ROW // ranks, max_ranks_per_document=ranks)


def trained(folder, through, ranks, loss, lengths=LENGTHS, architecture="Llama", **more):
    """Train, and return the losses of the steps and the weights."""
    world = PartialState(cpu=True).num_processes
    accumulation = MICRO_BATCHES * ranks // world
    model, data = build(architecture, torch.float64, num_hidden_layers=2), documents(lengths)
    if through != "loop":
        kind = SFTTrainer if through == "sft" else Trainer
        settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "gradient_accumulation_steps": accumulation}
        trainer = trainer_of(folder, kind, model, data, **settings | more)
        hfp.attach(trainer, budget(ranks), loss=loss)
        return logged(trainer), [each.detach() for each in trainer.model.parameters()]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    loader = hfp.prepare_dataloader(accelerator, data, budget(ranks), model=model, loss=loss)
    if more:  # FSDP
        for each in (*model.model.layers, model):
            fully_shard(each)
        optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for number, batch in enumerate(loader):
        if number == 4 * accumulation:
            break
        with accelerator.accumulate(model):
            computed = hfp.compute_loss(model, batch)
            accelerator.backward(computed)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(computed.detach(), reduction="mean").item())
    weights = [each.full_tensor() if more else each for each in (weight.detach() for weight in model.parameters())]
    return np.reshape(losses, (-1, accumulation)).mean(1).tolist(), weights


RUNS = {
    "loop": ("loop", "token", {}),
    "loop, sequence": ("loop", "sequence", {}),
    "FSDP": ("loop", "token", {"fsdp": True}),
    "Trainer": ("trainer", "token", {}),
    "Trainer, sequence": ("trainer", "sequence", {}),
    "checkpointing": ("trainer", "token", {"gradient_checkpointing": True}),
    "SFTTrainer": ("sft", "token", {}),
    "few tokens": ("loop", "token", {}),
}


def train_all(folder, ranks, names):
    for name in names:
        through, loss, more = RUNS[name]
        lengths = [1, 2, 1, 3, 2, 1] if name == "few tokens" else LENGTHS
        losses, weights = trained(folder / name, through, ranks, loss, lengths, **more)
        if PartialState().is_main_process:
            torch.save((losses, weights), folder / f"{name}.pt")


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    train_all(folder, 1, [name for name in RUNS if name != "FSDP"])
    return folder


@pytest.mark.parametrize(("world", "ranks"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_steps_are_those_of_one_process(world, ranks, on_one, tmp_path):
    on_ranks(train_all, tmp_path, ranks, [*RUNS], ranks=world)
    for name in RUNS:
        losses, weights = torch.load(tmp_path / f"{name}.pt")
        expected, wanted = torch.load(on_one / f"{'loop' if name == 'FSDP' else name}.pt")
        close = 1e-6 if name == "SFTTrainer" else 1e-12  # it computes in float32
        assert losses == pytest.approx(expected, rel=close if RUNS[name][0] == "loop" else 1e-6)  # logs are float32
        assert max(float((one - other).abs().max()) for one, other in zip(weights, wanted, strict=True)) < close
