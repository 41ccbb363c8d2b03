"""Packed rows through the stock trainers: losses are those of the documents, and rows without borders are refused."""

from functools import cache

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from documents_to_mask import hidden
from patched_models import patched
from tiers import fast_only
from tiny_models import build
from torch.utils.data import ConcatDataset, DataLoader, Subset
from trainers import arguments, logged, tokenizer, trainer_of
from trainers import documents as labeled
from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening, Trainer
from trl import SFTTrainer

import hf_packing as hfp
from tools.tiny_model import tiny_model

ROWS = 6
COLUMNS = ["input_ids", "labels"]
ROW = ["input_ids", "position_ids"]
DOCUMENTS = [np.random.default_rng(length).integers(5, 100, length).tolist() for length in (9, 5, 8, 10, 7, 6) * 4]


def documents():
    return datasets.Dataset.from_dict({"input_ids": DOCUMENTS})


def packed(**changes):
    return hfp.pack(documents(), hfp.BestFit(32, seed=None), **changes)


def mapped():
    return documents().map(hfp.BestFit(32, seed=None), batched=True, remove_columns=["input_ids"])


def packed_stream(**changes):
    return hfp.pack(documents().to_iterable_dataset(num_shards=2), hfp.BestFit(32, seed=None), **changes)


def lazily_packed(folder):
    documents().save_to_disk(folder)
    return hfp.pack(datasets.load_from_disk(folder), hfp.BestFit(32, seed=None), lazy=True)


def from_parquet(folder, dataset):
    dataset.to_parquet(folder / "rows.parquet")
    return datasets.load_dataset("parquet", data_files=str(folder / "rows.parquet"), split="train", cache_dir=folder)


@cache
def loss_alone():
    model, documents = build("Llama", torch.float64), [torch.tensor([each]) for each in DOCUMENTS]
    with torch.no_grad():
        losses = [float(model(ids, labels=ids).loss) * (ids.numel() - 1) for ids in documents]
    return sum(losses) / sum(ids.numel() - 1 for ids in documents)


def trainer(folder, dataset, kind=Trainer, collator=None, **changes):
    known = {"max_steps": 1, "learning_rate": 0.0, "per_device_train_batch_size": 24}
    stock = trainer_of(folder, kind, patched("Llama", torch.float64), dataset, **known | changes)
    stock.data_collator = collator or stock.data_collator
    return stock


FLAT = hfp.PackingCollator()
NOT_DISPATCHED = {"accelerator_config": {"dispatch_batches": False}}
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS}


PADDING_FREE = {"kind": SFTTrainer, "padding_free": True}
FLATTENING = {"collator": DataCollatorWithFlattening()}
RIGHT = {
    "pack": (lambda _: packed(), {}),
    "without position_ids": (lambda _: packed(position_ids=False), {}),
    "map": (lambda _: mapped().remove_columns("position_ids"), {}),
    "parquet": (lambda folder: from_parquet(folder, packed(position_ids=False)), {}),
    "lazy": (lazily_packed, {}),
    "default collator": (lambda _: packed(position_ids=False), {"collator": None, **ONE_BY_ONE}),
    "stream": (lambda _: packed_stream().map(lambda row: row).remove_columns("position_ids"), NOT_DISPATCHED),
    "padding_free": (lambda _: packed(), PADDING_FREE),
    "lazy, padding_free": (lazily_packed, {**PADDING_FREE, "dataset_kwargs": {"skip_prepare_dataset": True}}),
    "documents": (lambda _: documents(), {}),
    "flattened documents": (lambda _: documents(), FLATTENING),
    "padded documents": (lambda _: documents(), {"kind": SFTTrainer}),
}


def stock_of(folder, make, how):
    known = {} if how.get("kind") is SFTTrainer else {"collator": FLAT}
    return trainer(folder, make(folder / "data"), **known | how)


@pytest.mark.parametrize("case", RIGHT)
def test_rows_that_keep_their_borders_train_right(tmp_path, case):
    assert packed().num_rows == ROWS < len(DOCUMENTS)
    stock = stock_of(tmp_path, *RIGHT[case])
    hfp.patch_model(stock.model, padded=case == "padded documents")
    (loss,) = logged(stock)
    assert loss == pytest.approx(loss_alone(), rel=1e-6)


