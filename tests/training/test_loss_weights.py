"""Weighted labels: the loss of a step is the weighted sum over its labels, divided by the sum of the weights' sizes."""

from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from chunks import chunks_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_models import patched
from processes import on_ranks, read
from tiers import fast_only
from tiny_models import build
from torch.nn import functional as F
from trainers import Gradients, Plain, documents, loader_of, logged, on_each_batch, trainer_of
from training_by_hand import gradients_of, largest_difference
from training_process import write
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.training.kinds import labels_of

pytestmark = pytest.mark.filterwarnings("ignore:pack:UserWarning")

ONE_STEP = {"max_steps": 1, "max_grad_norm": 0}
CLOSE = 1e-6
"""Transformers computes losses in float32."""


def weighted(column="loss_weights", number=45, samples=1, of_documents=False):
    """Documents whose weights are 1, 0, negative or anything, for each token, or in `loss_weight` for each document."""
    data, generator = documents(number, samples), np.random.default_rng(3)
    numbers = generator.choice([1, 0, -0.7, 0.1, 2.5, 1 / 3], len(data))
    if column == "loss_weight":
        return data.add_column(column, numbers)
    each = [generator.choice([1, 0, -0.7, 0.1, 2.5, 1 / 3], len(row)).tolist() for row in data["input_ids"]]
    if of_documents:
        each = [[weight] * len(row) for weight, row in zip(numbers.tolist(), data["input_ids"], strict=True)]
    return data.add_column(column, each)


def weights_by_document(data):
    """The weights of each document, by its tokens."""
    given_ = data["loss_weights" if "loss_weights" in data.column_names else "loss_weight"]
    return {
        tuple(ids): np.broadcast_to(np.array(weights), len(ids))
        for ids, weights in zip(data["input_ids"], given_, strict=True)
    }


def by_hand(documents, weights, loss="token"):
    """The loss and the gradients of a step of documents, (tokens, labels), each run alone by the stock model."""
    model = build("Llama", torch.float64)
    summed = total = 0.0
    for ids, labels in documents:
        own, labels = torch.from_numpy(weights[tuple(ids)].copy()), torch.tensor(labels)
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
        trained = labels[1:] != -100
        if not trained.any():
            continue
        each = F.cross_entropy(logits[:-1][trained], labels[1:][trained], reduction="none")
        own = own[1:][trained] / (trained.sum() if loss == "sequence" else 1)
        summed, total = summed + (own * each).sum(), total + own.abs().sum()
    (summed / total).backward()
    return (summed / total).item(), gradients_of(model)


def seen_in(batch):
    """The documents of a batch, with their labels."""
    found = labels_of(batch).documents()
    return [(each["input_ids"][0].tolist(), each["labels"][0].tolist()) for each in found]


def first_step(trainer):
    """Train one step, and return its loss, its gradients, and its documents."""
    seen, gradients = [], Gradients()
    trainer.add_callback(gradients)
    on_each_batch(trainer, lambda batch: seen.extend(seen_in(batch)))
    (loss,) = logged(trainer)
    return loss, gradients.gradients, seen


WAYS = {
    "tokens": lambda data: data,
    "map-style": lambda data: Plain(data.to_list()),
    "transform": lambda data: data.with_transform(lambda batch: dict(batch)),
    "packed": lambda data: hfp.pack(data, hfp.BestFit(64)),
    "lazily packed": lambda data: hfp.pack(data, hfp.BestFit(64), lazy=True),
    "mapped": lambda data: data.map(hfp.BestFit(64), batched=True, remove_columns=data.column_names),
    "stream": lambda data: data.to_iterable_dataset(num_shards=4),
    "packed stream": lambda data: hfp.pack(data.to_iterable_dataset(num_shards=4), hfp.BestFit(64), streams=4),
}


FAST = ("tokens", "packed", "stream", "packed stream")


@pytest.mark.parametrize("kind", fast_only([Trainer, SFTTrainer], Trainer))
@pytest.mark.parametrize("accumulation", fast_only([1, 4], 4))
@pytest.mark.parametrize("column", ["loss_weights", "loss_weight"])
@pytest.mark.parametrize("way", fast_only(WAYS, *FAST))
def test_steps_of_trainers_are_weighted(way, column, accumulation, kind, tmp_path):
    data = weighted(column)
    if kind is SFTTrainer and way not in ("tokens", "packed", "mapped"):
        pytest.skip("SFTTrainer takes no others as they are")
    trainer = trainer_of(
        tmp_path,
        kind,
        patched(dtype=torch.float64),
        WAYS[way](data),
        gradient_accumulation_steps=accumulation,
        **ONE_STEP,
    )
    hfp.attach(trainer, hfp.TokenBudget(64))
    loss, gradients, seen = first_step(trainer)
    wanted, exact = by_hand(seen, weights_by_document(data))
    assert loss == pytest.approx(wanted, rel=CLOSE)
    assert largest_difference(gradients, exact) < CLOSE
    assert len(seen) > accumulation


