"""What a model, PEFT and a trainer compute is what is trained: each document alone on the stock model is the truth.

The right loss of an optimizer step is the mean over its micro-batches, weighted by their labels, of the loss that model
and trainer compute of each.
"""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import peft
import pytest
import torch
from accelerate import Accelerator
from chunks import WHOLE, chunks_of
from patched_models import patched_once
from processes import on_ranks
from tiers import fast_only
from tiny_models import build
from torch.nn import functional as F
from trainers import Gradients, documents, logged, on_each_batch, trainer_of
from training_by_hand import gradients_of, largest_difference
from transformers import LlamaForCausalLM, Trainer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import inner_model
from tools.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("default::UserWarning")

CLOSE = 1e-6
"""transformers' own loss converts logits to float32."""

BUDGET = hfp.TokenBudget(64)


class Alone(NamedTuple):
    logits: torch.Tensor
    """Of the tokens that predict, float [labels, vocabulary]."""
    labels: torch.Tensor
    all_logits: torch.Tensor
    """float [tokens, vocabulary]."""
    routers: tuple[torch.Tensor, ...] | None
    """The logits of the routers of each layer, float [tokens, experts]."""

    @property
    def cross_entropies(self):
        return F.cross_entropy(self.logits, self.labels, reduction="sum")


def alone(model, batch) -> Alone:
    borders = batch["cu_seq_lens_q"].tolist()
    logits, labels, everything, routers = [], [], [], []
    for begin, end in pairwise(borders):
        outputs = model(input_ids=batch["input_ids"][:, begin:end], use_cache=False)
        own = batch["labels"][0, begin + 1 : end]
        logits.append(outputs.logits[0, :-1][own != -100])
        labels.append(own[own != -100])
        everything.append(outputs.logits[0])
        routers.append(getattr(outputs, "router_logits", None))
    gates = None if routers[0] is None else tuple(torch.cat(each) for each in zip(*routers, strict=True))
    return Alone(torch.cat(logits), torch.cat(labels), torch.cat(everything), gates)


class Case(NamedTuple):
    model: Callable[[], torch.nn.Module]
    extra: Callable[[torch.nn.Module, Alone], Any] = lambda *_: 0.0
    """What is added to the mean over labels, given the model and a micro-batch."""
    kind: type[Trainer] = Trainer
    divided: Callable[[Alone], torch.Tensor] = lambda of: of.cross_entropies
    smoothing: float = 0.0
    prepare: Callable[[Trainer], Any] = lambda _: None


class Regularized(Trainer):
    def compute_loss(self, model, inputs, **others):
        loss = super().compute_loss(model, inputs, **others)
        return loss + norm(model)


def norm(model):
    return 0.02 * sum(each.square().sum() for name, each in model.named_parameters() if "q_proj" in name)


class CallsSuper(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Mean(Trainer):
    """Knows only the number of micro-batches, as was usual before Trainer passed the number of items."""

    def compute_loss(self, model, inputs, **_):
        labels = inputs["labels"][:, 1:].flatten()
        inputs = {name: each for name, each in inputs.items() if name != "labels"}
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels) / self.args.gradient_accumulation_steps


