"""What a user changes after attach: it takes effect at once, or after another attach, and until then it is refused."""

import math
import re
from functools import reduce

import pytest
import torch
from accelerate import Accelerator
from tiers import fast_only
from tiny_models import build
from trainers import attached, documents, on_each_batch, trainer_of
from transformers import Trainer, TrainerCallback, default_data_collator
from transformers.trainer_pt_utils import LabelSmoother
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.attention import is_patched

FEW, MORE = documents(20).to_list(), documents(40).to_list()


def set_to(path, value):
    *holders, name = path.split(".")
    return lambda trainer: setattr(reduce(getattr, holders, trainer), name, value)


def twice_the_loss(logits, labels, vocab_size, **_):
    logits, labels = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return 2 * torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)


HONORED = {
    "max_steps": set_to("args.max_steps", 3),
    "learning_rate": set_to("args.learning_rate", 1e-2),
    "per_device_eval_batch_size": set_to("args.per_device_eval_batch_size", 3),
    "dataloader_num_workers": set_to("args.dataloader_num_workers", 1),
    "per_device_train_batch_size": set_to("args.per_device_train_batch_size", 3),
    "seed": set_to("args.seed", 3),
    "eval_dataset": set_to("eval_dataset", documents(9)),
    "eval_dataset with other rows": lambda trainer: trainer.eval_dataset.extend(MORE[20:]),
    "eval_dataset by name": set_to("eval_dataset", {"few": documents(3), "more": documents(9)}),
    "compute_metrics": set_to("compute_metrics", lambda predicted: {"rows": len(predicted.label_ids)}),
    "the loss of the model": set_to("model.loss_function", twice_the_loss),
}
NO_EFFECT = {"dataloader_num_workers", "per_device_train_batch_size", "seed", "per_device_eval_batch_size"}
"""What decides neither losses nor the mean over an evaluation."""


def results(tmp_path, before=lambda _: None, after=lambda _: None):
    trainer = trainer_of(tmp_path, data=list(FEW), learning_rate=1e-3)
    trainer.eval_dataset = list(FEW)
    before(trainer)
    hfp.attach(trainer, hfp.TokenBudget(64))
    after(trainer)
    trainer.train()
    kept = ("loss", "tokens_per_step")
    trained = [{name: round(entry[name], 4) for name in kept} for entry in trainer.state.log_history if "loss" in entry]
    logs = trainer.evaluate().items()
    evaluated = {name: round(value, 4) for name, value in logs if name.endswith(("_loss", "_rows"))}
    return trained, evaluated, len(trainer.get_eval_dataloader(list(FEW)))


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    return results(tmp_path_factory.mktemp("unchanged"))


@pytest.mark.parametrize("name", fast_only(HONORED, "eval_dataset", "the loss of the model"))
def test_changes_that_take_effect(tmp_path, name, unchanged):
    found = results(tmp_path, after=HONORED[name])
    assert found == results(tmp_path, before=HONORED[name])
    assert (found[:2] == unchanged[:2]) == (name in NO_EFFECT)
    assert (found[2] == unchanged[2]) == (name != "per_device_eval_batch_size")
    assert all(math.isfinite(loss) for loss in found[1].values())


AFTER_ANOTHER_ATTACH = {
    "gradient_accumulation_steps": set_to("args.gradient_accumulation_steps", 2),
    "train_dataset": set_to("train_dataset", documents(40)),
    "len(train_dataset)": lambda trainer: trainer.train_dataset.extend(MORE[20:]),
    "label_smoothing_factor": set_to("args.label_smoothing_factor", 0.1),
    "data_collator": set_to("data_collator", default_data_collator),
}


@pytest.mark.parametrize("name", fast_only(AFTER_ANOTHER_ATTACH, "gradient_accumulation_steps", "train_dataset"))
def test_changes_that_need_another_attach(tmp_path, name):
    def change(trainer):
        AFTER_ANOTHER_ATTACH[name](trainer)
        for call in (trainer.train, trainer.evaluate):
            with pytest.raises(hfp.PackingError, match=re.escape(f"{name}: expected") + ".* call attach again"):
                call()
        hfp.attach(trainer, hfp.TokenBudget(64))

    assert results(tmp_path, after=change) == results(tmp_path, before=AFTER_ANOTHER_ATTACH[name])


def test_an_attach_that_fails_leaves_the_one_before(tmp_path):
    trainer = attached(tmp_path, data=documents(20))
    kind, before = type(trainer), vars(trainer).copy()
    with pytest.raises(hfp.PackingError, match="max_tokens: "):
        hfp.attach(trainer, hfp.TokenBudget(4))
    assert type(trainer) is kind
    assert vars(trainer) == before
    trainer.train()
    assert trainer.state.global_step == 2