@pytest.mark.parametrize("column", ["loss_weights", "loss_weight"])
def test_documents_that_share_prefixes(column, tmp_path):
    data = weighted(column, 12, samples=3)
    trainer = trainer_of(tmp_path, model=patched(dtype=torch.float64, trees=True), data=data, **ONE_STEP)
    summary = hfp.attach(trainer, hfp.TokenBudget(96, share_prefixes=1))
    loss, gradients, seen = first_step(trainer)
    wanted, exact = by_hand(seen, weights_by_document(data))
    assert loss == pytest.approx(wanted, rel=CLOSE)
    assert largest_difference(gradients, exact) < CLOSE
    assert len(seen) > 3
    assert " with a weight other than 1" in str(summary)


def test_prompts_are_shared_whatever_documents_weigh():
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    rows = [
        {"input_ids": [*prompt, *end], "labels": [-100] * 4 + end, "loss_weight": weight}
        for prompt in prompts
        for end, weight in (([20, 21], 1.0), ([22], -2.0), ([20, 21, 23], 0.5))
    ]
    with pytest.warns(UserWarning, match="pack shares 4 tokens less, since other columns differ where tokens agree"):
        packed = hfp.pack(datasets.Dataset.from_list(rows), hfp.BestFit(64), share_prefixes=1)
    # of each prompt, all three documents share it, and no two share a token that they train on with other weights
    assert [sum(map(len, packed["tree_input_ids"]))] == [sum(4 + 2 + 1 + 3 for _ in prompts)]
    (batch,) = [hfp.PackingCollator()(packed.to_list())]
    found = {tuple(ids): labels for ids, labels in seen_in(batch)}
    assert {tuple(row["input_ids"]): row["labels"] for row in rows} == found
    items = sum(len(row["labels"][4:]) * abs(row["loss_weight"]) for row in rows)
    assert float(labels_of(batch).items("token")) == items


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_steps_of_loops(loss, accumulation):
    data = weighted("loss_weight" if loss == "sequence" else "loss_weights")
    model = patched(dtype=torch.float64)
    loader = loader_of(data, accumulation=accumulation, model=model, loss=loss)
    summed, seen = 0.0, []
    for _, batch in zip(range(accumulation), loader, strict=False):
        with chunks_of(10, model):
            each = hfp.compute_loss(model, batch) / accumulation
        each.backward()
        summed += each.item()
        seen += seen_in(batch)
    wanted, exact = by_hand(seen, weights_by_document(data), loss)
    assert summed == pytest.approx(wanted, rel=CLOSE)
    assert largest_difference(gradients_of(model), exact) < CLOSE


@pytest.mark.parametrize("of_documents", [True, False])
def test_means_over_documents(of_documents, tmp_path):
    """Weights of the documents of packed rows are those of all of their tokens."""
    data = weighted(of_documents=of_documents)
    rows = hfp.pack(data, hfp.BestFit(64))
    trainer = trainer_of(tmp_path, model=patched(dtype=torch.float64), data=rows, **ONE_STEP)
    hfp.attach(trainer, hfp.TokenBudget(64), loss="sequence")
    if not of_documents:
        with pytest.raises(hfp.PackingError, match=r"expected one weight for all labels of a document .* got [-0-9.]+"):
            trainer.train()
        return
    loss, gradients, seen = first_step(trainer)
    wanted, exact = by_hand(seen, weights_by_document(data), "sequence")
    assert loss == pytest.approx(wanted, rel=CLOSE)
    assert largest_difference(gradients, exact) < CLOSE


def test_evaluation(tmp_path):
    data, model = weighted(), patched(dtype=torch.float64)
    rows = [(row["input_ids"], row["labels"]) for row in data]
    wanted, _ = by_hand(rows, weights_by_document(data))
    accelerator = Accelerator(cpu=True)
    assert hfp.evaluation_loss(accelerator, model, data, rows_per_batch=4) == pytest.approx(wanted, rel=CLOSE)
    small = data.map(lambda row: {"loss_weights": [each / 1000 for each in row["loss_weights"]]})
    assert hfp.evaluation_loss(accelerator, model, small) == pytest.approx(wanted, rel=CLOSE)
    trainer = trainer_of(tmp_path, model=model, data=data)
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert trainer.evaluate(hfp.pack(data, hfp.BestFit(64)))["eval_loss"] == pytest.approx(wanted, rel=CLOSE)


