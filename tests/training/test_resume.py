"""Checkpoints: going on with exactly what would have come, and refusing those of others."""

import pytest
import torch
import trainers
from patched_models import patched
from tiers import fast_only
from tiny_models import build
from trainers import documents, trainer_of

import hf_packing as hfp

pytestmark = pytest.mark.filterwarnings("ignore:dropout. documents that share:UserWarning")

SAVES = {"save_strategy": "steps", "save_steps": 1}
KINDS = {
    "documents": (lambda: documents(45), hfp.TokenBudget(64)),
    "trees": (lambda: documents(12, samples=3), hfp.TokenBudget(96, share_prefixes=2)),
    "stream": (lambda: documents(45).to_iterable_dataset(num_shards=4), hfp.TokenBudget(64)),
}


def attached(folder, kind="documents", batching=None, loss="token", **changes):
    """A trainer whose model has dropout."""
    make, usual = KINDS[kind]
    model = patched(trees=kind == "trees")
    layer = model.model.layers[0]
    layer.dropout = torch.nn.Dropout(0.5)
    layer.mlp.register_forward_hook(lambda _, __, out: layer.dropout(out))
    known = {"max_steps": 4, **SAVES, **changes}
    return trainers.attached(folder, batching or usual, {"loss": loss}, model=model, data=make(), **known)


def lines_of(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return [(line["loss"], line["epoch"]) for line in trainer.state.log_history if "loss" in line]


PERSISTENT = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
HOW = [
    *((kind, {}) for kind in KINDS),
    ("documents", PERSISTENT),
    ("documents", {"restore_callback_states_from_checkpoint": True}),
]


@pytest.mark.parametrize(("kind", "how"), fast_only(HOW, *((kind, {}) for kind in KINDS)), ids=str)
def test_resumed_bit_for_bit(tmp_path, kind, how):
    """Seeds of workers are not drawn from the generator that dropout draws from."""
    whole = lines_of(attached(tmp_path, kind, **how))
    assert len({loss for loss, _ in whole}) == 4
    resumed = attached(tmp_path, kind, **how)
    assert lines_of(resumed, tmp_path / "checkpoint-2") == whole
    assert resumed.args.ignore_data_skip is False
    assert torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False).ignore_data_skip is False


@pytest.mark.parametrize("kind", ["documents", "stream"])
def test_a_checkpoint_without_batches(tmp_path, kind):
    """It is refused, unless the run goes on with the next epoch."""
    trainer_of(tmp_path, model=build("Llama"), per_device_train_batch_size=1, **SAVES).train()
    with pytest.raises(hfp.PackingError, match="expected a checkpoint of an? (attached trainer|trainer attached)"):
        attached(tmp_path, kind).train(resume_from_checkpoint=True)
    ignoring = attached(tmp_path, kind, ignore_data_skip=True)
    ignoring.train(resume_from_checkpoint=True)
    assert ignoring.state.global_step == 4


@pytest.mark.slow
@pytest.mark.parametrize("began", [1, 2])
def test_a_checkpoint_of_a_run_that_ignored_where_it_was(tmp_path, began):
    """From then on its steps say where in an epoch it is only if it was resumed between two epochs."""
    again = tmp_path / "again"

    def losses(folder, resume=None, ignore=False):
        options = {"max_steps": 8, "learning_rate": 1e-2, "gradient_accumulation_steps": 4}
        return lines_of(attached(folder, ignore_data_skip=ignore, **options), resume)

    losses(tmp_path)
    ignoring = losses(again, tmp_path / f"checkpoint-{began}", ignore=True)
    if began == 2:
        assert losses(again, again / "checkpoint-5") == ignoring
        return
    with pytest.raises(hfp.PackingError, match="resumed with ignore_data_skip=True in the middle of an epoch"):
        losses(again, again / "checkpoint-5")
    assert len(losses(again, again / "checkpoint-5", ignore=True)) == 8


@pytest.mark.parametrize(
    ("kind", "argument", "other"),
    [
        ("documents", "batching", {"batching": hfp.TokenBudget(72)}),
        ("trees", "batching", {"batching": hfp.TokenBudget(96)}),
        ("stream", "loss", {"loss": "sequence"}),
    ],
)
def test_a_checkpoint_of_other_batches_is_refused(tmp_path, kind, argument, other):
    attached(tmp_path, kind, max_steps=2).train()
    with pytest.raises(hfp.PackingError, match=f"{argument}: expected"):
        attached(tmp_path, kind, **other).train(resume_from_checkpoint=True)
