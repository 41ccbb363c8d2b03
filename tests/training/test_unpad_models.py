"""attach(trainer, None): trainers with batches of their own have the same losses and gradients without the padding."""

import copy

import datasets
import numpy as np
import peft
import pytest
import torch
import trl
from own_batches import COMMON, moved, pairs, policy, step, texts, tokenizer
from tiers import fast_only
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

import hf_packing as hfp
from hf_packing.attention import is_patched, route_of
from hf_packing.attention.tiny_model import tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def dpo(folder, model, **changes):
    config = trl.DPOConfig(str(folder), max_length=None, **COMMON | changes)
    reference = None if hasattr(model, "peft_config") else moved(model)
    return trl.DPOTrainer(model, args=config, train_dataset=pairs(), processing_class=tokenizer(), ref_model=reference)


def reward(folder, model):
    data = pairs().map(
        lambda row: {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}, remove_columns="prompt"
    )
    config = trl.RewardConfig(str(folder), max_length=None, **COMMON)
    return trl.RewardTrainer(model, args=config, train_dataset=data, processing_class=tokenizer())


def kto(folder, model):
    data = texts(6, prompt=9, completion=8)
    data = data.add_column("label", [True, False] * 3)
    config = trl.KTOConfig(str(folder), max_length=None, **COMMON)
    return trl.KTOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer(), ref_model=moved(model))


def odds_ratio(folder, model):
    orpo = pytest.importorskip("trl.experimental.orpo", exc_type=ImportError)
    config = orpo.ORPOConfig(str(folder), max_length=64, **COMMON)
    return orpo.ORPOTrainer(model, args=config, train_dataset=pairs(), processing_class=tokenizer())


def check_step(trainer, names, close=1e-12):
    expected, gradients = step(trainer)
    unpadded = hfp.attach(trainer, None)
    assert list(unpadded.models) == names
    assert all("its tokens run as one packed row" in line for line in str(unpadded).splitlines())
    loss, found = step(trainer)
    assert loss == pytest.approx(expected, rel=1e-6)  # TRL's fused head returns float32
    scale = max(float(each.abs().max()) for each in gradients.values())
    assert scale > 0
    assert max(float((found[name] - each).abs().max()) for name, each in gradients.items()) <= close * scale


LOSSES = (["sigmoid"], ["ipo"], ["apo_zero"], ["sft"], ["aot"], ["sigmoid", "sft"])


@pytest.mark.parametrize("loss_type", fast_only(LOSSES, ["sigmoid"]), ids="+".join)
def test_dpo(tmp_path, loss_type):
    """The rows are padded on the right, where Llama's stock outputs are right."""
    check_step(dpo(tmp_path, policy("llama"), loss_type=loss_type), ["model", "ref_model"], close=1e-6)


def test_experts_of_pairs(tmp_path):
    """DPOTrainer asks for the logits of routers, which only tokens in one packed row have. Small embeddings make for
    gradients that differ by much more than outputs, though only in their last digits."""
    model = tiny_model("qwen3_moe", "causal", router_aux_loss_coef=0.1)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-3)

    def change(_, __, logits):
        if len(logits) > 1 and logits.requires_grad:
            logits.register_hook(lambda gradient: (1 + 2e-5) * gradient)

    model.lm_head.register_forward_hook(change)
    trainer = dpo(tmp_path, model, max_steps=1, logging_steps=1)
    assert trainer.aux_loss_enabled
    unpadded = hfp.attach(trainer, None)
    assert "its tokens run as one packed row" in unpadded.models["model"]
    trainer.train()
    assert trainer.state.log_history[0]["aux_loss"] > 0


def test_reward(tmp_path):
    model = tiny_model("gpt2", "sequence classification", torch.float64, num_labels=1).train()
    check_step(reward(tmp_path, model), ["model"])


@pytest.mark.slow
def test_kto(tmp_path):
    check_step(kto(tmp_path, policy("llama")), ["model", "ref_model"], close=1e-6)


