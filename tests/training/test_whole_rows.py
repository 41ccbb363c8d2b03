"""attach with a TokenBudget keeps rows whole for heads and pairs: gradients are those of the padded optimizer step."""

import copy

import datasets
import numpy as np
import pytest
import torch
import transformers
import trl
from padded_steps import apart, by_hand, read_rows
from transformers import default_data_collator
from whole_rows_process import (
    BUDGET,
    LEARNING_RATE,
    ROWS,
    Recorded,
    bert,
    classified,
    paired,
    tokenizer,
    trainer_of,
)

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.attention.tiny_model import tiny_model
from hf_packing.training import loss_units
from hf_packing.training.loss_units import count_units, find_loss_unit
from hf_packing.training.whole_rows import lengths_in, sizes_of_rows

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

KINDS = {
    "classifier": "labeled rows",
    "tokens": "labeled tokens",
    "reward": "rows",
    "dpo": "rows",
}
"""Kinds of trainers, and what their loss is a mean of."""


def attached(kind, folder, budget=None, **changes):
    trainer = trainer_of(kind, folder, **changes)
    trainer.data_collator = Recorded(trainer.data_collator)
    hfp.attach(trainer, budget or hfp.TokenBudget(BUDGET[kind]))
    return trainer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.usefixtures("exact_log_probs")
def test_steps_are_those_of_the_padded_batch(kind, accumulation, tmp_path):
    trainer = attached(kind, tmp_path, gradient_accumulation_steps=accumulation)
    assert trainer.planned_rows.unit == KINDS[kind]
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
    assert apart(before, expected) > 1e-6
    assert apart(trainer.model.state_dict(), expected) < 1e-12


def test_samples_per_second_count_rows(tmp_path):
    """Six rows in each of three steps would be 18; each step has about as many rows as the budget holds."""
    trainer = attached("classifier", tmp_path)
    metrics = trainer.train().metrics
    rows = sum(entry["documents_per_step"] for entry in trainer.state.log_history if "loss" in entry)
    assert rows not in (0, 18)
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(rows, rel=1e-2)


@pytest.mark.parametrize("kind", ["classifier", "tokens"])
def test_predictions_are_in_the_order_of_the_dataset(kind, tmp_path):
    stock, ours = trainer_of(kind, tmp_path), attached(kind, tmp_path)
    expected, found = (each.predict(each.train_dataset) for each in (stock, ours))
    parts = zip(_parts(expected.predictions), _parts(found.predictions), strict=True)
    mask = np.array(
        [[n < len(row) for n in range(60)] for row in stock.train_dataset["input_ids"]]
    )  # on padding, predictions mean nothing
    for theirs, own in parts:
        assert len(own) == ROWS
        real = mask[:, : own.shape[1]] if own.ndim > 2 else np.ones(len(own), dtype=bool)
        assert np.abs(theirs - own)[real].max() < 1e-12


def _parts(predictions):
    return predictions if isinstance(predictions, tuple) else (predictions,)


def test_evaluation_loss_is_a_mean_of_all_labeled_tokens(tmp_path):
    trainer = attached("tokens", tmp_path, per_device_eval_batch_size=4)
    whole = trainer.data_collator(list(trainer.get_train_dataloader().dataset.dataset))
    with torch.no_grad():
        expected = float(trainer.model.eval()(**whole).loss)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("losses", "unit"),
    [
        (["ipo"], "rows"),
        (["apo_zero"], "rows"),
        (["sigmoid", "ipo"], "rows"),
        (["sft"], "tokens of chosen completions"),
        (["sigmoid", "sft"], None),
        (["aot"], None),
        (["aot_unpaired"], None),
    ],
)
def test_losses_of_dpo(losses, unit, tmp_path):
    trainer = trainer_of("dpo", tmp_path, loss_type=losses, loss_weights=[1.0] * len(losses), dtype=torch.float32)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if unit is None:
        with pytest.raises(hfp.PackingError, match="loss_type: expected a loss that is a mean over rows"):
            hfp.attach(trainer, hfp.TokenBudget(400))
        assert not is_patched(trainer.model)
        assert not is_patched(trainer.ref_model)
    else:
        hfp.attach(trainer, hfp.TokenBudget(400))
        assert trainer.planned_rows.unit == unit
        assert f"the loss is a mean of {unit}" in str(trainer.planned_rows)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_losses_of_routers_are_named(tmp_path):
    """TRL adds the loss of the routers to that of the pairs; without it, DPO's loss is a mean over rows."""

    def trainer(coefficient):
        model, reference = (tiny_model("mixtral", "causal", torch.float64) for _ in range(2))
        for each in (model, reference):
            each.set_experts_implementation("eager")  # the grouped one has no float64
        arguments = {"max_length": None, "router_aux_loss_coef": coefficient, "report_to": "none", "use_cpu": True}
        config = trl.DPOConfig(str(tmp_path), **arguments)
        rows = datasets.Dataset.from_list(paired()[:24])
        return trl.DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer(), ref_model=reference)

    with pytest.raises(
        hfp.PackingError, match=r"router_aux_loss_coef: expected 0\.0 .* of MixtralForCausalLM.* got 0\.1"
    ):
        hfp.attach(trainer(0.1), hfp.TokenBudget(400))
    balanced = trainer(0.0)
    hfp.attach(balanced, hfp.TokenBudget(400))
    assert balanced.planned_rows.unit == "rows"


