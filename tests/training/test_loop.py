"""Training loops on one process: epochs, state, accumulation, losses; lazy packs have the batches of stored ones."""

import re
from functools import cache
from itertools import pairwise

import datasets
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import prepare_data_loader
from datasets import concatenate_datasets, load_from_disk
from model_inputs import documents as random_documents
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build
from trainers import attached, documents, loader_of, trainer_of
from training_by_hand import batch_of, gradients_of, gradients_of_a_padded_batch, largest_difference
from transformers import Trainer, TrainerCallback
from trl import SFTTrainer

import hf_packing as hfp
from tools.tiny_model import tiny_model


def tokens_in(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_a_models_own_loss_is_right_in_a_loop():
    """model(**batch).loss and compute_loss agree, and their mean over batches is the mean over tokens."""
    model = patched()
    batches = list(loader_of(accumulation=1000))
    ours = [hfp.compute_loss(model, batch).item() / 1000 for batch in batches]
    assert [model(**batch).loss.item() / 1000 for batch in batches] == pytest.approx(ours, rel=1e-5)
    assert sum(ours) == pytest.approx(hfp.evaluation_loss(Accelerator(cpu=True), model, documents(45)), rel=1e-5)


def test_modules_that_are_frozen_stay_frozen():
    model = patched("Mixtral", output_router_logits=True, num_hidden_layers=1).train()
    before = hfp.evaluation_loss(Accelerator(cpu=True), model, documents(9))
    frozen = model.model.layers[0].eval()
    assert hfp.evaluation_loss(Accelerator(cpu=True), model, documents(9)) == before
    assert model.training
    assert not any(module.training for module in frozen.modules())


@pytest.fixture
def expected():
    loader = loader_of()
    first, second = (tokens_in(loader) for _ in range(2))
    assert sorted(map(str, first)) != sorted(map(str, second))
    assert loader.epoch == 2
    assert len(first) > 3
    return first, second


def test_an_epoch_that_is_broken_off_begins_again(expected):
    loader = loader_of()
    next(iter(loader))
    assert tokens_in(loader) == expected[0]
    loader.set_epoch(0)
    for _, batch in zip(range(len(loader)), loader, strict=False):  # nobody asks for more than there are
        assert batch
    assert (loader.epoch, loader.micro_batches_done) == (1, 0)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_loop_goes_on_where_it_was(expected, epoch):
    """From a state, after batches that are skipped, or with both."""
    saved, state, skipping = (loader_of() for _ in range(3))
    saved.set_epoch(epoch)
    batches = iter(saved)
    for steps in range(1, len(saved) + 1):
        next(batches)
        left, ended = expected[epoch][steps:], steps == len(saved)
        state.load_state_dict(saved.state_dict())
        if ended:
            assert (state.epoch, state.micro_batches_done) == (epoch + 1, 0)
        else:
            state.skip_first_batches(steps)  # once more
            assert state.state_dict()["steps"] == steps
            assert tokens_in(state) == left
        skipping.set_epoch(epoch)
        skipping.skip_first_batches(steps)
        assert tokens_in(skipping) == left
        assert skipping.epoch == epoch + 1


def test_accelerate_takes_the_loader_as_it_is():
    accelerator, loader = Accelerator(cpu=True), loader_of()
    assert accelerator.prepare(loader) is loader
    for call in (
        lambda: accelerator.skip_first_batches(loader, 2),
        lambda: skip_first_batches(loader, 2),
        lambda: accelerator.prepare_data_loader(loader),
        lambda: prepare_data_loader(loader),
    ):
        with pytest.raises(AttributeError, match="'PackedLoader' object has no attribute "):
            call()


def synchronized(accelerator, model, loader, see=lambda _: None, stop=None):
    """After which batches, counted from 1, the model is updated."""
    found = []
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(hfp.compute_loss(model, batch))
        if accelerator.sync_gradients:
            found.append(number)
        see(batch)
        if number == stop:
            break
    return found


def test_updates_of_accumulated_batches():
    """Neither another loader in the middle of an update nor an epoch that was broken off changes them."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 8})
    loader, other = (hfp.prepare_dataloader(accelerator, rows, hfp.TokenBudget(3)) for _ in range(2))
    model = accelerator.prepare(patched())
    assert synchronized(accelerator, model, loader, stop=1) == []
    with pytest.raises(hfp.PackingError, match="after an optimizer step of 3 micro-batches, got a checkpoint after 1"):
        loader.state_dict()
    for see in (lambda _: None, lambda _: list(other), lambda _: next(iter(other))):
        model.zero_grad()
        assert synchronized(accelerator, model, loader, see) == [3, 6, 8]


def test_a_checkpoint_where_another_loader_was_broken_off(tmp_path):
    """Its step begins again."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader, other = (hfp.prepare_dataloader(accelerator, documents(45), hfp.TokenBudget(64)) for _ in range(2))
    expected = tokens_in(other)
    other.set_epoch(0)
    next(iter(other))
    list(loader)
    accelerator.save_state(tmp_path)
    other.set_epoch(3)
    accelerator.load_state(tmp_path)
    assert tokens_in(other) == expected


@pytest.mark.parametrize(
    ("architecture", "kind"), fast_only([("bart", "causal"), ("xlm", "masked")], ("bart", "causal"))
)
def test_evaluation_asks_a_model_for_its_loss(architecture, kind):
    model = hfp.patch_model(tiny_model(architecture, kind))
    data = documents(9).map(lambda row: {"labels": row["input_ids"][::-1]})  # others than the tokens it sees
    lengths = [len(row["input_ids"]) for row in data]
    losses = [model(**hfp.PackingCollator(keep_first_labels=True)([row])).loss.item() for row in data]
    mean = sum(loss * length for loss, length in zip(losses, lengths, strict=True)) / sum(lengths)
    assert hfp.evaluation_loss(Accelerator(cpu=True), model, data) == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("argument", "steps", "settings"),
    [("loss", 4, {"loss": "sequence"}), ("ranks x gradient_accumulation_steps", 2, {})],
)
def test_other_states_are_refused(argument, steps, settings):
    state = loader_of(batching=hfp.TokenBudget(40), accumulation=4).state_dict()
    with pytest.raises(hfp.PackingError, match=f"^{argument}: "):
        loader_of(None, hfp.TokenBudget(40), steps, **settings).load_state_dict(state)
    with pytest.raises(hfp.PackingError, match="^plans: expected 4, as when the checkpoint was saved, got 5"):
        loader_of().load_state_dict({"epoch": 0, "micro_batches_done": 4, "plans": 4})