def half_weighted():
    """Of which one of two processes sees weights of 1 alone, if it reads them as a stream."""
    data = weighted("loss_weight", 48)
    numbers = [1.0 if number < 24 else 2.5 - number % 2 for number in range(48)]
    return data.remove_columns("loss_weight").add_column("loss_weight", numbers)


def train_on_rank(folder, accumulation, stream):
    state, kind = PartialState(cpu=True), Trainer if stream else SFTTrainer
    data = half_weighted().to_iterable_dataset(num_shards=2) if stream else weighted()
    options = ONE_STEP | {"gradient_accumulation_steps": accumulation}
    trainer = trainer_of(folder, kind, patched(dtype=torch.float64), data, **options)
    hfp.attach(trainer, hfp.TokenBudget(64))
    has_weights = []
    on_each_batch(trainer, lambda batch: has_weights.append("loss_weights" in batch))
    loss, gradients, seen = first_step(trainer)
    write(folder, state.process_index, "seen", documents=seen, loss=loss, has_weights=has_weights)
    torch.save(gradients, folder / f"gradients-{state.process_index}.pt")


@pytest.mark.parametrize(("accumulation", "stream"), fast_only([(1, False), (2, False), (1, True)], (1, True)))
def test_steps_on_two_processes(accumulation, stream, tmp_path):
    on_ranks(train_on_rank, tmp_path, accumulation, stream, ranks=2)
    (first,), (second,) = (read(tmp_path, "seen", rank) for rank in (0, 1))
    data = half_weighted() if stream else weighted()
    wanted, exact = by_hand([*first["documents"], *second["documents"]], weights_by_document(data))
    assert first["loss"] == second["loss"] == pytest.approx(wanted, rel=CLOSE)
    for rank in (0, 1):
        assert largest_difference(torch.load(tmp_path / f"gradients-{rank}.pt"), exact) < CLOSE
    assert ({*first["has_weights"], *second["has_weights"]} == {False, True}) == stream


def logs_of(folder, data, **how):
    trainer = trainer_of(folder, data=data, learning_rate=1e-2, gradient_accumulation_steps=2, max_steps=4)
    hfp.attach(trainer, hfp.TokenBudget(64), **how)
    return logged(trainer), [each.detach().clone() for each in trainer.model.parameters()]


@pytest.mark.parametrize("loss", fast_only(["token", "sequence"], "token"))
def test_weights_of_one_change_no_bit(loss, tmp_path):
    data = documents(45)
    ones = data.add_column("loss_weights", [[1.0] * len(row) for row in data["input_ids"]])
    for other in (ones, data.add_column("loss_weight", [1] * len(data))):
        (found, weights), (wanted, exact) = (logs_of(tmp_path, each, loss=loss) for each in (other, data))
        assert found == wanted
        assert all(map(torch.equal, weights, exact))


@settings(max_examples=15)
@given(factor=st.floats(1e-6, 1e6))
def test_scaled_weights_are_the_same_loss(factor):
    data, model = weighted(number=6), patched(dtype=torch.float64)
    scaled = data.map(lambda row: {"loss_weights": [factor * each for each in row["loss_weights"]]})
    collate = hfp.PackingCollator()
    found, wanted = (hfp.compute_loss(model, collate(each.to_list())).item() for each in (scaled, data))
    assert found == pytest.approx(wanted, rel=CLOSE)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=6), min_size=1, max_size=5), st.sampled_from([64, 3]))
def test_packed_rows_keep_the_weight_of_every_token(weights, capacity):
    generator = np.random.default_rng(len(weights))
    rows = [{"input_ids": generator.integers(0, 99, len(each)), "loss_weights": each} for each in weights]
    data = datasets.Dataset.from_list(rows)
    packed = hfp.pack(data, hfp.BestFit(capacity))
    assert hfp.unpack(packed).num_rows >= len(rows)
    given_ = sorted((int(i), w) for row in rows for i, w in zip(row["input_ids"], row["loss_weights"], strict=True))
    kept = sorted((i, w) for row in packed for i, w in zip(row["input_ids"], row["loss_weights"], strict=True))
    assert kept == given_


