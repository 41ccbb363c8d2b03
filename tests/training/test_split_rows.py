"""Documents on several ranks: steps, logs and checkpoints are those of one process that has room for all."""

import json
from itertools import islice

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from chunks import chunks_of
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from tiers import slow
from tiny_models import build
from torch.distributed.fsdp import fully_shard
from trainers import trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import inner_model
from tools.tiny_model import tiny_model

MICRO_BATCHES, STEPS = 4, 5
LENGTHS = [70, 5, 9, 30, 3, 12, 25, 1, 8, 44, 6, 7, 61, 2, 10, 20] * 6
ROW = 96


def documents(lengths=LENGTHS, labels="some"):
    """Documents with labels for some of their tokens, or for the last one."""
    generator = np.random.default_rng(0)
    rows = []
    for length in lengths:
        ids = generator.integers(8, 100, length)
        is_left_out = generator.random(length) < 0.3 if labels == "some" else np.arange(length) < length - 1
        rows.append({"input_ids": ids, "labels": np.where(is_left_out, -100, ids)})
    return datasets.Dataset.from_list(rows)


def budget(ranks):
    return hfp.TokenBudget(ROW // ranks, max_ranks_per_document=ranks)


def shard(model):
    for each in (*model.model.layers, model):
        fully_shard(each)


def logs_of_trainer(folder, kind, model, data, ranks, loss, accumulation, fsdp, **more):
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": STEPS, "gradient_accumulation_steps": accumulation}
    trainer = trainer_of(folder, kind, model, data, **settings, **more)
    hfp.attach(trainer, budget(ranks), loss=loss)
    if fsdp:
        shard(trainer.model)
        trainer.accelerator.prepare_model = lambda model, **_: model  # accelerate has FSDP for GPUs only
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [[entry[name] for name in ("loss", "tokens_per_step", "documents_per_step")] for entry in logs]


def losses_of_loop(model, data, ranks, loss, accumulation, fsdp):
    """The losses of the steps, and how many parts had no labels."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    loader = hfp.prepare_dataloader(accelerator, data, budget(ranks), model=model, loss=loss)
    if fsdp:
        shard(model)
        optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses, unlabeled = [], 0
    for batch in islice(loader, STEPS * accumulation):
        with accelerator.accumulate(model):
            computed = hfp.compute_loss(model, batch)
            accelerator.backward(computed)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(computed.detach(), reduction="mean").item())
        unlabeled += int((batch.get("targets", batch.get("labels")) == -100).all())
    return np.reshape(losses, (-1, accumulation)).mean(1).tolist(), accelerator.reduce(torch.tensor(unlabeled)).item()


RUNS = {
    "loop": {"through": "loop"},
    "loop, sequence": {"through": "loop", "loss": "sequence"},
    "loop, FSDP2": {"through": "loop", "fsdp": True},
    "loop, in chunks": {"through": "loop", "in_chunks": True},
    "loop, ranks without labels": {"through": "loop", "labels": "last"},
    "loop, few tokens": {"through": "loop", "lengths": [1, 2, 1, 3, 2, 1]},
    "Trainer": {},
    "Trainer, sequence": {"loss": "sequence"},
    "Trainer, FSDP2": {"fsdp": True},
    "Trainer, in chunks": {"in_chunks": True},
    "Trainer, LoRA": {"lora": True},
    "Trainer, masked": {"architecture": "BertForMaskedLM"},
    "checkpointing": {"gradient_checkpointing": True},
    "SFTTrainer": {"through": "sft"},
    "SFTTrainer, FSDP2": {"through": "sft", "fsdp": True},
}
FAST = ["loop, sequence", "loop, ranks without labels", "Trainer, FSDP2", "SFTTrainer"]


def train(
    folder,
    ranks,
    *,
    through="trainer",
    loss="token",
    architecture="Llama",
    lengths=LENGTHS,
    labels="some",
    lora=False,
    in_chunks=False,
    fsdp=False,
    **more,
):
    """Train, and return the losses or the logs of the steps, the weights, and how many parts had no labels."""
    world = PartialState(cpu=True).num_processes
    model, data, unlabeled = build(architecture, torch.float64, num_hidden_layers=2), documents(lengths, labels), 0
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    how = {"ranks": ranks, "loss": loss, "accumulation": MICRO_BATCHES * ranks // world, "fsdp": fsdp and ranks > 1}
    with chunks_of(10 if in_chunks and ranks > 1 else 10_000, inner_model(model)) as chunks:
        if through == "loop":
            losses, unlabeled = losses_of_loop(model, data, **how)
        else:
            kind = SFTTrainer if through == "sft" else Trainer
            losses = logs_of_trainer(folder, kind, model, data, **how, **more)
    assert not in_chunks or ranks == 1 or len(chunks) > STEPS
    weights = [weight.full_tensor() if how["fsdp"] else weight for weight in model.parameters()]
    return losses, [each.detach() for each in weights], unlabeled


def train_all(folder, ranks, names):
    for name in names:
        found = train(folder / name, ranks, **RUNS[name])
        if PartialState().is_main_process:
            torch.save(found, folder / f"{name}.pt")


@pytest.mark.parametrize(
    ("world", "ranks", "names"), [(2, 2, FAST), slow(4, 2, [*RUNS]), slow(4, 4, [*RUNS])], ids=["2", "4 in 2 blocks", "4"]
)
def test_steps_are_those_of_one_process(world, ranks, names, tmp_path):
    train_all(tmp_path, 1, names)
    expected = {name: torch.load(tmp_path / f"{name}.pt") for name in names}
    on_ranks(train_all, tmp_path, ranks, names, ranks=world)
    for name in names:
        (losses, weights, unlabeled), (wanted, exact, _) = torch.load(tmp_path / f"{name}.pt"), expected[name]
        # logs are rounded to float32, in which SFTTrainer computes
        assert np.shape(losses)[0] == (1 if "few" in name else STEPS)
        assert np.allclose(losses, wanted, rtol=1e-12 if "loop" in name else 1e-6, atol=0), (name, losses, wanted)
        close = 1e-6 if "SFT" in name else 1e-12
        assert max(float((one - other).abs().max()) for one, other in zip(weights, exact, strict=True)) < close, name
        assert unlabeled > 0 or "without labels" not in name


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