def test_noise_that_would_depend_on_the_batch_is_refused(tmp_path):
    trainer = trainer_of("classifier", tmp_path)
    trainer.args.neftune_noise_alpha = 5.0
    for batching in (hfp.TokenBudget(160), None):
        with pytest.raises(hfp.PackingError, match=r"neftune_noise_alpha: expected None, .* got 5\.0"):
            hfp.attach(trainer, batching)


def test_margins_of_rewards(tmp_path):
    """RewardTrainer passes the margins of pairs to the model, too, which has no use for them."""
    rows = [{**row, "margin": 0.1 * number} for number, row in enumerate(paired())]
    plain = trainer_of("reward", tmp_path)
    trainer = trainer_of("reward", tmp_path, data=rows)
    hfp.attach(trainer, hfp.TokenBudget(BUDGET["reward"]))
    stock = trainer_of("reward", tmp_path, data=rows)
    batch = stock.data_collator([stock.train_dataset[number] for number in range(6)])
    assert batch["margin"].shape == (6,)
    losses = [float(each.compute_loss(each.model, dict(batch))) for each in (trainer, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    without = {name: value for name, value in batch.items() if name != "margin"}
    assert abs(float(plain.compute_loss(plain.model, without)) - losses[1]) > 1e-3
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_loss_that_compares_rows_is_refused(tmp_path):
    trainer = trainer_of("classifier", tmp_path)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.var(0).sum()  # noqa: ARG005
    with pytest.raises(
        hfp.PackingError, match="loss_unit: expected one of rows, labeled rows, .* got None. If the loss"
    ):
        hfp.attach(trainer, hfp.TokenBudget(160))
    for unit in ("rows", "labeled rows"):
        with pytest.raises(hfp.PackingError, match=f"mean over {unit}, .* depends on which rows share a micro-batch"):
            hfp.attach(trainer, hfp.TokenBudget(160), loss_unit=unit)
    assert not is_patched(trainer.model)


class WeightedByTokens(transformers.BertForSequenceClassification):
    """A head of the user's own: a row counts as often as it has tokens."""

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
    stock = trainer_of("classifier", tmp_path)
    settings = {"args": stock.args, "train_dataset": stock.train_dataset, "data_collator": stock.data_collator}
    stock.model.train()
    model = copy.deepcopy(stock.model)
    trainer = Penalized(model, **settings)
    trainer.args.gradient_accumulation_steps, trainer.args.max_steps = 100, 1
    with pytest.raises(hfp.PackingError, match="loss_unit: expected one of rows, .* Penalized with BertForSequence"):
        hfp.attach(trainer, hfp.TokenBudget(160))
    with pytest.raises(hfp.PackingError, match="loss_unit: expected one of rows, .*, got 'tokens'"):
        hfp.attach(trainer, hfp.TokenBudget(160), loss_unit="tokens")
    hfp.attach(trainer, hfp.TokenBudget(160), loss_unit="labeled rows")
    trainer.train()
    Penalized(stock.model, **settings).compute_loss(
        stock.model, stock.data_collator(list(stock.train_dataset))
    ).backward()
    with torch.no_grad():
        for parameter in stock.model.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    assert apart(model.state_dict(), stock.model.state_dict()) < 1e-12
    assert trainer.planned_rows.unit == "labeled rows"


def test_a_head_of_the_users_own_is_not_known(tmp_path):
    stock = trainer_of("classifier", tmp_path)
    model = WeightedByTokens(stock.model.config).double()
    trainer = transformers.Trainer(
        model, stock.args, train_dataset=stock.train_dataset, data_collator=stock.data_collator
    )
    with pytest.raises(hfp.PackingError, match="loss_unit: expected one of rows, .* Trainer with WeightedByTokens"):
        hfp.attach(trainer, hfp.TokenBudget(160))
    with pytest.raises(
        hfp.PackingError, match="a mean over labeled rows, but the loss of Trainer with WeightedByTokens"
    ):
        hfp.attach(trainer, hfp.TokenBudget(160), loss_unit="labeled rows")


@pytest.mark.parametrize(("kind", "unit"), KINDS.items())
def test_units_of_known_losses_are_not_named_otherwise(kind, unit, tmp_path):
    other = "rows" if unit != "rows" else "labeled tokens"
    with pytest.raises(hfp.PackingError, match=f"loss_unit: expected None or '{unit}', .*, got '{other}'"):
        hfp.attach(trainer_of(kind, tmp_path), hfp.TokenBudget(BUDGET[kind]), loss_unit=other)
    hfp.attach(trainer_of(kind, tmp_path), hfp.TokenBudget(BUDGET[kind]), loss_unit=unit)


@pytest.mark.parametrize("longest", [60, 25, 9])
def test_the_check_of_a_loss_keeps_within_the_budget(longest, tmp_path, monkeypatch):
    data = classified()
    data = data.map(lambda row: {"input_ids": (row["input_ids"] * 60)[: max(longest - row["input_ids"][0] % 5, 1)]})
    trainer = trainer_of("classifier", tmp_path, data=data)
    sizes, checked = [], loss_units.loss_of_batch

    def measured(trainer, kind, batch):
        sizes.append(int(batch["attention_mask"].sum()))
        return checked(trainer, kind, batch)

    monkeypatch.setattr(loss_units, "loss_of_batch", measured)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert len(sizes) <= 3
    assert 0 < max(sizes) <= 64
    assert len(sizes) == (2 if longest == 60 else 3)  # no two of the longest rows fit


def test_weights_that_overflow_are_named(tmp_path):
    """In float16, sums of log-probabilities overflow; that is not called a wrong mean."""
    trainer = trainer_of("classifier", tmp_path, dtype=torch.float16)
    with torch.no_grad():
        trainer.model.classifier.weight.mul_(1e6)
    with pytest.raises(
        hfp.PackingError, match="expected finite losses of 8 rows .* with weights in float16, has inf, .* If values"
    ):
        hfp.attach(trainer, hfp.TokenBudget(160))


def test_masked_classes_do_not_count(tmp_path):
    data = classified()
    data = data.map(lambda row, n: {"labels": -100 if n % 3 else row["labels"]}, with_indices=True)
    trainer = attached("classifier", tmp_path, data=data, gradient_accumulation_steps=100, max_steps=1)
    trainer.train()
    rows = [row for row in data if row["labels"] != -100]
    stock = trainer_of("classifier", tmp_path)
    loss = stock.compute_loss(stock.model, stock.data_collator(rows))
    loss.backward()
    with torch.no_grad():
        for parameter in stock.model.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    assert apart(trainer.model.state_dict(), stock.model.state_dict()) < 1e-12
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss))