@pytest.mark.parametrize("kind", [lambda rows: rows, datasets.Dataset.from_list])
def test_packed_rows_whose_columns_contradict_each_other(kind):
    rows = [{"input_ids": [5, 6, 7, 8], "seq_lengths": [2, 2], "position_ids": [0, 1, 0, 1]} for _ in range(4)]
    assert len(list(loader_of(kind(rows), hfp.TokenBudget(4)))) == 4
    rows[3]["position_ids"] = [0, 1, 2, 3]
    with pytest.raises(hfp.PackingError, match="column 'position_ids': expected segments .* in row .*'seq_lengths'"):
        list(loader_of(kind(rows), hfp.TokenBudget(4)))


PLAIN = [[11, 5, 9, 30, 31, 12, 13], [7, 8, 21], [40, 41], list(range(50, 70))]
HALVES = (PLAIN[:1], PLAIN[1:])
"""Batches of different numbers of labels and of documents: means of them are not the mean of all."""
NUMBERS = {"token": 28, "sequence": 4}


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_a_plain_loop(loss):
    """The loss of a batch of a PackingCollator is that of one padded batch, at once or in accumulated parts."""
    rows = datasets.Dataset.from_dict({"input_ids": PLAIN, "labels": PLAIN})
    expected, value = gradients_of_a_padded_batch(rows, loss)
    model, number = patched("Llama", torch.float64), NUMBERS[loss]
    default = {} if loss == "token" else {"loss": loss}
    for parts, options in (
        ([PLAIN], default),
        ([PLAIN], {"loss": loss, "num_items_in_batch": number}),
        (HALVES, {"loss": loss, "num_items_in_batch": torch.tensor(number)}),
        (HALVES, {"loss": loss, "num_items_in_batch": torch.tensor([float(number)])}),
    ):
        model.zero_grad()
        losses = [hfp.compute_loss(model, batch_of(part), **options) for part in parts]
        for each in losses:
            each.backward()
        assert largest_difference(gradients_of(model), expected) <= 1e-12
        assert sum(each.item() for each in losses) == pytest.approx(value, rel=1e-12)


def test_accumulation_without_the_number_of_items_is_refused():
    """The error comes with the backward pass that would add to the gradients of another batch."""
    model = patched()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [batch_of(half) for half in HALVES]
    for set_to_none in (True, False):
        for batch in batches:  # steps of one batch each
            loss = hfp.compute_loss(model, batch)
            optimizer.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
    loss = hfp.compute_loss(model, batches[0])
    message = "num_items_in_batch: expected the number of items of the whole optimizer step, got None, but the model"
    with pytest.raises(hfp.PackingError, match=message):
        loss.backward()
    with torch.no_grad():
        hfp.compute_loss(model, batches[0])
    model.zero_grad()
    with pytest.raises(hfp.PackingError, match=message):
        synchronized(Accelerator(cpu=True, gradient_accumulation_steps=2), model, batches)


def test_a_plain_batch_without_trainable_tokens():
    model = patched("Llama", torch.float64)
    batch = hfp.PackingCollator()([{"input_ids": ids, "labels": [-100] * len(ids)} for ids in PLAIN])
    for number in (None, 0, 3):
        for kind in ("token", "sequence"):
            model.zero_grad()
            loss = hfp.compute_loss(model, batch, loss=kind, num_items_in_batch=number)
            loss.backward()
            assert loss.item() == 0
            assert all(not parameter.grad.any() for parameter in model.parameters())


