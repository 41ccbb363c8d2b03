"""attach on one process: what it changes, what it leaves alone, and what it refuses."""

from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from peft import LoraConfig, get_peft_model
from tiny_models import build
from training_process import documents, tokenizer
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import hf_packing as hfp
from hf_packing.attention.survey.tiny import tiny_model
from hf_packing.errors import PackingError
from hf_packing.training.model_cost import linear_cost_of

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed


def arguments(folder, kind=TrainingArguments, **changes):
    known = {
        "output_dir": str(folder),
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    return kind(**known | ({"max_length": None} if kind is SFTConfig else {}) | changes)


def trainer_of(folder, kind=Trainer, model=None, data=None, **changes):
    config = SFTConfig if issubclass(kind, SFTTrainer) else TrainingArguments
    more = {"processing_class": tokenizer()} if issubclass(kind, SFTTrainer) else {}
    data = documents(45) if data is None else data
    return kind(model or build("Llama"), arguments(folder, config, **changes), train_dataset=data, **more)


def logged(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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


def test_another_collator_after_attach(tmp_path):
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.data_collator = lambda rows: rows[0]
    with pytest.raises(PackingError, match="data_collator: expected the one that attach has set, got function"):
        trainer.train()


def test_attached_twice(tmp_path):
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(PackingError, match="attach was called on it before"):
        hfp.attach(trainer, hfp.TokenBudget(64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices: expected True, since without it"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size: expected False"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: expected 'random'"),
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


def test_a_model_that_is_refused_leaves_the_trainer_alone(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise hfp.ModelNotSupportedError("it leaks")

    monkeypatch.setattr("hf_packing.training.attach.patch_model", refuse)
    trainer = trainer_of(tmp_path)
    before = vars(trainer).copy()
    with pytest.raises(hfp.ModelNotSupportedError, match="it leaks"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert type(trainer) is Trainer
    assert vars(trainer) == before


def test_a_model_that_leaks_in_mixed_precision(tmp_path, monkeypatch):
    report = SimpleNamespace(isolated=False, reason="it does")
    monkeypatch.setattr("hf_packing.training.attach.check_isolation", lambda _: report)
    trainer = trainer_of(tmp_path, bf16=True)
    with pytest.raises(hfp.ModelNotSupportedError, match="in bf16 mixed precision: it does"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(PackingError, match="is not"):
        hfp.unpatch_model(trainer.model)


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
def test_resumed_with_dropout(tmp_path, persistent):
    """Seeds of workers are not drawn from the generator that dropout draws from."""
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    options |= {"dataloader_num_workers": 2 * persistent, "dataloader_persistent_workers": persistent}

    def losses(resume=None, stop=None):
        model = build("Llama")
        model.model.layers[0].mlp.register_forward_hook(
            lambda _, __, out: torch.nn.functional.dropout(out, 0.5, model.training)
        )
        trainer = trainer_of(tmp_path, model=model, **options)
        hfp.attach(trainer, hfp.TokenBudget(64))
        if stop:
            trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    losses(stop=2)
    assert losses(resume=str(tmp_path / "checkpoint-2")) == losses()


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
    model = tiny_model("jetmoe", "causal", output_router_logits=True)
    trainer = trainer_of(tmp_path, model=model)
    assert trainer.model_accepts_loss_kwargs
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert trainer.planned_batches.loss_of_trainer
    assert len(logged(trainer)) == 2
    with pytest.raises(PackingError, match="loss: expected a model whose own loss is the cross-entropy of its logits"):
        hfp.attach(trainer_of(tmp_path, model=model), hfp.TokenBudget(64), loss="sequence")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: expected none, since loss='sequence' makes another"),
        ({"kind": "own"}, "loss: expected 'token', since Own.compute_loss makes its own, got 'sequence'"),
    ],
)
def test_losses_that_contradict(tmp_path, changes, message):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            raise NotImplementedError

    kind = Own if changes.pop("kind", None) else Trainer
    trainer = trainer_of(tmp_path, kind, **changes)
    with pytest.raises(PackingError, match=message):
        hfp.attach(trainer, hfp.TokenBudget(64), loss="sequence")


def test_context_parallelism(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.accelerator.state.parallelism_config = type("Config", (), {"tp_size": 1, "cp_size": 2, "sp_size": 1})()
    try:
        with pytest.raises(PackingError, match="cp_size: expected 1, got 2: rows cut across processes"):
            hfp.attach(trainer, hfp.TokenBudget(64))
    finally:
        trainer.accelerator.state.parallelism_config = None


@pytest.mark.parametrize(
    "method",
    ["_get_train_sampler", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "get_batch_samples"],
)
def test_trainers_with_their_own_batches(tmp_path, method):
    own = type("GroupTrainer", (Trainer,), {method: lambda *_: None})
    with pytest.raises(PackingError, match=f"GroupTrainer.{method} makes its own"):
        hfp.attach(trainer_of(tmp_path, own), hfp.TokenBudget(64))


@pytest.mark.parametrize(("name", "value"), [("packing", True), ("eval_packing", True)])
def test_rows_that_trl_has_packed(tmp_path, name, value):
    options = {name: value, "max_length": 48, "packing_strategy": "wrapped"}
    trainer = trainer_of(tmp_path, SFTTrainer, **options)
    with pytest.raises(PackingError, match=f"{name}: expected False, since rows are packed here"):
        hfp.attach(trainer, hfp.TokenBudget(64))


def test_trainers_of_trl_that_are_more_than_sft_trainer(tmp_path):
    more = type("DistillingTrainer", (SFTTrainer,), {"__module__": "trl.experimental"})
    with pytest.raises(PackingError, match="DistillingTrainer makes batches or losses of its own"):
        hfp.attach(trainer_of(tmp_path, more), hfp.TokenBudget(64))
    mine = type("MyTrainer", (SFTTrainer,), {})
    hfp.attach(trainer_of(tmp_path, mine), hfp.TokenBudget(64), loss="sequence")


def test_an_evaluation_that_cannot_be_planned(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.eval_dataset = documents(5).to_iterable_dataset()
    with pytest.raises(PackingError, match="expected a map-style dataset"):
        hfp.attach(trainer, hfp.TokenBudget(64))


def test_trainers_on_pairs(tmp_path):
    pairs = datasets.Dataset.from_dict({"prompt": ["<3>"], "chosen": ["<4>"], "rejected": ["<5>"]})
    config = arguments(tmp_path, DPOConfig)
    trainer = DPOTrainer(build("Llama"), build("Llama"), config, train_dataset=pairs, processing_class=tokenizer())
    with pytest.raises(PackingError, match="trainer: expected a Trainer or an SFTTrainer.*DPOTrainer"):
        hfp.attach(trainer, hfp.TokenBudget(64))


@pytest.mark.parametrize(
    ("trainer", "batching", "loss", "message"),
    [
        (None, hfp.TokenBudget(64), "token", "trainer: expected a Trainer or an SFTTrainer, got NoneType"),
        ("given", 64, "token", "batching: expected TokenBudget.* got 64"),
        ("given", hfp.TokenBudget, "token", "did you forget its arguments, as in TokenBudget"),
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


def test_a_checkpoint_without_batches(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=1, per_device_train_batch_size=1)
    trainer.train()
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=1, max_steps=4)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(PackingError, match="expected a checkpoint of a trainer with attached batches"):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_without_batches_from_the_next_epoch_on(tmp_path):
    trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=1, per_device_train_batch_size=1)
    trainer.train()
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "ignore_data_skip": True}
    trainer = trainer_of(tmp_path, **options)
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, _, state, control, **__):
        control.should_training_stop = state.global_step == self.step


def test_restored_callbacks(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": True}

    def losses(resume=None, stop=None):
        trainer = trainer_of(tmp_path, max_steps=4, **options)
        hfp.attach(trainer, hfp.TokenBudget(64))
        if stop:
            trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stopped = losses(stop=2)
    resumed = losses(resume=str(tmp_path / "checkpoint-2"))
    assert len(stopped) == 2
    assert resumed == losses()


def test_a_checkpoint_of_another_budget(tmp_path):
    for budget, steps in ((64, 2), (72, 4)):
        trainer = trainer_of(tmp_path, save_strategy="steps", save_steps=1, max_steps=steps)
        hfp.attach(trainer, hfp.TokenBudget(budget))
        if budget == 64:
            trainer.train()
    with pytest.raises(PackingError, match=r"batching: expected .TokenBudget\(.*max_tokens=64.* got .*max_tokens=72"):
        trainer.train(resume_from_checkpoint=True)


def test_evaluation_with_nothing_to_evaluate(tmp_path):
    nothing = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[-100, -100]]})
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(PackingError, match="dataset: expected a label to evaluate on, all are -100"):
        trainer.evaluate(nothing)


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_evaluation_is_the_mean_over_tokens(tmp_path, kind):
    model = build("Llama", torch.float64)
    data = documents(20)
    total, tokens = 0.0, 0
    for ids, labels in zip(data["input_ids"], data["labels"], strict=True):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum").item()
        tokens += int((wanted != -100).sum())
    trainer = trainer_of(tmp_path, kind, model=model, data=data)
    hfp.attach(trainer, hfp.TokenBudget(64))
    found = []
    for rows in (1, 2, 4):
        trainer.args.per_device_eval_batch_size = rows
        found += [trainer.evaluate(data)["eval_loss"], trainer.predict(data).metrics["test_loss"]]
    in_float32 = kind is SFTTrainer  # its fused head makes log-probabilities in float32
    assert found == pytest.approx([total / tokens] * 6, rel=1e-6 if in_float32 else 1e-12)
    assert max(found) - min(found) <= 1e-9 * max(found)


def test_evaluation_of_several_datasets_and_with_metrics(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.eval_dataset = {"few": documents(3), "more": documents(9)}
    trainer.compute_metrics = lambda predicted: {"rows": len(predicted.label_ids)}
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.args.per_device_eval_batch_size = 2
    found = trainer.evaluate()
    assert (found["eval_few_rows"], found["eval_more_rows"]) == (2, 5)
    assert found["eval_few_loss"] == pytest.approx(trainer.evaluate(documents(3))["eval_loss"])


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


def loader_of(**settings):
    return hfp.prepare_dataloader(Accelerator(cpu=True), documents(45), hfp.TokenBudget(64), **settings)


def test_a_models_own_loss_is_right_in_a_loop():
    """model(**batch).loss and compute_loss agree, and their mean over batches is the mean over tokens."""
    model = hfp.patch_model(build("Llama"))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1000)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    own, ours = [], []
    for batch in loader:
        own.append(model(**batch).loss.item() / 1000)
        ours.append(hfp.compute_loss(model, batch).item() / 1000)
    assert own == pytest.approx(ours, rel=1e-5)
    assert sum(ours) == pytest.approx(hfp.evaluation_loss(accelerator, model, documents(45)), rel=1e-5)


def test_a_loop_counts_its_epochs():
    loader = loader_of()
    first = [batch["input_ids"].tolist() for batch in loader]
    assert loader.epoch == 1
    second = [batch["input_ids"].tolist() for batch in loader]
    assert sorted(map(str, first)) != sorted(map(str, second))
    loader.set_epoch(0)
    assert [batch["input_ids"].tolist() for batch in loader] == first
    next(iter(loader))
    assert [batch["input_ids"].tolist() for batch in loader] == second


def test_a_loop_goes_on_from_its_state():
    loader = loader_of()
    expected = [[batch["input_ids"].tolist() for batch in loader] for _ in range(2)]
    for epoch in range(2):
        for steps in range(1, len(loader) + 1):
            before = loader_of()
            before.set_epoch(epoch)
            batches = iter(before)
            for _ in range(steps):
                next(batches)
            after = loader_of()
            after.load_state_dict(before.state_dict())
            if steps == len(loader):
                assert (after.epoch, after.step) == (epoch + 1, 0)
            else:
                assert [batch["input_ids"].tolist() for batch in after] == expected[epoch][steps:]
                assert after.epoch == epoch + 1


def test_no_checkpoint_between_accumulated_batches():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    next(iter(loader))
    with pytest.raises(PackingError, match="step: expected a checkpoint after 2 accumulated batches, got one after 1"):
        loader.state_dict()


def test_iterating_draws_nothing_from_the_generator_of_dropout():
    before = torch.get_rng_state()
    list(loader_of())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "collate_fn", "in_order"])
def test_options_that_the_batching_decides(name):
    with pytest.raises(PackingError, match=f"{name}: expected none, since the batching decides"):
        loader_of(**{name: 1})


def test_arguments_in_another_order():
    with pytest.raises(PackingError, match="accelerator: expected an Accelerator, got Dataset"):
        hfp.prepare_dataloader(documents(3), Accelerator(cpu=True), hfp.TokenBudget(64))


def test_a_state_of_something_else():
    with pytest.raises(PackingError, match="state: expected one that state_dict returned, it has no 'epoch'"):
        loader_of().load_state_dict({})


def test_accumulation_that_changes():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(PackingError, match="gradient_accumulation_steps: expected 2.*got 3; call it after"):
        next(iter(loader))


def test_a_step_begins_with_the_first_batch_after_a_break():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    model = accelerator.prepare(hfp.patch_model(build("Llama")))
    synchronised = []
    for stop in (1, 1000):
        for number, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(hfp.compute_loss(model, batch))
                synchronised.append(accelerator.sync_gradients)
            if number + 1 == stop:
                break
    assert synchronised[:4] == [False, False, False, True]


def test_the_last_gradients_of_an_epoch_are_used():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    try:
        with pytest.raises(PackingError, match="sync_with_dataloader: expected True, got False"):
            hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    finally:
        accelerator.gradient_state._reset_state()


def test_processes_that_do_not_know_of_each_other(monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PackingError, match="expected one that knows of all 2 processes that were launched"):
        hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))


def test_gradients_are_synchronised_at_the_end_of_an_epoch():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader = hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64))
    assert len(loader) % 3
    model = accelerator.prepare(hfp.patch_model(build("Llama")))
    synchronised = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(hfp.compute_loss(model, batch))
            synchronised.append(accelerator.sync_gradients)
    assert [step + 1 for step, done in enumerate(synchronised) if done] == [*range(3, len(loader), 3), len(loader)]


def test_a_batch_without_its_share():
    with pytest.raises(PackingError, match="batch: expected one of prepare_dataloader, got input_ids"):
        hfp.compute_loss(build("Llama"), {"input_ids": torch.tensor([[5, 6]])})


def test_sequence_weights_leave_models_no_labels():
    batch = next(iter(loader_of(loss="sequence")))
    assert "labels" not in batch
    assert float(batch["target_weights"].sum()) == pytest.approx(1.0)
    assert np.isfinite(hfp.compute_loss(build("Llama"), batch).item())


def test_more_ranks_than_rows():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PackingError, match="at least one row for each of 1 ranks, got 0 rows with tokens"):
        hfp.prepare_dataloader(accelerator, datasets.Dataset.from_dict({"input_ids": [[]]}), hfp.TokenBudget(8))
