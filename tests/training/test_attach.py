"""attach on one process: what it changes, and what it leaves alone."""

import copy
from dataclasses import dataclass
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from patched_models import patched_tiny
from tiers import fast_only
from tiny_models import build
from trainers import arguments, attached, documents, logged, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.sampling.batching import Batching, EpochPlan, keep_rows
from hf_packing.sampling.token_budget import linear_cost_of
from hf_packing.training.attach import PackedTrainer
from tools.tiny_model import tiny_model


def test_what_is_reported(tmp_path):
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    summary = hfp.attach(trainer, hfp.TokenBudget(64))
    lengths = [len(row) for row in documents(45)["input_ids"]]
    assert (summary.documents, summary.tokens) == (45, sum(lengths))
    assert summary.optimizer_steps == -(-summary.num_micro_batches // 2)
    assert summary.documents_per_step == pytest.approx(45 / summary.optimizer_steps)
    assert summary.largest_micro_batch <= 64
    assert summary.unpacked_documents_per_step == 8
    assert "match_documents_per_step=8 keeps that schedule" in str(summary)
    trainer.train()
    assert len(trainer.get_train_dataloader()) == summary.num_micro_batches


def test_the_unpacked_schedule(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=-1, num_train_epochs=2)
    summary = hfp.attach(trainer, hfp.TokenBudget(500), match_documents_per_step=9)
    assert summary.optimizer_steps == 5
    trainer.train()
    assert trainer.state.global_step == 10


MyTrainer = type("MyTrainer", (SFTTrainer,), {})


@pytest.mark.parametrize("kind", fast_only([Trainer, SFTTrainer, MyTrainer], Trainer, MyTrainer))
def test_trainers_stay_what_they_are(tmp_path, kind):
    trainer = attached(tmp_path, kind=kind, model=build("Llama", num_hidden_layers=1), bf16=kind is Trainer)
    order = [*type(trainer).__mro__]
    assert order.index(PackedTrainer) < order.index(kind)
    assert type(copy.deepcopy(trainer)) is type(trainer)
    assert hfp.check_isolation(trainer.model).isolated
    assert len(logged(trainer)) == 2


@pytest.mark.parametrize(("kind", "loss"), [(Trainer, "sequence"), (SFTTrainer, "token")])
def test_nothing_to_train_on_is_zero(tmp_path, kind, loss):
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100] * 3, [-100] * 2]})
    trainer = attached(tmp_path, hfp.TokenBudget(8), {"loss": loss}, kind=kind, data=data)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    assert logged(trainer) == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_bucket_batches(tmp_path):
    packed = hfp.pack(documents(45), hfp.Bucket((16, 32, 64)))
    trainer = trainer_of(tmp_path, data=packed)
    summary = hfp.attach(trainer, hfp.BucketBatches(64))
    assert summary.tokens == sum(len(row) for row in packed["input_ids"])
    assert len(logged(trainer)) == 2


