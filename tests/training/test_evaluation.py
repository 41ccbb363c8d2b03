"""Evaluation is the mean over trainable tokens, whatever the batches."""

import math

import datasets
import pytest
import torch
from chunks import WHOLE, chunks_of
from patched_models import patched
from tiny_models import build
from trainers import documents, trainer_of
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp


def test_evaluation_with_nothing_to_evaluate(tmp_path):
    nothing = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[-100, -100]]})
    trainer = trainer_of(tmp_path)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert math.isnan(trainer.evaluate(nothing)["eval_loss"])


def as_stream(data):
    return data.to_iterable_dataset(num_shards=2)


WAYS = {
    "documents": lambda data: data,
    "packed": lambda data: hfp.pack(data, hfp.BestFit(64)),
    "lazy": lambda data: hfp.pack(data, hfp.BestFit(64), lazy=True),
    "trees": lambda data: hfp.pack(data, hfp.BestFit(64), share_prefixes=2),
    "stream": as_stream,
    "packed stream": lambda data: hfp.pack(as_stream(data), hfp.BestFit(64), streams=2),
    "stream of trees": lambda data: hfp.pack(as_stream(data), hfp.BestFit(64), streams=2, share_prefixes=2),
}


@pytest.mark.parametrize(("kind", "way"), [*((Trainer, way) for way in WAYS), (SFTTrainer, "documents")])
def test_evaluation_is_the_mean_over_tokens(tmp_path, kind, way):
    model, data = build("Llama", torch.float64), documents(4, samples=2)
    total, tokens = 0.0, 0
    for ids, labels in zip(data["input_ids"], data["labels"], strict=True):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum").item()
        tokens += int((wanted != -100).sum())
    trained = as_stream(data) if way == "stream" else data
    trainer = trainer_of(tmp_path, kind, model=patched("Llama", torch.float64, trees=True), data=trained)
    hfp.attach(trainer, hfp.TokenBudget(64))
    rows, found = WAYS[way](data), [trainer.evaluate(data)["eval_loss"]]
    for size in (1, 4):
        trainer.args.per_device_eval_batch_size = size
        found.append(trainer.evaluate(rows)["eval_loss"])
        if way != "stream":
            found.append(hfp.evaluation_loss(trainer.accelerator, trainer.model, rows, rows_per_batch=size))
    found += [] if "stream" in way else [trainer.predict(rows).metrics["test_loss"]]
    in_float32 = kind is SFTTrainer or "trees" in way  # TRL's fused head, and norms of tokens that are shared
    assert found == pytest.approx([total / tokens] * len(found), rel=1e-6 if in_float32 else 1e-12)
    assert max(found) - min(found) <= 1e-9 * max(found) or in_float32


def test_evaluation_of_several_datasets_and_with_metrics(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.eval_dataset = {"few": documents(3), "more": documents(9)}
    trainer.compute_metrics = lambda predicted: {"rows": len(predicted.label_ids)}
    hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.args.per_device_eval_batch_size = 2
    found = trainer.evaluate()
    assert (found["eval_few_rows"], found["eval_more_rows"]) == (2, 5)
    assert found["eval_few_loss"] == pytest.approx(trainer.evaluate(documents(3))["eval_loss"])


class WithLogits(Trainer):
    """Uses logits even where only the loss is asked for."""

    def prediction_step(self, model, inputs, prediction_loss_only, *_, **__):
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        assert outputs.logits.shape[:2] == inputs["labels"].shape
        return (loss, None, None) if prediction_loss_only else (loss, outputs.logits, inputs["labels"])


@pytest.mark.parametrize("kind", [Trainer, WithLogits])
def test_evaluation_in_chunks(tmp_path, kind):
    """Logits of a whole row are computed only where predictions or metrics read them."""
    data = documents(9)
    found = []
    for tokens in (5, WHOLE):
        trainer = trainer_of(tmp_path, kind, model=patched("Llama", torch.float64), data=data)
        hfp.attach(trainer, hfp.TokenBudget(64))
        with chunks_of(tokens, trainer.model) as chunks:
            found.append(trainer.evaluate(data)["eval_loss"])
            assert bool(chunks) == (tokens == 5)
            predicted = trainer.predict(data)
            assert predicted.predictions.shape[-1] == trainer.model.config.vocab_size
            found.append(hfp.evaluation_loss(trainer.accelerator, trainer.model, data, rows_per_batch=3))
            trainer.compute_metrics = lambda predicted: {"rows": len(predicted.label_ids)}
            found.append(trainer.evaluate(data)["eval_loss"])
    assert found == pytest.approx([found[0]] * 6, rel=1e-12)