@pytest.mark.slow
def test_orpo(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    check_step(odds_ratio(tmp_path, policy("llama")), ["model"], close=1e-6)


@pytest.mark.parametrize("use_reentrant", fast_only([False, True], False))
def test_dpo_with_lora_and_checkpointing(tmp_path, use_reentrant):
    """Without a reference model, TRL switches the adapter off."""
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(policy("llama"), config)
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    check_step(dpo(tmp_path, model, **changes), ["model"], close=1e-6)


def answers(model, folder):
    """A GRPO trainer, and a batch as it makes them: prompts padded on the left, completions on the right."""
    sizes = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 2}
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=trl.GRPOConfig(str(folder), **COMMON | sizes),
        train_dataset=texts(4, prompt=9),
        processing_class=tokenizer(),
    )
    rng = np.random.default_rng(0)
    prompts, completions = ([rng.integers(8, 120, n).tolist() for n in lengths] for lengths in ((3, 12, 7), (9, 2, 5)))
    ids, mask = torch.zeros(3, 21, dtype=torch.long), torch.zeros(3, 21, dtype=torch.long)
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        place = slice(12 - len(prompt), 12 + len(completion))
        ids[number, place], mask[number, place] = torch.tensor(prompt + completion), 1
    return trainer, prompts, completions, ids, mask


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_grpo(tmp_path, name):
    """TRL passes no position_ids, so the stock GPT-2 counts the padding before a prompt; unpadded, it does not."""
    model = policy(name)
    alone = copy.deepcopy(model)
    trainer, prompts, completions, ids, mask = answers(model, tmp_path)
    stock = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 9)[0]
    assert "model" in hfp.attach(trainer, None).models
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 9)[0]
    errors, scores = [], []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        logits = alone(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logits = logits / trainer.temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        scores.append(expected)
        assert torch.allclose(found[number, : len(completion)].double(), expected, atol=1e-6)
        errors.append(float((stock[number, : len(completion)] - expected).detach().abs().max()))
    assert (max(errors) > 0.1) == (name == "gpt2")
    torch.cat(scores).sum().backward()
    torch.cat([found[number, : len(each)] for number, each in enumerate(completions)]).sum().backward()
    for one, other in zip(trainer.model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


@pytest.mark.slow
def test_grpo_trains_and_generates(tmp_path):
    trainer, *_ = answers(policy("llama").float(), tmp_path)
    hfp.attach(trainer, None)
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.state.global_step == 2
    assert is_patched(trainer.model)


def classifier(folder, model):
    rng = np.random.default_rng(0)
    data = datasets.Dataset.from_list(
        [{"input_ids": rng.integers(8, 120, n).tolist(), "labels": int(n % 2)} for n in rng.integers(2, 30, 12)]
    )
    arguments = TrainingArguments(str(folder), max_steps=2, **COMMON)
    return Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer()))


def test_a_stock_trainer_of_a_classifier(tmp_path):
    models = [tiny_model("bert", "sequence classification", torch.float64) for _ in range(2)]
    first, second = (classifier(tmp_path, model) for model in models)
    hfp.attach(second, None)
    for trainer in (first, second):
        trainer.train()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert first.predict(first.train_dataset).predictions == pytest.approx(
        second.predict(second.train_dataset).predictions, abs=1e-9
    )


def test_models_that_share_a_configuration_are_refused(tmp_path):
    trainer = dpo(tmp_path, policy("llama"))
    trainer.ref_model.config = trainer.model.config
    trainer.ref_model.model.config = trainer.model.config
    for layer in trainer.ref_model.model.layers:
        layer.self_attn.config = trainer.model.config
    with pytest.raises(
        hfp.PackingError, match="trainer.ref_model: model: expected a model with a configuration of its"
    ):
        hfp.attach(trainer, None)
    assert route_of(trainer.model) is None  # all models are as they were


def test_arguments_that_only_a_batching_uses_are_refused(tmp_path):
    trainer = classifier(tmp_path, tiny_model("bert", "sequence classification"))
    for name, value in {"loss": "token", "match_documents_per_step": 8, "tokens": 64, "max_segments": 4}.items():
        with pytest.raises(hfp.PackingError, match=f"{name}: expected no such argument if batching is None"):
            hfp.attach(trainer, None, **{name: value})
    with pytest.raises(hfp.PackingError, match="prove: expected one of first batch, model, small, got 'all'"):
        hfp.attach(trainer, None, prove="all")
    trainer.model = None
    with pytest.raises(hfp.PackingError, match="trainer: expected a Trainer with a model, got Trainer without one"):
        hfp.attach(trainer, None)


def test_a_model_that_is_refused(tmp_path):
    model = tiny_model("bert", "sequence classification")
    model.classifier.register_forward_hook(lambda _, __, output: output + 0.01 * output.mean(0))
    with pytest.raises(hfp.ModelNotSupportedError, match="trainer.model: .* padded batches are not supported"):
        hfp.attach(classifier(tmp_path, model), None)
