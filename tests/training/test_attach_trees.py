"""Trainers and loops on documents that share prefixes: the gradients of the documents alone, at the price of trees."""

import warnings

import datasets
import pytest
import torch
from accelerate import Accelerator
from patched_models import patched
from processes import losses, read, run
from tiers import fast_only
from tiny_models import build
from trainers import trainer_of
from training_process import documents
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.trees_of_documents import TreesOfDocuments
from hf_packing.training.loader import rows_loader

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning"),  # TRL uses names that transformers has renamed
    pytest.mark.filterwarnings("ignore:pack applies:UserWarning"),
]

DATA = documents(12, samples=3)
RAW = sum(map(len, DATA["input_ids"]))
ONE_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}


def weights_after(folder, kind, data, budget, loss="token", **changes):
    """The weights of a float64 model after one optimizer step on all documents."""
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


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_a_loop(loss):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    gradients = []
    for share in (False, 2):
        model = patched("GPT2", torch.float64)
        budget = hfp.TokenBudget(2048, share_prefixes=share)
        loader = hfp.prepare_dataloader(accelerator, DATA, budget, loss=loss, model=model)
        batches = list(loader)
        assert len(batches) == 2
        assert all(("parents" in batch) == bool(share) for batch in batches)
        for batch in batches:
            hfp.compute_loss(model, batch).backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    largest = max(float(each.abs().max()) for each in gradients[0].values())
    for name, expected in gradients[0].items():
        assert float((gradients[1][name] - expected).abs().max()) <= 1e-12 * largest


def test_evaluation_on_trees(tmp_path):
    packed = hfp.pack(DATA, hfp.BestFit(128), share_prefixes=2)
    trainer = trainer_of(tmp_path, data=DATA)
    hfp.attach(trainer, hfp.TokenBudget(256))
    expected = trainer.evaluate(DATA)["eval_loss"]
    assert trainer.evaluate(packed)["eval_loss"] == pytest.approx(expected, rel=1e-6)
    accelerator = Accelerator(cpu=True)
    assert hfp.evaluation_loss(accelerator, trainer.model, packed) == pytest.approx(expected, rel=1e-6)


def test_rows_of_other_kinds_of_datasets_have_the_same_sizes():
    from hf_packing.sampling.sizes import sizes_of

    packed = hfp.pack(DATA, hfp.BestFit(128), share_prefixes=2)
    one, other = sizes_of(packed), sizes_of(packed.to_list())
    lazy = sizes_of(hfp.pack(DATA, hfp.BestFit(128), share_prefixes=2, lazy=True))
    assert (one.fingerprint, one.trees) == (lazy.fingerprint, lazy.trees)
    trees = TreesOfDocuments.find(DATA, 128, 2, "error")
    for name in ("tokens", "segments", "squared_lengths"):
        assert (getattr(one, name) == getattr(other, name)).all()
        if name == "segments":
            assert one.segments.sum() == trees.sizes.segments.sum() == 36
    assert one.trees == other.trees
    assert trees.sizes.trees.raw_tokens == RAW
    rows = hfp.PackingCollator()(trees.__getitems__([*range(len(trees))]))
    from hf_packing.training.tree_batch import trees_of

    assert trees_of(rows).attention_cost == trees.sizes.squared_lengths.sum()


def test_copies_are_masked():
    trees = TreesOfDocuments.find(DATA.select(range(3)), 128, 2, "error")
    assert len(trees) == 1
    rows = hfp.pack(DATA.select(range(6)), hfp.BestFit(64), share_prefixes=2)
    from hf_packing.sampling.sizes import sizes_of

    sampler = RankBatchSampler(hfp.TokenBudget(64), sizes_of(rows), world_size=1, accumulation=1)
    loader = rows_loader(rows, sampler)
    whole = loader.dataset.__getitems__([(0, False), (0, True)])
    assert len(whole[0]["trained"]) > 0
    batch = hfp.PackingCollator()([whole[1]])
    assert (batch["tree_labels"] == -100).all()
    assert len(batch["trained"]) == 0


def test_lost_documents_are_counted(tmp_path):
    rows = {"input_ids": [[*range(3, 40)], [*range(3, 30), 50], [5] * 90, [], [7, 8]]}
    data = datasets.Dataset.from_dict(rows)
    trainer = trainer_of(tmp_path, data=data)
    with pytest.raises(hfp.PackingError, match="90"):
        hfp.attach(trainer, hfp.TokenBudget(64, share_prefixes=True))
    summary = hfp.attach(trainer, hfp.TokenBudget(64, share_prefixes=True, overflow="drop"))
    assert (summary.left_out, summary.lost_tokens, summary.tokens) == (2, 90, 38 + 2)


class OwnLoss(Trainer):
    def compute_loss(self, *arguments, **options):
        return super().compute_loss(*arguments, **options)


@pytest.mark.parametrize(
    ("kind", "settings", "how", "message"),
    [
        (OwnLoss, {}, {}, "trainer: expected the cross-entropy as the loss for documents that share prefixes"),
        (Trainer, {"label_smoothing_factor": 0.1}, {}, "trainer: expected the cross-entropy as the loss"),
        (Trainer, {}, {"tokens": 128, "max_segments": 9}, "tokens: expected None for documents that share prefixes"),
    ],
)
def test_what_trees_do_not_take(tmp_path, kind, settings, how, message):
    trainer = trainer_of(tmp_path, kind, data=DATA, **settings)
    with pytest.raises(hfp.PackingError, match=message):
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2), **how)


