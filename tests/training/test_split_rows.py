"""Documents on several ranks: steps, logs and checkpoints are those of one process that has room for all."""

import json

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
from tools.tiny_model import tiny_model

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


def evaluated(folder, ranks):
    """The losses of an evaluation by a trainer and in a loop, after training; and the tokens of the largest batch."""
    model, data = build("Llama", torch.float64, num_hidden_layers=1), documents()
    trainer = trainer_of(folder, Trainer, model, data, optim="sgd", max_steps=1, per_device_eval_batch_size=3)
    hfp.attach(trainer, budget(ranks))
    trainer.train()
    held_out, tokens = documents(LENGTHS[:11]), []
    model.register_forward_pre_hook(lambda _, __, given: tokens.append(given["input_ids"].numel()), with_kwargs=True)
    losses = [trainer.evaluate(held_out)["eval_loss"]]
    losses.append(hfp.evaluation_loss(trainer.accelerator, trainer.model, held_out, rows_per_batch=2))
    largest = max(tokens)
    predicted = [*trainer.predict(held_out).predictions.shape]
    trainer.compute_metrics = lambda of: {"rows": len(of.predictions)}
    predicted.append(trainer.evaluate(held_out)["eval_rows"])
    (folder / f"{PartialState().process_index}.json").write_text(json.dumps([losses, predicted, largest]))


def test_evaluation_is_that_of_one_process(tmp_path):
    """Without predictions, rows are on several ranks; with them, they are whole."""
    on_ranks(evaluated, tmp_path / "two", 2, ranks=2)
    on_ranks(evaluated, tmp_path / "one", 1, ranks=1)
    losses, predicted, whole = json.loads((tmp_path / "one" / "0.json").read_text())
    for rank in range(2):
        found, rows, part = json.loads((tmp_path / "two" / f"{rank}.json").read_text())
        assert found == pytest.approx(losses, rel=1e-12)
        assert rows == predicted
        assert part < 0.6 * whole


def resume(folder, ranks):
    """Train four steps; then once more from the checkpoint after two, in the middle of an epoch."""
    found = []
    for number in (0, 1):
        model = build("Llama", torch.float64, num_hidden_layers=1)
        settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 4, "gradient_accumulation_steps": 2}
        trainer = trainer_of(folder, Trainer, model, documents(), save_strategy="steps", save_steps=2, **settings)
        hfp.attach(trainer, budget(ranks))
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if number else None)
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    (folder / f"{PartialState().process_index}.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_a_run_that_was_resumed_has_the_losses_of_one_that_was_not(tmp_path):
    on_ranks(resume, tmp_path, 2, ranks=4)
    for rank in range(4):
        whole, resumed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(whole) == 4
        assert resumed == whole


def stream():
    return documents().to_iterable_dataset(num_shards=4)


def refused(folder):
    """What each rank says of what cannot have documents on several ranks."""
    accelerator = Accelerator(cpu=True)
    bloom = tiny_model("bloom", "causal")
    wide, three = budget(2), hfp.TokenBudget(48, max_ranks_per_document=3)
    calls = {
        "ranks": lambda: hfp.prepare_dataloader(accelerator, documents(), three, model=build("Llama")),
        "long": lambda: hfp.prepare_dataloader(accelerator, documents([97, 5]), wide, model=build("Llama")),
        "shapes": lambda: hfp.prepare_dataloader(
            accelerator, documents(), wide, model=build("Llama"), tokens=96, max_segments=9
        ),
        "stream": lambda: hfp.prepare_dataloader(accelerator, stream(), wide, model=build("Llama")),
        "model": lambda: hfp.prepare_dataloader(accelerator, documents(), wide),
        "biases": lambda: next(iter(hfp.prepare_dataloader(accelerator, documents(), wide, model=bloom))),
        "ranks disagree": lambda: hfp.prepare_dataloader(
            accelerator, documents([70, 5 + accelerator.process_index]), wide, model=build("Llama")
        ),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(hfp.PackingError) as error:
            call()
        found[name] = str(error.value)
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))


def test_refusals_are_the_same_on_all_ranks(tmp_path):
    on_ranks(refused, tmp_path, ranks=2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for one, other in zip(*(each.items() for each in found), strict=True):
        assert one == other
    said = found[0]
    assert said["ranks"] == "max_ranks_per_document: expected a number that divides the 2 ranks of this run, got 3"
    assert said["long"].startswith("max_tokens: row 0 has 97 tokens, but a row on 2 ranks may have at most 96")
    assert said["shapes"].startswith("max_ranks_per_document: expected 1 for batches of fixed shapes")
    assert said["stream"].startswith("max_ranks_per_document: expected 1 for a stream, got 2")
    assert said["model"].startswith("model: expected the model that is trained, for documents on several ranks")
    assert "BloomAttention gets a tensor with a value for each pair of" in said["biases"]
    assert said["ranks disagree"].startswith("dataset: expected the same data")
