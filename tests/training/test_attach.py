"""attach on one process: what it changes, and what it leaves alone."""

import datasets
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import build, with_loss_times
from trainers import arguments, logged, trainer_of
from training_process import documents
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention.survey.tiny import tiny_model
from hf_packing.errors import PackingError
from hf_packing.training.model_cost import linear_cost_of

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed


def test_what_is_reported(tmp_path):
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    summary = hfp.attach(trainer, hfp.TokenBudget(64))
    lengths = [len(row) for row in documents(45)["input_ids"]]
    assert (summary.documents, summary.tokens) == (45, sum(lengths))
    assert summary.optimiser_steps == -(-summary.micro_batches // 2)
    assert summary.documents_per_step == pytest.approx(45 / summary.optimiser_steps)
    assert summary.largest_micro_batch <= 64
    assert summary.unpacked_documents_per_step == 8
    assert "match_documents_per_step=8 keeps that schedule" in str(summary)
    trainer.train()
    assert len(trainer.get_train_dataloader()) == summary.micro_batches


def test_the_unpacked_schedule(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=-1, num_train_epochs=2)
    summary = hfp.attach(trainer, hfp.TokenBudget(500), match_documents_per_step=9)
    assert summary.optimiser_steps == 5
    trainer.train()
    assert trainer.state.global_step == 10


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_trainers_stay_what_they_are(tmp_path, kind):
    trainer = trainer_of(tmp_path, kind)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert isinstance(trainer, kind)
    assert hfp.check_isolation(trainer.model).isolated
    assert len(logged(trainer)) == 2


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_trainer_and_sft_trainer_agree(tmp_path, loss):
    """TRL makes the loss from its fused head, Trainer from logits."""
    found = []
    for kind in (Trainer, SFTTrainer):
        trainer = trainer_of(tmp_path, kind, learning_rate=1e-3, gradient_accumulation_steps=2)
        hfp.attach(trainer, hfp.TokenBudget(64), loss=loss)
        found.append(logged(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][0] != found[0][1]


def test_losses_differ(tmp_path):
    found = []
    for loss in ("token", "sequence"):
        trainer = trainer_of(tmp_path)
        hfp.attach(trainer, hfp.TokenBudget(64), loss=loss)
        found.append(logged(trainer)[0])
    assert abs(found[0] - found[1]) > 1e-3


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_nothing_to_train_on_is_zero(tmp_path, loss, kind):
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100] * 3, [-100] * 2]})
    trainer = trainer_of(tmp_path, kind, data=data)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    hfp.attach(trainer, hfp.TokenBudget(8), loss=loss)
    assert logged(trainer) == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_a_masked_language_model(tmp_path):
    """Bert takes no num_items_in_batch; two accumulated batches give the loss of one."""
    found = []
    for accumulation, budget in ((1, 4000), (3, 400)):
        trainer = trainer_of(
            tmp_path, model=tiny_model("bert", "masked"), gradient_accumulation_steps=accumulation, max_steps=1
        )
        hfp.attach(trainer, hfp.TokenBudget(budget), match_documents_per_step=45)
        found.append(logged(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_mixture_of_experts_balances_its_routers(tmp_path):
    model = build("Mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    trainer = trainer_of(tmp_path, model=model, gradient_accumulation_steps=2, max_steps=1)
    hfp.attach(trainer, hfp.TokenBudget(64))
    batches, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, torch.device("cpu"))
    with torch.no_grad():
        parts = [model(**batch, num_items_in_batch=items) for batch in batches]
    expected = sum(part.loss - part.aux_loss * 0.5 / 2 for part in parts)
    assert logged(trainer) == [pytest.approx(float(expected), rel=1e-5)]


def test_bucket_batches(tmp_path):
    packed = hfp.pack(documents(45), hfp.Bucket((16, 32, 64)))
    trainer = trainer_of(tmp_path, data=packed)
    summary = hfp.attach(trainer, hfp.BucketBatches(64))
    assert summary.tokens == sum(len(row) for row in packed["input_ids"])
    assert len(logged(trainer)) == 2


def test_a_trainers_own_loss_is_told_what_to_divide_by(tmp_path):
    seen = []

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.append(int(num_items_in_batch))
            loss = model(**{**inputs, "num_items_in_batch": num_items_in_batch}).loss
            return (loss, None) if return_outputs else loss

    trainer = trainer_of(tmp_path, Own, gradient_accumulation_steps=2)
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.train()
    assert len(seen) == 4
    assert seen[0] == seen[1] != seen[2]


def test_mixed_precision(tmp_path):
    trainer = trainer_of(tmp_path, bf16=True)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert len(logged(trainer)) == 2


def test_a_model_that_is_made_when_training_begins(tmp_path):
    """Trainer builds a new one in train(), which has to be patched, too."""
    trainer = Trainer(model_init=lambda: build("Llama"), args=arguments(tmp_path), train_dataset=documents(45))
    hfp.attach(trainer, hfp.TokenBudget(64))
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert hfp.check_isolation(trainer.model).isolated


def test_lora(tmp_path):
    model = get_peft_model(build("Llama"), LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    trainer = trainer_of(tmp_path, model=model)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert len(logged(trainer)) == 2


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_of_workers_are_the_same(tmp_path, persistent):
    found = []
    for workers in (0, 2):
        options = {"dataloader_persistent_workers": persistent and workers > 0, "num_train_epochs": 2, "max_steps": -1}
        trainer = trainer_of(tmp_path, dataloader_num_workers=workers, **options)
        hfp.attach(trainer, hfp.TokenBudget(64))
        found.append(logged(trainer))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("default::UserWarning")  # dynamo looks at the gradients of tensors that have none
def test_compiled(tmp_path):
    found = []
    for compiled in (False, True):
        trainer = trainer_of(tmp_path, torch_compile=compiled, torch_compile_backend="eager" if compiled else None)
        hfp.attach(trainer, hfp.TokenBudget(64))
        found.append(logged(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_loss_that_is_another_stays_the_models(tmp_path):
    model = with_loss_times(2.0)
    trainer = trainer_of(tmp_path, model=model)
    assert trainer.model_accepts_loss_kwargs
    hfp.attach(trainer, hfp.TokenBudget(64))
    usual = trainer_of(tmp_path)
    hfp.attach(usual, hfp.TokenBudget(64))
    assert logged(trainer)[0] == pytest.approx(2 * logged(usual)[0], rel=1e-5)
    with pytest.raises(PackingError, match="loss: expected a model whose own loss is the cross-entropy of its logits"):
        hfp.attach(trainer_of(tmp_path, model=model), hfp.TokenBudget(64), loss="sequence")


def test_linear_cost():
    assert linear_cost_of(build("Llama").config) == pytest.approx((2 * 64 * (64 + 32) + 3 * 64 * 96) / (2 * 64))
    one_of_two_layers = build("Gemma2").config
    assert linear_cost_of(one_of_two_layers) == pytest.approx(2 * (2 * 64 * (64 + 32) + 3 * 64 * 96) / (2 * 64))
    assert linear_cost_of(object()) == 6 * 2048


def test_the_balance_is_that_of_the_model(tmp_path):
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert trainer.planned_batches.batching.linear_cost == linear_cost_of(trainer.model.config)
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64, linear_cost=5))
    assert trainer.planned_batches.batching.linear_cost == 5