def test_batchings_and_datasets_that_share_no_prefixes(tmp_path):
    with pytest.raises(hfp.PackingError, match="share_prefixes: expected False, True, or the fewest tokens"):
        hfp.TokenBudget(64, share_prefixes="yes")
    schedule = hfp.LengthSchedule(8, 10)
    with pytest.raises(hfp.PackingError, match="length_schedule: expected None with share_prefixes"):
        hfp.TokenBudget(64, share_prefixes=True, length_schedule=schedule)
    packed = hfp.pack(DATA, hfp.BestFit(128), share_prefixes=2)
    trainer = trainer_of(tmp_path, data=packed)
    with pytest.raises(hfp.PackingError, match="length_schedule: expected None for documents that share prefixes"):
        hfp.attach(trainer, hfp.TokenBudget(128, length_schedule=schedule))
    for data, message in (
        (DATA.to_list(), "dataset: expected a Dataset of documents with share_prefixes, got list"),
        (DATA.with_transform(lambda rows: rows), "expected a dataset without a transform"),
        (hfp.pack(DATA, hfp.BestFit(128)), "expected documents that are not packed yet"),
        (packed, "expected documents that are not packed yet"),
    ):
        trainer = trainer_of(tmp_path, data=data)
        with pytest.raises(hfp.PackingError, match=message):
            hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=True))


def test_models_that_see_their_labels_are_refused(tmp_path):
    trainer = trainer_of(tmp_path, model=patched("BertForMaskedLM"), data=DATA)
    with pytest.raises(hfp.PackingError, match="expected a causal language model for documents that share prefixes"):
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2))


def test_prefixes_that_are_not_stable_are_refused(tmp_path):
    from hf_packing.attention.tiny_model import tiny_model

    trainer = trainer_of(tmp_path, model=tiny_model("axk2", "causal"), data=DATA)
    with pytest.raises(hfp.ModelNotSupportedError, match="the outputs for a prefix are not stable"):
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2))
    assert type(trainer) is Trainer
    assert not is_patched(trainer.model)


def test_what_is_not_exact_is_said_once(tmp_path):
    model = build("Mixtral", output_router_logits=True)
    model.config.attention_dropout = 0.1
    trainer = trainer_of(tmp_path, model=model, data=DATA)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=2))
        trainer.train()
    for start in ("dropout: documents that share a prefix", "output_router_logits: the balancing loss"):
        assert sum(str(each.message).startswith(start) for each in said) == 1
    assert trainer.state.log_history[0]["loss"] > 0


def test_buckets_of_trees(tmp_path):
    packed = hfp.pack(DATA, hfp.Bucket([32, 64, 128], padding_threshold=1), share_prefixes=2)
    assert len(set(packed["bucket"])) > 1
    trainer = trainer_of(tmp_path, data=packed)
    summary = hfp.attach(trainer, hfp.BucketBatches(tokens_per_batch=128))
    assert summary.documents == 36
    trainer.train()


def test_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}

    def run_of(resume=None):
        trainer = trainer_of(tmp_path, data=DATA, **options)
        assert hfp.attach(trainer, hfp.TokenBudget(96, share_prefixes=2)).optimizer_steps > 2
        trainer.train(resume_from_checkpoint=resume)
        return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}

    whole = run_of()
    resumed = run_of(str(tmp_path / "checkpoint-4"))
    assert {step: resumed[step] for step in range(5, 9)} == {step: whole[step] for step in range(5, 9)}
    trainer = trainer_of(tmp_path, data=DATA, **options)
    hfp.attach(trainer, hfp.TokenBudget(96))
    with pytest.raises(hfp.PackingError, match="batching: expected"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.slow
@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_killed_on_two_ranks(tmp_path, through):
    """The steps and losses of a run without an interruption, bit for bit, and every document once an epoch."""
    settings = {"through": through, "documents": 12, "samples": 3, "share_prefixes": 2, "epochs": 5, "max_tokens": 96}
    run(tmp_path / "whole", {"a": settings}, ranks=2)
    saved = settings | {"save_steps": 2, "stop_at": 4}
    run(tmp_path / "killed", {"a": saved | {"kill": True}}, ranks=2, fails=True)
    run(tmp_path / "killed", {"a": saved | {"stop_at": 0, "resume": True}}, ranks=2)
    whole, resumed = losses(tmp_path / "whole" / "a"), losses(tmp_path / "killed" / "a")
    assert len(whole) > 8
    assert {step: loss for step, loss in resumed.items() if step > 4} == {s: x for s, x in whole.items() if s > 4}
    seen = {}
    for rank in range(2):
        for line in read(tmp_path / "whole" / "a", "seen", rank):
            seen.setdefault(line["epoch"], []).extend(tuple(tokens) for tokens, trained in line["documents"] if trained)
    trained = [tuple(row) for row, labels in zip(*documents(12, 3).to_dict().values(), strict=True) if max(labels) > 0]
    assert all(sorted(each) == sorted(trained) for each in seen.values())
    assert len(seen) == 5
