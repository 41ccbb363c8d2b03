"""The proof of the step: what differs from the step without packing is found, whatever it is, and what is right trains.

Each relative is a trainer that somebody may have. What it trains is known, so that a test can say which of both it is.
"""

import copy
import os
import re
import types
from contextvars import ContextVar

import accelerate
import datasets
import peft
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from changing_layers import (
    DelayedScaling,
    EightBit,
    FourBit,
    Merging,
    Packing,
    Replacing,
    ScaleOfBatch,
    Subclass,
)
from patched_models import patched
from processes import on_ranks
from tiers import fast_only, rarely
from tiny_models import build
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainers import logged, tokenizer, trainer_of
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback
from trl import SFTTrainer
from whole_rows import trainer_of as rows_trainer_of

import hf_packing as hfp
from hf_packing.attention import function, in_mode, route
from hf_packing.sampling import rows
from hf_packing.training import step_counts
from hf_packing.training.kinds import labels_of
from hf_packing.training.step import prove_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

BUDGET = hfp.TokenBudget(128)
DIFFERS = "expected the step that it makes without packing, got not the step"


def losses_of(logits, labels, ahead=1):
    """Cross-entropies of labels that are so many tokens ahead, [rows, tokens]."""
    return F.cross_entropy(logits[:, :-ahead].transpose(1, 2).float(), labels[:, ahead:], reduction="none")


def mean(losses, labels, ahead=1):
    trained = labels[:, ahead:] != -100
    return (losses * trained).sum() / trained.sum().clamp(min=1)


class OwnLoss(Trainer):
    """A trainer whose loss is a function of itself, the model, the inputs without labels, and the labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ARG002
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.function(outputs.logits, labels, inputs)
        return (loss, outputs) if return_outputs else loss


def with_loss(function, **more):
    return type("Own", (OwnLoss,), {"function": lambda _, *given: function(*given), **more})


def plain(logits, labels, _):
    return mean(losses_of(logits, labels), labels)


def medusa(logits, labels, inputs):
    return plain(logits, labels, inputs) + mean(losses_of(logits, labels, 2), labels, 2)


def three_ahead(logits, labels, _):
    return mean(losses_of(logits, labels, 3), labels, 3)


def per_document(logits, labels, _):
    trained = labels[:, 1:] != -100
    return ((losses_of(logits, labels) * trained).sum(1) / trained.sum(1).clamp(min=1)).mean()


def unlikelihood(logits, labels, inputs):
    """Tokens that came earlier in the row should not come again."""
    seen = torch.zeros_like(logits).scatter(2, inputs["input_ids"][..., None], 1.0).cumsum(1).clamp(max=1)
    seen = seen.scatter(2, inputs["input_ids"].roll(-1, 1)[..., None], 0.0)
    unlikely = -(seen * torch.log1p(-logits.softmax(-1).clamp(max=0.99))).sum(-1)[:, :-1]
    return plain(logits, labels, inputs) + 0.1 * mean(unlikely, labels)


def contrast(logits, labels, inputs):
    """SimCTG: tokens of a row should not resemble each other."""
    states = F.normalize(logits, dim=-1)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).float()
    alike = (states @ states.transpose(1, 2)) * mask[:, :, None] * mask[:, None, :]
    return plain(logits, labels, inputs) + 0.1 * alike.sum() / mask.sum()


def per_row(logits, labels, _):
    return (losses_of(logits, labels) * (labels[:, 1:] != -100)).sum() / len(labels)


def of_first_row(logits, labels, _):
    return mean(losses_of(logits[:1], labels[:1]), labels[:1])


def last_token_counts_twice(logits, labels, _):
    trained = (labels[:, 1:] != -100).float()
    last = F.pad(trained, (0, 1))[:, 1:] == 0
    weights = trained * (1 + last)
    return (losses_of(logits, labels) * weights).sum() / weights.sum()


def focal(logits, labels, _):
    losses = losses_of(logits, labels)
    return mean((1 - torch.exp(-losses)) ** 2 * losses, labels)


def z_loss(logits, labels, inputs):
    return plain(logits, labels, inputs) + 1e-2 * logits.logsumexp(-1).square().mean()


def confidence(logits, labels, inputs):
    log_probs = logits[:, :-1].log_softmax(-1)
    return plain(logits, labels, inputs) + 0.1 * mean((log_probs.exp() * log_probs).sum(-1), labels)


def class_weights(logits, labels, _):
    weights = torch.linspace(0.5, 2, logits.shape[-1])[labels[:, 1:].clamp(min=0)]
    return mean(losses_of(logits, labels) * weights, labels)


def truncated(logits, labels, _):
    return mean(losses_of(logits, labels).clamp(max=5), labels)


def reverse_kl_to_uniform(logits, labels, _):
    log_probs = logits[:, :-1].log_softmax(-1)
    return mean((log_probs.exp() * log_probs).sum(-1), labels) + plain(logits, labels, _)


TAKES = ContextVar("TAKES", default=())
"""What a teacher gets beside tokens and a mask: with positions, transformers itself finds the documents of a row."""


def frozen_copy(folder, hold, takes=()):
    """A trainer with a loss against a copy of the model that `hold` keeps somewhere."""
    TAKES.set(takes)
    model = build("Llama")
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    with torch.no_grad():
        teacher.model.layers[0].self_attn.o_proj.weight.mul_(3)
    return hold(folder, model, teacher)


def divergence(logits, labels, inputs, teacher):
    known = {name: inputs[name] for name in ("input_ids", "attention_mask", *TAKES.get()) if name in inputs}
    with torch.no_grad():
        wanted = teacher(**known, use_cache=False).logits.log_softmax(-1)
    return mean(F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="none").sum(-1)[:, :-1], labels)


def teacher_in_closure(folder, model, teacher):
    kind = with_loss(lambda *given: divergence(*given, teacher))
    return trainer_of(folder, kind, model)


def teacher_of_class(folder, model, teacher):
    kind = with_loss(lambda *given: divergence(*given, Holder.teacher))
    Holder.teacher = teacher
    return trainer_of(folder, kind, model)


class Holder:
    teacher = None


def teacher_of_callback(folder, model, teacher):
    found = {}

    class Makes(TrainerCallback):
        def on_train_begin(self, *_, **__):
            found["teacher"] = teacher

    kind = with_loss(lambda *given: divergence(*given, found["teacher"]))
    return trainer_of(folder, kind, model, callbacks=[Makes()])


def teacher_in_attribute_of_callback(folder, model, teacher):
    holder = TrainerCallback()
    holder.teacher = teacher
    kind = with_loss(lambda *given: divergence(*given, holder.teacher))
    return trainer_of(folder, kind, model, callbacks=[holder])


def teacher_in_list(folder, model, teacher):
    kind = type("Own", (OwnLoss,), {"function": lambda self, *given: divergence(*given, self.teachers["chat"][0])})
    trainer = trainer_of(folder, kind, model)
    trainer.teachers = {"chat": [teacher]}
    return trainer


def teacher_of_trainer(folder, model, teacher):
    kind = type("Own", (OwnLoss,), {"function": lambda self, *given: divergence(*given, self.teacher)})
    trainer = trainer_of(folder, kind, model)
    trainer.teacher = teacher
    return trainer


def with_adapter(config):
    def make(folder):
        torch.manual_seed(0)
        model = peft.get_peft_model(build("Llama"), config)
        with torch.no_grad():
            for each in model.parameters():
                if each.requires_grad and not each.any():
                    each.normal_(std=0.05)
        return trainer_of(folder, model=model)

    return make


TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


class AddsMeanOfRow(nn.Module):
    """An adapter that reads the whole row."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(()))

    def forward(self, hidden):
        return self.inner(hidden) + self.scale * hidden.mean(1, keepdim=True)


