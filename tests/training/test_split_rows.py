"""Documents on several ranks: steps, logs and checkpoints are those of one process that has room for all."""

import json
import os
import time
from datetime import timedelta
from itertools import islice
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from chunks import chunks_of
from hypothesis import example, given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from processes import on_ranks
from tiers import rarely
from tiny_models import build
from torch.distributed.fsdp import fully_shard
from trainers import Plain, tokenizer, trainer_of
from transformers import DataCollatorForLanguageModeling, Trainer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from tree_rows import tree_row
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import inner_model
from hf_packing.training.kinds.split import PartCollator, RowsOnRanks
from hf_packing.training.losses import COUNTS
from tools.tiny_model import tiny_model

MICRO_BATCHES, STEPS = 4, 5
LENGTHS = [70, 5, 9, 30, 3, 12, 25, 1, 8, 44, 6, 7, 61, 2, 10, 20] * 6
EVALUATED = [9, 70, 30, 12, 5]
ROW = 96


def documents(lengths=LENGTHS, labels="some"):
    """Documents with labels for "some" of their tokens, for the "last" one, or with "no" labels; "weighted" ones also
    have weights, of which some are negative."""
    generator = np.random.default_rng(0)
    rows = []
    for length in lengths:
        ids = generator.integers(8, 100, length)
        is_left_out = np.arange(length) < length - 1 if labels == "last" else generator.random(length) < 0.3
        row = {"input_ids": ids} | ({"labels": np.where(is_left_out, -100, ids)} if labels != "no" else {})
        rows.append(row | ({"loss_weights": generator.normal(1, 1, length)} if labels == "weighted" else {}))
    return datasets.Dataset.from_list(rows)


def budget(ranks):
    return hfp.TokenBudget(ROW // ranks, max_ranks_per_document=ranks)


def shard(model):
    for each in (*model.model.layers, model):
        fully_shard(each)


def logs_of_trainer(folder, kind, model, data, ranks, loss, accumulation, fsdp, labels, **more):
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": STEPS, "gradient_accumulation_steps": accumulation}
    trainer = trainer_of(folder, kind, model, data, **settings, **more)
    if labels == "no":
        trainer.data_collator = DataCollatorForLanguageModeling(tokenizer(mask_token="w3"))
    hfp.attach(trainer, budget(ranks), loss=loss)
    if fsdp:
        shard(trainer.model)
        trainer.accelerator.prepare_model = lambda model, **_: model  # accelerate has FSDP for GPUs only
    if trainer.is_world_process_zero():
        next(iter(trainer.get_train_dataloader()))  # no other rank waits for it
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = [[entry[name] for name in ("loss", "tokens_per_step", "documents_per_step")] for entry in logs]
    return [*found, [trainer.evaluate(documents(EVALUATED, labels))["eval_loss"]] * 3]


def losses_of_loop(model, data, ranks, loss, accumulation, fsdp):
    """The losses of the steps and of an evaluation, and how many parts had no labels."""
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
        unlabeled += int((batch.get("packed_targets", batch.get("labels")) == -100).all())
    evaluated = hfp.evaluation_loss(accelerator, model, documents(EVALUATED))
    losses = [*np.reshape(losses, (-1, accumulation)).mean(1).tolist(), evaluated]
    return losses, accelerator.reduce(torch.tensor(unlabeled)).item()


RUNS = {
    "loop": {"through": "loop"},
    "loop, sequence": {"through": "loop", "loss": "sequence"},
    "loop, FSDP2": {"through": "loop", "fsdp": True},
    "loop, in chunks": {"through": "loop", "in_chunks": True},
    "loop, ranks without labels": {"through": "loop", "labels": "last"},
    "loop, weighted": {"through": "loop", "labels": "weighted"},
    "loop, few tokens": {"through": "loop", "lengths": [1, 2, 1, 3, 2, 1]},
    "Trainer": {},
    "Trainer, sequence": {"loss": "sequence"},
    "Trainer, weighted": {"labels": "weighted"},
    "Trainer, FSDP2": {"fsdp": True},
    "Trainer, in chunks": {"in_chunks": True},
    "Trainer, LoRA": {"lora": True},
    "Trainer, masked": {"architecture": "BertForMaskedLM", "labels": "no"},
    "checkpointing": {"gradient_checkpointing": True},
    "SFTTrainer": {"through": "sft"},
    "SFTTrainer, FSDP2": {"through": "sft", "fsdp": True},
}
FEW = ["loop, ranks without labels", "Trainer, FSDP2", "Trainer, weighted"]


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
    """Train and evaluate, and return the losses or logs, the weights, and how many parts had no labels."""
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
            losses = logs_of_trainer(folder, kind, model, data, **how, labels=labels, **more)
    assert not in_chunks or ranks == 1 or len(chunks) > STEPS
    if how["fsdp"]:
        model.reshard()  # after evaluation
    weights = [weight.full_tensor() if how["fsdp"] else weight for weight in model.parameters()]
    return losses, [each.detach() for each in weights], unlabeled


def train_all(folder, ranks, names):
    for name in names:
        found = train(folder / name, ranks, **RUNS[name])
        if PartialState().is_main_process:
            torch.save(found, folder / f"{name}.pt")


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    known = {}

    def trained(names):
        train_all(folder, 1, [name for name in names if name not in known])
        known.update({name: torch.load(folder / f"{name}.pt") for name in names})
        return known

    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "ranks", "names"),
    [(2, 2, FEW), (4, 2, FEW), (4, 4, FEW), *rarely([(4, 4, [*RUNS])])],
    ids=["2", "4 in 2 blocks", "4", "all on 4"],
)
def test_steps_are_those_of_one_process(world, ranks, names, on_one_process, tmp_path):
    on_ranks(train_all, tmp_path, ranks, names, ranks=world)
    alone = on_one_process(names)
    for name in names:
        (losses, weights, unlabeled), (wanted, exact, _) = torch.load(tmp_path / f"{name}.pt"), alone[name]
        # logs are rounded to float32, in which SFTTrainer computes
        assert np.shape(losses)[0] == (2 if "few" in name else STEPS + 1)
        assert np.allclose(losses, wanted, rtol=1e-12 if "loop" in name else 1e-6, atol=0), (name, losses, wanted)
        close = 1e-6 if "SFT" in name else 1e-12
        assert max(float((one - other).abs().max()) for one, other in zip(weights, exact, strict=True)) < close, name
        assert unlabeled > 0 or "without labels" not in name


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
    largest, trainer.args.per_device_eval_batch_size = max(tokens), 1
    predicted = [*trainer.predict(held_out).predictions.shape]
    trainer.compute_metrics = lambda of: {"rows": len(of.predictions)}
    predicted.append(trainer.evaluate(held_out)["eval_rows"])
    (folder / f"{PartialState().process_index}.json").write_text(json.dumps([losses, predicted, largest]))