def test_sizes_are_what_the_collator_makes_of_a_row(tmp_path):
    trainer = trainer_of("dpo", tmp_path)
    rows = trainer.train_dataset
    sizes = sizes_of_rows(rows, trainer.data_collator)
    for number in (0, 7, ROWS - 1):
        row = rows[number]
        chosen, rejected = (len(row["prompt_ids"]) + len(row[name]) for name in ("chosen_ids", "rejected_ids"))
        assert sizes.tokens[number] == chosen + rejected
        assert sizes.squared_lengths[number] == chosen**2 + rejected**2
    assert sizes.segments.tolist() == [1] * ROWS


def test_sizes_of_a_collator_that_truncates():
    def collate(rows):
        return default_data_collator([{"input_ids": (row["input_ids"] + [0] * 9)[:9]} for row in rows])

    data = datasets.Dataset.from_dict({"input_ids": [[1] * 4, [2] * 30]})
    assert sizes_of_rows(data, collate).tokens.tolist() == [9, 9]


def test_lengths_in_batches_of_any_shape():
    mask = torch.tensor([[[1, 1, 0], [1, 0, 0]], [[1, 1, 1], [0, 0, 0]]])
    assert lengths_in({"attention_mask": mask}).tolist() == [2, 1, 3, 0]
    assert lengths_in({"input_ids": torch.ones(2, 5)}).tolist() == [5, 5]


def test_units_that_a_batch_lacks():
    with pytest.raises(hfp.PackingError, match="expected batches with labeled tokens, got a batch with columns input"):
        count_units("labeled tokens", {"input_ids": torch.ones(1, 2)}, 1)


def test_answers_are_trained_on_in_the_trainers_own_batches(tmp_path):
    """Their loss counts the logits of padding."""
    trainer = trainer_of("answers", tmp_path, max_steps=1)
    with pytest.raises(hfp.PackingError, match="batching: expected None for BertForQuestionAnswering, .*trainer, None"):
        hfp.attach(trainer, hfp.TokenBudget(160))
    hfp.attach(trainer, None)
    assert trainer.train().global_step == 1