REFUSED = {
    "average_tokens_across_devices": set_to("args.average_tokens_across_devices", False),
    "auto_find_batch_size": set_to("args.auto_find_batch_size", True),
    "train_sampling_strategy": set_to("args.train_sampling_strategy", "sequential"),
    "packing": set_to("args.packing", True),
    "dispatch_batches": set_to("accelerator.dataloader_config.dispatch_batches", True),
    "split_batches": set_to("accelerator.dataloader_config.split_batches", True),
    "get_train_dataloader": set_to("get_train_dataloader", list),
    "_get_train_sampler": set_to("_get_train_sampler", lambda _: None),
    "model": lambda trainer: setattr(trainer, "model", build("Llama")),
    "train_dataset": set_to("train_dataset", None),
    "predict_with_generate": set_to("args.predict_with_generate", True),
    "label_smoothing_factor": set_to("args.label_smoothing_factor", 0.1),
    "use_liger_kernel": set_to("args.use_liger_kernel", True),
    "loss_type": set_to("args.loss_type", "dft"),
    "label_smoother": set_to("label_smoother", LabelSmoother(0.1)),
    "compute_loss_func": set_to("compute_loss_func", lambda *_, **__: 0),
    "model_accepts_loss_kwargs": set_to("model_accepts_loss_kwargs", False),
    "data_collator": set_to("data_collator", lambda rows: rows[0]),
    "compute_loss": set_to("compute_loss", lambda *_, **__: 0),
}


@pytest.fixture(scope="module", params=[Trainer, SFTTrainer])
def trainer(request, tmp_path_factory):
    return attached(tmp_path_factory.mktemp("attached"), kind=request.param, data=documents(20))


@pytest.mark.parametrize("name", REFUSED)
def test_changes_that_are_refused(trainer, name):
    if not hasattr(trainer.args, name) and name in ("loss_type", "packing"):
        pytest.skip("an argument of SFTTrainer")
    state = [(each, vars(each).copy()) for each in (trainer, trainer.args, trainer.accelerator.dataloader_config)]
    REFUSED[name](trainer)
    try:
        for call in (trainer.train, lambda: trainer.evaluate(documents(3)), lambda: trainer.predict(documents(3))):
            with pytest.raises(hfp.PackingError, match=f"^{name}: "):
                call()
    finally:
        for holder, before in state:
            vars(holder).clear()
            vars(holder).update(before)
    assert trainer.state.global_step == 0


def test_accumulation_that_a_callback_changes_is_refused(tmp_path):
    """The trainer would update elsewhere than what losses are divided by says, its gradient several times as large."""

    class Slower(TrainerCallback):
        def on_step_end(self, args, state, *_, **__):
            args.gradient_accumulation_steps = state.global_step

    trainer = attached(tmp_path, callbacks=[Slower()], max_steps=4)
    with pytest.raises(hfp.PackingError, match="^gradient_accumulation_steps: "):
        trainer.train()
    assert trainer.state.global_step == 2
    trainer.remove_callback(Slower)
    trainer.args.gradient_accumulation_steps = 1
    trainer.train()
    assert trainer.state.global_step == 4


def test_a_model_that_was_unpatched_is_patched_again(tmp_path):
    trainer = attached(tmp_path, data=documents(20))
    hfp.unpatch_model(trainer.model)
    assert not is_patched(trainer.model)
    trainer.train()
    assert is_patched(trainer.model)
    hfp.unpatch_model(trainer.model)
    trainer.evaluate(documents(3))
    assert is_patched(trainer.model)


def test_rows_that_are_added_while_training_are_refused(tmp_path):
    rows = list(FEW)
    trainer = attached(tmp_path, data=rows, max_steps=-1, num_train_epochs=2)
    on_each_batch(trainer, lambda _: rows.append(MORE[30]))
    try:
        with pytest.raises(hfp.PackingError, match=r"^len\(train_dataset\): "):
            trainer.train()
    finally:
        trainer.accelerator.gradient_state._reset_state()  # else the loader that was broken off stays the active one


def test_changes_that_a_loop_refuses():
    accelerator, data = Accelerator(cpu=True), list(FEW)
    loader = hfp.prepare_dataloader(accelerator, data, hfp.TokenBudget(64))
    assert len(list(loader)) == len(loader)
    data.extend(MORE[20:])
    with pytest.raises(hfp.PackingError, match="^dataset: "):
        next(iter(loader))
    del data[20:]
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(hfp.PackingError, match="^gradient_accumulation_steps: "):
        next(iter(loader))
