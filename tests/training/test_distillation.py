"""Trainers of TRL that distill a teacher: attach(trainer, None) leaves losses and gradients as they are, unpadded."""

import copy
from importlib import import_module

import datasets
import pytest
import torch
import trl
from tiers import slow
from trainers import tokenizer
from training_by_hand import gradients_of, largest_difference
from whole_rows import arguments, llama, texts

import hf_packing as hfp
from hf_packing.attention import is_patched

pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATE = (
    "{% for message in messages %}{{ 'w3 ' if message.role == 'user' else 'w4 ' }}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)
WITH_TEACHER, TEACHES_ITSELF = ["model", "teacher_model"], {"num_generations": 4, "max_completion_length": 8}


def rows(number=12):
    return texts(number, seed=4, prompt=9, completion=6, privileged_context=5)


def chats():
    turns = [[("user", row["prompt"]), ("assistant", row["completion"])] for row in rows()]
    return datasets.Dataset.from_list(
        [{"messages": [{"role": role, "content": content} for role, content in each]} for each in turns]
    )


def of_trl(name, module):
    """A trainer and its arguments, in TRL itself or in its experiments; skipped where TRL has none."""
    try:
        found = trl if module is None else import_module(f"trl.experimental.{module}")
        return getattr(found, f"{name}Trainer"), getattr(found, f"{name}Config")
    except (ImportError, AttributeError):
        pytest.skip(f"no {name}Trainer in TRL")


def trainer_of(name, module, data, with_teacher, folder, **options):
    kind, config = of_trl(name, module)
    words = tokenizer(chat_template=TEMPLATE, padding_side="left")
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = llama("CausalLM", torch.float64)
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
        model.save_pretrained(folder / f"model-{seed}")  # from which some trainers load another copy
        model.name_or_path = model.config._name_or_path = str(folder / f"model-{seed}")
        models.append(model)
        words.save_pretrained(folder / f"model-{seed}")
    args = arguments(folder, config, per_device_train_batch_size=4, **options)
    given = {"teacher_model": models[1]} if with_teacher else {}
    if name == "SDPO":
        given["reward_funcs"] = lambda completions, **_: [float(len(each) % 2) for each in completions]
    return kind(models[0], args=args, train_dataset=data, processing_class=words, **given)


class SeenError(Exception):
    """Ends a training at its first loss."""


def first_inputs(trainer):
    """What the trainer computes its first loss of, after sampling."""
    seen = []

    def note(_, inputs, *others, **named):
        seen.append((inputs, others, named))
        raise SeenError

    trainer.compute_loss = note
    with pytest.raises(SeenError):
        trainer.train()
    del trainer.compute_loss
    return seen[0]


def step(trainer, compute_loss, seen):
    inputs, others, named = seen
    model = trainer.model_wrapped
    model.train().zero_grad()
    loss = compute_loss(trainer, model, copy.copy(inputs), *others, **named)
    loss.backward()
    return loss.item(), gradients_of(trainer.model)


RUNS = {
    "Distillation": ("Distillation", None, rows, True, {"max_completion_length": 9, "beta": 0.5}),
    "Distillation, forward": ("Distillation", None, rows, True, {"max_completion_length": 9, "beta": 0.0}),
    "GKD": ("GKD", "gkd", chats, True, {"max_new_tokens": 8, "max_length": 64}),
    "IWOPD": ("IWOPD", "iw_opd", chats, True, {"max_completion_length": 8}),
    "SDFT": ("SDFT", "sdft", rows, False, TEACHES_ITSELF),
    "SDPO": ("SDPO", "sdpo", rows, False, TEACHES_ITSELF),
}


@pytest.mark.parametrize("run", ["Distillation", *map(slow, [name for name in RUNS if name != "Distillation"])])
def test_losses_and_gradients_are_those_of_the_trainer(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    name, module, data, with_teacher, options = RUNS[run]
    trainer = trainer_of(name, module, data(), with_teacher, tmp_path, **options)
    own, seen = type(trainer).compute_loss, first_inputs(trainer)
    expected, gradients = step(trainer, own, seen)
    unpadded = hfp.attach(trainer, None)
    assert list(unpadded.models) == WITH_TEACHER
    assert all("its tokens run as one packed row" in line for line in str(unpadded).splitlines())
    loss, found = step(trainer, own, seen)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert largest_difference(found, gradients) <= 1e-6  # TRL computes the divergence in float32
    trainer.train()
    said = capsys.readouterr().out
    assert "step: proven on the first training batch: 4 documents of " in said
    assert "of 0 tokens" not in said
    assert len([entry for entry in trainer.state.log_history if "loss" in entry]) == 3


@pytest.mark.parametrize("run", ["Distillation", slow("GKD"), slow("IWOPD")])
def test_a_batching_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    name, module, data, with_teacher, options = RUNS[run]
    trainer = trainer_of(name, module, data(), with_teacher, tmp_path, **options)
    said = rf"got {name}Trainer, .*attach\(trainer, None\) keeps its batches"
    with pytest.raises(hfp.PackingError, match=said):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert not is_patched(trainer.model)