@pytest.mark.slow
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


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), ranks=st.integers(2, 8))
@example(lengths=[11], ranks=5)
def test_every_rank_has_tokens_however_few_a_row_has(lengths, ranks):
    rows, batching = [{"input_ids": [*range(5, 5 + length)]} for length in lengths], budget(ranks)
    on_ranks = [RowsOnRanks(ranks, rank, batching) for rank in range(ranks)]
    parts = [PartCollator(hfp.PackingCollator(), each, "token")(rows) for each in on_ranks]
    assert all(part["input_ids"].numel() for part in parts)
    tokens, documents = np.sum([part[COUNTS].tolist() for part in parts], axis=0)[:2]
    assert (tokens, documents) == (sum(lengths), len(lengths))


def route(folder):
    """The loss of routers on two ranks, and the mean over the parts of the row, by their labels."""
    accelerator = Accelerator(cpu=True)
    model, data = (
        build("Mixtral", torch.float64, output_router_logits=True, router_aux_loss_coef=1.0),
        documents([70, 5, 9]),
    )
    loader = hfp.prepare_dataloader(accelerator, data, budget(2), model=model)
    (batch,), losses = loader, []
    for model.router_aux_loss_coef in (1.0, 0.0):
        losses.append(accelerator.reduce(hfp.compute_loss(model, batch).detach(), reduction="mean").item())
    row = hfp.PackingCollator()([data[number] for number, _ in loader.plan.micro_batch(0, 0)])
    logits, part = model(**row).router_logits, batch["max_length_q"].segments.part
    places = torch.from_numpy(part.layout.places(part.rank))
    of_part = load_balancing_loss_func(tuple(layer[places] for layer in logits), 4, 2).detach()
    items = (batch["packed_targets"] != -100).sum()
    share = items.double() / accelerator.reduce(items)
    expected = accelerator.reduce(of_part * share).item()
    assert abs(expected - load_balancing_loss_func(logits, 4, 2).item()) > 1e-3, "that of the whole row"
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps([losses[0] - losses[1], expected]))


