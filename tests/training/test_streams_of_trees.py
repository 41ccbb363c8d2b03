"""Training on streams whose documents share prefixes; test_elastic_streams has several processes and resumed runs."""

import warnings

import datasets
import pytest
import torch
from accelerate import Accelerator
from patched_models import patched
from trainers import trainer_of
from training_process import documents, segments
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning"),  # TRL uses names that transformers has renamed
    pytest.mark.filterwarnings("ignore:pack applies:UserWarning"),
    pytest.mark.filterwarnings("ignore:pack shares fewer:UserWarning"),
]

DATA = documents(12, samples=3)
RAW = sum(map(len, DATA["input_ids"]))


def stream(shards=2):
    return DATA.to_iterable_dataset(num_shards=shards)


def packed(streams=2):
    return hfp.pack(stream(), hfp.BestFit(96), share_prefixes=2, streams=streams, window_packs=4)


def epoch_of(data, budget, loss="token"):
    """The batches of an epoch in a loop, and the gradients of all of them in float64."""
    model = patched("GPT2", torch.float64, trees=True)
    batches = list(hfp.prepare_dataloader(Accelerator(cpu=True), data, budget, loss=loss))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(batches))
    for batch in hfp.prepare_dataloader(accelerator, data, budget, loss=loss, model=model):
        accelerator.backward(hfp.compute_loss(model, batch))
    return batches, {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_an_epoch_is_that_of_the_documents_alone(loss):
    _, expected = epoch_of(DATA, hfp.TokenBudget(8192), loss)
    largest = max(float(each.abs().max()) for each in expected.values())
    for data, budget in (
        (stream(shards=1), hfp.TokenBudget(96, share_prefixes=2)),
        (packed(streams=1), hfp.TokenBudget(96)),
        (packed(streams=1), hfp.TokenBudget(200)),  # two rows in a batch
    ):
        batches, found = epoch_of(data, budget, loss)
        assert sorted(ids for batch in batches for ids, _ in segments(batch)) == sorted(DATA["input_ids"])
        assert sum(batch["input_ids"].shape[1] for batch in batches) < 0.7 * RAW
        for name, each in expected.items():
            assert float((found[name] - each).abs().max()) <= 1e-12 * largest


@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
def test_a_trainer_trains_on_the_rows_of_the_stream(tmp_path, kind):
    rows = list(packed())
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}} if kind is SFTTrainer else {}
    trainer = trainer_of(tmp_path, kind, patched("Llama"), packed(), max_steps=len(rows), **options)
    trainer.eval_dataset = packed()
    summary = hfp.attach(trainer, hfp.TokenBudget(96))
    assert "share_prefixes=2" in str(summary)
    expected = hfp.evaluation_loss(trainer.accelerator, trainer.model, DATA)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert hfp.evaluation_loss(trainer.accelerator, trainer.model, packed()) == pytest.approx(expected, rel=1e-6)
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(tuple(inputs["input_ids"][0].tolist())), with_kwargs=True
    )
    trainer.train()
    assert [each["loss"] > 0 for each in trainer.state.log_history if "loss" in each] == [True] * len(rows)
    expected = [tuple(row["tree_input_ids"]) for row in rows]
    assert list(dict.fromkeys(each for each in seen if each in expected)) == expected  # the first batch is also proven


def test_a_mixture_counts_documents_and_their_tokens(tmp_path):
    few = hfp.mix({"few": stream(), "same": stream()}, {"few": 1, "same": 3}, stopping_strategy="first_exhausted")
    rows = hfp.pack(few, hfp.BestFit(96), share_prefixes=2, streams=2, window_packs=4)
    trainer = trainer_of(tmp_path, data=rows, model=patched("Llama", trees=True), max_steps=4)
    hfp.attach(trainer, hfp.TokenBudget(96))
    trainer.train()
    logs = next(each for each in reversed(trainer.state.log_history) if "source_few_tokens" in each)
    found = [document for row in list(rows)[:4] for document in _documents_of(row)]
    for name, number in (("few", 0), ("same", 1)):
        assert logs[f"source_{name}_documents"] == sum(source == number for source, _ in found) > 0
        assert logs[f"source_{name}_tokens"] == sum(tokens for source, tokens in found if source == number)
        assert f"source_{name}_loss" not in logs, "a token of a tree belongs to several documents"


def _documents_of(row):
    """The source and the number of tokens of each document, found by walking up from its end."""
    begins = [sum(row["segment_lengths"][:segment]) for segment in range(len(row["parents"]))]
    for end in row["ends"]:
        tokens, segment = 0, end
        while segment >= 0:
            tokens, segment = tokens + row["segment_lengths"][segment], row["parents"][segment]
        yield row["source"][begins[end]], tokens


def test_prefixes_that_other_columns_split_are_counted():
    ids = [[*range(5, 30), last] for last in (1, 2)]
    types = [[0] * 26, [0] * 20 + [1] * 6]
    data = datasets.Dataset.from_dict({"input_ids": ids, "token_type_ids": types})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        list(hfp.pack(data.to_iterable_dataset(), hfp.BestFit(64), share_prefixes=2))
    (warning,) = (str(each.message) for each in said if "shares fewer" in str(each.message))
    assert warning.startswith("pack shares fewer tokens at about 1 places of a stream")


def test_what_is_refused(tmp_path):
    schedule = hfp.LengthSchedule(8, 10)
    for data, budget, message in (
        (packed(), hfp.TokenBudget(96, share_prefixes=3), "share_prefixes: expected False for rows that are packed"),
        (packed(), hfp.TokenBudget(96, length_schedule=schedule), "length_schedule: expected None for train_dataset"),
        (stream(), hfp.TokenBudget(96, share_prefixes=2, max_documents=3), "max_documents: expected None with share"),
        (packed(None), hfp.TokenBudget(96), "expected a stream with logical streams, which ranks can share"),
        (packed().filter(bool), hfp.TokenBudget(96), "got a packed stream that was changed afterwards"),
    ):
        trainer = trainer_of(tmp_path, data=data)
        with pytest.raises(hfp.PackingError, match=message):
            hfp.attach(trainer, budget)
    trainer = trainer_of(tmp_path, model=patched("BertForMaskedLM"), data=packed())
    with pytest.raises(hfp.PackingError, match="expected a causal language model for documents that share prefixes"):
        hfp.attach(trainer, hfp.TokenBudget(96))
    trainer = trainer_of(tmp_path, model=patched("Llama", trees=True), data=packed(), label_smoothing_factor=0.1)
    with pytest.raises(hfp.PackingError, match="expected the cross-entropy as the loss for documents that share"):
        hfp.attach(trainer, hfp.TokenBudget(96))
