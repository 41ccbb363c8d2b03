"""Evaluations, and figures that Trainer and TRL derive themselves: those of the documents, whatever the batches."""

import copy
import json
import math
import os

import datasets
import numpy as np
import pytest
import torch
from chunks import WHOLE, chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched
from processes import on_ranks
from tiny_models import build
from torch.nn import functional as F
from trainers import attached, documents, documents_in, on_each_batch, tokenizer, trainer_of
from transformers import Trainer
from trl import SFTTrainer
from whole_rows import bert

import hf_packing as hfp
from hf_packing.sampling.evaluation import InOrder
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of
from hf_packing.training.step_counts import Predictions, StepCounts, micro_batch_counts

SHAPES = {"tokens": 96, "max_segments": 24}
NUMBER = 45


def ending_with_eos(number=NUMBER):
    rows = [[*row[:-1], 0] for row in documents(number)["input_ids"]]
    return datasets.Dataset.from_dict({"input_ids": rows})


def tokens_in(data):
    return sum(map(len, data["input_ids"]))


def attached_with_tokenizer(folder, shapes=None, data=None, **changes):
    trainer = attached(folder, how=shapes, data=ending_with_eos() if data is None else data, **changes)
    trainer.processing_class = tokenizer()
    assert trainer.processing_class.pad_token_id == 0
    return trainer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shapes", [{}, SHAPES])
def test_copies_of_rows_count_as_nothing(shapes, packed):
    """Of three rows, the second of two ranks runs a copy beside the last one."""
    data = hfp.pack(ending_with_eos(12), hfp.BestFit(64, seed=0)).select(range(3)) if packed else ending_with_eos(3)
    sizes, collate = sizes_of(data), hfp.PackingCollator(**shapes)
    counts = []
    for rank in range(2):
        rows = SampledRows(data, RankBatchSampler(InOrder(1), sizes, 2, rank))
        counts += [micro_batch_counts([collate(rows.__getitems__(each))], "token")[0].tolist() for each in rows.sampler]
    assert counts.pop() == [0, 0, 0, 0]
    assert sum(tokens for tokens, *_ in counts) == tokens_in(data)
    segments = [len(row["seq_lengths"]) for row in data] if packed else [1, 1, 1]
    assert sum(found for _, found, *_ in counts) == sum(segments)


@pytest.mark.parametrize(("steps", "shapes"), [(3, SHAPES), (11, {})])
def test_samples_per_second_count_documents(tmp_path, steps, shapes):
    trainer = attached_with_tokenizer(tmp_path, shapes, max_steps=steps, logging_steps=2)
    trained = []
    on_each_batch(trainer, lambda batch: trained.append(sum(ids[-1:] == [0] for ids in documents_in(batch))))
    metrics = trainer.train().metrics
    filled = steps if shapes else 0  # the segment that fills a batch repeats its first token, which is not 0
    assert sum(trained) > 2 * steps > filled
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(sum(trained), rel=1e-2)
    assert trainer.state.log_history[-1]["train_samples_per_second"] == metrics["train_samples_per_second"]


def test_a_second_training_counts_its_own_documents(tmp_path):
    trainer = attached_with_tokenizer(tmp_path, max_steps=-1, num_train_epochs=1)
    for _ in range(2):
        metrics = trainer.train().metrics
        assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(NUMBER, rel=1e-2)


def test_speed_of_an_evaluation(tmp_path):
    trainer = attached_with_tokenizer(tmp_path, SHAPES, per_device_eval_batch_size=4)
    packed = hfp.pack(ending_with_eos(), hfp.BestFit(48))
    for data, number in ((ending_with_eos(23), 23), (packed, NUMBER)):
        for metrics, name in (
            (trainer.evaluate(data), "eval"),
            (trainer.evaluate(data, metric_key_prefix="eval_other"), "eval_other"),
            (trainer.predict(data).metrics, "test"),
        ):
            seconds = metrics[f"{name}_runtime"]
            assert metrics[f"{name}_samples_per_second"] * seconds == pytest.approx(number, rel=2e-2)
            assert metrics[f"{name}_steps_per_second"] * seconds == pytest.approx(math.ceil(number / 4), rel=2e-2)


def test_gathered_results_of_copies_are_left_out():
    """Of three ranks with two results each, the second and the third run copies; some trainers gather objects."""

    class Ranks:
        gather = staticmethod(lambda _: torch.tensor([3, 0, 0]))

    predictions = Predictions(Ranks)
    predictions.begin(hfp.PackingCollator()([{"input_ids": [1, 2]}]))
    assert predictions.documents == 3
    results = torch.arange(6)
    for gather in (lambda _: (results, {"more": results[:, None]}), lambda _: list(results)):
        found = predictions.gathered(gather, results)
        if isinstance(found, tuple):
            assert found[1]["more"].tolist() == [[0], [1]]
            found = list(found[0])
        assert [int(each) for each in found] == [0, 1]