def test_the_summary_counts_weights_other_than_one(tmp_path):
    data = weighted()
    trained = [
        weight
        for row in data
        for label, weight in zip(row["labels"][1:], row["loss_weights"][1:], strict=True)
        if label != -100
    ]
    other = sum(each != 1 for each in trained)
    trainer = trainer_of(tmp_path, data=data)
    summary = hfp.attach(trainer, hfp.TokenBudget(64))
    assert f"{len(trained)} of {len(trained)} labels are left, {other} with a weight other than 1" in str(summary)


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", ["loss_weights", "loss_weight"])
def test_weights_that_are_not_finite_are_refused_with_their_row(column, weight, tmp_path):
    rows = weighted(column).to_list()
    rows[17][column] = weight if column == "loss_weight" else [1.0, weight] + [1.0] * (len(rows[17]["input_ids"]) - 2)
    said = f"column '{column}': expected .*number.* row 17"
    with pytest.raises(hfp.PackingError, match=said):
        hfp.attach(trainer_of(tmp_path, data=datasets.Dataset.from_list(rows)), hfp.TokenBudget(64))
    begins = rf"got .*{weight}.* in row 1, which begins with the tokens \[{rows[17]['input_ids'][0]}, "
    with pytest.raises(hfp.PackingError, match=f"expected one of them, with finite numbers, in every row, {begins}"):
        hfp.PackingCollator()([rows[3], rows[17]])


def test_a_step_whose_weights_are_all_zero_is_refused(tmp_path):
    data = weighted().map(lambda row: {"loss_weights": [0.0] * len(row["loss_weights"])})
    trainer = trainer_of(tmp_path, data=data)
    hfp.attach(trainer, hfp.TokenBudget(64))
    said = r"expected a weight other than 0 in every optimizer step, .* that begins with the tokens \["
    with pytest.raises(hfp.PackingError, match=said):
        trainer.train()
    with pytest.raises(hfp.PackingError, match=said):
        next(iter(loader_of(data, model=patched())))


def test_a_step_with_some_weights_of_zero_is_not_refused(tmp_path):
    data = weighted("loss_weight")
    some = data.remove_columns("loss_weight").add_column("loss_weight", [0.0, 1.0] * (len(data) // 2) + [2.0])
    trainer = trainer_of(tmp_path, model=patched(dtype=torch.float64), data=some, **ONE_STEP)
    hfp.attach(trainer, hfp.TokenBudget(200))
    loss, _, seen = first_step(trainer)
    assert loss == pytest.approx(by_hand(seen, weights_by_document(some))[0], rel=CLOSE)


def test_what_cannot_be_weighted_is_refused(tmp_path):
    data = weighted()
    trainer = trainer_of(tmp_path, data=data, label_smoothing_factor=0.1)
    hfp.attach(trainer, hfp.TokenBudget(64))
    with pytest.raises(hfp.PackingError, match="for loss_weights .* computes 0"):
        trainer.train()
    with pytest.raises(hfp.PackingError, match="loss_weights: .* has to be taken out of the inputs"):
        patched()(**hfp.PackingCollator()(data.to_list()))
    both = data.add_column("loss_weight", [1.0] * len(data))
    with pytest.raises(hfp.PackingError, match="no column 'loss_weights' beside it"):
        hfp.pack(both, hfp.BestFit(64))
    with pytest.raises(hfp.PackingError, match="column 'loss_weight': expected a number for each document.* string"):
        hfp.pack(documents(45).add_column("loss_weight", ["1"] * 45), hfp.BestFit(64))
    with pytest.raises(hfp.PackingError, match="column 'loss_weight': expected a finite number, got nan in row 2"):
        hfp.pack(documents(45).add_column("loss_weight", [1.0, 1.0, None] * 15), hfp.BestFit(64))
    with pytest.raises(hfp.PackingError, match="expected one of them, with finite numbers, in every row, got None"):
        hfp.PackingCollator()([data[0], {"input_ids": [5, 6], "labels": [5, 6]}])


def test_rows_that_stay_whole_have_no_weights(tmp_path):
    model = build("LlamaForSequenceClassification")
    data = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], "label": 1, "loss_weight": 2.0}] * 8)
    model.config.pad_token_id = 0
    for rows in (data, Plain(data.to_list())):
        with pytest.raises(hfp.PackingError, match="column 'loss_weight': expected no weights for Trainer"):
            hfp.attach(trainer_of(tmp_path, model=model, data=rows), hfp.TokenBudget(64))


