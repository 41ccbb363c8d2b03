"""attach(trainer, None): trainers with batches of their own have the same losses and gradients without the padding.

A trainer's other models, such as a teacher, read the packed batches of the model that is trained. Rows that share
prefixes compute each of them once.
"""

import copy

import datasets
import numpy as np
import peft
import pytest
import torch
import trl
from hypothesis import given
from hypothesis import strategies as st
from model_inputs import SEQUENCE, padded
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build
from torch.nn.functional import kl_div
from trainers import documents, documents_in, tokenizer, trainer_of
from training_by_hand import gradients_of, largest_difference
from transformers import CLIPVisionConfig, CLIPVisionModel, Trainer
from whole_rows import answers, arguments, dpo, grpo, moved, pairs, policy, step, texts
from whole_rows import trainer_of as rows_trainer_of

import hf_packing as hfp
from hf_packing.attention import inner_model, is_patched, share_prefixes
from hf_packing.attention.kinds.padded import PaddedRows
from hf_packing.attention.kinds.trees import sharing_prefixes
from hf_packing.training.models import models_of
from hf_packing.trees.find import find_in_batch
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


@pytest.mark.slow
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


def test_a_trainer_with_a_batching_gets_its_own_batches_back(tmp_path):
    for trainer in (rows_trainer_of("reward", tmp_path), trainer_of(tmp_path)):
        before = type(trainer), trainer.data_collator, [*trainer.callback_handler.callbacks]
        hfp.attach(trainer, hfp.TokenBudget(512))
        assert type(trainer) is not before[0]
        hfp.attach(trainer, None)
        assert (trainer.attached.kind, trainer.data_collator, trainer.callback_handler.callbacks) == before


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


@pytest.mark.parametrize("kind", ["classifier", "tokens"])
def test_a_stock_trainer_of_a_classifier(tmp_path, kind):
    first, second = (rows_trainer_of(kind, tmp_path) for _ in range(2))
    hfp.attach(second, None)
    for trainer in (first, second):
        trainer.train()
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    if kind == "classifier":  # outputs for each token have some at padding, too
        found = [trainer.predict(trainer.train_dataset).predictions for trainer in (first, second)]
        assert np.allclose(*found, rtol=0, atol=1e-9)


def test_noise_that_depends_on_the_length_of_a_row_is_refused(tmp_path):
    trainer = rows_trainer_of("classifier", tmp_path, neftune_noise_alpha=5.0)
    hfp.attach(trainer, None)
    with pytest.raises(hfp.PackingError, match="trainer: expected the step that it makes without packing"):
        trainer.train()
    assert trainer.state.global_step == 0


def divergence(student, teacher):
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
    trainer.judge = build("GPT2", n_layer=1)
    trainer.teachers, trainer.by_task = [build("GPT2", n_layer=1)], {"chat": build("GPT2", n_layer=1)}
    trainer.part, trainer.whole = student.model, torch.nn.ModuleList([student])
    trainer.loss_fn, trainer.projection = torch.nn.CrossEntropyLoss(), torch.nn.Linear(64, 64)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    trainer.tower = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=16))
    assert list(models_of(trainer)) == ["model", "the_teacher", "judge"]
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert all(is_patched(model) for model in models_of(trainer).values())
    assert not is_patched(trainer.teachers[0])


def test_a_model_that_is_not_of_transformers_is_refused_by_name(tmp_path):
    student, teacher = models()
    trainer = distilling(tmp_path, student, teacher)
    trainer.judge = torch.nn.Sequential(torch.nn.Embedding(128, 4), torch.nn.GRU(4, 4))
    with pytest.raises(hfp.PackingError, match=r"trainer\.judge: .*expected a transformers PreTrainedModel.* outside"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert not is_patched(student)
    assert not is_patched(teacher)


def computed_tokens(model):
    seen = []
    norm = next(each for each in inner_model(model).modules() if "Norm" in type(each).__name__)
    norm.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[:-1].numel()))
    return seen


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@given(DOCUMENTS, st.integers(1, 3))
def test_laws_of_trees_in_a_batch(documents, fewest):
    tokens = np.array([token for document in documents for token in document])
    found = find_in_batch(tokens, {}, [*map(len, documents)], fewest)
    assert (tokens[found.taken][found.given] == tokens).all()
    begin = 0
    for document in documents:
        path = found.given[begin : begin + len(document)]
        assert found.trees.position_ids[path].tolist() == [*range(len(document))]
        assert found.trees.predecessors[path].tolist() == [-1, *path[:-1]]
        begin += len(document)
    if fewest == 1:
        assert found.trees.tokens == len({tuple(each[: end + 1]) for each in documents for end in range(len(each))})


def test_other_values_of_tokens_split_a_prefix():
    tokens, types = np.array([5, 6, 7, 5, 6, 8]), np.array([0, 0, 0, 0, 1, 0])
    assert find_in_batch(tokens, {}, [3, 3], 1).trees.tokens == 4
    assert find_in_batch(tokens, {"token_type_ids": types}, [3, 3], 1).trees.tokens == 5


