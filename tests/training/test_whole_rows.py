"""attach with a TokenBudget keeps rows whole for heads and pairs: gradients are those of the padded optimizer step."""

import json
from collections import Counter

import datasets
import pytest
import torch
import transformers
import trl
from processes import on_ranks
from tiers import slow
from training_by_hand import largest_difference
from transformers import default_data_collator
from whole_rows import (
    BUDGET,
    ROWS,
    Recorded,
    after_a_step,
    by_hand,
    classified,
    paired,
    read_rows,
    tokenizer,
    train_all,
    trainer_of,
)

import hf_packing as hfp
from hf_packing.training import whole_rows
from hf_packing.training.whole_rows import sizes_of_rows
from tools.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KINDS = {"classifier": "labeled rows", "tokens": "labeled tokens", "reward": "rows", "dpo": "rows"}
"""Kinds of trainers, and what their loss is a mean of."""


def attached(kind, folder, budget=None, **changes):
    trainer = trainer_of(kind, folder, patched=True, **changes)
    trainer.data_collator = Recorded(trainer.data_collator)
    hfp.attach(trainer, budget or hfp.TokenBudget(BUDGET[kind]))
    return trainer


@pytest.mark.parametrize(("kind", "accumulation"), [*zip(KINDS, (1, 2, 2, 2), strict=True)])
@pytest.mark.usefixtures("exact_log_probs")
def test_steps_are_those_of_the_padded_batch(kind, accumulation, tmp_path):
    trainer = attached(kind, tmp_path, gradient_accumulation_steps=accumulation)
    assert trainer.attached.loss == KINDS[kind]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with (tmp_path / "rows.jsonl").open("w") as trainer.data_collator.file:
        trainer.train()
    batches = read_rows(tmp_path / "rows.jsonl")
    per_epoch = len(trainer.get_train_dataloader())
    assert per_epoch >= 3 * accumulation  # otherwise the last step of the epoch would be smaller
    steps = [
        [row for batch in batches[first : first + accumulation] for row in batch]
        for first in range(0, 3 * accumulation, accumulation)
    ]
    assert len({len(batch) for batch in batches}) > 1  # otherwise the weights of micro-batches would not matter
    expected = by_hand(kind, tmp_path, steps)
    assert largest_difference(before, expected) > 1e-6
    assert largest_difference(trainer.model.state_dict(), expected) < 1e-12


def test_samples_per_second_count_rows(tmp_path):
    """Six rows in each of three steps would be 18; each step has about as many rows as the budget holds."""
    trainer = attached("classifier", tmp_path)
    metrics = trainer.train().metrics
    rows = sum(entry["documents_per_step"] for entry in trainer.state.log_history if "loss" in entry)
    assert rows not in (0, 18)
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(rows, rel=1e-2)


@pytest.mark.parametrize(
    ("losses", "unit"), [slow(["sigmoid", "ipo"], "rows"), (["sft"], "tokens of chosen completions")]
)
def test_losses_of_dpo(losses, unit, tmp_path):
    weights = [1.0] * len(losses)
    trainer = trainer_of("dpo", tmp_path, None, 0.0, torch.float32, True, loss_type=losses, loss_weights=weights)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    hfp.attach(trainer, hfp.TokenBudget(400))
    assert trainer.attached.loss == unit
    assert f"the loss is a mean of {unit}" in str(trainer.attached)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_losses_of_routers_are_named(tmp_path):
    model, reference = (tiny_model("mixtral", "causal") for _ in range(2))
    config = trl.DPOConfig(str(tmp_path), max_length=None, router_aux_loss_coef=0.1, report_to="none", use_cpu=True)
    rows = datasets.Dataset.from_list(paired()[:9])
    trainer = trl.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer(), ref_model=reference)
    with pytest.raises(hfp.PackingError, match=r"^router_aux_loss_coef: expected 0\.0 "):
        hfp.attach(trainer, hfp.TokenBudget(400))