def reading_adapter(folder):
    model = build("Llama", num_hidden_layers=1)
    model.model.layers[0].mlp = AddsMeanOfRow(model.model.layers[0].mlp)
    return trainer_of(folder, model=model)


class CountsCalls(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden):
        self.calls += 1
        self.seen += 1
        return self.inner(hidden)


def counting(folder):
    model = build("Llama", num_hidden_layers=1)
    model.model.layers[0].mlp = CountsCalls(model.model.layers[0].mlp)
    return trainer_of(folder, model=model)


def compiled(folder):
    model = build("Llama", num_hidden_layers=1)
    model.forward = torch.compile(model.forward, backend="eager")
    return trainer_of(folder, model=model)


def with_layers(kind, **settings):
    """Trainers of models in which some linear layers are of another kind."""

    def make(folder):
        torch.manual_seed(0)
        model = build("Llama", num_hidden_layers=2)
        for layer in model.model.layers:
            layer.self_attn.v_proj = kind(layer.self_attn.v_proj, **settings)
            layer.mlp.up_proj = kind(layer.mlp.up_proj, **settings)
        return trainer_of(folder, model=model)

    return make


def spectral(layer):
    """Each forward in training mode takes a step of a power iteration, which changes the weight."""
    return nn.utils.parametrizations.spectral_norm(layer)


def hooked(folder):
    """Hooks of accelerate, as for weights that are moved to the device before a module runs, and back after it."""

    class Moves(ModelHook):
        def pre_forward(self, module, *args, **named):
            self.kept = {name: each.data for name, each in module.named_parameters(recurse=False)}
            for each in module.parameters(recurse=False):
                each.data = each.data.clone()
            return args, named

        def post_forward(self, _, output):
            self.calls = getattr(self, "calls", 0) + 1
            return output

    model = build("Llama", num_hidden_layers=1)
    for module in (model.model.layers[0].mlp.up_proj, model.model.layers[0].self_attn.q_proj):
        add_hook_to_module(module, Moves())
    return trainer_of(folder, model=model)