def report(folder, rows):
    data, seen = documents(23), []

    def metrics(predicted):
        seen.append([len(predicted.predictions), *(int((row != -100).sum()) for row in predicted.label_ids)])
        return {}

    micro_batches = 2 // int(os.environ.get("WORLD_SIZE", "1"))
    known = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": micro_batches}
    known |= {"per_device_eval_batch_size": rows}
    trainer = attached_with_tokenizer(folder / "trainer", data=data, **known)
    trainer.compute_metrics = metrics
    speed = trainer.train().metrics
    loss, predicted = trainer.evaluate(data)["eval_loss"], trainer.predict(data)
    facts = {
        "labels": [row[row != -100].tolist() for row in predicted.label_ids],
        "loss": loss,
        "seen_by_metrics": seen,
        "documents": round(predicted.metrics["test_samples_per_second"] * predicted.metrics["test_runtime"]),
        "trained_documents": speed["train_samples_per_second"] * speed["train_runtime"],
    }
    (folder / f"facts-{trainer.args.process_index}.json").write_text(json.dumps(facts))
    assert len(predicted.predictions) == len(facts["labels"])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_predictions_of_two_ranks_have_no_copies(tmp_path, rows):
    """23 rows: rank 1 lacks the last one, and runs a copy in its place."""
    found = []
    for ranks in (1, 2):
        on_ranks(report, tmp_path / str(ranks), rows, ranks=ranks)
        found += [json.loads((tmp_path / str(ranks) / f"facts-{rank}.json").read_text()) for rank in range(ranks)]
    one, two, other = found
    assert two["labels"] == other["labels"]
    assert two["labels"] == one["labels"]
    assert len(one["labels"]) == -(-23 // rows)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["seen_by_metrics"] == one["seen_by_metrics"]
    for facts in found:
        assert facts["documents"] == 23
        assert facts["trained_documents"] == pytest.approx(2 * 23, rel=1e-2)


def test_evaluation_with_nothing_to_evaluate(tmp_path):
    nothing = datasets.Dataset.from_dict({"input_ids": [[5, 6]], "labels": [[-100, -100]]})
    trainer = attached(tmp_path)
    assert math.isnan(trainer.evaluate(nothing)["eval_loss"])


def test_an_evaluation_that_fails_leaves_the_trainer_as_it_was(tmp_path):
    trainer = attached(tmp_path)
    before = trainer.gather_function, trainer.args.per_device_eval_batch_size
    trainer.prediction_step = lambda *_, **__: {}[0]
    with pytest.raises(KeyError):
        trainer.evaluate(documents(3))
    assert (trainer.gather_function, trainer.args.per_device_eval_batch_size) == before


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
    trainer = attached(tmp_path, kind=kind, model=patched("Llama", torch.float64, trees=True), data=trained)
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
        trainer = attached(tmp_path, kind=kind, model=patched("Llama", torch.float64), data=data)
        with chunks_of(tokens, trainer.model) as chunks:
            found.append(trainer.evaluate(data)["eval_loss"])
            assert bool(chunks) == (tokens == 5)
            predicted = trainer.predict(data)
            assert predicted.predictions.shape[-1] == trainer.model.config.vocab_size
            found.append(hfp.evaluation_loss(trainer.accelerator, trainer.model, data, rows_per_batch=3))
            trainer.compute_metrics = lambda predicted: {"rows": len(predicted.label_ids)}
            found.append(trainer.evaluate(data)["eval_loss"])
    assert found == pytest.approx([found[0]] * 6, rel=1e-12)


def test_a_token_classifiers_own_loss():
    """Of a packed batch, it is the mean over the labels of the documents, the first ones too."""
    stock = bert("TokenClassification", num_labels=3).eval()
    model = hfp.patch_model(copy.deepcopy(stock))
    rows = [{"input_ids": [5, 6, 3], "labels": [2, -100, 1]}, {"input_ids": [9, 12, 7, 8], "labels": [0, 0, 2, -100]}]
    alone = [
        F.cross_entropy(stock(torch.tensor([row["input_ids"]])).logits[0], torch.tensor(row["labels"]), reduction="sum")
        for row in rows
    ]
    found = model(**hfp.PackingCollator(keep_first_labels=True)(rows)).loss
    assert float(found.detach()) == pytest.approx(float(sum(alone).detach()) / 5, rel=1e-12)
    without_first = model(**hfp.PackingCollator()(rows)).loss
    assert abs(float(without_first.detach()) - float(found.detach())) > 1e-3


@settings(max_examples=30)
@given(st.lists(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=2), min_size=1))
def test_facts_of_steps_on_two_ranks(steps):
    seen = StepCounts()
    for ranks in steps:
        batches = [hfp.PackingCollator()([{"input_ids": [5] * length} for length in lengths]) for lengths in ranks]
        seen.add(torch.stack([micro_batch_counts([batch], "token") for batch in batches]))
    found = seen.take(50)
    tokens = [[sum(lengths) for lengths in ranks] for ranks in steps]
    squares = [[sum(n * n for n in lengths) for lengths in ranks] for ranks in steps]
    assert found["packing_efficiency"] == pytest.approx(np.mean(tokens) / 50)
    assert found["documents_per_step"] == pytest.approx(sum(len(own) for ranks in steps for own in ranks) / len(steps))
    assert found["tokens_per_step"] == pytest.approx(np.sum(tokens) / len(steps))
    assert found["token_utilization"] == pytest.approx(np.mean([np.mean(step) / max(step) for step in tokens]))
    assert found["attention_utilization"] == pytest.approx(np.mean([np.mean(step) / max(step) for step in squares]))
    assert seen.take(50) == {}