def test_asking_a_trainer_for_its_loss_leaves_no_trace(tmp_path):
    class Own(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    trainer = trainer_of(tmp_path, Own)
    state = torch.get_rng_state()
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert torch.equal(torch.get_rng_state(), state)
    assert not trainer._metrics["train"]
    assert not trainer._total_train_tokens


def test_training_in_evaluation_mode(tmp_path):
    """Without dropout, say: it is training all the same."""

    class InEvaluationMode(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.eval()
            model.train = lambda *_: model
            return super().training_step(model, inputs, num_items_in_batch)

    changes = {"gradient_accumulation_steps": 2}
    found = [logged(attached(tmp_path, kind=kind, **changes)) for kind in (Trainer, InEvaluationMode)]
    assert found[0] == found[1]


def test_trainers_that_cannot_be_subclassed_stay_as_they_are(tmp_path):
    class Final(Trainer):
        def __init_subclass__(cls, *, allowed):
            pass

    trainer = trainer_of(tmp_path, Final, model=build("Llama"))
    before = vars(trainer).copy()
    with pytest.raises(TypeError, match="allowed"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert vars(trainer) == before
    with pytest.raises(hfp.PackingError, match="is not"):
        hfp.unpatch_model(trainer.model)


def masked_documents():
    """Of a masked language model, with two token types, and labels also at first tokens."""
    rng = np.random.default_rng(0)
    rows = []
    for ids in documents(12)["input_ids"]:
        hidden = rng.random(len(ids)) < 0.3
        hidden[0] = len(rows) % 2
        hidden[-1] |= not hidden.any()
        rows.append(
            {
                "input_ids": np.where(hidden, 3, ids).tolist(),
                "labels": np.where(hidden, ids, -100).tolist(),
                "token_type_ids": (np.arange(len(ids)) > len(ids) // 2).astype(int).tolist(),
            }
        )
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("architecture", fast_only(["bert", "roberta", "electra", "deberta-v2"], "bert"))
def test_token_types_and_first_labels_of_masked_models(tmp_path, architecture):
    model, data = tiny_model(architecture, "masked"), masked_documents()
    types = {} if getattr(model.config, "type_vocab_size", 0) < 2 else {"token_type_ids"}
    total = tokens = 0.0
    for row in data:
        names = ("input_ids", "labels", *types)
        with torch.no_grad():
            loss = model(**{name: torch.tensor([row[name]]) for name in names}).loss
        trained = sum(label != -100 for label in row["labels"])
        total, tokens = total + loss.item() * trained, tokens + trained
    proven = patched_tiny(architecture, "masked")
    step = {"max_steps": 1, "gradient_accumulation_steps": 2}
    how = {"match_documents_per_step": 12}
    trainer = attached(tmp_path, hfp.TokenBudget(2000), how, model=proven, data=data, **step)
    assert logged(trainer)[0] == pytest.approx(total / tokens, rel=2e-5)


LOGGED = ("packing_efficiency", "documents_per_step", "tokens_per_step")
UTILIZATION = ("token_utilization", "attention_utilization")
"""What is 1 by nature in a single process, and not logged."""


def test_what_is_logged_while_training(tmp_path):
    steps = hfp.attach(trainer_of(tmp_path, data=documents(20)), hfp.TokenBudget(64)).optimizer_steps
    trainer = trainer_of(tmp_path, data=documents(20), max_steps=2 * steps, logging_steps=steps)
    summary = hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.train()
    first, second, last = trainer.state.log_history
    for entry in (first, second):
        assert entry["documents_per_step"] == pytest.approx(summary.documents_per_step)
        assert entry["tokens_per_step"] == pytest.approx(summary.tokens_per_step)
        assert entry["packing_efficiency"] == pytest.approx(summary.tokens / (64 * summary.num_micro_batches))
        assert not set(UTILIZATION) & set(entry)
    assert not {*LOGGED, *UTILIZATION} & set(last)
    assert not {*LOGGED, *UTILIZATION} & set(trainer.evaluate(documents(9)))


@dataclass(frozen=True)
class OneByOne(Batching):
    """A batching of the user's own: every row is a micro-batch."""

    limit: int | None = None

    most_tokens = property(lambda self: self.limit)

    def fit(self, sizes):
        return keep_rows(sizes, sizes.tokens > 0)

    def plan_fitted(self, rows, epoch):
        number = len(rows.kept) // epoch.world_size * epoch.world_size
        return EpochPlan(
            epoch.world_size,
            rows=rows.kept[:number],
            is_copy=np.zeros(number, dtype=bool),
            offsets=np.arange(number + 1),
            left_out=rows.kept[number:],
        )


@pytest.mark.parametrize("limit", [None, 64])
def test_a_batching_of_the_users_own(tmp_path, limit):
    trainer = trainer_of(tmp_path, max_steps=5)
    summary = hfp.attach(trainer, OneByOne(limit))
    assert summary.num_micro_batches == 45
    trainer.train()
    lengths = [len(tokens) for tokens in documents(45)["input_ids"][:5]]
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["tokens_per_step"] for line in logs] == lengths
    assert [line.get("packing_efficiency") for line in logs] == [limit and length / limit for length in lengths]
    with pytest.raises(hfp.PackingError, match="^tokens: "):
        hfp.attach(trainer_of(tmp_path), OneByOne(), tokens=99, max_segments=9)


def test_a_model_that_is_made_when_training_begins(tmp_path):
    """Trainer builds a new one in train(), which has to be patched, too."""
    made = partial(build, "Llama", num_hidden_layers=1)
    trainer = Trainer(model_init=made, args=arguments(tmp_path), train_dataset=documents(45))
    hfp.attach(trainer, hfp.TokenBudget(64))
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert hfp.check_isolation(trainer.model).isolated


def test_linear_cost_is_that_of_the_model(tmp_path):
    per_layer = (2 * 64 * (64 + 32) + 3 * 64 * 96) / (2 * 64)
    one_of_two_layers = build("Gemma2").config
    assert linear_cost_of(one_of_two_layers) == pytest.approx(2 * per_layer)
    for given, expected in ((None, per_layer), (5, 5)):
        trainer = attached(tmp_path, hfp.TokenBudget(64, linear_cost=given))
        assert trainer.attached.batching.linear_cost == pytest.approx(expected)