def averaged(folder):
    """A loss against a moving average of the model, which a callback holds and updates."""

    class Averages(TrainerCallback):
        def on_train_begin(self, *_, model, **__):
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def on_step_end(self, *_, model, **__):
            self.average.update_parameters(model)

    return trainer_of(folder, model=build("Llama", num_hidden_layers=1), callbacks=[Averages()])


def weight_decayed(folder):
    """Weights that parametrizations compute from others."""
    model = build("Llama", num_hidden_layers=1)
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return trainer_of(folder, model=model)


def frozen_in_evaluation_mode(folder):
    """A part of the model never trains, and stays in evaluation mode whatever the trainer does."""
    model = build("Llama", num_hidden_layers=2)
    model.model.layers[0].eval().requires_grad_(False)
    model.model.layers[0].train = lambda _: model.model.layers[0]
    return trainer_of(folder, model=model)


def of(kind=Trainer, **settings):
    return lambda folder: trainer_of(folder, kind, **{"model": build("Llama", num_hidden_layers=1), **settings})


class ShiftsTwice(SFTTrainer):
    """Labels that somebody has shifted before the model shifts them."""

    def compute_loss(self, model, inputs, *given, **named):
        return super().compute_loss(model, {**inputs, "labels": inputs["labels"].roll(-1, 1)}, *given, **named)


class WeightsOfLength(Trainer):
    """Each token is weighted by the length of its row."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        loss = loss * mask.sum(1).float().mean()
        return (loss, outputs) if return_outputs else loss


class MeansAnyway(Trainer):
    """Divides by the labels of its own batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # noqa: ARG002
        return super().compute_loss(model, inputs, return_outputs)


class Penalty(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-3 * sum(each.square().sum() for each in model.parameters())
        return (loss, outputs) if return_outputs else loss


MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}

RIGHT = {
    "plain": of(),
    "SFTTrainer": of(SFTTrainer),
    "SFTTrainer, dft": of(SFTTrainer, loss_type="dft"),
    "smoothing": of(label_smoothing_factor=0.1),
    "checkpointing": of(gradient_checkpointing=True),
    "compiled": compiled,
    "experts with a router loss": of(model=build("Mixtral", **MOE)),
    "counts calls": counting,
    "focal": lambda folder: of(with_loss(focal))(folder),
    "z-loss": lambda folder: of(with_loss(z_loss))(folder),
    "confidence": lambda folder: of(with_loss(confidence))(folder),
    "class weights": lambda folder: of(with_loss(class_weights))(folder),
    "truncated": lambda folder: of(with_loss(truncated))(folder),
    "reverse KL": lambda folder: of(with_loss(reverse_kl_to_uniform))(folder),
    "penalty of weights": of(Penalty),
    "divides by its own labels": of(MeansAnyway),
    "teacher of the trainer": lambda folder: frozen_copy(folder, teacher_of_trainer, ["position_ids"]),
    "teacher in a closure with positions": lambda folder: frozen_copy(folder, teacher_in_closure, ["position_ids"]),
    "last tokens count twice": lambda folder: of(with_loss(last_token_counts_twice))(folder),
    "LoRA": with_adapter(peft.LoraConfig(**TARGETS)),
    "DoRA": with_adapter(peft.LoraConfig(use_dora=True, **TARGETS)),
    "VeRA": with_adapter(peft.VeraConfig(r=4, **TARGETS)),
    "LoHa": with_adapter(peft.LoHaConfig(**TARGETS)),
    "LoKr": with_adapter(peft.LoKrConfig(**TARGETS)),
    "IA3": with_adapter(peft.IA3Config(feedforward_modules=[], **TARGETS)),
    "OFT": with_adapter(peft.OFTConfig(r=4, oft_block_size=0, **TARGETS)),
    "BOFT": with_adapter(peft.BOFTConfig(boft_block_size=4, **TARGETS)),
    "bone": with_adapter(peft.MissConfig(r=4, **TARGETS)),
    "FourierFT": with_adapter(peft.FourierFTConfig(n_frequency=8, **TARGETS)),
    "layers that merge": with_layers(Merging, is_inert=False),
    "layers that get other data": with_layers(Replacing, is_inert=False),
    "4 bit, packed in evaluation": with_layers(Packing, is_inert=False),
    "4 bit in buffers": with_layers(FourBit),
    "8 bit with a state": with_layers(EightBit),
    "weights of a class of their own": with_layers(Subclass),
    "weight norm": weight_decayed,
    "moved weights": hooked,
    "a moving average": averaged,
    "frozen in evaluation mode": frozen_in_evaluation_mode,
    "layer norms": with_adapter(peft.LNTuningConfig(task_type="CAUSAL_LM")),
}