@pytest.mark.slow
def test_the_loss_of_routers_is_a_mean_over_parts(tmp_path):
    on_ranks(route, tmp_path, ranks=2)
    for rank in range(2):
        found, expected = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(expected, abs=1e-12)


SECONDS = 15


def leave(folder, how):
    """Train; in the second step, rank 1 does not come to an exchange."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=SECONDS))])
    model, rank = build("Llama", num_hidden_layers=1), accelerator.process_index
    layer = model.model.layers[0]
    loader = hfp.prepare_dataloader(accelerator, documents(), budget(2), model=model)
    model = accelerator.prepare(model)

    def end(*_):
        if how == "dies":
            os._exit(0)
        while how == "hangs" and not (folder / "0.txt").exists():
            time.sleep(0.1)
        raise SystemExit

    for number, batch in enumerate(loader):
        if (rank, number) == (1, 1):
            layer.register_forward_pre_hook(end)
        try:
            accelerator.backward(hfp.compute_loss(model, batch))
        except RuntimeError as error:
            (folder / f"{rank}.txt").write_text(f"{number}: {error}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("dies", ""), ("raises", ""), ("hangs", f"imed out waiting {SECONDS}000ms")])
def test_a_rank_does_not_wait_forever_for_one_that_does_not_come(how, said, tmp_path):
    """The time-out is that of the process group that the user has configured."""
    on_ranks(leave, tmp_path, how, ranks=2, fails=True)
    told = (tmp_path / "0.txt").read_text()
    assert told.startswith("1: ")
    assert said in told
    assert not (tmp_path / "1.txt").exists()


def refused(folder):
    """What each rank says of what cannot have documents on several ranks."""
    accelerator, wide = Accelerator(cpu=True), budget(2)
    few, stream = documents([9, 5]), documents().to_iterable_dataset(num_shards=4)
    classes = few.remove_columns("labels").add_column("label", [0, 1])
    trees = Plain([tree_row([[5, 6, 7], [5, 6, 8, 9], [3]])[0]] * 4)

    def prepare(data=few, batching=wide, **more):
        return hfp.prepare_dataloader(accelerator, data, batching, **{"model": build("Llama"), **more})

    def parallel(**sizes):
        with pytest.MonkeyPatch.context() as patch:
            config = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1, **sizes})
            patch.setattr(accelerator.state, "parallelism_config", config)
            prepare()

    def attach(kind=Trainer, model=None, data=few, **settings):
        trainer = trainer_of(folder, kind, model or build("Llama"), data, **settings)
        hfp.attach(trainer, wide)
        return trainer

    def by_another_model(call):
        (batch,) = prepare()
        call(hfp.patch_model(build("Llama", num_hidden_layers=1)), batch=batch)

    def looking_far_back():
        model = build("Llama")
        model.model.layers[0].mlp.register_forward_hook(
            lambda _, __, out: out + (out.roll(100, 1) if out.shape[1] > 150 else 0)
        )
        far = hfp.TokenBudget(200, max_ranks_per_document=2, seed=0)  # the row of one document comes first
        loader, batches = prepare(documents([390, 300, 40, 20, 30]), far, model=model), 0
        try:
            for _ in loader:
                batches += 1
        except hfp.PackingError as error:
            raise hfp.PackingError(f"{loader.first_batch_proof}; after {batches} batches: {error}") from error

    def part_as_a_tensor():
        model = build("Llama")
        (batch,) = prepare(model=model)
        hfp.compute_loss(model, {**batch, "max_length_q": torch.tensor(batch["max_length_q"])})

    calls = {
        "far back": looking_far_back,
        "a part as a tensor": part_as_a_tensor,
        "parts as ints": lambda: attach(Converting).train(),
        "three ranks": lambda: prepare(batching=hfp.TokenBudget(48, max_ranks_per_document=3)),
        "more ranks than there are": lambda: prepare(batching=budget(4)),
        "a long document": lambda: prepare(documents([97, 5])),
        "fixed shapes": lambda: prepare(tokens=96, max_segments=9),
        "a stream": lambda: prepare(stream),
        "trees": lambda: prepare(trees),
        "no model": lambda: prepare(model=None),
        "biases": lambda: next(iter(prepare(model=tiny_model("bloom", "causal")))),
        "ranks disagree": lambda: prepare(documents([70, 5 + accelerator.process_index])),
        "tensor parallelism": lambda: parallel(tp_size=2),
        "context parallelism": lambda: parallel(cp_size=2),
        "sequence parallelism": lambda: parallel(sp_size=2),
        "another model": lambda: by_another_model(hfp.compute_loss),
        "sums of documents": lambda: by_another_model(hfp.document_logps),
        "a check of a part": lambda: by_another_model(hfp.check_isolation),
        "rows that stay whole": lambda: attach(model=build("LlamaForSequenceClassification"), data=classes),
        "a loss of its own": lambda: attach(Distilled).train(),
        "label smoothing": lambda: attach(label_smoothing_factor=0.1).train(),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(hfp.PackingError) as error:
            call()
        found[name] = str(error.value)
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))


class Converting(Trainer):
    def _prepare_inputs(self, inputs):
        return {name: each if isinstance(each, torch.Tensor) else int(each) for name, each in inputs.items()}


class Distilled(Trainer):
    def compute_loss(self, model, inputs, **named):
        loss, outputs = super().compute_loss(model, inputs, **{**named, "return_outputs": True})
        return loss + outputs.logits.square().mean()


ONE = "max_ranks_per_document: expected 1"
DIVIDING = "max_ranks_per_document: expected a number that divides the 2 ranks of this run"
PART = "max_length_q: expected the int of the loader, which knows which part of a row on several ranks the batch is"
REFUSED = {
    "far back": "replacing documents changed the outputs of other documents on several ranks",
    "a part as a tensor": f"{PART}, got Tensor. Convert only the tensors",
    "parts as ints": f"{PART}, got int",
    "three ranks": f"{DIVIDING}, got 3",
    "more ranks than there are": f"{DIVIDING}, got 4",
    "a long document": "max_tokens: row 0 has 97 tokens, but a row on 2 ranks may have at most 96",
    "fixed shapes": f"{ONE} for batches of fixed shapes",
    "a stream": f"{ONE} for a stream, since only documents of a map-style dataset can be on several ranks, got 2",
    "trees": f"{ONE} for rows of trees, got 2",
    "no model": "model: expected the model that is trained, for documents on several ranks",
    "biases": "BloomAttention gets a tensor with a value for each pair of",
    "ranks disagree": "dataset: expected the same on all ranks",
    "tensor parallelism": f"{ONE} with tensor parallelism, got 2",
    "context parallelism": "cp_size: expected 1, got 2; for documents on several processes, pass "
    "TokenBudget(max_tokens, max_ranks_per_document=2)",
    "sequence parallelism": "sp_size: expected 1, got 2; for documents on several processes, pass "
    "TokenBudget(max_tokens, max_ranks_per_document=2)",
    "another model": f"{ONE}, since it is not proven that LlamaForCausalLM runs rows on 2 ranks",
    "sums of documents": "batch: expected whole documents, got a part of a row",
    "a check of a part": "batch: expected whole documents, got a part of a row",
    "rows that stay whole": f"{ONE} for Trainer with LlamaForSequenceClassification, whose rows stay whole, got 2",
    "a loss of its own": "trainer: expected the step that it makes without packing",
    "label smoothing": "for documents that share prefixes or are on several ranks, but LlamaForCausalLM computes 0",
}


@pytest.mark.slow
def test_refusals_are_the_same_on_all_ranks(tmp_path):
    on_ranks(refused, tmp_path, ranks=2)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == other
    assert one.keys() == REFUSED.keys()
    for name, words in REFUSED.items():
        assert words in one[name], name
    # a row of one document shows nothing
    proven, found = one["far back"].split("; after 1 batches: ")
    assert proven.startswith("step: proven on the first training batch: ")
    assert "on 4 documents of up to 300 tokens, 390 in all, in training mode and float32, replacing documents" in found


def test_ranks_that_are_no_multiple_are_refused(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(hfp.PackingError, match="max_ranks_per_document: .* divides the 1 ranks of this run, got 2"):
        hfp.attach(trainer, hfp.TokenBudget(8, max_ranks_per_document=2))
