"""Training on batches of fixed shapes: the same losses, metrics and evaluation as on batches of any shape."""

import pytest
import torch
from patched_models import patched
from tiers import fast_only
from torch._dynamo.utils import counters
from trainers import attached, documents, loader_of, logged, trainer_of
from training_by_hand import gradients_of, largest_difference
from transformers import Trainer
from trl import SFTTrainer

import hf_packing as hfp

LIMITED = hfp.TokenBudget(64, max_documents=7)
SHAPES = {"tokens": 80, "max_segments": 8}


def shapes_of(loader):
    return {
        tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in batch.values())
        for batch in loader
    }


@pytest.mark.parametrize(("kind", "loss"), [(Trainer, "sequence"), (SFTTrainer, "token")])
def test_attach_trains_as_on_batches_of_any_shape(tmp_path, kind, loss):
    entries = []
    for shapes in ({}, SHAPES):
        more = {"gradient_accumulation_steps": 2, "learning_rate": 1e-3}
        trainer = attached(tmp_path, LIMITED, {"loss": loss, **shapes}, kind=kind, **more)
        loader = trainer.get_train_dataloader()
        assert len(shapes_of(loader)) == (1 if shapes else len(loader))
        trainer.train()
        entries.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for found, expected in zip(entries[1], entries[0], strict=True):
        for name in ("loss", "grad_norm", "documents_per_step", "tokens_per_step"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
        assert found["packing_efficiency"] == pytest.approx(expected["packing_efficiency"] * 64 / 80)


def test_shapes_are_those_of_the_arguments_or_of_the_trainers_collator(tmp_path):
    other = {"tokens": 90, "max_segments": 9}
    for collator, given, used in ({}, SHAPES, SHAPES), (SHAPES, {}, SHAPES), (SHAPES, other, other):
        trainer = trainer_of(tmp_path)
        trainer.data_collator = hfp.PackingCollator(**collator)
        hfp.attach(trainer, hfp.TokenBudget(64), **given)
        assert trainer.data_collator == hfp.PackingCollator(**used)
        batches = list(trainer.get_train_dataloader())
        assert all((batch["seq_idx"] < 0).any() for batch in batches), "a segment is left for the padding"


def test_evaluation_batches_are_filled(tmp_path):
    losses = []
    for shapes in ({}, SHAPES):
        trainer = attached(tmp_path, LIMITED, shapes, per_device_eval_batch_size=2)
        assert len(shapes_of(trainer.get_eval_dataloader(documents(40)))) == 1 or not shapes
        losses.append(trainer.evaluate(documents(40))["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    rows = len(trainer.get_eval_dataloader(documents(40)))
    tokens = sum(map(len, documents(40)["input_ids"]))
    assert rows < 20
    assert tokens > 0.6 * 80 * rows
    predicted = trainer.predict(documents(40))
    assert predicted.predictions.shape[:2] == predicted.label_ids.shape == (rows, 80)
    trained = sum(label != -100 for row in documents(40)["labels"] for label in row[1:])
    assert (predicted.label_ids != -100).sum() == trained
    with pytest.raises(hfp.PackingError, match="tokens: expected at most 80 tokens in each row, but row 1 has 100"):
        trainer.evaluate(documents(1).add_item({"input_ids": [5] * 100, "labels": [5] * 100}))


@pytest.mark.parametrize("loss", fast_only(["token", "sequence"], "token"))
def test_a_training_loop(loss):
    found = []
    for shapes in ({}, SHAPES):
        model = patched(dtype=torch.float64)
        batches = list(loader_of(None, LIMITED, 3, loss=loss, model=model, **shapes))
        assert len({batch["input_ids"].shape for batch in batches}) == 1 or not shapes
        losses = [hfp.compute_loss(model, batch) for batch in batches]
        sum(losses).backward()
        found.append(([each.item() for each in losses], gradients_of(model)))
        if loss == "token":
            assert [model(**batch).loss.item() for batch in batches] == pytest.approx(found[-1][0])
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-10)
    assert largest_difference(found[1][1], found[0][1]) <= 1e-10


def test_a_model_whose_routers_would_learn_from_padding_is_refused(tmp_path):
    model = patched("Mixtral", num_hidden_layers=1)
    model.config.output_router_logits = True
    trainer = attached(tmp_path, LIMITED, {"prove": "model", **SHAPES}, model=model)
    with pytest.raises(hfp.PackingError, match="^aux_loss: expected none with batches of fixed shapes, since Mixtral"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch and transformers, while they are traced
@pytest.mark.parametrize(("shapes", "most"), [({}, 4), (SHAPES, 1)])
def test_a_trainer_that_compiles_its_model(tmp_path, shapes, most):
    """The proof on the first batch compiles nothing of its own."""
    torch._dynamo.reset()
    counters.clear()
    compiling = {"torch_compile": True, "torch_compile_backend": "eager"}
    compiled = logged(attached(tmp_path, how=shapes, max_steps=8, **compiling))
    assert counters["stats"]["unique_graphs"] <= most
    assert compiled == pytest.approx(logged(attached(tmp_path, how=shapes, max_steps=8)), rel=1e-4)
    torch._dynamo.reset()
