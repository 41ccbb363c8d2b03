"""Training on documents that share prefixes, also of streams: the gradients of the documents, at the price of trees."""

import warnings

import datasets
import pytest
import torch
from accelerate import Accelerator
from patched_models import patched
from tiers import fast_only
from tiny_models import build
from trainers import documents, logged, trainer_of
from training_by_hand import largest_difference
from training_process import segments
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import is_patched

pytestmark = [
    pytest.mark.filterwarnings("ignore:pack applies:UserWarning"),
    pytest.mark.filterwarnings("ignore:pack shares fewer:UserWarning"),
]

DATA = documents(12, samples=3)
RAW = sum(map(len, DATA["input_ids"]))
ONE_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}


def weights_after(folder, kind, data, budget, loss="token", **changes):
    model = patched("GPT2", torch.float64, trees=True)
    trainer = trainer_of(folder, kind, model, data, gradient_accumulation_steps=3, **ONE_STEP | changes)
    summary = hfp.attach(trainer, budget, loss=loss)
    assert summary.optimizer_steps == 1
    trainer.train()
    return summary, {name: each.detach().clone() for name, each in model.named_parameters()}


def check_equal(found, expected):
    before = build("GPT2", torch.float64).state_dict()
    largest = max(float((each - before[name]).abs().max()) for name, each in expected.items())
    assert largest > 1e-3, "the step has to change the weights"
    assert max(float((found[name] - each).abs().max()) for name, each in expected.items()) <= 1e-11 * largest


CASES = [(kind, loss) for kind in (Trainer, SFTTrainer) for loss in ("token", "sequence")]


@pytest.mark.parametrize(("kind", "loss"), fast_only(CASES, (Trainer, "token"), (SFTTrainer, "sequence")))
def test_a_step_is_that_of_the_documents_alone(tmp_path, kind, loss):
    summary, expected = weights_after(tmp_path, Trainer, DATA, hfp.TokenBudget(2048), loss)
    assert summary.tokens == RAW
    shared, found = weights_after(tmp_path, kind, DATA, hfp.TokenBudget(2048, share_prefixes=2), loss)
    assert (shared.documents, shared.trees.documents, shared.trees.raw_tokens) == (36, 36, RAW)
    assert shared.tokens == shared.trees.unique_tokens < 0.6 * RAW
    assert "documents of a tree are in one optimizer step" in str(shared)
    check_equal(found, expected)
    packed = hfp.pack(DATA, hfp.BestFit(128), share_prefixes=2)
    if kind is Trainer:  # SFTTrainer expects tokens or text in its dataset
        rows, found = weights_after(tmp_path, kind, packed, hfp.TokenBudget(2048), loss)
        assert (rows.documents, rows.tokens) == (36, sum(map(len, packed["tree_input_ids"])))
        check_equal(found, expected)


def test_lost_documents_are_counted(tmp_path):
    rows = {"input_ids": [[*range(3, 40)], [*range(3, 30), 50], [5] * 90, [], [7, 8]]}
    data = datasets.Dataset.from_dict(rows)
    trainer = trainer_of(tmp_path, data=data)
    with pytest.raises(hfp.PackingError, match="90"):
        hfp.attach(trainer, hfp.TokenBudget(64, share_prefixes=True))
    summary = hfp.attach(trainer, hfp.TokenBudget(64, share_prefixes=True, overflow="drop"))
    assert (summary.left_out, summary.lost_tokens, summary.tokens) == (2, 90, 38 + 2)


def test_prefixes_that_are_not_stable_are_refused(tmp_path):
    from tools.tiny_model import tiny_model

    trainer = trainer_of(tmp_path, model=tiny_model("axk2", "causal", num_hidden_layers=1), data=DATA)
    with pytest.raises(hfp.ModelNotSupportedError, match="the outputs for a prefix are not stable"):
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2))
    assert type(trainer) is Trainer
    assert not is_patched(trainer.model)


def test_what_is_not_exact_is_said_once(tmp_path):
    model = build("Mixtral", output_router_logits=True, num_hidden_layers=1)
    model.config.attention_dropout = 0.1
    trainer = trainer_of(tmp_path, model=model, data=DATA)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2))
        trainer.train()
    for start in ("dropout: documents that share a prefix", "output_router_logits: the balancing loss"):
        assert sum(str(each.message).startswith(start) for each in said) == 1
    assert trainer.state.log_history[0]["loss"] > 0


@pytest.mark.parametrize(("share", "column"), [(False, "input_ids"), (2, "tree_input_ids")])
def test_buckets(tmp_path, share, column):
    packed = hfp.pack(DATA, hfp.Bucket([32, 64, 128], padding_threshold=1), share_prefixes=share)
    assert len(set(packed["bucket"])) > 1
    trainer = trainer_of(tmp_path, data=packed)
    summary = hfp.attach(trainer, hfp.BucketBatches(tokens_per_batch=128))
    assert (summary.documents, summary.tokens) == (36, sum(map(len, packed[column])))
    assert len(logged(trainer)) == 2


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


@pytest.mark.parametrize("loss", fast_only(["token", "sequence"], "sequence"))
def test_an_epoch_is_that_of_the_documents_alone(loss):
    _, expected = epoch_of(DATA, hfp.TokenBudget(8192), loss)
    for data, budget in (
        (DATA, hfp.TokenBudget(2048, share_prefixes=2)),
        (stream(shards=1), hfp.TokenBudget(96, share_prefixes=2)),
        (packed(streams=1), hfp.TokenBudget(96)),
        (packed(streams=1), hfp.TokenBudget(200)),  # two rows in a batch
    ):
        batches, found = epoch_of(data, budget, loss)
        assert sorted(ids for batch in batches for ids, _ in segments(batch)) == sorted(DATA["input_ids"])
        assert sum(batch["input_ids"].shape[1] for batch in batches) < 0.7 * RAW
        assert largest_difference(found, expected) <= 1e-12


@pytest.mark.parametrize("kind", fast_only([Trainer, SFTTrainer], SFTTrainer))
def test_a_trainer_trains_on_the_rows_of_the_stream(tmp_path, kind):
    rows = list(packed())
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}} if kind is SFTTrainer else {}
    trainer = trainer_of(tmp_path, kind, patched("Llama"), packed(), max_steps=len(rows), **options)
    summary = hfp.attach(trainer, hfp.TokenBudget(96))
    assert "share_prefixes=2" in str(summary)
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(tuple(inputs["input_ids"][0].tolist())), with_kwargs=True
    )
    losses = logged(trainer)
    assert [loss > 0 for loss in losses] == [True] * len(rows)
    expected = [tuple(row["tree_input_ids"]) for row in rows]
    assert list(dict.fromkeys(each for each in seen if each in expected)) == expected  # the first batch is also proven