LOST = "^dataset: expected the column seq_lengths or position_ids in packed rows"
PACKING = {"kind": SFTTrainer, "packing": True, "max_length": 32}
WRONG = {
    "select_columns": (lambda _: packed().select_columns(COLUMNS), {}, LOST),
    "with_format": (lambda _: packed().with_format("torch", columns=COLUMNS), {}, LOST),
    "map and shuffle": (lambda _: packed().map(lambda _: {"n": 1}).shuffle().select_columns(COLUMNS), {}, LOST),
    "train_test_split": (lambda _: packed().train_test_split(0.4)["train"].select_columns(COLUMNS), {}, LOST),
    "concatenated with documents": (
        lambda _: datasets.concatenate_datasets([packed().select_columns(["input_ids"]), documents()]),
        {},
        LOST,
    ),
    "Subset": (lambda _: Subset(packed().select_columns(COLUMNS), range(4)), {}, LOST),
    "ConcatDataset": (lambda _: ConcatDataset([documents(), packed().select_columns(["input_ids"])]), {}, LOST),
    "stream": (lambda _: packed_stream().select_columns(COLUMNS), NOT_DISPATCHED, LOST),
    "lazy": (lambda folder: lazily_packed(folder).select_columns(COLUMNS), {}, LOST),
    "padding_free without seq_lengths": (lambda _: packed().remove_columns("seq_lengths"), PADDING_FREE, LOST),
    "wrapped": (lambda _: packed(), PACKING | {"packing_strategy": "wrapped"}, LOST),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_that_lose_their_borders_are_refused(tmp_path, case):
    *how, message = WRONG[case]
    with pytest.raises(hfp.PackingError, match=message):
        logged(stock_of(tmp_path, *how))


@pytest.mark.parametrize("kept", [True, False])
def test_rows_of_trees_are_no_rows_of_a_stock_trainer(tmp_path, kept):
    """Whether the trainer keeps the columns that no argument of the model's forward has, or not."""
    rows = hfp.pack(labeled(12, samples=3), hfp.BestFit(128), share_prefixes=2)
    stock = trainer_of(tmp_path, model=patched(trees=True), data=rows, remove_unused_columns=not kept)
    stock.data_collator = FLAT
    with pytest.raises(ValueError, match="did not return a loss" if kept else "No columns in the dataset match"):
        stock.train()


def test_the_refusal_comes_again_until_the_rows_are_right(tmp_path):
    stock = trainer(tmp_path, packed().select_columns(COLUMNS), collator=FLAT)
    for _ in range(2):
        with pytest.raises(hfp.PackingError, match=LOST):
            stock.train()
    stock.train_dataset = packed()
    assert logged(stock)[-1] == pytest.approx(loss_alone(), rel=1e-6)


def test_evaluation_of_rows_without_borders_is_refused(tmp_path):
    args, model = arguments(tmp_path, per_device_eval_batch_size=24), patched("Llama", torch.float64)
    right = Trainer(model, args, eval_dataset=packed(), data_collator=FLAT).evaluate()["eval_loss"]
    assert right == pytest.approx(loss_alone(), rel=1e-6)
    lost = packed().select_columns(COLUMNS)
    for collator in (FLAT, DataCollatorWithFlattening()):
        with pytest.raises(hfp.PackingError, match=LOST):
            Trainer(model, args, eval_dataset=lost, data_collator=collator).evaluate()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loop_without_accelerate(workers):
    model = patched("Llama", torch.float64)
    (batch,) = DataLoader(packed(), batch_size=ROWS, collate_fn=FLAT, num_workers=workers)
    assert model(**batch).loss.item() == pytest.approx(loss_alone(), rel=1e-6)
    (batch,) = DataLoader(documents(), batch_size=24, collate_fn=FLAT, num_workers=workers)
    assert model(**batch).loss.item() == pytest.approx(loss_alone(), rel=1e-6)


def test_labels_that_a_collator_makes_itself():
    """A document's first token is not predicted from the document before."""
    model, rows = patched("Llama", torch.float64), [{name: row[name] for name in ROW} for row in packed()]
    batches = [DataCollatorForLanguageModeling(tokenizer(), mlm=False)([row]) for row in rows]
    predicted = [batch["position_ids"].count_nonzero() for batch in batches]
    losses = [model(**batch).loss * number for batch, number in zip(batches, predicted, strict=True)]
    assert all((batch["labels"] == batch["input_ids"]).all() for batch in batches)
    assert float(sum(losses).detach() / sum(predicted)) == pytest.approx(loss_alone(), rel=1e-6)


def test_a_loop_that_finds_the_borders_itself():
    """The collator joins rows without borders, and the loop adds them before the model gets the batch."""
    model, dataset = patched("Llama", torch.float64), packed()
    loader = Accelerator(cpu=True).prepare(
        DataLoader(dataset.select_columns("input_ids"), batch_size=ROWS, collate_fn=DataCollatorWithFlattening())
    )
    (batch,) = loader
    batch["position_ids"] = torch.tensor([[position for row in dataset["position_ids"] for position in row]])
    for _ in loader:
        assert model(**batch).loss.item() == pytest.approx(loss_alone(), rel=1e-6)


def test_attach_and_the_rest_of_the_package_refuse_rows_without_borders(tmp_path):
    lost = packed().select_columns(COLUMNS)
    model = patched("Llama", torch.float64)
    stream = packed_stream(streams=2).select_columns(COLUMNS)
    for call in (
        lambda: hfp.attach(trainer(tmp_path, lost), hfp.TokenBudget(64)),
        lambda: hfp.attach(trainer(tmp_path, lost.with_transform(lambda rows: rows)), hfp.TokenBudget(64)),
        lambda: hfp.attach(trainer(tmp_path, stream), hfp.TokenBudget(64)),
        lambda: hfp.prepare_dataloader(Accelerator(cpu=True), lost, hfp.TokenBudget(64), model=model),
        lambda: hfp.pack(lost, hfp.BestFit(64)),
        lambda: hfp.pack(stream, hfp.BestFit(64)),
        lambda: hfp.score(model, lost, max_tokens=64),
    ):
        with pytest.raises(hfp.PackingError, match=LOST):
            call()
    with pytest.raises(hfp.PackingError, match="column 'seq_lengths' says that row 0 is packed"):
        hfp.score(model, packed(), max_tokens=64)


def test_rows_that_are_documents_again_can_be_used(tmp_path):
    unpacked = {"input_ids": DOCUMENTS}
    dataset = packed().map(lambda _: unpacked, batched=True, remove_columns=packed().column_names)
    with pytest.raises(hfp.PackingError, match="set dataset.info.description = ''"):
        logged(trainer(tmp_path, dataset, collator=FLAT))
    dataset.info.description = ""
    (loss,) = logged(trainer(tmp_path, dataset, collator=FLAT))
    assert loss == pytest.approx(loss_alone(), rel=1e-6)


LEARNING_RATE = 2e-3
STEPS = 3
PER_STEP = 2
CLOSE = 1e-6
"""Share of a loss: models have float64, but Trainer adds up losses in float32, whose rounding is 6e-8."""


@pytest.fixture
def rows():
    return hfp.pack(labeled(60), hfp.BestFit(48))


def trainer_on(folder, kind, model, rows, **changes):
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": PER_STEP, "learning_rate": LEARNING_RATE}
    return trainer_of(folder, kind, model, rows, train_sampling_strategy="sequential", **sizes | changes)


def llama():
    return build("Llama", torch.float64)


def jamba():
    model = tiny_model("jamba", "causal", torch.float64, router_aux_loss_coef=0.0)
    model.set_experts_implementation("eager")  # the grouped one has no float64
    return model


def bert():
    return tiny_model("bert", "masked", torch.float64)


def segments_of(row):
    ends = np.cumsum(row["seq_lengths"])[:-1]
    return list(zip(np.split(np.array(row["input_ids"]), ends), np.split(np.array(row["labels"]), ends), strict=True))


def unpacked_losses(model, packed, shift=1):
    """The same documents, each in a row of its own, in a plain loop with the trainers' defaults and a stock model. The
    shift is 1 where a token predicts the next, 0 where it predicts what it hides."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        rows = [packed[row] for row in range(step * PER_STEP, (step + 1) * PER_STEP)]
        segments = [segment for row in rows for segment in segments_of(row)]
        predicted = sum(int((labels[shift:] != -100).sum()) for _, labels in segments)
        total = 0.0
        for ids, labels in segments:
            logits = model(torch.tensor(ids)[None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                logits[: len(ids) - shift], torch.tensor(labels[shift:]), ignore_index=-100, reduction="sum"
            )
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        (total / predicted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach() / predicted))
    return losses


FAST = [(llama, "varlen", False), (bert, "varlen", True)]


@pytest.mark.parametrize(
    ("make", "route", "position_ids"),
    fast_only([(llama, "varlen", True), *FAST, (jamba, "varlen + segments", True)], *FAST),
)
def test_trainer(tmp_path, make, route, position_ids):
    rows, shift = (labeled(60).map(hidden), 0) if make is bert else (labeled(60), 1)
    packed = hfp.pack(rows, hfp.BestFit(48), position_ids=position_ids)
    expected = unpacked_losses(make(), packed, shift)
    model = hfp.patch_model(make())
    assert hfp.check_isolation(model).route.name == route
    trainer = trainer_on(tmp_path, Trainer, model, packed, remove_unused_columns=position_ids)
    trainer.data_collator = hfp.PackingCollator()
    assert logged(trainer) == pytest.approx(expected, rel=CLOSE)
    assert len(set(expected)) == STEPS
    assert max(map(len, packed["seq_lengths"])) > 1


@pytest.mark.parametrize(
    ("make", "checkpointing"), fast_only([(llama, True), (jamba, False), (jamba, True)], (llama, True))
)
def test_sft_trainer(rows, tmp_path, make, checkpointing):
    expected = unpacked_losses(make(), rows)
    changes = {"padding_free": True, "gradient_checkpointing": checkpointing}
    trainer = trainer_on(tmp_path, SFTTrainer, hfp.patch_model(make()), rows, **changes)
    assert logged(trainer) == pytest.approx(expected, rel=CLOSE)


def test_that_losses_would_show_a_leak(rows, tmp_path):
    expected = unpacked_losses(llama(), rows)

    def leaky(rows):
        batch = hfp.PackingCollator()(rows)
        mask = torch.ones_like(batch["input_ids"])
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "attention_mask": mask}

    trainer = trainer_on(tmp_path, Trainer, llama(), rows)
    trainer.data_collator = leaky
    assert abs(logged(trainer)[0] - expected[0]) > 1e-3
