"""Trainers, arguments and data that attach refuses, and that are as they were afterwards."""

from types import SimpleNamespace

import datasets
import pytest
import trl
from patched_models import patched
from tiny_models import build, with_loss_times
from trainers import trainer_of
from training_process import documents, tokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    default_data_collator,
)
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.errors import PackingError

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed


def test_another_collator_after_attach(tmp_path):
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.data_collator = lambda rows: rows[0]
    with pytest.raises(PackingError, match="data_collator: expected the collator set by attach, got function"):
        trainer.train()


def test_attached_twice(tmp_path):
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(PackingError, match="got an attached trainer"):
        hfp.attach(trainer, hfp.TokenBudget(64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices: expected True, since otherwise"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: expected False"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: expected 'random'"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: expected None, since its noise becomes weaker"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches: expected False, got True"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches: expected False, got True"),
    ],
)
def test_arguments_that_contradict(tmp_path, changes, message):
    trainer = trainer_of(tmp_path, **changes)
    before = vars(trainer).copy()
    with pytest.raises(PackingError, match=message):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert type(trainer) is Trainer
    assert vars(trainer) == before


def test_evaluation_that_generates(tmp_path):
    """Trainer would generate from packed rows, after the first epoch."""
    args = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True)
    trainer = Seq2SeqTrainer(patched(), args, train_dataset=documents(45), processing_class=tokenizer())
    message = "predict_with_generate: expected False, since evaluation batches are packed"
    with pytest.raises(PackingError, match=message):
        hfp.attach(trainer, hfp.TokenBudget(64))
    args.predict_with_generate = False
    hfp.attach(trainer, hfp.TokenBudget(64))
    args.predict_with_generate = True
    with pytest.raises(PackingError, match=message):
        trainer.evaluate(documents(4))


def test_a_model_that_is_refused_leaves_the_trainer_alone(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise hfp.ModelNotSupportedError("it leaks")

    monkeypatch.setattr("hf_packing.attention.patch.patch_model", refuse)
    trainer = trainer_of(tmp_path, model=build("Llama"))
    before = vars(trainer).copy()
    with pytest.raises(hfp.ModelNotSupportedError, match="it leaks"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert type(trainer) is Trainer
    assert vars(trainer) == before


def test_a_model_that_leaks_in_mixed_precision(tmp_path, monkeypatch):
    report = SimpleNamespace(isolated=False, reason="it does")
    monkeypatch.setattr("hf_packing.attention.patch.check_isolation", lambda _: report)
    trainer = trainer_of(tmp_path, model=build("Llama"), bf16=True)
    with pytest.raises(hfp.ModelNotSupportedError, match="in bf16 mixed precision: it does"):
        hfp.attach(trainer, hfp.TokenBudget(64), prove="model")
    with pytest.raises(PackingError, match="is not"):
        hfp.unpatch_model(trainer.model)


def test_losses_that_contradict(tmp_path):
    trainer = trainer_of(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(PackingError, match="label_smoothing_factor: expected 0 with loss='sequence', got 0.1"):
        hfp.attach(trainer, hfp.TokenBudget(64), loss="sequence")


def test_a_loss_by_document_of_a_trainer_that_computes_no_cross_entropy(tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, **_):
            labels = inputs.pop("labels")[0, 1:, None]
            return -model(**inputs).logits[0, :-1].log_softmax(-1).gather(1, labels.clamp(min=0)).mean()

    trainer = trainer_of(tmp_path, Own)
    hfp.attach(trainer, hfp.TokenBudget(64), loss="sequence")
    with pytest.raises(PackingError, match="computed from one F.cross_entropy of its logits .* computes 0"):
        trainer.train()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimpleNamespace(mlm=True), "does not mask tokens, got SimpleNamespace with mlm=True"),
        (
            lambda: MaskingCollator(),
            r"such as default_data_collator, .*got MaskingCollator\. attach would replace this collator",
        ),
        (lambda: lambda rows: rows, r"got <lambda>\. attach would replace this collator"),
    ],
)
def test_collators_of_the_users(tmp_path, make, message):
    trainer = trainer_of(tmp_path)
    trainer.data_collator = make()
    with pytest.raises(PackingError, match=message):
        hfp.attach(trainer, hfp.TokenBudget(64))


class MaskingCollator(hfp.PackingCollator):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: default_data_collator,
        hfp.PackingCollator,
        lambda: DataCollatorWithPadding(tokenizer()),
        DataCollatorWithFlattening,
        lambda: DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    ],
)
def test_collators_whose_work_is_done(tmp_path, make):
    trainer = trainer_of(tmp_path)
    trainer.data_collator = make()
    assert hfp.attach(trainer, hfp.TokenBudget(64)).documents == 45


