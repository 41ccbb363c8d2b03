"""Checkpoints: going on with exactly what would have come, and refusing those of others."""

import pytest
import torch
from patched_models import patched
from tiers import fast_only
from tiny_models import build
from trainers import trainer_of
from transformers import TrainerCallback

import hf_packing as hfp
from hf_packing.errors import PackingError
from hf_packing.training.ranks import BatchesOfCheckpoint

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, _, state, control, **__):
        control.should_training_stop = state.global_step == self.step


SAVES = {"save_strategy": "steps", "save_steps": 1}


def losses_of(trainer, resume=None, stop=None):
    if stop:
        trainer.add_callback(StopAt(stop))
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("persistent", fast_only([False, True], False))
def test_resumed_with_dropout(tmp_path, persistent):
    """Seeds of workers are not drawn from the generator that dropout draws from."""
    workers = {"dataloader_num_workers": 2 * persistent, "dataloader_persistent_workers": persistent}

    def trainer():
        model = patched()
        model.model.layers[0].mlp.register_forward_hook(
            lambda _, __, out: torch.nn.functional.dropout(out, 0.5, model.training)
        )
        made = trainer_of(tmp_path, model=model, max_steps=4, **SAVES, **workers)
        hfp.attach(made, hfp.TokenBudget(64))
        return made

    losses_of(trainer(), stop=2)
    assert losses_of(trainer(), resume=tmp_path / "checkpoint-2") == losses_of(trainer())


def test_a_checkpoint_without_batches(tmp_path):
    """It is refused, unless the run goes on with the next epoch."""
    stock = trainer_of(tmp_path, model=build("Llama"), per_device_train_batch_size=1, **SAVES)
    stock.train()
    for ignore in (False, True):
        trainer = trainer_of(tmp_path, max_steps=4, ignore_data_skip=ignore, **SAVES)
        hfp.attach(trainer, hfp.TokenBudget(64))
        if ignore:
            trainer.train(resume_from_checkpoint=True)
            assert trainer.state.global_step == 4
        else:
            with pytest.raises(PackingError, match="expected a checkpoint of an attached trainer"):
                trainer.train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("began", [1, 2])
def test_a_checkpoint_of_a_run_that_ignored_where_it_was(tmp_path, began):
    """From then on its steps say where in an epoch it is only if it was resumed between two epochs."""
    (tmp_path / "again").mkdir()

    def losses(folder, resume=None, ignore=False):
        options = {"max_steps": 8, "learning_rate": 1e-2, "gradient_accumulation_steps": 4, **SAVES}
        trainer = trainer_of(folder, ignore_data_skip=ignore, **options)
        assert hfp.attach(trainer, hfp.TokenBudget(64)).optimizer_steps == 2
        return losses_of(trainer, resume)

    losses(tmp_path)
    ignoring = losses(tmp_path / "again", tmp_path / f"checkpoint-{began}", ignore=True)
    saved = tmp_path / "again" / "checkpoint-5"
    if began == 2:
        assert losses(tmp_path / "again", saved) == ignoring
        return
    with pytest.raises(PackingError, match="itself resumed with ignore_data_skip=True, 1 steps into an epoch"):
        losses(tmp_path / "again", saved)
    assert len(losses(tmp_path / "again", saved, ignore=True)) == 8


@pytest.mark.slow
def test_restored_callbacks(tmp_path):
    def trainer():
        made = trainer_of(tmp_path, max_steps=4, restore_callback_states_from_checkpoint=True, **SAVES)
        hfp.attach(made, hfp.TokenBudget(64))
        return made

    assert len(losses_of(trainer(), stop=2)) == 2
    assert losses_of(trainer(), resume=tmp_path / "checkpoint-2") == losses_of(trainer())


def test_a_checkpoint_of_another_budget(tmp_path):
    for budget, steps in ((64, 2), (72, 4)):
        trainer = trainer_of(tmp_path, max_steps=steps, **SAVES)
        hfp.attach(trainer, hfp.TokenBudget(budget))
        if budget == 64:
            trainer.train()
    with pytest.raises(PackingError, match=r"batching: expected .TokenBudget\(.*max_tokens=64.* got .*max_tokens=72"):
        trainer.train(resume_from_checkpoint=True)


def test_the_callback_comes_back_with_its_loss():
    """As restore_callback_states_from_checkpoint makes it again."""
    callback = BatchesOfCheckpoint("sequence")
    assert BatchesOfCheckpoint.from_state(callback.state()).loss == "sequence"