FOUND = {
    "Medusa": lambda folder: of(with_loss(medusa))(folder),
    "three tokens ahead": lambda folder: of(with_loss(three_ahead))(folder),
    "a mean for each document": lambda folder: of(with_loss(per_document))(folder),
    "unlikelihood of earlier tokens": lambda folder: of(with_loss(unlikelihood))(folder),
    "contrast of tokens": lambda folder: of(with_loss(contrast))(folder),
    "a sum for each row": lambda folder: of(with_loss(per_row))(folder),
    "the first row alone": lambda folder: of(with_loss(of_first_row))(folder),
    "weights of lengths": of(WeightsOfLength),
    "labels shifted twice": of(ShiftsTwice),
    "teacher in a closure": lambda folder: frozen_copy(folder, teacher_in_closure),
    "teacher of a class": lambda folder: frozen_copy(folder, teacher_of_class),
    "teacher of a callback": lambda folder: frozen_copy(folder, teacher_of_callback),
    "NEFTune": of(neftune_noise_alpha=5.0),
}

NOT_ISOLATED = {
    "delayed scaling": (
        with_layers(DelayedScaling),
        "depends on earlier batches; the difference begins in DelayedScaling",
    ),
    "one scale for a call": (with_layers(ScaleOfBatch), DIFFERS),
    "spectral norm": (with_layers(spectral), "depends on earlier batches"),
}


FAST = ("plain", "SFTTrainer", "experts with a router loss", "counts calls", "z-loss", "teacher of the trainer", "LoRA")


@pytest.mark.parametrize("name", fast_only([*RIGHT], *FAST))
def test_what_is_right_trains(name, tmp_path):
    trainer = RIGHT[name](tmp_path)
    hfp.attach(trainer, BUDGET)
    assert len(logged(trainer)) == 2
    report = trainer.attached.first_batch_proof.proofs["step: proven on the first training batch"]
    assert report.same
    assert report.documents >= 3
    assert report.parameters == sum(each.requires_grad for each in trainer.model.parameters()) > 0
    assert report.loss == pytest.approx(report.unpacked_loss, rel=1e-4)


@pytest.mark.parametrize(
    "name", fast_only([*FOUND], "Medusa", "a mean for each document", "teacher in a closure", "NEFTune")
)
def test_what_differs_is_found(name, tmp_path):
    trainer = FOUND[name](tmp_path)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    hfp.attach(trainer, hfp.TokenBudget(128, seed=1))
    with pytest.raises(hfp.PackingError, match=DIFFERS) as found:
        trainer.train()
    assert "; look for a loss that reads across documents" in str(found.value)
    assert trainer.state.global_step == 0
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert all(each.grad is None for each in trainer.model.parameters())