STRATEGY = hfp.BestFit(64)


def unlabeled():
    return documents(45).select_columns("input_ids")


def both(folder, strategy=STRATEGY, source="tokens"):
    unlabeled().map(SOURCES[source]).save_to_disk(folder)
    return [hfp.pack(load_from_disk(folder), strategy, lazy=lazy) for lazy in (False, True)]


VIEWS = {
    "all": lambda rows: rows,
    "shuffled": lambda rows: rows.shuffle(seed=1),
    "selected": lambda rows: rows.select([3, 1, 2, 1]),
    "repeated": lambda rows: concatenate_datasets([rows.select([2, 1]), rows]),
    "mapped": lambda rows: rows.map(lambda row: {"labels": [-100] * 5 + row["labels"][5:]}),
    "without position_ids": lambda rows: rows.remove_columns("position_ids"),
}
SOURCES = {
    "tokens": lambda _: {},
    "labels": lambda row: {"labels": [-100, *row["input_ids"][1:]]},
    "masks": lambda row: {"completion_mask": [number % 2 for number in range(len(row["input_ids"]))]},
}


def check_same(packed, lazy, batching=None, **how):
    one, other = (list(loader_of(rows, batching or hfp.TokenBudget(128), **how)) for rows in (packed, lazy))
    assert len(one) == len(other) > 0
    for batches in zip(one, other, strict=True):
        ours, theirs = ({name: torch.as_tensor(batch[name]) for name in batch} for batch in batches)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:pack applies:UserWarning")
@pytest.mark.parametrize(
    ("view", "source"), [*((view, "labels") for view in VIEWS), ("all", "tokens"), ("all", "masks")]
)
def test_micro_batches(tmp_path, view, source):
    packed, lazy = map(VIEWS[view], both(tmp_path, source=source))
    assert max(map(len, packed["seq_lengths"])) > 1
    check_same(packed, lazy, num_workers=int(view == "shuffled"))


def test_micro_batches_of_buckets(tmp_path):
    check_same(*both(tmp_path, hfp.Bucket((16, 32, 64))), batching=hfp.BucketBatches(64))


def test_lazy_rows_of_trees():
    """Their sizes are found by reading all rows, as those of any dataset with a transform."""
    prompts = [[number, *range(20)] for number in range(8)]
    source = datasets.Dataset.from_dict({"input_ids": [[*prompts[n % 8], 30 + n] for n in range(40)]})
    rows = [hfp.pack(source, hfp.BestFit(64), lazy=lazy, share_prefixes=4) for lazy in (False, True)]
    check_same(*rows, model=patched_tiny("llama", "causal", trees=True))


def test_rows_are_read_without_the_formatting_of_datasets(tmp_path, monkeypatch):
    _, lazy = both(tmp_path)
    loader = loader_of(lazy)
    for name in ("__getitems__", "__getitem__"):
        monkeypatch.setattr(datasets.Dataset, name, lambda *_: pytest.fail("formatted"))
    assert len(list(loader)) > 1
    with pytest.raises(pytest.fail.Exception, match="formatted"):
        lazy[0]


LONGEST = 32
SCHEDULE = hfp.LengthSchedule(4, steps=4)
BUDGET = hfp.TokenBudget(LONGEST, length_schedule=SCHEDULE)
LENGTHS = [30, 12, 9, 25, 7, 18, 32, 14, 3, 21, 17, 26]


def scheduled():
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


def train_scheduled(through, folder):
    rows, model = scheduled(), patched("Llama", torch.float64)
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
    rows, seen = train_scheduled(through, tmp_path)
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

    whole, stopped, resumed, jumped = (loader_of(scheduled(), BUDGET, accumulation=2) for _ in range(4))
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
    rows, model = scheduled(), build("Llama", torch.float64)
    if through == "trainer":
        trainer = attached(tmp_path, BUDGET, model=model, data=rows, max_steps=1)
        trainer.train()
        proof = trainer.attached.first_batch_proof
    else:
        loader = loader_of(rows, BUDGET, model=model)
        assert next(iter(loader))["max_length_q"] == SCHEDULE.start
        proof = loader.first_batch_proof
    proven = proof.proofs["isolation: proven on the first training batch"]
    assert int(re.search(r"documents of up to (\d+) tokens", str(proven))[1]) > SCHEDULE.start


def test_evaluation_does_not_cut(tmp_path):
    model, rows = patched("Llama", torch.float64), scheduled()
    trainers = [attached(tmp_path, each, model=model, data=rows) for each in (BUDGET, hfp.TokenBudget(LONGEST))]
    assert len({trainer.evaluate(rows)["eval_loss"] for trainer in trainers}) == 1
