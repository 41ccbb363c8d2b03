"""attach on one process: what it changes and leaves alone, checkpoints, and batches of fixed shapes."""

import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from aligned_layers import with_aligned_layers
from documents_to_mask import hidden
from patched_models import patched, patched_once, patched_tiny
from tiers import fast_only, slow
from tiny_models import build
from torch._dynamo.utils import counters
from torch.nn import functional as F
from trainers import Gradients, Plain, arguments, attached, documents, loader_of, logged, on_each_batch, trainer_of
from training_by_hand import gradients_of, largest_difference
from transformers import LlamaForCausalLM, Trainer
from trl import SFTTrainer

import hf_packing as hfp
from hf_packing.sampling.batching import Batching, EpochPlan, keep_rows
from hf_packing.sampling.token_budget import linear_cost_of
from hf_packing.training.attach import PackedTrainer
from tools.tiny_model import tiny_model


def test_what_is_reported(tmp_path):
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    summary = hfp.attach(trainer, hfp.TokenBudget(64))
    lengths = [len(row) for row in documents(45)["input_ids"]]
    assert (summary.documents, summary.tokens) == (45, sum(lengths))
    assert summary.optimizer_steps == -(-summary.num_micro_batches // 2)
    assert summary.documents_per_step == pytest.approx(45 / summary.optimizer_steps)
    assert summary.largest_micro_batch <= 64
    assert summary.unpacked_documents_per_step == 8
    assert "match_documents_per_step=8 keeps that schedule" in str(summary)
    trainer.train()
    assert len(trainer.get_train_dataloader()) == summary.num_micro_batches


def test_the_unpacked_schedule(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=-1, num_train_epochs=2)
    summary = hfp.attach(trainer, hfp.TokenBudget(500), match_documents_per_step=9)
    assert summary.optimizer_steps == 5
    trainer.train()
    assert trainer.state.global_step == 10


MyTrainer = type("MyTrainer", (SFTTrainer,), {})


@pytest.mark.parametrize("kind", fast_only([Trainer, SFTTrainer, MyTrainer], Trainer, MyTrainer))
def test_trainers_stay_what_they_are(tmp_path, kind):
    trainer = attached(tmp_path, kind=kind, model=build("Llama", num_hidden_layers=1), bf16=kind is Trainer)
    order = [*type(trainer).__mro__]
    assert order.index(PackedTrainer) < order.index(kind)
    assert type(copy.deepcopy(trainer)) is type(trainer)
    assert hfp.check_isolation(trainer.model).isolated
    assert len(logged(trainer)) == 2


@pytest.mark.parametrize(("kind", "loss"), [(Trainer, "sequence"), (SFTTrainer, "token")])
def test_nothing_to_train_on_is_zero(tmp_path, kind, loss):
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100] * 3, [-100] * 2]})
    trainer = attached(tmp_path, hfp.TokenBudget(8), {"loss": loss}, kind=kind, data=data)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    assert logged(trainer) == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_asking_a_trainer_for_its_loss_leaves_no_trace(tmp_path):
    class Own(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    trainer = trainer_of(tmp_path, Own)
    state = torch.get_rng_state()
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert torch.equal(torch.get_rng_state(), state)
    assert not trainer._metrics["train"]
    assert not trainer._total_train_tokens


def test_training_in_evaluation_mode(tmp_path):
    """Without dropout, say: it is training all the same."""

    class InEvaluationMode(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.eval()
            model.train = lambda *_: model
            return super().training_step(model, inputs, num_items_in_batch)

    changes = {"gradient_accumulation_steps": 2}
    found = [logged(attached(tmp_path, kind=kind, **changes)) for kind in (Trainer, InEvaluationMode)]
    assert found[0] == found[1]


def test_trainers_that_cannot_be_subclassed_stay_as_they_are(tmp_path):
    class Final(Trainer):
        def __init_subclass__(cls, *, allowed):
            pass

    trainer = trainer_of(tmp_path, Final, model=build("Llama"))
    before = vars(trainer).copy()
    with pytest.raises(TypeError, match="allowed"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert vars(trainer) == before
    with pytest.raises(hfp.PackingError, match="is not"):
        hfp.unpatch_model(trainer.model)


def with_types(row):
    return {"token_type_ids": [int(place > len(row["input_ids"]) // 2) for place in range(len(row["input_ids"]))]}


@pytest.mark.parametrize("architecture", fast_only(["bert", "roberta", "electra", "deberta-v2"], "bert"))
def test_token_types_and_first_labels_of_masked_models(tmp_path, architecture):
    model, data = tiny_model(architecture, "masked"), documents(12).map(hidden).map(with_types)
    data = data.filter(lambda row: set(row["labels"]) != {-100})
    assert any(row["labels"][0] != -100 for row in data)
    types = {} if getattr(model.config, "type_vocab_size", 0) < 2 else {"token_type_ids"}
    total = tokens = 0.0
    for row in data:
        names = ("input_ids", "labels", *types)
        with torch.no_grad():
            loss = model(**{name: torch.tensor([row[name]]) for name in names}).loss
        trained = sum(label != -100 for label in row["labels"])
        total, tokens = total + loss.item() * trained, tokens + trained
    proven = patched_tiny(architecture, "masked")
    step = {"max_steps": 1, "gradient_accumulation_steps": 2}
    how = {"match_documents_per_step": len(data)}
    trainer = attached(tmp_path, hfp.TokenBudget(2000), how, model=proven, data=data, **step)
    assert logged(trainer)[0] == pytest.approx(total / tokens, rel=2e-5)


def test_token_types_of_models_that_embed_them_with_their_tokens(tmp_path):
    """As GPT-2 does, also for types of 0."""
    data = documents(12).map(lambda row: {"input_ids": (row["input_ids"] * 8)[:8], "labels": (row["labels"] * 8)[:8]})
    data = data.map(with_types)  # of equal lengths, since the trainer's own collator pads no types
    settings = {"max_steps": 1, "per_device_train_batch_size": len(data)}
    expected = logged(trainer_of(tmp_path, model=build("GPT2"), data=data, **settings))
    trainer = attached(tmp_path, hfp.TokenBudget(2000), model=build("GPT2"), data=data, **settings)
    assert logged(trainer) == pytest.approx(expected, rel=1e-5)


class Boxes(LlamaForCausalLM):
    def forward(self, input_ids, bbox=None, **inputs):  # noqa: ARG002
        return super().forward(input_ids, **inputs)


def test_values_of_the_own_collator_that_rows_cannot_have_are_refused(tmp_path):
    data = documents(12).map(lambda row: {"bbox": [[1, 2, 3, 4]] * len(row["input_ids"])})
    trainer = trainer_of(tmp_path, model=Boxes(build("Llama").config), data=data)
    with pytest.raises(hfp.PackingError, match="^column 'bbox': expected no such value in batches"):
        hfp.attach(trainer, hfp.TokenBudget(64))


LOGGED = ("packing_efficiency", "documents_per_step", "tokens_per_step")
UTILIZATION = ("token_utilization", "attention_utilization")
"""What is 1 by nature in a single process, and not logged."""


def test_what_is_logged_while_training(tmp_path):
    steps = hfp.attach(trainer_of(tmp_path, data=documents(20)), hfp.TokenBudget(64)).optimizer_steps
    trainer = trainer_of(tmp_path, data=documents(20), max_steps=2 * steps, logging_steps=steps)
    summary = hfp.attach(trainer, hfp.TokenBudget(64))
    trainer.train()
    first, second, last = trainer.state.log_history
    for entry in (first, second):
        assert entry["documents_per_step"] == pytest.approx(summary.documents_per_step)
        assert entry["tokens_per_step"] == pytest.approx(summary.tokens_per_step)
        assert entry["packing_efficiency"] == pytest.approx(summary.tokens / (64 * summary.num_micro_batches))
        assert not set(UTILIZATION) & set(entry)
    assert not {*LOGGED, *UTILIZATION} & set(last)
    assert not {*LOGGED, *UTILIZATION} & set(trainer.evaluate(documents(9)))


@dataclass(frozen=True)
class OneByOne(Batching):
    limit: int | None = None

    most_tokens = property(lambda self: self.limit)

    def fit(self, sizes):
        return keep_rows(sizes, sizes.tokens > 0)

    def plan_fitted(self, rows, epoch):
        number = len(rows.kept) // epoch.world_size * epoch.world_size
        return EpochPlan(
            epoch.world_size,
            rows=rows.kept[:number],
            is_copy=np.zeros(number, dtype=bool),
            offsets=np.arange(number + 1),
            left_out=rows.kept[number:],
        )


@pytest.mark.parametrize("limit", [None, 64])
def test_a_batching_of_the_users_own(tmp_path, limit):
    trainer = trainer_of(tmp_path, max_steps=5)
    summary = hfp.attach(trainer, OneByOne(limit))
    assert summary.num_micro_batches == 45
    trainer.train()
    lengths = [len(tokens) for tokens in documents(45)["input_ids"][:5]]
    logs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["tokens_per_step"] for line in logs] == lengths
    assert [line.get("packing_efficiency") for line in logs] == [limit and length / limit for length in lengths]
    with pytest.raises(hfp.PackingError, match="^tokens: "):
        hfp.attach(trainer_of(tmp_path), OneByOne(), tokens=99, max_segments=9)


def test_a_model_that_is_made_when_training_begins(tmp_path):
    """Trainer builds a new one in train(), which has to be patched, too."""
    made = partial(build, "Llama", num_hidden_layers=1)
    trainer = Trainer(model_init=made, args=arguments(tmp_path), train_dataset=documents(45))
    hfp.attach(trainer, hfp.TokenBudget(64))
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert hfp.check_isolation(trainer.model).isolated


def test_linear_cost_of_layers_of_other_sizes():
    """Some configurations raise an error where they are asked for a size that layers have for themselves."""

    class OfLayers(SimpleNamespace):
        @property
        def head_dim(self):
            raise RuntimeError("ask the configuration of a layer")

    sizes = build("Llama").config.to_dict()
    one, other = (SimpleNamespace(**sizes | {"head_dim": size}) for size in (32, 16))
    config = OfLayers(is_heterogeneous=True, per_layer_config=[one, other], num_hidden_layers=2)
    assert linear_cost_of(config) == linear_cost_of(one)


def test_linear_cost_is_that_of_the_model(tmp_path):
    per_layer = (2 * 64 * (64 + 32) + 3 * 64 * 96) / (2 * 64)
    one_of_two_layers = build("Gemma2").config
    assert linear_cost_of(one_of_two_layers) == pytest.approx(2 * per_layer)
    for given, expected in ((None, per_layer), (5, 5)):
        trainer = attached(tmp_path, hfp.TokenBudget(64, linear_cost=given))
        assert trainer.attached.batching.linear_cost == pytest.approx(expected)


SAVES = {"save_strategy": "steps", "save_steps": 1}
KINDS = {
    "documents": (lambda: documents(45), hfp.TokenBudget(64)),
    "trees": (lambda: documents(12, samples=3), hfp.TokenBudget(96, share_prefixes=2)),
    "stream": (lambda: documents(45).to_iterable_dataset(num_shards=4), hfp.TokenBudget(64)),
}


def with_dropout(folder, kind="documents", batching=None, loss="token", **changes):
    make, usual = KINDS[kind]
    model = patched(trees=kind == "trees")
    layer = model.model.layers[0]
    layer.dropout = torch.nn.Dropout(0.5)
    layer.mlp.register_forward_hook(lambda _, __, out: layer.dropout(out))
    known = {"max_steps": 4, **SAVES, **changes}
    return attached(folder, batching or usual, {"loss": loss}, model=model, data=make(), **known)


def lines_of(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return [(line["loss"], line["epoch"]) for line in trainer.state.log_history if "loss" in line]


PERSISTENT = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
HOW = [
    *((kind, {}) for kind in KINDS),
    ("documents", PERSISTENT),
    ("documents", {"restore_callback_states_from_checkpoint": True}),
]


@pytest.mark.filterwarnings("ignore:dropout. documents that share:UserWarning")
@pytest.mark.parametrize(("kind", "how"), fast_only(HOW, *((kind, {}) for kind in KINDS)), ids=str)
def test_resumed_bit_for_bit(tmp_path, kind, how):
    """Seeds of workers are not drawn from the generator that dropout draws from."""
    whole = lines_of(with_dropout(tmp_path, kind, **how))
    assert len({loss for loss, _ in whole}) == 4
    resumed = with_dropout(tmp_path, kind, **how)
    assert lines_of(resumed, tmp_path / "checkpoint-2") == whole
    assert resumed.args.ignore_data_skip is False
    assert torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False).ignore_data_skip is False


@pytest.mark.parametrize("kind", ["documents", "stream"])
def test_a_checkpoint_without_batches(tmp_path, kind):
    """It is refused, unless the run goes on with the next epoch."""
    trainer_of(tmp_path, model=build("Llama"), per_device_train_batch_size=1, **SAVES).train()
    with pytest.raises(hfp.PackingError, match="expected a checkpoint of an? (attached trainer|trainer attached)"):
        with_dropout(tmp_path, kind).train(resume_from_checkpoint=True)
    ignoring = with_dropout(tmp_path, kind, ignore_data_skip=True)
    ignoring.train(resume_from_checkpoint=True)
    assert ignoring.state.global_step == 4


@pytest.mark.slow
@pytest.mark.parametrize("began", [1, 2])
def test_a_checkpoint_of_a_run_that_ignored_where_it_was(tmp_path, began):
    """From then on its steps say where in an epoch it is only if it was resumed between two epochs. What an earlier run
    has saved in the same folder does not count."""
    again = tmp_path if began == 1 else tmp_path / "again"

    def losses(folder, resume=None, ignore=False):
        options = {"max_steps": 8, "learning_rate": 1e-2, "gradient_accumulation_steps": 4}
        return lines_of(with_dropout(folder, ignore_data_skip=ignore, **options), resume)

    losses(tmp_path)
    ignoring = losses(again, tmp_path / f"checkpoint-{began}", ignore=True)
    if began == 2:
        assert losses(again, again / "checkpoint-5") == ignoring
        return
    with pytest.raises(hfp.PackingError, match="resumed with ignore_data_skip=True in the middle of an epoch"):
        losses(again, again / "checkpoint-5")
    assert len(losses(again, again / "checkpoint-5", ignore=True)) == 8


@pytest.mark.filterwarnings("ignore:dropout. documents that share:UserWarning")
@pytest.mark.parametrize(
    ("kind", "argument", "other"),
    [
        ("documents", "max_tokens", {"batching": hfp.TokenBudget(72)}),
        ("trees", "share_prefixes", {"batching": hfp.TokenBudget(96)}),
        ("stream", "loss", {"loss": "sequence"}),
    ],
)
def test_a_checkpoint_of_other_batches_is_refused(tmp_path, kind, argument, other):
    with_dropout(tmp_path, kind, max_steps=2).train()
    with pytest.raises(hfp.PackingError, match=f"{argument}: expected"):
        with_dropout(tmp_path, kind, **other).train(resume_from_checkpoint=True)


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


def test_evaluation_batches_have_no_more_tokens_than_those_of_the_training(tmp_path):
    """A longer document is alone, and so are rows of a stream."""
    data = documents(12).add_item({"input_ids": [5] * 70, "labels": [5] * 70})
    lengths, number, in_turn = [len(row) for row in data["input_ids"]], [], []
    trainer = attached(tmp_path, hfp.TokenBudget(48), per_device_eval_batch_size=4)
    for batch in trainer.get_eval_dataloader(data):
        own = batch["cu_seq_lens_q"].diff().tolist()
        assert own == [lengths.pop(0) for _ in own]
        assert sum(own) <= 48 or own == [70]
        number.append(len(own))
        in_turn.append(sum(own))
    assert not lengths
    assert number[-1] == 1
    assert len({*number[:-1]}) > 1, "some batches have as few documents as fit, others four"
    assert max(number) == 4
    stream = hfp.pack(data.to_iterable_dataset(), hfp.BestFit(24, overflow="split"), streams=1)
    in_batches = [batch["input_ids"].shape[1] for batch in trainer.get_eval_dataloader(stream)]
    assert 24 < max(in_batches) <= 48

    model, losses = patched(), []
    for most in ({}, {"rows_per_batch": 4, "max_tokens": 48}):
        seen = []
        note = lambda *given, seen=seen: seen.append(given[2]["input_ids"].shape[1])  # noqa: E731
        watch = model.register_forward_pre_hook(note, with_kwargs=True)
        losses.append(hfp.evaluation_loss(Accelerator(cpu=True), model, data, **most))
        watch.remove()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert seen == in_turn


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


ALIGNED = {"align_tokens": 24}


@pytest.mark.parametrize(
    ("kind", "loss"), [(Trainer, "token"), slow(SFTTrainer, "sequence"), slow(None, "token"), slow(None, "sequence")]
)
def test_aligned_batches_train_and_evaluate_as_others(tmp_path, kind, loss):
    """All documents are in one optimizer step of four micro-batches, whose rows differ. Layers take multiples only."""
    found, loops = [], []
    for aligned in ({}, ALIGNED):
        budget = hfp.TokenBudget(360, **aligned)
        model = with_aligned_layers(build("Llama", torch.float64), 8) if aligned else patched(dtype=torch.float64)
        hfp.patch_model(model)
        if kind is None:
            batches = list(loader_of(None, budget, 4, loss=loss, model=model))
            sum(hfp.compute_loss(model, batch) for batch in batches).backward()
            found.append(
                (hfp.evaluation_loss(Accelerator(cpu=True), model, documents(9), **aligned), gradients_of(model))
            )
        else:
            seen, batches = Gradients(), []
            more = {"gradient_accumulation_steps": 4, "max_steps": 1, "max_grad_norm": 0.0, "callbacks": [seen]}
            trainer = attached(tmp_path, budget, {"loss": loss}, kind=kind, model=model, **more)
            on_each_batch(trainer, lambda batch, batches=batches: batches.append(dict(batch)))
            evaluated = list(trainer.get_eval_dataloader(documents(9)))
            loss_before = trainer.evaluate(documents(9))["eval_loss"]
            trainer.train()
            entry = next(each for each in trainer.state.log_history if "documents_per_step" in each)
            found.append(
                (loss_before, entry["loss"], entry["tokens_per_step"], entry["documents_per_step"], seen.gradients)
            )
            batches += evaluated
        loops.append(batches)
    for batch in loops[1]:
        assert 0 < batch["input_ids"].shape[1] <= 360
        assert batch["input_ids"].shape[1] % 24 == 0
    assert any(batch["input_ids"].shape[1] % 24 for batch in loops[0])
    for one, other in zip(*found, strict=True):
        if isinstance(one, dict):
            assert largest_difference(other, one) <= 1e-12
        else:
            assert other == pytest.approx(one, rel=1e-6 if kind else 1e-12)  # Trainer rounds what it logs


def test_the_collator_of_the_trainer_has_the_multiples_of_the_batching(tmp_path):
    for given, batching, fits in (({}, ALIGNED, True), (ALIGNED, ALIGNED, True), (ALIGNED, {}, False)):
        trainer = trainer_of(tmp_path)
        trainer.data_collator = hfp.PackingCollator(**given)
        if fits:
            summary = hfp.attach(trainer, hfp.TokenBudget(96, **batching))
            assert trainer.data_collator == hfp.PackingCollator(**batching)
            filled = [(batch["seq_idx"] == -1).sum().item() for batch in trainer.get_train_dataloader()]
            assert summary.filled == sum(filled) > 0
            assert f"{summary.filled:,} masked tokens fill up micro-batches" in str(summary)
        else:
            with pytest.raises(hfp.PackingError, match="^align_tokens: expected 24 in the batching, .* got 1"):
                hfp.attach(trainer, hfp.TokenBudget(96, **batching))


@pytest.mark.parametrize(("kind", "most"), [(Trainer, 1e-7), (SFTTrainer, 1e-6)])  # both balance in float32
def test_routers_learn_nothing_from_filled_tokens(tmp_path, kind, most):
    """All documents are in one micro-batch, whose tokens are those that routers balance. The model is patched before
    the trainer is built, in which SFTTrainer puts a head of its own around the backbone."""
    found = []
    for shapes in ({}, {"tokens": 2048, "max_segments": 99}, ALIGNED):
        model = patched(
            "Mixtral", torch.float64, num_hidden_layers=1, output_router_logits=True, router_aux_loss_coef=0.5
        )
        aligned = shapes if shapes is ALIGNED else {}
        with_aligned_layers(model, 8 if aligned else 1)
        seen = Gradients()
        trainer = trainer_of(tmp_path, kind, model=model, max_steps=1, max_grad_norm=0.0, callbacks=[seen])
        hfp.attach(trainer, hfp.TokenBudget(2040, **aligned), prove="model", **({} if aligned else shapes))
        trainer.train()
        found.append(seen.gradients)
    for filled in found[1:]:
        assert largest_difference(filled, found[0]) <= most


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


BUDGET = hfp.TokenBudget(64)
TAKES_ALL = {"remove_unused_columns": False}


LIKE_OURS = ("targets", "counts")
"""Names that sound like those of keys that the package adds to batches."""


def columns_of(rows):
    """Numbers that follow from the tokens, so that every batch can be checked alone."""
    return {
        "input_ids": rows,
        "weights": [[token / 100 for token in row] for row in rows],
        "kinds": [[token % 7 for token in row] for row in rows],
        "marked": [[token % 2 == 0 for token in row] for row in rows],
        **{key: [[token % 5 for token in row] for row in rows] for key in LIKE_OURS},
    }


def weighted(**changes):
    rng = np.random.default_rng(3)
    columns = columns_of([rng.integers(3, 99, size).tolist() for size in rng.integers(2, 20, 30)])
    return datasets.Dataset.from_dict(columns | changes)


def with_more():
    rows = weighted()["input_ids"]
    return weighted(text=["text"] * 30, pairs=[[[token, 1] for token in row] for row in rows])


def check(batch):
    """Every value is that of its token, in the dtype that models take, and 0 where tokens fill a batch."""
    tokens = batch["input_ids"]
    own = batch["seq_idx"] >= 0 if "seq_idx" in batch else batch.get("attention_mask", torch.ones_like(tokens)) > 0
    zero = torch.zeros_like(tokens)
    assert torch.allclose(batch["weights"], torch.where(own, tokens / 100, zero.float()))
    assert torch.equal(batch["kinds"], torch.where(own, tokens % 7, zero))
    assert torch.equal(batch["marked"], torch.where(own, tokens % 2 == 0, zero.bool()))
    assert all(torch.equal(batch[name], torch.where(own, tokens % 5, zero)) for name in LIKE_OURS)
    assert [batch[name].dtype for name in ("weights", "kinds", "marked")] == [torch.float32, torch.int64, torch.bool]
    assert not {"text", "pairs"} & set(batch)


class Checked(Trainer):
    filled, seen = 0, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if hasattr(self, "attached"):
            check(inputs)
            self.seen += 1
            self.filled += int((inputs.get("seq_idx", torch.zeros(1)) < 0).any())
        given = {name: inputs[name] for name in inputs if name not in ("weights", "kinds", "marked", *LIKE_OURS)}
        outputs = model(**given)
        labels = F.pad(given["labels"], (0, 1), value=-100)[:, 1:]
        losses = F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="none")
        weights = inputs.get("weights", torch.ones_like(losses)).to(losses)
        loss = (losses * weights).sum() / (1 if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.filterwarnings("ignore:pack leaves out columns without one number")
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [(kind, {}) for kind in ("packed", "lazy", "transform", "plain", "stream")]
    + [(kind, {"tokens": 80, "max_segments": 40}) for kind in ("documents", "packed stream")],
)
def test_compute_loss_gets_them(tmp_path, kind, shapes):
    few = hfp.BestFit(32, max_documents=19)
    make = {
        "documents": lambda data: data,
        "packed": lambda data: hfp.pack(data, hfp.BestFit(32)),
        "lazy": lambda _: hfp.pack(datasets.load_from_disk(tmp_path / "saved"), hfp.BestFit(32), lazy=True),
        "transform": lambda data: data.with_transform(lambda batch: batch),
        "plain": lambda data: Plain(data.to_list()),
        "stream": lambda data: data.to_iterable_dataset(),
        "packed stream": lambda data: hfp.pack(data.to_iterable_dataset(), few, streams=1),
    }
    weighted().save_to_disk(tmp_path / "saved")
    data = make[kind](with_more())
    trainer = attached(tmp_path, BUDGET, shapes, kind=Checked, data=data, **TAKES_ALL)
    assert min(logged(trainer)) > 0
    trained = trainer.seen
    assert (trainer.filled > 0) == bool(shapes)
    if "stream" not in kind:
        trainer.evaluate(data)
        assert trainer.seen > trained >= 2


class Weighted(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, weights=None, num_items_in_batch=None, **others):
        outputs = super().forward(input_ids, labels=None, **others)
        if labels is not None:
            targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
            losses = F.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction="none")
            self.seen.append(weights)
            weights = torch.ones_like(labels) if weights is None else weights
            outputs.loss = (losses * weights.to(losses)).sum() / (num_items_in_batch or (targets != -100).sum())
        return outputs


def with_weights():
    model = build("Llama")
    model.__class__, model.seen = Weighted, []
    return model


def with_weights_proven():
    return copy.deepcopy(patched_once(with_weights, trees=False))


@pytest.mark.parametrize(
    ("make", "left"),
    [(with_weights_proven, "counts, kinds, marked, targets"), (patched, "counts, kinds, marked, targets, weights")],
)
def test_the_model_gets_what_its_forward_takes(tmp_path, make, left):
    """As Trainer does it by default."""
    trainer = trainer_of(tmp_path, data=weighted(), model=make())
    hfp.attach(trainer, BUDGET)
    loader = loader_of(weighted(), model=make())
    for batch in (*trainer.get_train_dataloader(), *loader):
        assert not set(left.split(", ")) & set(batch)
        if make is with_weights_proven:
            assert torch.allclose(batch["weights"], batch["input_ids"] / 100)


def test_shared_prefixes(tmp_path):
    """A prefix is shared only where weights are equal, too."""
    prompt = list(range(10, 40))
    rows = [[*prompt, *range(50 + number, 60 + number)] for number in range(6)]
    data = datasets.Dataset.from_dict(columns_of(rows))
    for each, share in ((data, True), (hfp.pack(data, hfp.BestFit(128), share_prefixes=True), False)):
        trainer = trainer_of(tmp_path, data=each, model=patched(trees=True), **TAKES_ALL)
        summary = hfp.attach(trainer, hfp.TokenBudget(128, share_prefixes=share))
        assert summary.trees.shared_ratio > 2
        for batch in trainer.get_train_dataloader():
            check(batch)


@pytest.mark.parametrize("changed", [{"weights": [[1.0]] * 30}, {"vector": [[0.5] * 3] * 30}])
def test_another_number_of_values_is_refused(tmp_path, changed):
    data = weighted(**changed)
    name = next(iter(changed))
    with pytest.raises(hfp.PackingError, match=f"column '{name}': expected"):
        hfp.PackingCollator()([dict(row) for row in data])
    for each in (data, Plain(data.to_list())):
        with pytest.raises(hfp.PackingError, match=f"column '{name}': expected"):
            attached(tmp_path, data=each, **TAKES_ALL).train()


def test_an_own_loop_with_the_collator():
    packed = hfp.pack(weighted(), hfp.BestFit(32))
    for form in (None, "numpy", "torch"):
        loader = torch.utils.data.DataLoader(packed.with_format(form), batch_size=2, collate_fn=hfp.PackingCollator())
        for batch in loader:
            check(batch)


@pytest.mark.parametrize("accumulation", fast_only([1, 3], 3))
def test_a_weighted_gradient_is_that_of_the_documents(tmp_path, accumulation):
    data, model, seen = weighted(), patched(dtype=torch.float64), Gradients()
    step = {"max_steps": 1, "gradient_accumulation_steps": accumulation, "max_grad_norm": 0.0, **TAKES_ALL}
    trainer = trainer_of(tmp_path, Checked, model=model, data=data, callbacks=[seen], **step)
    summary = hfp.attach(trainer, hfp.TokenBudget(400), match_documents_per_step=len(data))
    assert (summary.optimizer_steps, summary.num_micro_batches) == (1, accumulation)
    alone = build("Llama", torch.float64)
    alone.load_state_dict(model.state_dict())
    labels = sum(len(row) - 1 for row in data["input_ids"])
    for row in data["input_ids"]:
        tokens = torch.tensor([row])
        losses = F.cross_entropy(alone(tokens, use_cache=False).logits[0, :-1], tokens[0, 1:], reduction="none")
        (losses @ (tokens[0, :-1] / 100).to(losses) / labels).backward()
    trainer.train()
    assert trainer.seen == accumulation
    assert largest_difference(seen.gradients, gradients_of(alone)) <= 1e-7


def cut(data, length, overflow):
    """Documents, cut by hand."""
    rows = []
    for row in data:
        pieces = range(0, len(row["input_ids"]), length) if overflow == "split" else [0]
        rows += [{name: values[first : first + length] for name, values in row.items()} for first in pieces]
    return datasets.Dataset.from_list(rows)


def segments_in(loader):
    return sorted(
        tuple(batch["input_ids"][0, first:end].tolist())
        for batch in loader
        for first, end in pairwise(batch["cu_seq_lens_q"].tolist())
    )


@pytest.mark.parametrize("overflow", fast_only(["truncate", "split"], "truncate"))
@pytest.mark.parametrize("kind", ["dataset", "stream", "shared prefixes"])
def test_documents_are_shorter_than_micro_batches(tmp_path, overflow, kind):
    data, more = documents(45), {"share_prefixes": 4} if kind == "shared prefixes" else {}
    budget = hfp.TokenBudget(64, max_length=20, overflow=overflow, **more)
    given = data.to_iterable_dataset() if kind == "stream" else data
    model = patched("Llama", torch.float64)
    trainer = attached(tmp_path, budget, model=model, data=given)
    wanted = cut(data, 20, overflow)
    if kind == "dataset":
        assert segments_in(trainer.get_train_dataloader()) == sorted(map(tuple, wanted["input_ids"]))
        batches = [batch["input_ids"].numel() for batch in trainer.get_train_dataloader()]
        assert 20 < max(batches) <= 64
    if kind == "stream":
        batches = list(islice(trainer.get_train_dataloader(), 3))
        assert all(int(batch["max_length_q"]) <= 20 < batch["input_ids"].numel() <= 64 for batch in batches)
    if kind == "shared prefixes":
        assert trainer.attached.source.sampler.sizes.trees.raw_tokens == sum(map(len, wanted["input_ids"]))
    by_hand = hfp.evaluation_loss(Accelerator(cpu=True), model, wanted)
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(by_hand, rel=1e-6)
    assert by_hand != pytest.approx(hfp.evaluation_loss(Accelerator(cpu=True), model, data), rel=1e-3)


def test_documents_are_cut_where_trl_cuts_them(tmp_path):
    """packing=True with a max_length and a batch of 2, in training and evaluation."""
    data = documents(45).select_columns("input_ids")
    model, packed = build("Llama"), {"packing": True, "max_length": 16, "padding_free": True}
    rows = trainer_of(tmp_path, SFTTrainer, model, data, **packed).train_dataset
    cut_by_trl = sorted(
        tuple(row["input_ids"][first:end])
        for row in rows
        for first, end in pairwise(np.cumsum([0, *row["seq_lengths"]]).tolist())
    )
    budget = hfp.TokenBudget(2 * 16, max_length=16, overflow="truncate")
    trainer = attached(tmp_path, budget, kind=SFTTrainer, model=model, data=data)
    assert segments_in(trainer.get_train_dataloader()) == segments_in(trainer.get_eval_dataloader(data)) == cut_by_trl
    lost = sum(max(0, len(ids) - 16) for ids in data["input_ids"])
    assert trainer.evaluate(data)["eval_lost_tokens"] == lost > 0
