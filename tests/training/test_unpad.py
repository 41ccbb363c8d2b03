"""attach(trainer, None): trainers with batches of their own have the same losses and gradients without the padding.

A trainer's other models, such as a teacher, read the packed batches of the model that is trained.
"""

import copy

import numpy as np
import peft
import pytest
import torch
import trl
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build
from torch.nn.functional import kl_div
from trainers import documents, documents_in, tokenizer, trainer_of
from training_by_hand import largest_difference
from transformers import CLIPVisionConfig, CLIPVisionModel, Trainer, TrainerCallback
from whole_rows import answers, arguments, dpo, grpo, moved, pairs, policy, step, texts
from whole_rows import trainer_of as rows_trainer_of

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.training.models import models_of
from tools.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def kto(folder, model):
    data = texts(6, prompt=9, completion=8)
    data = data.add_column("label", [True, False] * 3)
    config = arguments(folder, trl.KTOConfig, max_length=None)
    return trl.KTOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer(), ref_model=moved(model))


def odds_ratio(folder, model):
    orpo = pytest.importorskip("trl.experimental.orpo", exc_type=ImportError)
    config = arguments(folder, orpo.ORPOConfig, max_length=64)
    return orpo.ORPOTrainer(model, args=config, train_dataset=pairs(), processing_class=tokenizer())


def check_step(trainer, names, close=1e-12, stock=None):
    """Compare the first step before and after attach, or with that of a stock trainer."""
    expected, gradients = step(stock or trainer)
    unpadded = hfp.attach(trainer, None)
    assert list(unpadded.models) == names
    assert all("its tokens run as one packed row" in line for line in str(unpadded).splitlines())
    loss, found = step(trainer)
    assert loss == pytest.approx(expected, rel=1e-6)  # TRL's fused head returns float32
    assert largest_difference(found, gradients) <= close


LOSSES = (["sigmoid"], ["ipo"], ["apo_zero"], ["sft"], ["aot"], ["sigmoid", "sft"])


@pytest.mark.parametrize("loss_type", fast_only(LOSSES), ids="+".join)
def test_dpo(tmp_path, loss_type):
    """The rows are padded on the right, where Llama's stock outputs are right."""
    proven = patched_tiny("llama", "causal", torch.float64).train()
    stock, trainer = (dpo(tmp_path, model, loss_type=loss_type) for model in (policy("llama"), proven))
    check_step(trainer, ["model", "ref_model"], close=1e-6, stock=stock)


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
    check_step(rows_trainer_of("reward", tmp_path), ["model"], close=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "names"), [(kto, ["model", "ref_model"]), (odds_ratio, ["model"])])
def test_kto_and_orpo(tmp_path, monkeypatch, make, names):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    check_step(make(tmp_path, policy("llama")), names, close=1e-6)


@pytest.mark.parametrize("use_reentrant", fast_only([False, True], False))
def test_dpo_with_lora_and_checkpointing(tmp_path, use_reentrant):
    """Without a reference model, TRL switches the adapter off."""
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(policy("llama"), config)
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    check_step(dpo(tmp_path, model, **changes), ["model"], close=1e-6)


@pytest.mark.parametrize("name", fast_only(["gpt2", "llama"], "gpt2"))
def test_grpo(tmp_path, name):
    """TRL passes no position_ids, so the stock GPT-2 counts the padding before a prompt; unpadded, it does not."""
    model = policy(name)
    alone = copy.deepcopy(model)
    trainer, rng = grpo(tmp_path, model), np.random.default_rng(0)
    prompts, completions = ([rng.integers(8, 120, n).tolist() for n in lengths] for lengths in ((3, 12, 7), (9, 2, 5)))
    ids, mask = answers(prompts, completions)
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


