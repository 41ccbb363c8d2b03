"""A trainer goes on from a checkpoint whose steps had other sizes: how many steps there are, and what is refused."""

import json
import shutil

import pytest
from trainers import trainer_of
from training_process import documents, segments
from transformers import TrainerCallback

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.training.resumed_steps import ResumedSteps

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "max_steps": -1, "num_train_epochs": 2}
DOCUMENTS = documents(70)
TRAINED_ON = sum(set(labels[1:]) != {-100} for labels in DOCUMENTS["labels"])


class Seen(TrainerCallback):
    """The epochs that begin and end, and the learning rate after each step."""

    def __init__(self, stop):
        self.stop, self.epochs, self.rates = stop, [], []

    def on_epoch_begin(self, _, state, control, **__):
        self.epochs.append([state.global_step])
        assert not control.should_epoch_stop

    def on_epoch_end(self, _, state, __, **___):
        self.epochs[-1].append(state.global_step)

    def on_step_end(self, _, state, control, lr_scheduler=None, **__):
        self.rates.append(lr_scheduler.get_last_lr()[0])
        control.should_training_stop |= state.global_step == self.stop


def train(folder, accumulation, resume=None, stop=None, batching=None, data=DOCUMENTS, **changes):
    """The trainer after training; it has what it has seen as `seen`, and the documents of each epoch as `counts`."""
    options = EVERY_STEP | {"gradient_accumulation_steps": accumulation, "learning_rate": 1e-3} | changes
    trainer = trainer_of(folder, data=data, **options)
    trainer.per_epoch = hfp.attach(trainer, batching or hfp.TokenBudget(48)).optimizer_steps
    trainer.seen, trainer.counts, step = Seen(stop), {}, trainer.training_step
    trainer.add_callback(trainer.seen)

    def counted(model, inputs, *args):
        found = trainer.counts.setdefault(int(trainer.state.epoch or 0), [])
        found += [tuple(ids) for ids, trained in segments(inputs) if trained]
        return step(model, inputs, *args)

    trainer.training_step = counted
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def losses(trainer):
    return [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Checkpoints of a run with 4 micro-batches in a step, 5 steps in an epoch."""
    folder = tmp_path_factory.mktemp("begun")
    trainer = train(folder, 4)
    assert trainer.per_epoch == 5
    assert trainer.state.global_step == 10
    return folder, trainer


def test_steps_end_with_the_epochs(begun, tmp_path):
    """Also if a run is stopped and goes on with steps of the same size, or with those of the run before."""
    folder, _ = begun
    whole = train(tmp_path / "whole", 2, folder / "checkpoint-2", warmup_steps=1)
    end = whole.state.global_step
    (first, middle), (same, last) = whole.seen.epochs
    assert (first, same, last, last - same) == (2, middle, whole.state.max_steps, whole.per_epoch)
    assert 0 < middle - first < whole.per_epoch
    assert (whole.state.epoch, whole.seen.rates[-1], whole.state.num_train_epochs) == (2, 0, 2)
    assert len(set(whole.counts[1])) == len(whole.counts[1]) == TRAINED_ON
    epochs = [entry["epoch"] for entry in whole.state.log_history if "loss" in entry]
    assert epochs[:2] == pytest.approx([0.2, 0.4])
    assert epochs[2] == pytest.approx(0.4 + 0.6 / (middle - first))
    assert epochs[middle - 1 :] == [1 + done / whole.per_epoch for done in range(whole.per_epoch + 1)]
    for stop in (first + 1, middle, middle + 1):
        saved = tmp_path / "whole" / f"checkpoint-{stop}"
        rest = train(tmp_path / "rest", 2, saved, warmup_steps=1)
        assert losses(rest) == losses(whole)
        assert rest.state.max_steps == rest.state.global_step == end
        assert rest.seen.rates == whole.seen.rates[stop - first :]
    again = train(tmp_path / "again", 4, tmp_path / "whole" / f"checkpoint-{middle + 1}")
    assert again.seen.epochs[0][0] == middle + 1
    assert len(again.seen.epochs) == 1
    assert again.state.global_step == again.state.max_steps < end
    assert not set(again.counts[1]) & set(whole.counts[1][: len(whole.counts[1]) - len(again.counts[1])])


def test_the_end_of_an_epoch(begun, tmp_path):
    """A checkpoint of a whole epoch: all the next ones are whole, and the last checkpoint leaves nothing to do."""
    folder, _ = begun
    rest = train(tmp_path / "rest", 2, folder / "checkpoint-5", num_train_epochs=3)
    assert rest.seen.epochs == [[5, 5 + rest.per_epoch], [5 + rest.per_epoch, 5 + 2 * rest.per_epoch]]
    assert {epoch: len(set(found)) for epoch, found in rest.counts.items()} == {1: TRAINED_ON, 2: TRAINED_ON}
    assert rest.state.max_steps == rest.state.global_step
    nothing = train(tmp_path / "nothing", 2, folder / "checkpoint-10")
    assert (nothing.seen.epochs, nothing.state.global_step, nothing.state.max_steps) == ([], 10, 10)


@pytest.mark.parametrize(
    ("saved", "changes", "epochs"),
    [
        (2, {"max_steps": 9}, None),
        (2, {"max_steps": 2}, 0.4),
        (7, {"num_train_epochs": 1.7}, 1.7),
        (2, {"num_train_epochs": 1.7}, 1.7),
        (7, {"num_train_epochs": 1.2}, 1.4),
    ],
)
def test_steps_and_epochs_that_the_user_sets(begun, tmp_path, saved, changes, epochs):
    folder, _ = begun
    trainer = train(tmp_path, 1, folder / f"checkpoint-{saved}", save_strategy="no", **changes)
    state = trainer.state
    assert state.global_step == state.max_steps == changes.get("max_steps", state.max_steps)
    if epochs is not None:
        assert epochs <= state.epoch < epochs + 1 / 19  # rounded up to a step
    assert trainer.seen.rates[-1:] == [0.0] * (state.global_step > saved)


@pytest.mark.parametrize(
    ("data", "batching"),
    [
        (hfp.pack(DOCUMENTS, hfp.BestFit(64), load_from_cache_file=False), hfp.TokenBudget(64)),
        (hfp.pack(DOCUMENTS, hfp.Bucket((32, 64)), load_from_cache_file=False), hfp.BucketBatches(64)),
    ],
)
def test_epochs_that_do_not_end_with_a_whole_step(tmp_path, data, batching):
    """Copies that are not trained on fill the last step."""
    train(tmp_path / "begun", 3, stop=2, data=data, batching=batching)
    begun = train(tmp_path / "seen", 3, stop=2, data=data, batching=batching)
    rest = train(tmp_path / "rest", 5, tmp_path / "begun" / "checkpoint-2", data=data, batching=batching)
    sampler = rest.callback_handler.train_dataloader.dataset.sampler
    assert sampler.plan.num_micro_batches % 5
    assert len(sampler) % 5 == 0
    assert sorted(begun.counts[0] + rest.counts[0]) == sorted(rest.counts[1])
    assert len(set(rest.counts[1])) == len(rest.counts[1]) > 60  # pieces of documents, where buckets have cut them
    assert rest.state.max_steps == rest.state.global_step == rest.seen.epochs[-1][1]


def test_a_checkpoint_that_does_not_tell_the_steps(begun, tmp_path):
    folder, trainer = begun
    saved = shutil.copytree(folder / "checkpoint-2", tmp_path / "checkpoint-2")
    file = saved / "trainer_state.json"
    state = json.loads(file.read_text())
    assert state["stateful_callbacks"]["BatchesOfCheckpoint"]["attributes"]["batches"].pop("steps")
    file.write_text(json.dumps(state))
    hint = "accumulation_steps: expected 4, .* got 2 .*; use gradient_accumulation_steps=4"
    with pytest.raises(PackingError, match=hint):
        train(tmp_path / "other", 2, saved)
    assert losses(train(tmp_path / "same", 4, saved)) == losses(trainer)


def test_a_training_loop_that_does_not_ask_for_its_place(begun, tmp_path, monkeypatch):
    folder, _ = begun
    train(tmp_path, 2, folder / "checkpoint-2", stop=3)
    monkeypatch.setattr(ResumedSteps, "begin", lambda _: None)
    with pytest.raises(PackingError, match="expected 2, .* got 4 .*use gradient_accumulation_steps=2"):
        train(tmp_path / "other", 4, tmp_path / "checkpoint-3")
    with pytest.raises(PackingError, match="the trainer's train.*before step 2 had another size"):
        train(tmp_path / "same", 2, tmp_path / "checkpoint-3")


def test_a_new_epoch_with_other_steps_if_the_place_is_ignored(begun, tmp_path):
    folder, _ = begun
    trainer = train(tmp_path, 1, folder / "checkpoint-2", ignore_data_skip=True, save_strategy="no", max_steps=5)
    assert trainer.seen.epochs[0][0] == 2
    assert not set(trainer.counts[0]) - set(map(tuple, DOCUMENTS["input_ids"]))