@pytest.mark.parametrize("loss", [medusa, *rarely([three_ahead])])
def test_losses_that_look_ahead_are_found_though_prompts_come_first(loss, tmp_path):
    """At the border of two documents, they read no label of a document that begins without labels."""
    draw, rows = torch.Generator().manual_seed(0), []
    for length in (20, 24, 28, 32, 36, 40):
        ids = torch.randint(8, 60, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    trainer = of(with_loss(loss))(tmp_path)
    trainer.train_dataset = datasets.Dataset.from_list(rows)
    hfp.attach(trainer, BUDGET)
    with pytest.raises(hfp.PackingError, match=DIFFERS):
        trainer.train()


PLACE, OF_DOCUMENT, MARK = 100, 30, 7


def up_to_a_place(logits, labels, inputs):
    return plain(logits, labels.masked_fill(torch.arange(labels.shape[1]) >= PLACE, -100), inputs)


def up_to_a_mark(logits, labels, inputs):
    return plain(logits, labels.masked_fill((inputs["input_ids"] == MARK).cumsum(1) > 0, -100), inputs)


def heavy_at_first(logits, labels, _):
    weights = torch.where(torch.arange(labels.shape[1] - 1) < PLACE, 1, 0.2) * (labels[:, 1:] != -100)
    return (losses_of(logits, labels) * weights).sum() / weights.sum()


def up_to_a_place_of_each_document(logits, labels, inputs):
    places = inputs.get("position_ids", torch.arange(labels.shape[1])[None])
    return plain(logits, labels.masked_fill(places >= OF_DOCUMENT, -100), inputs)


def with_long_documents(folder, loss, dtype=torch.float32):
    """Short documents, of which the proof makes a step, have no token at the place, and no mark."""
    draw, rows = torch.Generator().manual_seed(0), []
    for length in (4, 5, 6, 4, 60, 61, 62) * 2:
        ids = torch.randint(MARK + 1, 60, (length,), generator=draw)
        ids[length // 2] = MARK if length > OF_DOCUMENT else MARK + 1
        rows.append(ids.tolist())
    trainer = of(with_loss(loss))(folder)
    trainer.model.to(dtype)
    trainer.train_dataset = datasets.Dataset.from_dict({"input_ids": rows})
    return trainer


@pytest.mark.parametrize("loss", [up_to_a_place, up_to_a_mark, heavy_at_first])
def test_a_loss_by_places_that_short_documents_do_not_reach(loss, tmp_path):
    trainer = with_long_documents(tmp_path, loss)
    hfp.attach(trainer, hfp.TokenBudget(256, seed=1))
    with pytest.raises(hfp.PackingError, match="with the documents in the opposite order, so it depends on places in"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_by_places_in_each_document(dtype, tmp_path):
    trainer = with_long_documents(tmp_path, up_to_a_place_of_each_document, dtype)
    hfp.attach(trainer, hfp.TokenBudget(256, seed=1))
    assert len(logged(trainer)) == 2
    assert trainer.attached.first_batch_proof.proofs["step: proven on the first training batch"].same


TEACHERS = {
    "of a closure": teacher_in_closure,
    "of a class": teacher_of_class,
    "of a callback": teacher_of_callback,
    "an attribute of a callback": teacher_in_attribute_of_callback,
    "in a list": teacher_in_list,
}


@pytest.mark.parametrize("hold", fast_only(TEACHERS, "in a list"))
def test_a_teacher_that_is_not_patched_is_found(hold, tmp_path):
    """Whoever holds it."""
    trainer = frozen_copy(tmp_path, TEACHERS[hold])
    hfp.attach(trainer, BUDGET)
    with pytest.raises(hfp.PackingError, match=f"{DIFFERS}.* a model that reads packed rows but is not patched"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("hold", fast_only(TEACHERS, "in a list"))
def test_a_teacher_that_the_user_has_patched_trains(hold, tmp_path):
    def hold_patched(folder, model, teacher):
        return TEACHERS[hold](folder, model, hfp.patch_model(teacher, padded=True))

    trainer = frozen_copy(tmp_path, hold_patched, ("position_ids",))
    hfp.attach(trainer, BUDGET)
    assert len(logged(trainer)) == 2
    assert trainer.attached.first_batch_proof.proofs["step: proven on the first training batch"].same


def test_steps_that_rounding_changes_are_not_compared(tmp_path):
    """A fault cannot be told from rounding there. If gradients alone, or the loss alone, show it, it can."""

    def chaotic(logits, labels, inputs):
        return plain(logits, labels, inputs) * (2 + torch.sin(1e9 * logits.mean()))

    trainer = trainer_of(tmp_path, kind=with_loss(chaotic))
    hfp.attach(trainer, BUDGET)
    report = hfp.check_step(trainer)
    assert (report.same, report.compared, report.problem) == (False, False, "")
    assert re.search(r", whose loss changes by \d+% with rounding: loss", str(report))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_ISOLATED)
def test_what_documents_share_is_refused(name, tmp_path):
    make, reason = NOT_ISOLATED[name]
    trainer = make(tmp_path)

    def train():
        hfp.attach(trainer, BUDGET)
        trainer.train()

    with pytest.raises(hfp.PackingError, match=reason):
        train()
    assert trainer.state.global_step == 0


def test_an_adapter_that_reads_the_row_runs_by_segment(tmp_path):
    trainer = reading_adapter(tmp_path)
    hfp.attach(trainer, BUDGET)
    assert len(logged(trainer)) == 2


FAULTS = {}


def fault(function):
    FAULTS[function.__name__.replace("_", " ")] = function
    return function


def replaced(monkeypatch, owner, name, change):
    """Let a function be changed by another one, which gets it first."""
    before = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **named: change(before, *args, **named))


@fault
def labels_shifted_by_one(monkeypatch, _):
    def shifted(collate, *args):
        batch = collate(*args)
        return {**batch, "labels": batch["labels"].roll(1, 1)}

    replaced(monkeypatch, hfp.PackingCollator, "__call__", shifted)


@fault
def a_divisor_for_each_micro_batch(monkeypatch, _):
    replaced(monkeypatch, step_counts.StepCounts, "add", lambda add, *args: add(*args) // 2)


@fault
def a_loss_mask_lost(monkeypatch, _):
    replaced(monkeypatch, rows.SampledRows, "_with_labels", lambda _, __, row: {**row, "labels": row["input_ids"]})


@fault
def positions_off_by_one_in_a_document(monkeypatch, _):
    def moved(build, *args):
        inputs = build(*args)
        positions = inputs["position_ids"].clone()
        positions[:, : args[-1].lengths[0]] += 1
        return {**inputs, "position_ids": positions}

    replaced(monkeypatch, route.Method, "build", moved)


@fault
def a_layer_without_its_patch(_, trainer):
    layer = trainer.model.transformer.h[0].attn
    layer.config = copy.deepcopy(layer.config)
    layer.config._attn_implementation = "sdpa"


@fault
def a_gradient_that_is_detached(monkeypatch, _):
    def detached(packed_varlen, module, query, key, value, *args, **named):
        return packed_varlen(module, query, key.detach(), value, *args, **named)

    replaced(monkeypatch, function, "packed_varlen", detached)
    function.register()


@fault
def a_gradient_that_is_a_hundredth_larger(_, trainer):
    def scale(_, __, output):
        if len(output) == 1 and output.requires_grad:  # one row
            output.register_hook(lambda gradient: gradient * 1.01)

    trainer.model.transformer.h[0].mlp.register_forward_hook(scale)


@fault
def a_teacher_without_its_patch(_, trainer):
    hfp.unpatch_model(trainer.teacher)


OF_LABELS = "labels: expected those of the trainer's own collator"
SAID = {
    "labels shifted by one": OF_LABELS,
    "a loss mask lost": OF_LABELS,
    "a layer without its patch": "GPT2LMHeadModel: the first batch shows that packed documents are not isolated",
    "a gradient that is detached": "GPT2LMHeadModel: the first batch shows that packed documents are not isolated",
}


@pytest.mark.parametrize(
    "name",
    fast_only(FAULTS, "labels shifted by one", "positions off by one in a document", "a teacher without its patch"),
)
def test_planted_faults_are_found(name, tmp_path, monkeypatch):
    model = build("GPT2", n_layer=2)
    trainer = trainer_of(tmp_path, model=model)
    if name == "a teacher without its patch":
        trainer = frozen_copy(tmp_path, teacher_of_trainer)
    is_of_labels = SAID.get(name) == OF_LABELS  # which attach compares
    if not is_of_labels:
        hfp.attach(trainer, BUDGET)
    FAULTS[name](monkeypatch, trainer)
    with pytest.raises(hfp.PackingError) as found:
        hfp.attach(trainer, BUDGET) if is_of_labels else trainer.train()
    assert re.match(SAID.get(name, f"trainer: {DIFFERS}"), str(found.value)), found.value
    assert trainer.state.global_step == 0


def test_pairs_that_are_weighted_by_packs_are_found(tmp_path, monkeypatch):
    """As in a packed DPO whose loss is a mean over packs of means over the pairs of a pack: 1/2, 1/6, 1/6, 1/6."""
    trainer = rows_trainer_of("dpo", tmp_path, patched=True)
    hfp.attach(trainer, hfp.TokenBudget(140))
    counted = trainer.attached.source.counted

    def alike(checked):
        one = torch.tensor([1, 3])
        return [{**batch, "packed_counts": batch["packed_counts"].index_fill(0, one, 1)} for batch in counted(checked)]

    monkeypatch.setattr(trainer.attached.source, "counted", alike)
    with pytest.raises(hfp.PackingError, match=DIFFERS):
        trainer.train()


class Engine(nn.Module):
    """A wrapper that runs the backward pass itself."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **inputs):
        return self.module(**inputs)

    def backward(self, loss):
        raise AssertionError(loss)


@pytest.mark.parametrize(("wrap", "gradients"), [(lambda model: model, True), (Engine, False)])
def test_loops_compare_their_own_function(wrap, gradients):
    model = wrap(patched())
    batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 8]}, {"input_ids": [5, 9, 7]}])
    report = hfp.check_step(model, batch)
    assert report.same
    assert bool(report.parameters) == gradients
    for own, is_right in {plain: True, focal: True, medusa: False, per_document: False}.items():

        def loss(model, batch, own=own):
            inputs = {name: each for name, each in batch.items() if name != "labels"}
            return own(model(**inputs).logits, batch["labels"], inputs)

        assert hfp.check_step(model, batch, loss=loss).same is is_right
    assert all(each.grad is None for each in model.parameters())


def test_what_check_step_refuses(tmp_path):
    trainer = trainer_of(tmp_path)
    batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7, 8]}])
    for argument, call in (
        ("of", lambda: hfp.check_step(trainer)),
        ("of", lambda: hfp.check_step(None)),
        ("batch", lambda: hfp.check_step(patched())),
        ("model", lambda: hfp.check_step(build("Llama"), batch)),
    ):
        with pytest.raises(hfp.PackingError, match=f"^{argument}: "):
            call()
    hfp.attach(trainer, BUDGET)
    with pytest.raises(hfp.PackingError, match="^loss: "):
        hfp.check_step(trainer, loss=plain)
    with pytest.raises(hfp.PackingError, match="^batch: expected None for a trainer whose batches attach has planned"):
        hfp.check_step(trainer, batch)
    assert hfp.check_step(trainer).same


def test_a_module_that_is_replaced_in_the_training_is_refused(tmp_path):
    model, other = build("Llama"), build("Llama")

    class Replaces(TrainerCallback):
        def on_step_end(self, *_, **__):
            model.model.layers[1] = other.model.layers[1]

    trainer = trainer_of(tmp_path, model=model, callbacks=[Replaces()])
    hfp.attach(trainer, BUDGET)
    with pytest.raises(hfp.PackingError, match=r"^model\.layers\.1: expected the modules that were there"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_metrics_and_counts_of_a_trainer_are_those_of_its_own_steps(tmp_path):
    class Counts(SFTTrainer):
        seen = []  # noqa: RUF012

        def compute_loss(self, *given, **named):
            self.seen.append(0)
            self.calls = getattr(self, "calls", 0) + 1
            return super().compute_loss(*given, **named)

    logs = []
    for prove in ("first batch", "model"):
        trainer = trainer_of(tmp_path, Counts, build("Llama"))
        Counts.seen.clear()
        hfp.attach(trainer, BUDGET, prove=prove)
        trainer.train()
        assert trainer.calls == len(Counts.seen) == 2
        logs.append(
            [
                {n: v for n, v in entry.items() if "runtime" not in n and "per_second" not in n}
                for entry in trainer.state.log_history
            ]
        )
    assert logs[0] == logs[1]


class LearnsItsWeight(Trainer):
    """The weight of the loss is learned, and its mean is noted, by tensors that the trainer holds."""

    def compute_loss(self, *given, **named):
        loss = super().compute_loss(*given, **named)
        self.mean.mul_(0.5).add_(loss.detach(), alpha=0.5)
        return loss * torch.exp(-self.log_variance) + self.log_variance


@pytest.mark.parametrize("prove", ["first batch", "model"])
@pytest.mark.parametrize("shape", [(), (2**17,)])
def test_tensors_of_the_trainer_are_as_after_one_step(tmp_path, prove, shape):
    trainer = trainer_of(tmp_path, LearnsItsWeight, build("Llama"), max_steps=1)
    trainer.mean, trainer.log_variance = torch.zeros(shape), nn.Parameter(torch.zeros(()))
    hfp.attach(trainer, BUDGET, prove=prove)
    trainer.train()
    loss = trainer.state.log_history[0]["loss"]  # exp(0) and 0 leave it as it is
    assert float(trainer.mean.max()) == float(trainer.mean.min()) == pytest.approx(loss / 2, rel=1e-3)
    assert float(trainer.log_variance.grad) == pytest.approx(1 - loss, rel=1e-3)


class Rows(torch.utils.data.Dataset):
    """A dataset of your own, whose rows are computed."""

    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table)

    def __getitem__(self, number):
        return dict(self.table[number])


READ_AS = {
    "a table": lambda data: data,
    "rows that are computed": Rows,
    "a transform": lambda data: data.with_transform(dict),
    "a stream": lambda data: data.to_iterable_dataset(),
}


@pytest.mark.parametrize("read_as", READ_AS)
@pytest.mark.parametrize("where", ["train_dataset", "eval_dataset"])
def test_collators_that_make_other_labels_are_refused(read_as, where, tmp_path):
    """transformers' own collator trains on no pad token, also where it ends a text."""
    data = READ_AS[read_as](datasets.Dataset.from_dict({"input_ids": [[5, 6, 7, 2], [8, 9, 2], [5, 5, 6, 7, 2]] * 4}))
    other = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 4})
    words = tokenizer()
    words.pad_token = words.eos_token
    own = DataCollatorForLanguageModeling(words, mlm=False)
    for collator in (own, None):
        trainer = trainer_of(tmp_path, data=data if where == "train_dataset" else other, max_steps=1)
        trainer.eval_dataset = data if where == "eval_dataset" else None
        trainer.data_collator = collator or trainer.data_collator
        if collator:
            with pytest.raises(
                hfp.PackingError, match=f"^labels: expected .* from token . of row 0 of {where} on, got"
            ):
                hfp.attach(trainer, BUDGET)
        else:
            hfp.attach(trainer, BUDGET)


def test_collators_that_make_other_labels_of_cut_documents_are_refused(tmp_path):
    words = tokenizer()
    words.pad_token = words.eos_token
    trainer = trainer_of(tmp_path, data=datasets.Dataset.from_dict({"input_ids": [[5, 6, 7, 8, 9, 2], [8, 9, 2]] * 4}))
    trainer.data_collator = DataCollatorForLanguageModeling(words, mlm=False)
    with pytest.raises(hfp.PackingError, match="^labels: expected those of the trainer's own collator"):
        hfp.attach(trainer, hfp.TokenBudget(64, max_length=4, overflow="truncate"))


def masks_first_labels(inputs):
    labels = inputs["labels"].clone()
    labels[:, :3] = -100
    return {**inputs, "labels": labels}


class MasksInStep(Trainer):
    def training_step(self, model, inputs, *given, **named):
        return super().training_step(model, masks_first_labels(inputs), *given, **named)


class MasksInInputs(Trainer):
    def _prepare_inputs(self, inputs):
        return masks_first_labels(super()._prepare_inputs(inputs))


@pytest.mark.parametrize("kind", [MasksInStep, MasksInInputs])
def test_what_changes_inputs_before_the_loss_is_found(kind, tmp_path):
    trainer = of(kind)(tmp_path)
    hfp.attach(trainer, BUDGET)
    with pytest.raises(hfp.PackingError, match=DIFFERS):
        trainer.train()


class CountsSteps(Trainer):
    def training_step(self, *given, **named):
        self.counted = getattr(self, "counted", 0) + 1
        return super().training_step(*given, **named)


def test_a_training_step_of_your_own_trains(tmp_path):
    trainer = of(CountsSteps)(tmp_path)
    hfp.attach(trainer, BUDGET)
    assert len(logged(trainer)) == 2
    assert trainer.counted == 2


def masked_by_place(labels):
    return labels.masked_fill(torch.arange(labels.shape[1]) >= PLACE, -100)


def by_its_loss_function(model):
    own = model.loss_function
    model.loss_function = lambda logits, labels, *given, **named: own(logits, masked_by_place(labels), *given, **named)


def by_its_own_forward(model):
    own = model.forward

    def forward(self, *, labels=None, **named):  # noqa: ARG001
        return own(labels=None if labels is None else masked_by_place(labels), **named)

    model.forward = types.MethodType(forward, model)


def by_a_hook(model):
    def hook(_, given, named):
        return given, named | ({"labels": masked_by_place(named["labels"])} if "labels" in named else {})

    model.register_forward_pre_hook(hook, with_kwargs=True)


class MasksByPlace(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **named):
        return super().forward(input_ids, labels=None if labels is None else masked_by_place(labels), **named)


def by_its_class(model):
    model.__class__ = MasksByPlace


@pytest.mark.parametrize("change", [by_its_loss_function, by_its_own_forward, by_a_hook, by_its_class])
@pytest.mark.parametrize("is_loop", [False, True])
def test_places_in_code_of_the_model_are_found(change, is_loop, tmp_path):
    trainer, batching = with_long_documents(tmp_path, plain), hfp.TokenBudget(256, seed=1)
    change(trainer.model)

    def train():
        if is_loop:
            return next(iter(loop_of(trainer.model, trainer.train_dataset, batching)))
        attached = trainer_of(tmp_path, model=trainer.model, data=trainer.train_dataset)
        hfp.attach(attached, batching)
        return attached.train()

    with pytest.raises(hfp.PackingError, match="with the documents in the opposite order, so it depends on places in"):
        train()


def loop_of(model, data, batching):
    return hfp.prepare_dataloader(accelerate.Accelerator(cpu=True), data, batching, model=model)


def test_places_in_the_loss_of_an_evaluation_are_found(tmp_path):
    trainer = with_long_documents(tmp_path, up_to_a_place)
    hfp.attach(trainer, hfp.TokenBudget(256, seed=1))
    with pytest.raises(hfp.PackingError, match="with the documents in the opposite order, so it depends on places in"):
        trainer.evaluate(trainer.train_dataset)


def test_terms_of_an_evaluation_that_start_later_are_found(tmp_path):
    class Evaluates(StartsLater):
        def compute_loss(self, model, *given, **named):
            step = self.state.global_step
            self.state.global_step = 0 if model.training else step
            try:
                return super().compute_loss(model, *given, **named)
            finally:
                self.state.global_step = step

    trainer = of(Evaluates)(tmp_path)
    hfp.attach(trainer, BUDGET)
    trainer.evaluate(trainer.train_dataset)
    trainer.train()
    with pytest.raises(hfp.PackingError, match=DIFFERS):
        trainer.evaluate(trainer.train_dataset)


def test_terms_of_hooks_that_start_later_are_found_in_loops(tmp_path):
    trainer, steps = of()(tmp_path), []
    model = trainer.model

    def hook(_, __, outputs):
        if len(steps) > 1 and outputs.loss is not None:
            outputs.loss = outputs.loss + outputs.logits[:, 0].square().mean()
        return outputs

    model.register_forward_hook(hook)
    loader = loop_of(model, trainer.train_dataset, hfp.TokenBudget(64))

    def train():
        for batch in loader:
            hfp.compute_loss(model, batch).backward()
            model.zero_grad()
            steps.append(batch)

    with pytest.raises(hfp.PackingError, match=DIFFERS):
        train()
    assert len(steps) == 2


class StartsLater(OwnLoss):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.function = medusa if self.state.global_step else plain
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def test_terms_that_start_later_are_found(tmp_path):
    trainer = of(StartsLater)(tmp_path)
    hfp.attach(trainer, BUDGET)
    with pytest.raises(hfp.PackingError, match=DIFFERS):
        trainer.train()
    assert trainer.state.global_step == 1


def train_by_places(folder, _):
    """Only the second rank has documents that reach the place."""
    rank = int(os.environ["RANK"])
    trainer = with_long_documents(folder / str(rank), up_to_a_place)
    lengths = [4] * 24 if rank == 0 else [4, 5, 6, 4, 60, 61, 62]
    hfp.attach(trainer, hfp.TokenBudget(256, seed=1))
    case = trainer.step_case(trainer.model, None)
    rows = [{"input_ids": torch.arange(MARK + 1, MARK + 1 + length)} for length in lengths]
    case.documents = labels_of(hfp.PackingCollator()(rows)).documents()
    with in_mode(trainer.model, training=True):
        report = prove_step(case)
    (folder / f"{rank}.txt").write_text(report.problem)


@pytest.mark.slow
def test_ranks_make_the_same_calls_where_one_has_a_loss_by_places(tmp_path):
    on_ranks(train_by_places, tmp_path, None, ranks=2)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == ""
    assert "with the documents in the opposite order" in second