def test_mixtures_and_files_keep_the_weight_of_every_token(tmp_path):
    """Of which a few documents wait for the next window of a stream."""
    weights = {1: 0.5, 2: 2.0, 3: -1.0}
    rows = [[{"input_ids": [each] * n, "loss_weight": weights[each]} for n in (3, 2, 7, 5) * 5] for each in (1, 2)]
    first, second = map(datasets.Dataset.from_list, rows)
    streams = {"first": first.to_iterable_dataset(num_shards=2), "second": second.to_iterable_dataset(num_shards=2)}
    mixed = hfp.mix(streams, {"first": 80, "second": 80}, stopping_strategy="all_exhausted")
    first.to_parquet(tmp_path / "first.parquet")
    hfp.fleet.pack([str(tmp_path / "first.parquet")], hfp.BestFit(16), str(tmp_path / "fleet"))
    of_files = datasets.load_dataset("parquet", data_files=str(tmp_path / "fleet" / "*.parquet"), split="train")
    made = [hfp.pack(mixed, hfp.BestFit(16), **how) for how in ({"window_packs": 2}, {"streams": 2})]
    for packed in (*made, of_files):
        pairs = (zip(row["input_ids"], row["loss_weights"], strict=True) for row in packed)
        found = [*chain.from_iterable(pairs)]
        assert all(weights[ids] == weight for ids, weight in found)
        assert len(found) >= sum(len(row["input_ids"]) for row in first)
    third = datasets.Dataset.from_list([{"input_ids": [3]}]).to_iterable_dataset()
    with pytest.raises(hfp.PackingError, match="expected the token columns input_ids, loss_weight, as in 'first'"):
        hfp.mix(streams | {"third": third}, {"first": 1, "second": 1, "third": 1})


def test_a_weight_of_zero_is_not_that_of_a_document_that_does_not_train_on_the_token():
    rows = [
        {"input_ids": [20, 63, 7], "labels": [-100, -100, 7], "loss_weight": 2.0},
        {"input_ids": [20, 63, 9], "labels": [-100, 63, 9], "loss_weight": 0.0},
        {"input_ids": [30, 31, 32], "labels": [-100, 31, 32], "loss_weight": 1.0},
    ]
    data, model = datasets.Dataset.from_list(rows), patched(dtype=torch.float64, trees=True)
    wanted, _ = by_hand([(row["input_ids"], row["labels"]) for row in rows], weights_by_document(data))
    trees = hfp.pack(data, hfp.BestFit(64), share_prefixes=1)
    assert hfp.compute_loss(model, hfp.PackingCollator()(trees.to_list())).item() == pytest.approx(wanted, rel=CLOSE)


@pytest.mark.parametrize("wrong", [0.5, ["1", "1", "1"], [[1.0], [1.0], [1.0]]], ids=["number", "texts", "lists"])
def test_weights_of_other_types_are_refused(wrong, tmp_path):
    data = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [5, 6, 7], "loss_weights": wrong}] * 8)
    said = "column 'loss_weights': expected lists of numbers, one for each token, got"
    with pytest.raises(hfp.PackingError, match=said):
        hfp.pack(data, hfp.BestFit(8))
    for dataset in (data, data.to_iterable_dataset()):
        with pytest.raises(hfp.PackingError, match=said):
            hfp.attach(trainer_of(tmp_path, data=dataset), hfp.TokenBudget(8))
    both = Plain([{"input_ids": [5, 6, 7], "loss_weight": 1.0, "loss_weights": [1.0] * 3}] * 8)
    trainer = trainer_of(tmp_path, data=both)
    hfp.attach(trainer, hfp.TokenBudget(8, max_length=2, overflow="split"))
    with pytest.raises(hfp.PackingError, match="column 'loss_weights': expected no such column beside 'loss_weight'"):
        trainer.train()


def masks_some(outputs, labels, num_items_in_batch):
    labels = F.pad(labels, (0, 1), value=-100)[0, 1:]
    labels = labels.masked_fill(labels % 5 == 0, -100)
    return F.cross_entropy(outputs.logits[0], labels, reduction="sum") / num_items_in_batch


def other_index(outputs, labels, num_items_in_batch):
    labels = F.pad(labels, (0, 1), value=-100)[0, 1:]
    labels = labels.masked_fill(labels == -100, -1)
    return F.cross_entropy(outputs.logits[0], labels, ignore_index=-1, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("loss", [masks_some, other_index])
@pytest.mark.parametrize("kind", [Trainer, SFTTrainer])
@pytest.mark.parametrize(("data", "of_mean"), [(weighted("loss_weight"), None), (documents(45), "sequence")])
def test_labels_that_change_after_they_were_weighted_are_refused(loss, kind, data, of_mean, tmp_path):
    trainer = trainer_of(tmp_path, kind, data=data)
    trainer.compute_loss_func = loss
    hfp.attach(trainer, hfp.TokenBudget(64), loss=of_mean, prove="model")
    with pytest.raises(hfp.PackingError, match="loss: expected a cross-entropy of the labels of the batch, got other"):
        trainer.train()
