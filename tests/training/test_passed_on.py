"""Columns with one number for each token, such as weights: from the dataset to the model or to compute_loss."""

import copy

import datasets
import numpy as np
import pytest
import torch
from patched_models import patched, patched_once
from tiers import fast_only
from tiny_models import build
from torch.nn import functional as F
from trainers import Gradients, Plain, attached, loader_of, logged, trainer_of
from training_by_hand import gradients_of, largest_difference
from transformers import LlamaForCausalLM, Trainer

import hf_packing as hfp

BUDGET = hfp.TokenBudget(64)
TAKES_ALL = {"remove_unused_columns": False}


def columns_of(rows):
    """Numbers that follow from the tokens, so that every batch can be checked alone."""
    return {
        "input_ids": rows,
        "weights": [[token / 100 for token in row] for row in rows],
        "kinds": [[token % 7 for token in row] for row in rows],
        "marked": [[token % 2 == 0 for token in row] for row in rows],
    }


def weighted(**changes):
    rng = np.random.default_rng(3)
    columns = columns_of([rng.integers(3, 99, size).tolist() for size in rng.integers(2, 20, 30)])
    return datasets.Dataset.from_dict(columns | changes)


def with_more():
    rows = weighted()["input_ids"]
    return weighted(text=["text"] * 30, pairs=[[[token, 1] for token in row] for row in rows])


def check(batch):
    """Every value is that of its token, in the dtype that models take, and 0 where tokens fill a batch."""
    tokens = batch["input_ids"]
    own = batch["seq_idx"] >= 0 if "seq_idx" in batch else torch.ones_like(tokens, dtype=torch.bool)
    zero = torch.zeros_like(tokens)
    assert torch.allclose(batch["weights"], torch.where(own, tokens / 100, zero.float()))
    assert torch.equal(batch["kinds"], torch.where(own, tokens % 7, zero))
    assert torch.equal(batch["marked"], torch.where(own, tokens % 2 == 0, zero.bool()))
    assert [batch[name].dtype for name in ("weights", "kinds", "marked")] == [torch.float32, torch.int64, torch.bool]
    assert not {"text", "pairs"} & set(batch)


class Checked(Trainer):
    filled, seen = 0, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if hasattr(self, "attached"):
            check(inputs)
            self.seen += 1
            self.filled += int((inputs["seq_idx"] < 0).any())
        given = {name: inputs[name] for name in inputs if name not in ("weights", "kinds", "marked")}
        outputs = model(**given)
        labels = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
        losses = F.cross_entropy(outputs.logits[0], labels[0], reduction="none")
        weights = inputs.get("weights", torch.ones(1, len(losses)))[0].to(losses)
        loss = losses @ weights / (1 if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.filterwarnings("ignore:pack leaves out columns without one number")
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(kind, {}) for kind in ("packed", "lazy", "transform", "plain", "stream")]
    + [(kind, {"tokens": 80, "max_segments": 40}) for kind in ("documents", "packed stream")],
)
def test_compute_loss_gets_them(tmp_path, kind, shapes):
    few = hfp.BestFit(32, max_documents=19)
    make = {
        "documents": lambda data: data,
        "packed": lambda data: hfp.pack(data, hfp.BestFit(32)),
        "lazy": lambda _: hfp.pack(datasets.load_from_disk(tmp_path / "saved"), hfp.BestFit(32), lazy=True),
        "transform": lambda data: data.with_transform(lambda batch: batch),
        "plain": lambda data: Plain(data.to_list()),
        "stream": lambda data: data.to_iterable_dataset(),
        "packed stream": lambda data: hfp.pack(data.to_iterable_dataset(), few, streams=1),
    }
    weighted().save_to_disk(tmp_path / "saved")
    data = make[kind](with_more())
    trainer = attached(tmp_path, BUDGET, shapes, kind=Checked, data=data, **TAKES_ALL)
    assert min(logged(trainer)) > 0
    trained = trainer.seen
    assert (trainer.filled > 0) == bool(shapes)
    if "stream" not in kind:
        trainer.evaluate(data)
        assert trainer.seen > trained >= 2


