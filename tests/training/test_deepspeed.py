"""Training under ZeRO of DeepSpeed, on two processes: the weights are those of plain SGD on documents alone.

accelerate takes DeepSpeed for GPUs, so its state is told that these processes on CPUs are of DeepSpeed.
"""

import json
from importlib.util import find_spec

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from patched_models import patched
from processes import on_ranks
from tiny_models import build
from torch.nn import functional as F
from trainers import documents, documents_in, on_each_batch, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason='needs pip install -e ".[deepspeed]"'),
]

RANKS, NUMBER, RATE = 2, 45, 0.1
CASES = {
    f"{through}, stage {stage}, {accumulation} micro-batches": (through, stage, accumulation)
    for through, stage, accumulation in (
        *(("trainer", 1, 1), ("trainer", 2, 2), ("trainer", 3, 2)),
        *(("loop", 1, 2), ("loop", 2, 2), ("loop", 3, 1)),
        *(("smoothing", 1, 2), ("smoothing", 3, 2), ("sft", 2, 2), ("sft", 3, 2)),
    )
}
"""`smoothing`: a Trainer that computes its loss outside of the model; `sft`: an SFTTrainer."""


def zero(stage):
    """A configuration in which ZeRO-3 shards even the smallest weights, and shards them again after each use."""
    always = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    return {
        "zero_optimization": {"stage": stage, **dict.fromkeys(always, 0)},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,  # accelerate clips to 1.0 if it is not said
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def seen_in(batch):
    """The documents of a batch with their labels, as lists."""
    labels = documents_in(batch, "labels" if "labels" in batch else "packed_targets")
    return [*zip(documents_in(batch), labels, strict=True)]


def through_trainer(folder, through, stage, accumulation):
    trainer = trainer_of(
        folder / "checkpoints",
        SFTTrainer if through == "sft" else Trainer,
        data=documents(NUMBER),
        deepspeed=zero(stage),
        accelerator_config={"use_configured_state": True},
        optim="sgd",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_steps=-1,
        num_train_epochs=1,
        gradient_accumulation_steps=accumulation,
        label_smoothing_factor=0.1 if through == "smoothing" else 0.0,
    )
    # ZeRO-3 learns from the first calls in which order modules run, and TRL's loss does not run the output layer
    prove = "model" if (through, stage) == ("sft", 3) else "first batch"
    summary, seen = hfp.attach(trainer, hfp.TokenBudget(64), prove=prove), []
    on_each_batch(trainer, lambda batch: seen.append([trainer.state.global_step, seen_in(batch)]))
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return trainer.model_wrapped, seen, losses, summary, lambda: trainer.evaluate(documents(NUMBER))["eval_loss"]


def through_loop(_, __, stage, accumulation):
    plugin = DeepSpeedPlugin(hf_ds_config=zero(stage))
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation)
    model, seen, losses = patched(), [], [0.0]
    loader = hfp.prepare_dataloader(accelerator, documents(NUMBER), hfp.TokenBudget(64), model=model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    for batch in loader:
        seen.append([len(losses) - 1, seen_in(batch)])
        with accelerator.accumulate(model):
            loss = hfp.compute_loss(model, batch)
            accelerator.backward(loss)
            losses[-1] += accelerator.reduce(loss.detach(), reduction="mean").item() / accumulation
            optimizer.step()
            optimizer.zero_grad()
        losses += [0.0] if accelerator.sync_gradients else []
    evaluate = lambda: hfp.evaluation_loss(accelerator, model, documents(NUMBER))  # noqa: E731
    return model, seen, losses[:-1], loader.summary, evaluate


def facts_of(engine):
    """What shows that a stage of ZeRO is on."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    own = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    return {
        "stage": stage,
        "ranks": PartialState().num_processes,
        "accumulation": engine.gradient_accumulation_steps(),
        "optimizer": type(optimizer.optimizer).__name__,
        "all": sum(getattr(each, "ds_numel", each.numel()) for each in engine.parameters()),
        "in memory": sum(each.numel() for each in engine.parameters()),
        "shards": sum(each.ds_tensor.numel() for each in engine.parameters()) if stage == 3 else None,
        "stepped here": sum(each.numel() for each in own),
        "shards gradients": engine.zero_optimization_partition_gradients(),
    }


def train_on_rank(folder, cases):
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # else it compiles a sum over processes, which takes minutes
    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
    rank = PartialState().process_index
    for name, (through, stage, accumulation) in cases.items():
        AcceleratorState._reset_state()
        run = through_loop if through == "loop" else through_trainer
        engine, seen, losses, summary, evaluate = run(folder, through, stage, accumulation)
        found = {"seen": seen, "losses": losses, "summary": str(summary), **facts_of(engine), "evaluated": evaluate()}
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
        with deepspeed.zero.GatheredParameters([*engine.parameters()]):
            weights = {name.removeprefix("module."): each.detach().clone() for name, each in engine.named_parameters()}
        torch.save(weights, folder / f"{name}-{rank}.pt")
        engine.destroy()


def loss_of(model, of_step, smoothing=0.0):
    """The mean loss over all labels of documents, each of which runs alone."""
    items = sum(label != -100 for _, labels in of_step for label in labels[1:])
    how = {"ignore_index": -100, "reduction": "sum", "label_smoothing": smoothing}
    total = 0.0
    for ids, labels in of_step:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits, torch.tensor(labels[1:]), **how) / items
    return total


def trained_by_hand(steps, smoothing):
    """A stock model after steps of plain SGD, and the loss of each."""
    model, losses = build("Llama", torch.float64), []
    for of_step in steps:
        model.zero_grad()
        loss = loss_of(model, of_step, smoothing)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return model.requires_grad_(False), losses


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DS_ACCELERATOR", "cpu")
        on_ranks(train_on_rank, folder, CASES, ranks=RANKS)
    return folder


def check_stage(found, stage, accumulation):
    expected = {"stage": stage, "ranks": RANKS, "accumulation": accumulation, "optimizer": "SGD"}
    assert {name: found[name] for name in expected} == expected
    assert found["shards gradients"] == (stage > 1)
    assert found["stepped here"] == found["all"] // RANKS
    assert found["in memory"] == (0 if stage == 3 else found["all"])
    assert found["shards"] == (found["all"] // RANKS if stage == 3 else None)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_sgd_on_documents_alone(on_two_ranks, name):
    through, stage, accumulation = CASES[name]
    of_ranks = [json.loads((on_two_ranks / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
    numbers = [[step for step, _ in found["seen"]] for found in of_ranks]
    assert numbers[0] == numbers[1] == sorted([*range(max(numbers[0]) + 1)] * accumulation)
    steps = [
        [document for found in of_ranks for number, seen in found["seen"] if number == step for document in seen]
        for step in dict.fromkeys(numbers[0])
    ]
    assert len(steps) >= 2
    rows = documents(NUMBER)
    known = [ids for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True) if set(labels[1:]) != {-100}]
    trained = [ids for of_step in steps for ids, labels in of_step if set(labels[1:]) != {-100}]
    assert sorted(trained) == sorted(known)

    smoothing = 0.1 if through == "smoothing" else 0.0
    model, losses = trained_by_hand(steps, smoothing)
    first = dict(build("Llama", torch.float64).requires_grad_(False).named_parameters())
    moved = max(float((each - first[key]).abs().max()) for key, each in model.named_parameters())
    assert moved > 0.01  # 10,000 times what the weights below may differ by
    everything = [[ids, labels] for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)]
    evaluated = loss_of(model, everything, smoothing).item()
    for rank, found in enumerate(of_ranks):
        check_stage(found, stage, accumulation)
        weights = torch.load(on_two_ranks / f"{name}-{rank}.pt")
        for key, expected in model.named_parameters():
            assert float((weights[key] - expected).abs().max()) <= 1e-6, key
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert found["evaluated"] == pytest.approx(evaluated, rel=1e-6)
        if (through, stage) != ("sft", 3):
            assert "isolation: proven on the first training batch" in found["summary"]
            assert "step: proven on the first training batch" in found["summary"]
