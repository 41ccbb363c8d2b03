"""Packed rows through the stock trainers: the losses are those of the unpacked documents."""

import datasets
import numpy as np
import pytest
import torch
from tiny_models import build
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp
from hf_packing.attention.tiny_model import tiny_model

LEARNING_RATE = 2e-3
STEPS = 3
ROWS_PER_STEP = 2
CLOSE = 1e-6
"""Share of a loss: models have float64, but Trainer adds up losses in float32, whose rounding is 6e-8."""


@pytest.fixture
def documents(rng):
    rows = [rng.integers(3, 99, n).tolist() for n in np.clip(rng.lognormal(2.5, 0.8, 60), 2, 40).astype(int)]
    labels = [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in rows]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})


@pytest.fixture
def packed(documents):
    return hfp.pack(documents, hfp.BestFit(48))


@pytest.fixture
def tokenizer():
    vocabulary = {f"<{i}>": i for i in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<0>", eos_token="<2>")


def options(folder):
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS_PER_STEP,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "learning_rate": LEARNING_RATE,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }


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
    """The same documents, each in a row of its own, in a plain loop with the trainers' defaults.

    Args:
        model: not patched.
        packed: rows.
        shift: 1 where a token predicts the next, 0 where it predicts what it hides.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        rows = [packed[row] for row in range(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP)]
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


def logged_losses(trainer):
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float64}
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def masked(documents, rng):
    def hide_some(row):
        hidden = rng.random(len(row["input_ids"])) < 0.3
        hidden[0] = False  # packed rows have no label there
        ids = np.array(row["input_ids"])
        return {"input_ids": np.where(hidden, 4, ids), "labels": np.where(hidden, ids, -100)}

    return documents.map(hide_some)


@pytest.mark.parametrize(
    ("make", "route", "position_ids"),
    [(llama, "varlen", True), (llama, "varlen", False), (jamba, "varlen + segments", True), (bert, "varlen", True)],
)
def test_trainer(documents, rng, tmp_path, make, route, position_ids):
    rows, shift = (masked(documents, rng), 0) if make is bert else (documents, 1)
    packed = hfp.pack(rows, hfp.BestFit(48), position_ids=position_ids)
    expected = unpacked_losses(make(), packed, shift)
    model = hfp.patch_model(make())
    assert hfp.check_isolation(model).route.name == route
    arguments = TrainingArguments(**options(tmp_path), remove_unused_columns=position_ids)
    trainer = Trainer(model, arguments, train_dataset=packed, data_collator=hfp.PackingCollator())
    assert logged_losses(trainer) == pytest.approx(expected, rel=CLOSE)
    assert len(set(expected)) == STEPS
    assert max(map(len, packed["seq_lengths"])) > 1


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL still uses names that transformers has renamed
def test_sft_trainer(packed, tokenizer, tmp_path):
    expected = unpacked_losses(llama(), packed)
    config = SFTConfig(**options(tmp_path), padding_free=True, max_length=None)
    trainer = SFTTrainer(hfp.patch_model(llama()), config, train_dataset=packed, processing_class=tokenizer)
    assert logged_losses(trainer) == pytest.approx(expected, rel=CLOSE)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_sft_trainer_with_a_model_that_runs_by_segment(packed, tokenizer, tmp_path, gradient_checkpointing):
    expected = unpacked_losses(jamba(), packed)
    config = SFTConfig(
        **options(tmp_path), padding_free=True, max_length=None, gradient_checkpointing=gradient_checkpointing
    )
    trainer = SFTTrainer(hfp.patch_model(jamba()), config, train_dataset=packed, processing_class=tokenizer)
    assert logged_losses(trainer) == pytest.approx(expected, rel=CLOSE)


def test_that_losses_would_show_a_leak(packed, tmp_path):
    """The same training with a stock model and an attention mask of ones gives other losses."""
    expected = unpacked_losses(llama(), packed)

    def leaky(rows):
        batch = hfp.PackingCollator()(rows)
        return {
            "input_ids": batch["input_ids"],
            "labels": batch["labels"],
            "attention_mask": torch.ones_like(batch["input_ids"]),
        }

    trainer = Trainer(llama(), TrainingArguments(**options(tmp_path)), train_dataset=packed, data_collator=leaky)
    assert abs(logged_losses(trainer)[0] - expected[0]) > 1e-3
