"""With a length_schedule, documents are cut to a length that grows with the steps; losses are those of the pieces."""

from functools import cache
from itertools import pairwise

import datasets
import pytest
import torch
from accelerate import Accelerator
from padded_models import documents as random_documents
from patched_models import patched
from tiers import fast_only
from tiny_models import build
from trainers import attached, loader_of, trainer_of
from training_by_hand import gradients_of, largest_difference
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

import hf_packing as hfp

LONGEST = 32
SCHEDULE = hfp.LengthSchedule(4, steps=4)
BUDGET = hfp.TokenBudget(LONGEST, length_schedule=SCHEDULE)
LENGTHS = [30, 12, 9, 25, 7, 18, 32, 14, 3, 21, 17, 26]


def documents():
    return datasets.Dataset.from_dict({"input_ids": random_documents(lengths=LENGTHS)})


class Seen(TrainerCallback):
    def __init__(self, model):
        self.model, self.step, self.batches, self.loss, self.gradient = model, 0, {}, {}, {}
        model.register_forward_pre_hook(self.before, with_kwargs=True)

    def before(self, _, __, inputs):
        if self.model.training and torch.is_grad_enabled() and "cu_seq_lens_q" in inputs:
            self.batches.setdefault(self.step, []).append(
                {name: inputs[name].clone() for name in ("input_ids", "cu_seq_lens_q", "position_ids")}
            )

    def on_pre_optimizer_step(self, *_, **__):
        self.step_ends()

    def step_ends(self):
        self.gradient[self.step] = gradients_of(self.model)
        self.step += 1


@cache
def stock():
    return build("Llama", torch.float64)


def by_hand(batches, borders_of_documents):
    """The gradient of the mean loss over a step's pieces, each run alone; the last token of a piece predicts the next
    piece's first one if both are of one document."""
    model, total, tokens = stock(), 0.0, 0
    for batch in batches:
        ids, borders = batch["input_ids"][0], batch["cu_seq_lens_q"].tolist()
        logits = torch.cat([model(ids[None, a:b]).logits[0] for a, b in pairwise(borders)])
        labels = ids.clone()
        labels[borders_of_documents(ids)] = -100
        total += torch.nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        tokens += int((labels[1:] != -100).sum())
    model.zero_grad()
    (total / tokens).backward()
    return gradients_of(model)


def begins(rows):
    known = {tuple(row[:3]) for row in rows["input_ids"]}
    assert len(known) == len(rows)
    return lambda ids: [at for at in range(len(ids)) if tuple(ids[at : at + 3].tolist()) in known]


def train(through, folder):
    rows, model = documents(), patched("Llama", torch.float64)
    seen = Seen(model)
    settings = {"num_train_epochs": 2, "max_steps": -1, "learning_rate": 0.0, "gradient_accumulation_steps": 2}
    if through == "loop":
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        loader = hfp.prepare_dataloader(accelerator, rows, BUDGET, model=model, prove="model")
        seen.batches.clear()
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(hfp.compute_loss(model, batch))
                    if accelerator.sync_gradients:
                        seen.step_ends()
                        model.zero_grad()
        assert loader.optimizer_steps == seen.step
        return rows, seen
    kind = Trainer if through == "trainer" else SFTTrainer
    trainer = trainer_of(folder, kind, model, rows, **settings, max_grad_norm=0.0)
    summary = hfp.attach(trainer, BUDGET, prove="model")
    assert "length of segments: 4 tokens in the first step, whole documents after 4 steps" in str(summary)
    seen.batches.clear()
    trainer.add_callback(seen)
    trainer.train()
    return rows, seen


@pytest.mark.usefixtures("exact_log_probs")
@pytest.mark.parametrize("through", fast_only(["trainer", "sft", "loop"], "sft", "loop"))
def test_the_gradient_is_that_of_the_pieces(through, tmp_path):
    rows, seen = train(through, tmp_path)
    begin_of = begins(rows)
    assert seen.step > SCHEDULE.steps
    for step, batches in seen.batches.items():
        limit = SCHEDULE.length_at(step, LONGEST) or LONGEST
        for batch in batches:
            ids, borders = batch["input_ids"][0], batch["cu_seq_lens_q"].tolist()
            starts = [*begin_of(ids), len(ids)]
            assert borders == sorted({at for a, b in pairwise(starts) for at in range(a, b, limit)} | {len(ids)})
        assert largest_difference(seen.gradient[step], by_hand(batches, begin_of)) <= 1e-12
    assert len({len(batches) for batches in seen.batches.values()} - {1}) == 1


def test_a_resumed_loop_goes_on_with_its_length():
    def longest(batches):
        return [batch["max_length_q"] for batch in batches]

    whole, stopped, resumed, jumped = (loader_of(documents(), BUDGET, accumulation=2) for _ in range(4))
    expected = longest(whole) + longest(whole)
    batches = iter(stopped)
    for _ in range(4):
        next(batches)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.optimizer_steps == 2
    assert longest(resumed) + longest(resumed) == expected[4:]
    jumped.set_epoch(1)
    assert longest(jumped) == expected[len(whole) :]


@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_isolation_is_proven_on_whole_documents(through, tmp_path):
    rows, model = documents(), build("Llama", torch.float64)
    if through == "trainer":
        trainer = attached(tmp_path, BUDGET, model=model, data=rows, max_steps=1)
        trainer.train()
        proof = trainer.attached.first_batch_proof
    else:
        loader = loader_of(rows, BUDGET, model=model)
        assert next(iter(loader))["max_length_q"] == SCHEDULE.start
        proof = loader.first_batch_proof
    (proven,) = proof.proofs.values()
    assert proven.longest > SCHEDULE.start


def test_evaluation_does_not_cut(tmp_path):
    model, rows = patched("Llama", torch.float64), documents()
    trainers = [attached(tmp_path, each, model=model, data=rows) for each in (BUDGET, hfp.TokenBudget(LONGEST))]
    assert len({trainer.evaluate(rows)["eval_loss"] for trainer in trainers}) == 1