def test_a_stock_trainer_of_a_classifier(tmp_path):
    first, second = (rows_trainer_of("classifier", tmp_path) for _ in range(2))
    hfp.attach(second, None)
    for trainer in (first, second):
        trainer.train()
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    found = [trainer.predict(trainer.train_dataset).predictions for trainer in (first, second)]
    assert np.allclose(*found, rtol=0, atol=1e-9)


def divergence(student, teacher):
    """The sum over tokens of the divergence of two models' predictions."""
    return kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")


class Distilling(Trainer):
    """Learns from a teacher alone, which gets the columns `given` of a batch; None for all of them."""

    given = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad():
            teacher = self.the_teacher(**{name: inputs[name] for name in self.given or inputs}).logits
        outputs = model(**inputs)
        loss = divergence(outputs.logits, teacher) / (1 if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def models(make=build):
    teacher = make("Llama", torch.float64, num_hidden_layers=1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(0.7)
    return make("Llama", torch.float64), teacher.eval()


def distilling(folder, student, teacher, **changes):
    trainer = trainer_of(folder, Distilling, student, documents(6), **changes)
    trainer.the_teacher = teacher
    return trainer


def test_a_teacher_reads_each_document_alone(tmp_path):
    alone, (student, teacher) = models(), models(patched)
    trainer = distilling(tmp_path, student, teacher)
    hfp.attach(trainer, hfp.TokenBudget(256))
    batch = next(iter(trainer.get_train_dataloader()))
    rows = documents_in(batch)
    assert len(rows) == 6
    with torch.no_grad():
        found = trainer.compute_loss(student, batch, num_items_in_batch=torch.tensor(1))
        expected = sum(divergence(*(model(torch.tensor([row])).logits for model in alone)) for row in rows)
        as_one_document = divergence(*(model(batch["input_ids"]).logits for model in alone))
    assert float(expected) > 1
    assert float(found) == pytest.approx(float(expected), rel=1e-10)
    assert abs(float(as_one_document - expected)) > 1e-3 * float(expected)  # a leak would be seen


def test_a_teacher_that_gets_no_borders_is_refused(tmp_path):
    trainer = distilling(tmp_path, *models(patched), per_device_eval_batch_size=4)
    hfp.attach(trainer, hfp.TokenBudget(256))
    trainer.given = ["input_ids"]
    for run in (trainer.train, lambda: trainer.evaluate(documents(6))):
        with pytest.raises(hfp.PackingError, match="position_ids: .* pass them to all models that get the batch"):
            run()
    trainer.given = ["input_ids", "position_ids"]
    trainer.train()
    assert trainer.evaluate(documents(6))["eval_loss"] > 0


def test_all_models_of_a_trainer_are_found(tmp_path):
    student, teacher = models()
    trainer = distilling(tmp_path, student, teacher)
    trainer.teachers = [teacher, build("GPT2", n_layer=1), "a name"]
    trainer.by_task = {"chat": build("GPT2", n_layer=1)}
    trainer.part, trainer.whole = student.model, torch.nn.ModuleList([student])
    trainer.loss_fn, trainer.projection = torch.nn.CrossEntropyLoss(), torch.nn.Linear(64, 64)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    trainer.tower = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=16))

    class Averaging(TrainerCallback):
        def __init__(self, average):
            self.average = average

    trainer.add_callback(Averaging(copy.deepcopy(student)))
    names = ["model", "the_teacher", "teachers[1]", "by_task['chat']", "Averaging.average"]
    assert list(models_of(trainer)) == names
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert all(is_patched(model) for model in models_of(trainer).values())


def test_a_model_that_is_not_of_transformers_is_refused_by_name(tmp_path):
    student, teacher = models()
    trainer = distilling(tmp_path, student, teacher)
    trainer.judge = torch.nn.Sequential(torch.nn.Embedding(128, 4), torch.nn.GRU(4, 4))
    with pytest.raises(hfp.PackingError, match=r"trainer\.judge: .*expected a transformers PreTrainedModel.* outside"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert not is_patched(student)
    assert not is_patched(teacher)