class PopsLabels(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")[..., 1:].reshape(-1)
        outputs = model(**inputs)
        logits = outputs.logits[..., :-1, :].reshape(len(labels), -1)
        loss = F.cross_entropy(logits, labels, reduction="sum") / float(num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class ZLossInTraining(LlamaForCausalLM):
    def forward(self, **inputs):
        outputs = super().forward(**inputs)
        if self.training and outputs.loss is not None:
            outputs.loss = outputs.loss + 0.1 * outputs.logits.logsumexp(-1).square().mean()
        return outputs


def z_loss(factor):
    return lambda _, of: factor * of.all_logits.logsumexp(-1).square().mean()


def in_training():
    model = build("Llama", torch.float64)
    model.__class__ = ZLossInTraining
    return model


def ada_lora(**sizes):
    torch.manual_seed(0)
    config = peft.AdaLoraConfig(
        r=4, target_modules=["q_proj"], orth_reg_weight=0.5, task_type="CAUSAL_LM", total_step=100, tinit=1, tfinal=1
    )
    return peft.get_peft_model(build("Llama", torch.float64, **sizes), config).to(torch.float64)


def orthogonal(model, _):
    total, count = 0.0, 0
    for name, each in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            product = each @ each.T if "lora_A" in name else each.T @ each
            total = total + torch.dist(product, torch.eye(len(product), dtype=each.dtype))
            count += 1
    return 0.5 * total / count


def adaption_prompt():
    torch.manual_seed(0)
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("Llama", torch.float64), config)
    for name, each in model.named_parameters():
        if "gate" in name:
            each.data.fill_(0.5)
    return model.to(torch.float64)


def smoothed(of: Alone):
    log_probs = of.logits.log_softmax(-1)
    own = -log_probs.gather(1, of.labels[:, None]).sum()
    return 0.9 * own - 0.1 * log_probs.sum() / log_probs.shape[-1]


def by_function(outputs, labels, num_items_in_batch=None):
    losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return losses.sum() / num_items_in_batch + 0.01 * outputs.logits.square().mean()


def focal():
    model = build("Llama", torch.float64)

    def loss_function(logits, labels, vocab_size, num_items_in_batch, **_):
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        losses = F.cross_entropy(logits.view(-1, vocab_size), labels, reduction="none")
        return focused(losses) / num_items_in_batch

    model.loss_function = loss_function
    return model


def focused(losses):
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum()


def bamba():
    model = tiny_model("bamba", "causal", torch.float64, experts_implementation="eager")
    model.z_loss_coefficient = 0.1
    return model


def experts():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return build("Qwen3Moe", torch.float64, output_router_logits=True, router_aux_loss_coef=0.5, **sizes)


def llama():
    return build("Llama", torch.float64, num_hidden_layers=1)


def no_items():
    """As Gemma 4 and others say of themselves: accumulating must not divide their losses once more."""
    model = llama()
    model.accepts_loss_kwargs = False
    return model


CASES = {
    "plain": Case(llama),
    "no items": Case(no_items),
    "no items, smoothed": Case(no_items, divided=smoothed, smoothing=0.1),
    "capped": Case(lambda: build("Gemma2", torch.float64, final_logit_softcapping=3.0)),
    "smoothed": Case(llama, divided=smoothed, smoothing=0.1),
    "compute_loss_func": Case(
        llama,
        lambda _, of: 0.01 * of.all_logits.square().mean(),
        prepare=lambda trainer: setattr(trainer, "compute_loss_func", by_function),
    ),
    "regularized": Case(llama, lambda model, _: norm(model), Regularized),
    "mean": Case(llama, kind=Mean),
    "pops labels": Case(llama, kind=PopsLabels),
    "focal": Case(focal, divided=lambda of: focused(F.cross_entropy(of.logits, of.labels, reduction="none"))),
    "z-loss in training": Case(in_training, z_loss(0.1)),
    "AdaLoRA": Case(ada_lora, orthogonal),
    "AdaptionPrompt": Case(adaption_prompt),
    "Qwen3-MoE": Case(experts, lambda _, of: 0.5 * load_balancing_loss_func(of.routers, 4, 2)),
    "Bamba": Case(bamba, z_loss(0.1)),
}
CASES |= {f"super of {name}": CASES[name]._replace(kind=CallsSuper) for name in ("Qwen3-MoE", "Bamba", "AdaLoRA")}
SFT = ("plain", "no items", "capped", "smoothed", "compute_loss_func", "Qwen3-MoE")
"""TRL itself fails with AdaptionPrompt."""
CASES |= {f"SFTTrainer of {name}": CASES[name]._replace(kind=SFTTrainer) for name in SFT}


class Trained(NamedTuple):
    loss: float
    gradients: dict[str, torch.Tensor]
    batches: list[dict[str, torch.Tensor]]


def train(tmp_path, case, model, accumulation, **settings) -> Trained:
    seen, batches = Gradients(), []
    arguments = {"gradient_accumulation_steps": accumulation, "max_steps": 1, "max_grad_norm": 0.0}
    arguments["label_smoothing_factor"] = case.smoothing
    trainer = trainer_of(tmp_path, case.kind, model=model, data=documents(45), **arguments)
    case.prepare(trainer)
    trainer.add_callback(seen)
    hfp.attach(trainer, BUDGET, **settings)
    on_each_batch(trainer, lambda batch: batches.append(dict(batch)))
    (loss,) = logged(trainer)
    return Trained(loss, seen.gradients, batches)


def documents_in(batch):
    for begin, end in pairwise(batch["cu_seq_lens_q"].tolist()):
        own = {name: batch[name][:, begin:end] for name in ("input_ids", "labels")}
        yield {**own, "cu_seq_lens_q": torch.tensor([0, end - begin])}


def documents_with_labels(batch):
    return sum(bool((own["labels"][0, 1:] != -100).any()) for own in documents_in(batch))


def right_step(case, model, batches, kind="token"):
    model.train()
    model.zero_grad()
    each = [alone(model, batch) for batch in batches]
    if kind == "token":
        loss = sum(case.divided(of) for of in each) / sum(len(of.labels) for of in each)
    else:
        by_document = [alone(model, own) for batch in batches for own in documents_in(batch)]
        means = [of.cross_entropies / len(of.labels) for of in by_document if len(of.labels)]
        loss = sum(means) / len(means)
    items = [
        len(of.labels) if kind == "token" else documents_with_labels(batch)
        for of, batch in zip(each, batches, strict=True)
    ]
    loss = loss + sum(case.extra(model, of) * own for of, own in zip(each, items, strict=True)) / sum(items)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def proven(case):
    return copy.deepcopy(patched_once(case.model, trees=False))


STEPS = [(name, *how, "token") for name in CASES for how in ((1, WHOLE), (3, WHOLE), (2, 5))]
STEPS += [(name, 3, WHOLE, "sequence") for name in ("plain", "Qwen3-MoE", "Bamba", "AdaLoRA", "super of Bamba")]
FEW = [
    *(("plain", 1, WHOLE), ("mean", 3, WHOLE), ("Qwen3-MoE", 3, WHOLE), ("no items", 3, WHOLE)),
    *((name, 2, 5) for name in ("z-loss in training", "AdaLoRA")),
]
FEW = [*((*step, "token") for step in FEW), ("AdaLoRA", 3, WHOLE, "sequence")]


@pytest.mark.parametrize(("name", "accumulation", "tokens", "loss"), fast_only(STEPS, *FEW))
def test_steps_of_attach(tmp_path, name, accumulation, tokens, loss):
    case = CASES[name]
    stock, model = case.model(), proven(case)
    inner = inner_model(model)
    with chunks_of(tokens, inner) as chunks:
        found = train(tmp_path, case, model, accumulation, loss=loss)
    reads_all_logits = case.kind is SFTTrainer or case.smoothing or name in ("compute_loss_func", "focal")
    assert reads_all_logits or bool(chunks) == (tokens == 5)
    assert len(found.batches) == accumulation
    assert all(len(batch["cu_seq_lens_q"]) > 3 for batch in found.batches)  # several documents in each
    expected, gradients = right_step(case, stock, found.batches, loss)
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert largest_difference(found.gradients, gradients) <= CLOSE


@pytest.mark.parametrize("name", fast_only(["plain", "AdaLoRA", "Qwen3-MoE", "Bamba"], "AdaLoRA"))
def test_loops(name):
    case = CASES[name]
    stock, model = case.model(), proven(case)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader = hfp.prepare_dataloader(accelerator, documents(30), BUDGET, model=model)
    model.train()
    batches = []
    for batch, _ in zip(loader, range(3), strict=False):
        batches.append({**batch, "labels": batch.get("labels", batch.get("packed_targets"))})
        accelerator.backward(hfp.compute_loss(model, batch))
    _, gradients = right_step(case, stock, batches)
    assert largest_difference(gradients_of(model), gradients) <= CLOSE
    model.zero_grad()
    plain = {name: each for name, each in batches[0].items() if name != "num_items_in_batch"}
    found = hfp.compute_loss(model, plain)
    assert float(found.detach()) == pytest.approx(right_step(case, stock, batches[:1])[0], rel=1e-6)


EVALUATED = ["plain", "smoothed", "compute_loss_func", "pops labels", "Qwen3-MoE", "SFTTrainer of Qwen3-MoE"]


@pytest.mark.parametrize("name", fast_only(EVALUATED, "compute_loss_func", "Qwen3-MoE"))
def test_evaluation_is_by_the_trainers_own_loss(tmp_path, name):
    """Each batch counts by its labels. In a loop, evaluation_loss is the cross-entropy alone."""
    case, data = CASES[name], documents(9)
    stock, model = case.model().eval(), proven(case)
    trainer = trainer_of(tmp_path, case.kind, model=model, data=documents(45), label_smoothing_factor=case.smoothing)
    case.prepare(trainer)
    hfp.attach(trainer, BUDGET)
    rows = [*data]
    for size in (1, 4):
        batches = [hfp.PackingCollator()(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
        with torch.no_grad():
            each = [alone(stock, batch) for batch in batches]
            labels = sum(len(of.labels) for of in each)
            right = sum(case.divided(of) + case.extra(stock, of) * len(of.labels) for of in each) / labels
        trainer.args.per_device_eval_batch_size = size
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(float(right), rel=1e-5)
    cross_entropy = sum(float(of.cross_entropies) for of in each) / labels
    assert hfp.evaluation_loss(Accelerator(cpu=True), trainer.model, data) == pytest.approx(cross_entropy, rel=1e-6)


ON_TWO_RANKS = ["plain", "smoothed", "compute_loss_func", "regularized", "AdaLoRA", "Qwen3-MoE", "Bamba", "mean"]
ACCUMULATIONS = [1, 4]


def train_cases(folder, names, accumulations):
    for name in names:
        for accumulation in accumulations:
            found = train(folder / "output", CASES[name], CASES[name].model(), accumulation)
            torch.save(found._asdict(), folder / f"{name}-{accumulation}-{torch.distributed.get_rank()}.pt")


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    on_ranks(train_cases, folder, ON_TWO_RANKS, ACCUMULATIONS, ranks=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_steps_on_two_ranks(on_two_ranks, name, accumulation):
    found = [torch.load(on_two_ranks / f"{name}-{accumulation}-{rank}.pt", weights_only=False) for rank in range(2)]
    batches = [batch for each in found for batch in each["batches"]]
    assert len(batches) == 2 * accumulation
    assert len({str(batch["input_ids"].tolist()) for batch in batches}) == 2 * accumulation
    case = CASES[name]
    loss, gradients = right_step(case, case.model(), batches)
    for each in found:
        assert each["loss"] == pytest.approx(loss, rel=1e-5)
        assert largest_difference(each["gradients"], gradients) <= CLOSE
