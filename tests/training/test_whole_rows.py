"""attach with a TokenBudget keeps rows whole for heads, pairs and pictures: gradients are those of the padded step."""

import json
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
import trainers
import transformers
import trl
from PIL import Image
from processes import on_ranks
from tiers import slow
from training_by_hand import largest_difference
from transformers import Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig, SFTTrainer
from whole_rows import (
    BUDGET,
    ROWS,
    SIZES,
    Recorded,
    after_a_step,
    arguments,
    by_hand,
    classified,
    paired,
    read_rows,
    tokenizer,
    train_all,
    trainer_of,
)

import hf_packing as hfp
from hf_packing.training import loss_unit
from hf_packing.training.whole_rows import patches_in, sizes_of_rows
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


@pytest.mark.skipif(not hasattr(trl.DPOConfig, "router_aux_loss_coef"), reason="DPO of an older TRL has no router loss")
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


def test_a_penalty_of_weights(tmp_path):
    """A penalty of weights is whole in every micro-batch, whose shares of the step have the sum 1."""
    changes = {"gradient_accumulation_steps": 100, "max_steps": 1}
    stock = trainer_of("classifier", tmp_path, **changes)
    trainer = trainer_of("classifier", tmp_path, patched=True, **changes)
    stock.__class__ = trainer.__class__ = Penalized
    hfp.attach(trainer, hfp.TokenBudget(160))
    assert trainer.attached.loss == "labeled rows"
    trainer.train()
    loss = stock.compute_loss(stock.model.train(), stock.data_collator(list(stock.train_dataset)))
    assert largest_difference(trainer.model.state_dict(), after_a_step(stock.model, loss)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_units_are_told_apart_by_gradients(dtype, tmp_path):
    """The losses of an untrained model are about the same for all rows, and those in half precision are rounded."""
    trainer = trainer_of("tokens", tmp_path, dtype=dtype)
    hfp.attach(trainer, hfp.TokenBudget(160))
    assert trainer.attached.loss == "labeled tokens"


class WithClassWeights(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ARG002
        labels = inputs["labels"]
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1, 1, 20.0]).to(outputs.logits))
        return (loss, outputs) if return_outputs else loss