def test_margins_of_rewards(tmp_path):
    """RewardTrainer passes the margins of pairs to the model, too, which has no use for them."""
    rows = [{**row, "margin": 0.1 * number} for number, row in enumerate(paired())]
    trainer, stock = attached("reward", tmp_path, data=rows), trainer_of("reward", tmp_path, data=rows)
    batch = stock.data_collator([stock.train_dataset[number] for number in range(6)])
    losses = [float(each.compute_loss(each.model, dict(batch))) for each in (trainer, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    other = float(stock.compute_loss(stock.model, batch | {"margin": batch["margin"] + 1}))
    assert abs(other - losses[1]) > 1e-3
    trainer.train()
    assert trainer.state.global_step == 3


class WeightedByTokens(transformers.BertForSequenceClassification):
    def forward(self, input_ids, attention_mask=None, labels=None):
        outputs = super().forward(input_ids, attention_mask=attention_mask)
        if labels is not None:
            losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
            outputs.loss = (losses * attention_mask.sum(1)).sum() / attention_mask.sum()
        return outputs


class Penalized(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ARG002
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss + 0.1 * sum(each.square().sum() for each in model.classifier.parameters())
        return (loss, outputs) if return_outputs else loss


def test_losses_that_are_not_known_name_their_unit(tmp_path):
    """A penalty of weights is whole in every micro-batch, whose shares of the step have the sum 1."""
    changes = {"gradient_accumulation_steps": 100, "max_steps": 1}
    stock = trainer_of("classifier", tmp_path, **changes)
    trainer = trainer_of("classifier", tmp_path, patched=True, **changes)
    stock.__class__ = trainer.__class__ = Penalized
    hfp.attach(trainer, hfp.TokenBudget(160), loss_unit="labeled rows")
    assert trainer.attached.loss == "labeled rows"
    trainer.train()
    loss = stock.compute_loss(stock.model.train(), stock.data_collator(list(stock.train_dataset)))
    assert largest_difference(trainer.model.state_dict(), after_a_step(stock.model, loss)) < 1e-12


def test_a_head_of_the_users_own_is_not_known(tmp_path):
    trainer = trainer_of("classifier", tmp_path, patched=True)
    trainer.model.__class__ = WeightedByTokens
    for unit in (None, "labeled rows"):
        with pytest.raises(hfp.PackingError, match="Trainer with WeightedByTokens"):
            hfp.attach(trainer, hfp.TokenBudget(160), loss_unit=unit)


@pytest.mark.parametrize(("longest", "batches"), [(60, 2), (9, 3)])
def test_the_check_of_a_loss_keeps_within_the_budget(longest, batches, tmp_path, monkeypatch):
    """No two rows of 60 tokens fit."""
    data = classified()
    data = data.map(lambda row: {"input_ids": (row["input_ids"] * 60)[: max(longest - row["input_ids"][0] % 5, 1)]})
    trainer = trainer_of("classifier", tmp_path, data=data, patched=True)
    sizes, checked = [], whole_rows.loss_of_batch

    def measured(trainer, kind, batch):
        sizes.append(int(batch["attention_mask"].sum()))
        return checked(trainer, kind, batch)

    monkeypatch.setattr(whole_rows, "loss_of_batch", measured)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert len(sizes) == batches
    assert 0 < max(sizes) <= 64


def test_masked_classes_do_not_count(tmp_path):
    data = classified()
    data = data.map(lambda row, n: {"labels": -100 if n % 3 else row["labels"]}, with_indices=True)
    trainer = attached("classifier", tmp_path, data=data, gradient_accumulation_steps=100, max_steps=1)
    trainer.train()
    rows = [row for row in data if row["labels"] != -100]
    stock = trainer_of("classifier", tmp_path)
    loss = stock.compute_loss(stock.model, stock.data_collator(rows))
    assert largest_difference(trainer.model.state_dict(), after_a_step(stock.model, loss)) < 1e-12
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss))


def test_sizes_are_those_of_collated_rows():
    """A collator may truncate; a batch without a mask has no padding."""

    def collate(rows):
        return default_data_collator([{"input_ids": (row["input_ids"] + [0] * 9)[:9]} for row in rows])

    data = datasets.Dataset.from_dict({"input_ids": [[1] * 4, [2] * 30]})
    assert sizes_of_rows(data, collate).tokens.tolist() == [9, 9]


def test_sizes_of_rows_with_several_sequences():
    mask = [[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]]
    rows = [{"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor(each)} for each in mask]
    sizes = sizes_of_rows(rows, lambda rows: rows[0])
    assert (sizes.tokens.tolist(), sizes.squared_lengths.tolist()) == ([3, 3], [5, 9])


def test_match_documents_per_step(tmp_path):
    trainer = trainer_of("classifier", tmp_path, patched=True)
    summary = hfp.attach(trainer, hfp.TokenBudget(160), match_documents_per_step=6)
    assert summary.optimizer_steps == ROWS // 6
    assert summary.documents == ROWS


def test_the_question_leaves_the_trainer_as_it_was(tmp_path):
    trainer = trainer_of("dpo", tmp_path, patched=True)
    metrics = {mode: dict(values) for mode, values in trainer._metrics.items()}
    state = torch.random.get_rng_state()
    hfp.attach(trainer, hfp.TokenBudget(BUDGET["dpo"]))
    assert {mode: dict(values) for mode, values in trainer._metrics.items()} == metrics
    assert torch.equal(torch.random.get_rng_state(), state)


ON_TWO = ("classifier", "dpo", "reward")


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    """A folder with an evaluation, and of each kind an epoch, a few steps, and an unbroken run beside a killed one."""
    folder = tmp_path_factory.mktemp("two")
    whole = {"max_steps": -1, "num_train_epochs": 1}
    save = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "dropout": 0.1}
    runs = {"epoch": whole, "few": {"gradient_accumulation_steps": 2}, "unbroken": save}
    unbroken = {f"{kind}/{name}": run | {"kind": kind} for kind in ON_TWO for name, run in runs.items()}
    on_ranks(train_all, folder, unbroken, ranks=2)
    for kind in ON_TWO:
        cut = {f"{kind}/cut": save | {"kind": kind, "kill": 3}}
        on_ranks(train_all, folder, cut, ranks=2, fails=True)
        assert not (folder / kind / "cut" / "parameters.pt").exists()
    resumed = {f"{kind}/cut": save | {"kind": kind, "resume": True} for kind in ON_TWO}
    on_ranks(train_all, folder, resumed, ranks=2)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("exact_log_probs")
@pytest.mark.parametrize("kind", ON_TWO)
def test_two_processes(kind, on_two_processes, tmp_path):
    """Each row once an epoch; parameters are those of one process with padded batches; a killed run resumes exactly."""
    folder = on_two_processes / kind
    seen = [read_rows(folder / "epoch" / f"rows-{rank}.jsonl") for rank in range(2)]
    assert len(seen[0]) == len(seen[1]) > 1
    counts = Counter(json.dumps(row) for rank in seen for batch in rank for row in batch)
    assert len(counts) == ROWS
    assert set(counts.values()) == {1}

    first, second = (read_rows(folder / "few" / f"rows-{rank}.jsonl") for rank in range(2))
    assert len(first) == len(second) >= 6  # accelerate reads one more than it needs
    steps = [[row for batch in (*first[n : n + 2], *second[n : n + 2]) for row in batch] for n in (0, 2, 4)]
    assert largest_difference(torch.load(folder / "few" / "parameters.pt"), by_hand(kind, tmp_path, steps)) < 1e-12

    unbroken, resumed = (torch.load(folder / name / "parameters.pt") for name in ("unbroken", "cut"))
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)