def test_batches_that_were_set_on_the_trainer(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.get_train_dataloader = lambda: documents(45)
    with pytest.raises(PackingError, match="get_train_dataloader: expected the method of Trainer, got <function"):
        hfp.attach(trainer, hfp.TokenBudget(64))


def test_a_loss_that_is_set_after_attaching(tmp_path):
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.compute_loss_func = lambda *_, **__: 0
    with pytest.raises(PackingError, match="compute_loss_func: expected None, the value when attach"):
        trainer.train()


def test_a_model_whose_loss_is_refused_is_as_it_was(tmp_path):
    trainer = trainer_of(tmp_path, model=with_loss_times(None))
    with pytest.raises(PackingError, match="expected a model that returns a loss of a packed batch, but Other returns"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(PackingError, match="is not"):
        hfp.unpatch_model(trainer.model)


def test_context_parallelism(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.accelerator.state.parallelism_config = type("Config", (), {"tp_size": 1, "cp_size": 2, "sp_size": 1})()
    try:
        with pytest.raises(
            PackingError,
            match="cp_size: expected 1, got 2; documents are not isolated in rows that are split across processes",
        ):
            hfp.attach(trainer, hfp.TokenBudget(64))
    finally:
        trainer.accelerator.state.parallelism_config = None


@pytest.mark.parametrize(
    "method",
    ["_get_train_sampler", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "get_batch_samples"],
)
def test_trainers_with_their_own_batches(tmp_path, method):
    own = type("GroupTrainer", (Trainer,), {method: lambda *_: None})
    with pytest.raises(PackingError, match=f"got GroupTrainer, which overrides {method}"):
        hfp.attach(trainer_of(tmp_path, own), hfp.TokenBudget(64))


@pytest.mark.parametrize(("name", "value"), [("packing", True), ("eval_packing", True)])
def test_rows_that_trl_has_packed(tmp_path, name, value):
    options = {name: value, "max_length": 48, "packing_strategy": "wrapped"}
    trainer = trainer_of(tmp_path, SFTTrainer, **options)
    with pytest.raises(PackingError, match=f"{name}: expected False, since attach packs rows itself"):
        hfp.attach(trainer, hfp.TokenBudget(64))


def test_trainers_of_trl_that_are_more_than_sft_trainer(tmp_path):
    more = type("DistillingTrainer", (SFTTrainer,), {"__module__": "trl.experimental"})
    with pytest.raises(PackingError, match=r"DistillingTrainer, which makes its own batches .*attach\(trainer, None\)"):
        hfp.attach(trainer_of(tmp_path, more), hfp.TokenBudget(64))
    mine = type("MyTrainer", (SFTTrainer,), {})
    hfp.attach(trainer_of(tmp_path, mine), hfp.TokenBudget(64), loss="sequence")


def test_an_evaluation_that_cannot_be_planned(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.eval_dataset = {"web": documents(5), "code": documents(5).to_iterable_dataset()}
    message = r"eval_dataset\['code'\]: expected a map-style dataset, .*got IterableDataset\. .*stream\.take\(1000\)"
    with pytest.raises(PackingError, match=message):
        hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.eval_dataset = datasets.Dataset.from_list(list(trainer.eval_dataset["code"].take(1000)))
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(PackingError, match="eval_dataset: expected a map-style dataset"):
        trainer.evaluate(documents(5).to_iterable_dataset())


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer", "KTOTrainer", "RewardTrainer", "DPOTrainer"])
def test_other_trainers_of_trl(name):
    kind = getattr(trl, name)
    with pytest.raises(PackingError, match=f"trainer: expected a Trainer or an SFTTrainer.*{name}"):
        hfp.attach(kind.__new__(kind), hfp.TokenBudget(64))


@pytest.mark.parametrize(
    ("trainer", "batching", "loss", "message"),
    [
        (None, hfp.TokenBudget(64), "token", "trainer: expected a Trainer or an SFTTrainer, got NoneType"),
        ("given", 64, "token", "batching: expected TokenBudget.* got 64"),
        ("given", hfp.TokenBudget, "token", "pass an instance of the class, such as TokenBudget"),
        ("given", hfp.TokenBudget(64), "mean", "loss: expected one of token, sequence, got 'mean'"),
        ("given", hfp.BucketBatches(64), "token", "dataset: expected a column 'bucket'"),
        ("given", hfp.TokenBudget(8), "token", "max_tokens: row 0 has"),
    ],
)
def test_bad_arguments(tmp_path, trainer, batching, loss, message):
    trainer = trainer_of(tmp_path) if trainer else None
    with pytest.raises(PackingError, match=message):
        hfp.attach(trainer, batching, loss=loss)
    assert trainer is None or type(trainer) is Trainer


def test_documents_per_step_of_buckets(tmp_path):
    with pytest.raises(PackingError, match="match_documents_per_step: expected None with BucketBatches"):
        hfp.attach(trainer_of(tmp_path), hfp.BucketBatches(64), match_documents_per_step=4)