class OfTasks(transformers.Trainer):
    """The mean over the tasks of a batch of the mean over their rows."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ARG002
        inputs = dict(inputs)
        tasks = inputs.pop("task")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = torch.stack([losses[tasks == task].mean() for task in tasks.unique()]).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("kind", [WithClassWeights, OfTasks])
def test_a_unit_that_fits_most_rows_is_refused(kind, tmp_path):
    """Only one row in a hundred is of the rare class, or of the other task."""
    rows = classified()
    rows = datasets.concatenate_datasets([rows] * -(-300 // len(rows))).select(range(300))
    rare = [number % 100 == 57 for number in range(300)]
    rows = rows.remove_columns("labels").add_column("labels", [2 * each or n % 2 for n, each in enumerate(rare)])
    if kind is OfTasks:
        rows = rows.add_column("task", [*map(int, rare)])
    trainer = trainer_of("classifier", tmp_path, data=rows, patched=True, remove_unused_columns=kind is not OfTasks)
    trainer.__class__ = kind
    with pytest.raises(hfp.PackingError, match="trainer: expected a loss that is a mean over rows, labeled rows"):
        hfp.attach(trainer, hfp.TokenBudget(160))


def test_a_head_of_the_users_own_is_not_known(tmp_path):
    trainer = trainer_of("classifier", tmp_path, patched=True)
    trainer.model.__class__ = WeightedByTokens
    with pytest.raises(hfp.PackingError, match="Trainer with WeightedByTokens"):
        hfp.attach(trainer, hfp.TokenBudget(160))


@pytest.mark.parametrize(("longest", "batches"), [(60, 2), (9, 3)])
def test_the_check_of_a_loss_keeps_within_the_budget(longest, batches, tmp_path, monkeypatch):
    """No two rows of 60 tokens fit."""
    data = classified()
    data = data.map(lambda row: {"input_ids": (row["input_ids"] * 60)[: max(longest - row["input_ids"][0] % 5, 1)]})
    trainer = trainer_of("classifier", tmp_path, data=data, patched=True)
    sizes, checked = [], loss_unit._steps

    def measured(trainer, given):
        sizes.extend(int(batch["attention_mask"].sum()) for batch in given)
        return checked(trainer, given)

    monkeypatch.setattr(loss_unit, "_steps", measured)
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


def train_after_an_evaluation(folder):
    """On each rank, in transformers, with a model of its own."""
    trainer = trainers.trainer_of(folder, max_steps=2)
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.evaluate(trainers.documents(6))
    with pytest.raises(hfp.PackingError, match="trainer: expected a model in DistributedDataParallel"):
        trainer.train()
    again = trainers.trainer_of(folder, max_steps=2)
    hfp.attach(again, hfp.TokenBudget(64))
    again.train()
    assert again.state.global_step == 2


@pytest.mark.slow
def test_ranks_that_would_train_models_of_their_own_are_refused(tmp_path):
    on_ranks(train_after_an_evaluation, tmp_path, ranks=2)


PICTURE = 128
PICTURE_ROWS = 40
PICTURE_TEMPLATE = """{% for message in messages %}{{ 'w3' if message['role'] == 'user' else 'w4' }}
{% if message['content'] is string %}{{ message['content'] }}
{% else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}
{% endfor %}{% endif %} w2 {% endfor %}"""


@pytest.fixture(scope="module")
def processor():
    """Pictures of 16 x 16 pixels have 16 patches, and 17 tokens."""
    tokenizer = trainers.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="full",
        chat_template=PICTURE_TEMPLATE,
        num_additional_image_tokens=1,
    )


def llava():
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(vocab_size=PICTURE + 1, pad_token_id=0, **sizes),
        image_token_index=PICTURE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).double()


@pytest.fixture(scope="module")
def chats():
    rng = np.random.default_rng(0)

    def said(by, most):
        return {"role": by, "content": " ".join(f"w{n}" for n in rng.integers(10, 128, rng.integers(1, most)))}

    def picture():
        return Image.fromarray(rng.integers(0, 255, (20, 16, 3), dtype=np.uint8))

    rows = [
        {
            "images": [picture() for _ in range(rng.integers(0, 3))],
            "messages": [said("user", 20), said("assistant", 30)],
        }
        for _ in range(PICTURE_ROWS)
    ]
    text = datasets.Value("string")
    messages = datasets.List({"role": text, "content": text})
    features = datasets.Features({"images": datasets.List(datasets.Image()), "messages": messages})
    return datasets.Dataset.from_list(rows, features=features)


def sft(folder, processor, chats, **changes):
    config = arguments(folder, SFTConfig, max_length=None, **changes)
    return SFTTrainer(llava(), config, train_dataset=chats, processing_class=processor)


def test_texts_that_the_collator_may_cut_are_refused(processor, chats, tmp_path):
    trainer = sft(tmp_path, processor, chats)
    trainer.args.max_length = 1024
    with pytest.raises(hfp.PackingError, match="max_length: expected None with .* pictures, .* got 1024"):
        hfp.attach(trainer, hfp.TokenBudget(200))


class Kept:
    def __init__(self, collate):
        self.collate, self.batches = collate, []

    def __call__(self, rows):
        batch = self.collate(rows)
        self.batches.append({name: value.clone() for name, value in batch.items()})
        return batch


@pytest.mark.usefixtures("exact_log_probs")
def test_sft_with_pictures(processor, chats, tmp_path):
    accumulation = 3
    ours = sft(tmp_path, processor, chats, gradient_accumulation_steps=accumulation, max_steps=2)
    ours.data_collator = Kept(ours.data_collator)
    summary = hfp.attach(ours, hfp.TokenBudget(200, max_patches=48))
    assert summary.documents == PICTURE_ROWS
    assert ours.attached.loss == "labeled tokens but the first"
    ours.data_collator.batches.clear()
    ours.train()
    batches = ours.data_collator.batches[: 2 * accumulation]
    assert any(patches_in(batch, 16) == 48 for batch in batches)
    assert all(patches_in(batch, 16) <= 48 for batch in batches)
    assert all(int(batch["attention_mask"].sum()) <= 200 for batch in batches)
    assert any((batch["attention_mask"] == 0).any() for batch in batches)

    stock = llava()
    for first in range(0, 2 * accumulation, accumulation):
        step, loss = batches[first : first + accumulation], 0
        labels = [batch.pop("labels")[:, 1:] for batch in step]
        for batch, of_batch in zip(step, labels, strict=True):
            logits = stock(**batch).logits[:, :-1].flatten(0, 1)
            summed = torch.nn.functional.cross_entropy(logits, of_batch.flatten(), reduction="sum")
            loss += summed / sum(int((each != -100).sum()) for each in labels)
        after_a_step(stock, loss)
    expected, before = stock.state_dict(), llava().state_dict()
    # an older SFTTrainer leaves the loss to the model, which computes it in float32
    exact = 1e-12 if hasattr(trl.trainer.utils, "add_fused_lm_head") else 1e-8
    assert largest_difference(ours.model.state_dict(), expected) < exact
    moved = {name for name in expected if not torch.equal(expected[name], before[name])}
    assert any("vision" in name for name in moved)
    assert any("language" in name for name in moved)


def test_rows_of_a_plain_trainer(tmp_path):
    """pixel_values in the dataset, one row in ten without a picture, and a collator by hand."""
    rng = np.random.default_rng(1)
    rows = []
    for number in range(30):
        pictures = 0 if number % 10 == 0 else int(rng.integers(1, 3))
        words = rng.integers(10, 128, rng.integers(2, 30)).tolist()
        pixels = rng.standard_normal((pictures, 3, 16, 16)).tolist()
        rows.append({"input_ids": [PICTURE] * 17 * pictures + words, "pixel_values": pixels})

    def collate(rows):
        tokens = [torch.tensor(row["input_ids"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        batch = {"input_ids": padded, "attention_mask": (padded != 0).long()}
        batch["labels"] = padded.masked_fill((padded == 0) | (padded == PICTURE), -100)
        pixels = [torch.tensor(row["pixel_values"]) for row in rows if row["pixel_values"]]
        return batch | ({"pixel_values": torch.cat(pixels)} if pixels else {})

    config = arguments(tmp_path, TrainingArguments, remove_unused_columns=False)
    trainer = Trainer(llava(), config, train_dataset=datasets.Dataset.from_list(rows), data_collator=collate)
    summary = hfp.attach(trainer, hfp.TokenBudget(120, max_patches=64))
    assert summary.documents == 30
    plan = trainer.get_train_dataloader().batch_sampler.plan
    patches = np.array([len(row["pixel_values"]) * 16 for row in rows])
    assert plan.per_micro_batch(patches).max() == 64
    trainer.train()
    assert trainer.state.global_step == 3


class Centered(trl.DPOTrainer):
    """Adds the square of the mean margin of a batch, which is 0 as long as the policy is its reference."""

    def compute_loss(self, model, inputs, *args, **named):
        loss = super().compute_loss(model, inputs, *args, **named)
        logps = self.log_probs_of(model, inputs)
        return loss + (logps - logps.detach() + self.state.global_step * logps / 100).mean() ** 2

    def log_probs_of(self, model, inputs):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        of_tokens = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
        return (of_tokens * inputs["attention_mask"][:, 1:]).sum(1)


def test_terms_that_are_0_at_first_are_found_later(tmp_path):
    stock = trainer_of("dpo", tmp_path, max_steps=6)
    data = datasets.Dataset.from_list(paired())
    models = {"model": stock.model, "ref_model": stock.ref_model}
    trainer = Centered(**models, args=stock.args, train_dataset=data, processing_class=tokenizer())
    hfp.attach(trainer, hfp.TokenBudget(BUDGET["dpo"]))
    with pytest.raises(hfp.PackingError, match="trainer: expected the step that it makes without packing"):
        trainer.train()
    assert trainer.state.global_step > 0


@pytest.mark.parametrize(
    ("shape", "patches"),
    [((12, 96), 12), ((3, 10, 96), 30), ((2, 3, 16, 16), 32), ((2, 5, 3, 16, 8), 80), ((0, 96), 0)],
)
def test_patches_of_pictures_in_any_layout(shape, patches):
    assert patches_in({"pixel_values": torch.zeros(shape), "input_ids": torch.ones(1, 4)}, 16) == patches
    assert patches_in({"pixel_values_videos": torch.zeros(shape)}, 16) == patches