def test_match_documents_per_step(tmp_path):
    trainer = trainer_of("classifier", tmp_path)
    summary = hfp.attach(trainer, hfp.TokenBudget(160), match_documents_per_step=6)
    assert summary.optimizer_steps == ROWS // 6
    assert summary.documents == ROWS


@pytest.mark.parametrize(
    ("budget", "options", "message"),
    [
        (hfp.TokenBudget(20), {}, "max_tokens: row .* of train_dataset has .* raise max_tokens"),
        (hfp.TokenBudget(160, overflow="split"), {}, "overflow: expected 'error' or 'drop'"),
        (hfp.BucketBatches(160), {}, "batching: expected a TokenBudget for Trainer with BertForSequenceClass"),
        (hfp.TokenBudget(160), {"loss": "sequence"}, "loss: expected None for Trainer with BertForSequenceClass"),
        (hfp.TokenBudget(160), {"tokens": 160, "max_segments": 9}, "tokens: expected None for Trainer"),
    ],
)
def test_refused_arguments(budget, options, message, tmp_path):
    trainer = trainer_of("classifier", tmp_path)
    with pytest.raises(hfp.PackingError, match=message):
        hfp.attach(trainer, budget, **options)
    assert not is_patched(trainer.model)
    assert type(trainer).__name__ == "Trainer"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0, 1]] * ROWS, "trainer: expected a loss of 8 rows of train_dataset, but .* raised ValueError: .*Do the"),
        ([7] * ROWS, "trainer: expected a loss of 8 rows of train_dataset, but .* raised IndexError: .*Do the"),
        (None, "trainer: expected a loss of 8 rows of train_dataset, but Trainer .*did not return a loss"),
    ],
    ids=["two to a row", "no such class", "none"],
)
def test_refused_labels(labels, message, tmp_path):
    trainer = trainer_of("classifier", tmp_path)
    data = trainer.train_dataset.remove_columns("labels")
    trainer.train_dataset = data if labels is None else data.add_column("labels", labels)
    with pytest.raises(hfp.PackingError, match=message):
        hfp.attach(trainer, hfp.TokenBudget(160))
    assert not is_patched(trainer.model)


def test_a_collator_that_cannot_pad_is_refused(tmp_path):
    trainer = trainer_of("classifier", tmp_path)
    trainer.data_collator = default_data_collator
    with pytest.raises(hfp.PackingError, match="expected a collator that pads .*, got default_data_collator, which"):
        hfp.attach(trainer, hfp.TokenBudget(160))


def test_refused_datasets(tmp_path):
    trainer = trainer_of("classifier", tmp_path)
    data = trainer.train_dataset
    for changed, message in (
        (None, "train_dataset: expected a dataset, but the trainer has none"),
        (data.to_iterable_dataset(), r"train_dataset: expected a map-style dataset.*attach\(trainer, None\) keeps"),
        (data.select([]), "train_dataset: expected at least one row"),
        (data.add_column("seq_lengths", [[1]] * ROWS), "'seq_lengths' says that rows are packs"),
    ):
        trainer.train_dataset = changed
        with pytest.raises(hfp.PackingError, match=message):
            hfp.attach(trainer, hfp.TokenBudget(160))


def test_changes_after_attach_are_refused(tmp_path):
    trainer = attached("classifier", tmp_path)
    own = trainer.data_collator
    trainer.data_collator = own.collate
    with pytest.raises(hfp.PackingError, match="data_collator: expected the collator that the trainer had"):
        trainer.train()
    trainer.data_collator, model = own, trainer.model
    trainer.model = bert("SequenceClassification", num_labels=3)
    with pytest.raises(hfp.PackingError, match="model: expected the model that the trainer had"):
        trainer.train()
    trainer.model = model
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()  # noqa: ARG005
    with pytest.raises(hfp.PackingError, match="compute_loss_func"):
        trainer.train()
    with pytest.raises(hfp.PackingError, match="call attach once"):
        hfp.attach(trainer, hfp.TokenBudget(160))


def test_the_question_leaves_the_trainer_as_it_was(tmp_path):
    trainer = trainer_of("dpo", tmp_path)
    hfp.attach(trainer, None)
    metrics = {mode: dict(values) for mode, values in trainer._metrics.items()}
    state = torch.random.get_rng_state()
    parts = [trainer.train_dataset[n] for n in range(7)], [trainer.train_dataset[8]]
    assert find_loss_unit(trainer, type(trainer), parts, trainer.data_collator, None) == "rows"
    assert {mode: dict(values) for mode, values in trainer._metrics.items()} == metrics
    assert torch.equal(torch.random.get_rng_state(), state)
