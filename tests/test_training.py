"""Packed rows through the stock trainers: the losses are those of the unpacked documents."""

import numpy as np
import pytest
import torch
from tiers import fast_only
from tiny_models import build
from trainers import documents, logged, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from tools.tiny_model import tiny_model

LEARNING_RATE = 2e-3
STEPS = 3
ROWS_PER_STEP = 2
CLOSE = 1e-6
"""Share of a loss: models have float64, but Trainer adds up losses in float32, whose rounding is 6e-8."""


@pytest.fixture
def packed():
    return hfp.pack(documents(60), hfp.BestFit(48))


def trainer_on(folder, kind, model, rows, **changes):
    """A trainer on rows as they are, in their order."""
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": ROWS_PER_STEP, "learning_rate": LEARNING_RATE}
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


def masked(rows, rng):
    def hide_some(row):
        hidden = rng.random(len(row["input_ids"])) < 0.3
        hidden[0] = False  # packed rows have no label there
        ids = np.array(row["input_ids"])
        return {"input_ids": np.where(hidden, 4, ids), "labels": np.where(hidden, ids, -100)}

    return rows.map(hide_some)


FAST = [(llama, "varlen", False), (bert, "varlen", True)]


@pytest.mark.parametrize(
    ("make", "route", "position_ids"),
    fast_only([(llama, "varlen", True), *FAST, (jamba, "varlen + segments", True)], *FAST),
)
def test_trainer(rng, tmp_path, make, route, position_ids):
    rows, shift = (masked(documents(60), rng), 0) if make is bert else (documents(60), 1)
    packed = hfp.pack(rows, hfp.BestFit(48), position_ids=position_ids)
    expected = unpacked_losses(make(), packed, shift)
    model = hfp.patch_model(make())
    assert hfp.check_isolation(model).route.name == route
    trainer = trainer_on(tmp_path, Trainer, model, packed, remove_unused_columns=position_ids)
    trainer.data_collator = hfp.PackingCollator()
    assert logged(trainer) == pytest.approx(expected, rel=CLOSE)
    assert len(set(expected)) == STEPS
    assert max(map(len, packed["seq_lengths"])) > 1


@pytest.mark.filterwarnings("default::FutureWarning")  # TRL still uses names that transformers has renamed
@pytest.mark.parametrize(
    ("make", "checkpointing"), fast_only([(llama, True), (jamba, False), (jamba, True)], (llama, True))
)
def test_sft_trainer(packed, tmp_path, make, checkpointing):
    expected = unpacked_losses(make(), packed)
    changes = {"padding_free": True, "gradient_checkpointing": checkpointing}
    trainer = trainer_on(tmp_path, SFTTrainer, hfp.patch_model(make()), packed, **changes)
    assert logged(trainer) == pytest.approx(expected, rel=CLOSE)


def test_that_losses_would_show_a_leak(packed, tmp_path):
    """The same training with a stock model and an attention mask of ones gives other losses."""
    expected = unpacked_losses(llama(), packed)

    def leaky(rows):
        batch = hfp.PackingCollator()(rows)
        mask = torch.ones_like(batch["input_ids"])
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "attention_mask": mask}

    trainer = trainer_on(tmp_path, Trainer, llama(), packed)
    trainer.data_collator = leaky
    assert abs(logged(trainer)[0] - expected[0]) > 1e-3