class Weighted(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, weights=None, num_items_in_batch=None, **others):
        outputs = super().forward(input_ids, labels=None, **others)
        if labels is not None:
            targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
            losses = F.cross_entropy(outputs.logits[0], targets[0], reduction="none")
            self.seen.append(weights)
            weights = torch.ones_like(labels) if weights is None else weights
            outputs.loss = (losses @ weights[0].to(losses)) / (num_items_in_batch or (targets != -100).sum())
        return outputs


def with_weights():
    model = build("Llama")
    model.__class__, model.seen = Weighted, []
    return model


def with_weights_proven():
    return copy.deepcopy(patched_once(with_weights, trees=False))


@pytest.mark.parametrize(
    ("make", "left"), [(with_weights_proven, "kinds, marked"), (patched, "kinds, marked, weights")]
)
def test_the_model_gets_what_its_forward_takes(tmp_path, make, left):
    """As Trainer does it by default. Others are left out and named."""
    trainer = trainer_of(tmp_path, data=weighted(), model=make())
    with pytest.warns(UserWarning, match=f"attach leaves out the columns {left}, since no argument"):
        hfp.attach(trainer, BUDGET)
    with pytest.warns(UserWarning, match=f"prepare_dataloader leaves out the columns {left}, since"):
        loader = loader_of(weighted(), model=make())
    for batch in (*trainer.get_train_dataloader(), *loader):
        assert not set(left.split(", ")) & set(batch)
        if make is with_weights_proven:
            assert torch.allclose(batch["weights"], batch["input_ids"] / 100)


def test_shared_prefixes(tmp_path):
    """A prefix is shared only where weights are equal, too."""
    prompt = list(range(10, 40))
    rows = [[*prompt, *range(50 + number, 60 + number)] for number in range(6)]
    data = datasets.Dataset.from_dict(columns_of(rows))
    for each, share in ((data, True), (hfp.pack(data, hfp.BestFit(128), share_prefixes=True), False)):
        trainer = trainer_of(tmp_path, data=each, model=patched(trees=True), **TAKES_ALL)
        summary = hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=share))
        assert summary.trees.shared_ratio > 2
        for batch in trainer.get_train_dataloader():
            check(batch)


@pytest.mark.parametrize("changed", [{"weights": [[1.0]] * 30}, {"vector": [[0.5] * 3] * 30}])
def test_another_number_of_values_is_refused(tmp_path, changed):
    data = weighted(**changed)
    name = next(iter(changed))
    with pytest.raises(hfp.PackingError, match=f"column '{name}': expected"):
        hfp.PackingCollator()([dict(row) for row in data])
    for each in (data, Plain(data.to_list())):
        with pytest.raises(hfp.PackingError, match=f"column '{name}': expected"):
            attached(tmp_path, data=each, **TAKES_ALL).train()


def test_an_own_loop_with_the_collator():
    packed = hfp.pack(weighted(), hfp.BestFit(32))
    for form in (None, "numpy", "torch"):
        loader = torch.utils.data.DataLoader(packed.with_format(form), batch_size=2, collate_fn=hfp.PackingCollator())
        for batch in loader:
            check(batch)


@pytest.mark.filterwarnings("ignore:attach leaves out the columns")
@pytest.mark.parametrize("accumulation", fast_only([1, 3], 3))
def test_a_weighted_gradient_is_that_of_the_documents(tmp_path, accumulation):
    data, model, seen = weighted(), patched(dtype=torch.float64), Gradients()
    step = {"max_steps": 1, "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.0, **TAKES_ALL}
    trainer = trainer_of(tmp_path, Checked, model=model, data=data, callbacks=[seen], **step)
    summary = hfp.attach(trainer, hfp.TokenBudget(400), match_documents_per_step=len(data))
    assert (summary.optimizer_steps, summary.num_micro_batches) == (1, accumulation)
    alone = build("Llama", torch.float64)
    alone.load_state_dict(model.state_dict())
    labels = sum(len(row) - 1 for row in data["input_ids"])
    for row in data["input_ids"]:
        tokens = torch.tensor([row])
        losses = F.cross_entropy(alone(tokens, use_cache=False).logits[0, :-1], tokens[0, 1:], reduction="none")
        (losses @ (tokens[0, :-1] / 100).to(losses) / labels).backward()
    trainer.train()
    assert trainer.seen == accumulation
    assert largest_difference(seen.gradients, gradients_of(alone)) <= 1e-7