@pytest.mark.parametrize("side", fast_only(["right", "left"], "right"))
@pytest.mark.parametrize("name", fast_only(["gpt2", "llama", "mamba"], "gpt2"))
def test_rows_of_a_padded_batch(name, side):
    model = patched_tiny(name, "causal", torch.float64, padded=True)
    rng = np.random.default_rng(0)
    prompt, middle = (rng.integers(8, 100, n).tolist() for n in (20, 5))
    ends = [rng.integers(8, 100, n).tolist() for n in (3, 9, 1, 6)]
    documents = [prompt + ends[0], ends[1], prompt + middle + ends[1], prompt + ends[0], prompt + middle + ends[2]]
    batch, _ = padded(documents, side, extra=0)
    expected = model(**batch).logits
    share_prefixes(model, 4)
    seen = computed_tokens(model)
    found = model(**batch).logits
    assert seen == [20 + 3 + 3 + 9 + 5 + 9 + 1], "3 tokens are too few to share"
    real = batch["attention_mask"].bool()
    close = 1e-12 if name == "gpt2" else 1e-5
    assert float((found - expected)[real].detach().abs().max()) <= close * float(expected[real].detach().std())
    gradients = []
    for logits in (found, expected):
        model.zero_grad()
        weights = torch.randn(logits[real].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (logits[real] * weights).sum().backward()
        gradients.append(gradients_of(model))
    assert largest_difference(gradients[1], gradients[0]) <= 10 * close
    with hfp.unpatch_model(model):
        pass
    seen.clear()
    model(**batch)
    assert seen == [50], "the route keeps the setting"
    share_prefixes(model, None)
    model(**batch)
    assert seen[-1] == sum(map(len, documents))


def test_what_shares_nothing():
    model = patched_tiny("llama", padded=True, num_hidden_layers=1)
    share_prefixes(model, 2)
    documents = [[9, 10, 11, 12], [9, 10, 11, 13, 14]]
    batch, _ = padded(documents, "right", extra=0)
    seen = computed_tokens(model)
    model(**batch)
    embedded = model.get_input_embeddings()(batch["input_ids"])
    model(inputs_embeds=embedded, attention_mask=batch["attention_mask"])
    model(**padded([[9, 10], [11, 12, 13]], "right", extra=0)[0])
    assert seen == [6, 9, 5]
    ids = torch.tensor([[5], [5]])
    rows = PaddedRows(np.ones((2, 1), dtype=bool), ids.device)
    others = {"labels": ids, "weights": ids.float(), "position_ids": ids.expand(3, 2, 1)}
    assert all(sharing_prefixes(rows, {"input_ids": ids, name: value}, 1) is rows for name, value in others.items())
    assert sharing_prefixes(rows, {"input_ids": ids, "types": ids}, 1).layout.tokens == 1


def proven_policy():
    return patched_tiny("llama", "causal", torch.float64, trees=True).train()


def test_pairs_share_their_prompt(tmp_path):
    trainer = dpo(tmp_path, proven_policy(), pairs(prompt=20, chosen=6))
    with hfp.unpatch_model(trainer.model), hfp.unpatch_model(trainer.ref_model):
        expected, gradients = step(trainer)
    shared = hfp.attach(trainer, None, share_prefixes=True)
    assert all("prefixes that rows share are computed once" in line for line in str(shared).splitlines())
    assert len(shared.models) == 2
    seen = computed_tokens(trainer.model)
    loss, found = step(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    assert seen[0] < 0.8 * int(batch["attention_mask"].sum())
    assert loss == pytest.approx(expected, rel=1e-6)
    assert largest_difference(found, gradients) <= 1e-6


@pytest.mark.slow
def test_pairs_share_their_prompt_in_rows_of_a_budget(tmp_path):
    trainer = dpo(tmp_path, proven_policy(), pairs(prompt=20, chosen=6))
    summary = hfp.attach(trainer, hfp.TokenBudget(512, share_prefixes=2))
    assert "prefixes that rows share are computed once" in str(summary)
    seen = computed_tokens(trainer.model)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.compute_loss(trainer.model, batch)
    assert seen[0] < 0.8 * int(batch["attention_mask"].sum())


def test_samples_of_a_prompt_in_grpo(tmp_path):
    """Prompts padded on the left, completions on the right."""
    trainer, rng = grpo(tmp_path, proven_policy()), np.random.default_rng(0)
    prompts = [rng.integers(8, 120, n).tolist() for n in (12, 5)]
    completions = [rng.integers(8, 120, 1 + number).tolist() for number in range(8)]
    ids, mask = answers([prompts[number // 4] for number in range(8)], completions)
    hfp.attach(trainer, None)
    expected = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 9)[0]
    share_prefixes(trainer.model, 4)
    seen = computed_tokens(trainer.model)
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 9)[0]
    assert seen == [12 + 5 + sum(range(1, 9))]
    real = mask[:, 12:] != 0
    assert torch.allclose(found[real], expected[real], atol=1e-6)


def test_datasets_that_share_nothing_are_as_before(tmp_path):
    data = datasets.Dataset.from_list([{"prompt": "w9", "chosen": " w10", "rejected": " w11 w12"}] * 2)
    trainer = dpo(tmp_path, proven_policy(), data)
    hfp.attach(trainer, None, share_prefixes=True)
    seen = computed_tokens(trainer.model)
    step(trainer)
    assert seen[0] >= 10, "prompts of fewer than 16 tokens are computed again"


def test_models_without_outputs_for_each_token_are_refused():
    with pytest.raises(hfp.ModelNotSupportedError, match="only if the model returns outputs for each token"):
        share_prefixes(patched_tiny("llama", SEQUENCE, num_hidden_layers=1), 4)
