"""What training refuses, by the argument's name: calls leave trainers as they were, changes need another attach."""

import copy
import math
import re
from functools import reduce
from types import SimpleNamespace

import datasets
import pytest
import torch
import trl
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from datasets.distributed import split_dataset_by_node
from documents_to_mask import TOKENIZER, collator
from documents_to_mask import documents as to_mask
from patched_models import patched, patched_once, patched_tiny
from tiers import fast_only, slow
from tiny_models import build, with_loss_times
from trainers import attached, documents, on_each_batch, tokenizer, trainer_of
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_pt_utils import LabelSmoother
from trl import SFTTrainer
from whole_rows import ROWS
from whole_rows import trainer_of as rows_trainer_of

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.training.streams import training_stream
from tools.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BUDGET = hfp.TokenBudget(64)
ALIGNED = hfp.TokenBudget(64, align_tokens=8)
LIMITED = hfp.TokenBudget(64, max_documents=7)
SHAPES = {"tokens": 80, "max_segments": 8}
SHARED = hfp.TokenBudget(128, share_prefixes=2)
SCHEDULE = hfp.LengthSchedule(8, 10)
SCHEDULED = hfp.TokenBudget(128, length_schedule=SCHEDULE)
DATA, RELATED = documents(45), documents(12, samples=3)
UNLABELED = DATA.remove_columns("labels")

CACHED = "_signature_columns"
"""What a trainer notes when its dataloader is asked for."""


class Trainers:
    """Makes trainers in a folder, and checks that they are as they were."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def __call__(self, kind=Trainer, on=None, data=DATA, **settings):
        return self.noted(trainer_of(self.folder, kind, data=data, **settings), on)

    def of_rows(self, kind="classifier", on=None, patched=True, **settings):
        return self.noted(rows_trainer_of(kind, self.folder, patched=patched, **settings), on)

    def attached(self, batching=BUDGET, kind=Trainer, on=None, shapes=None, loss="token", data=DATA, **settings):
        how = {"loss": loss, **(shapes or {})}
        return self.noted(attached(self.folder, batching, how, kind=kind, data=data, **settings), on)

    def noted(self, trainer, on=None):
        for name, value in (on or {}).items():
            setattr(trainer, name, value)
        self.made.append((trainer, type(trainer), vars(trainer).copy(), [*map(is_patched, models_in(trainer))]))
        return trainer

    def check(self):
        for trainer, kind, attributes, patched_before in self.made:
            assert type(trainer) is kind
            assert vars(trainer) | {CACHED: None} == attributes | {CACHED: None}
            assert [*map(is_patched, models_in(trainer))] == patched_before


def models_in(trainer):
    return [each for each in (trainer.model, getattr(trainer, "ref_model", None)) if each is not None]


def check_refused(argument, call):
    with pytest.raises(hfp.PackingError) as found:
        call()
    assert str(found.value).startswith((f"{argument}: ", f"{argument}, row ")), str(found.value)


def overriding(method):
    return type("GroupTrainer", (Trainer,), {method: lambda *_: None})


class MaskingCollator(hfp.PackingCollator):
    pass


class Regularized(Trainer):
    def compute_loss(self, *arguments, **options):
        loss, outputs = super().compute_loss(*arguments, **{**options, "return_outputs": True})
        return loss + outputs.logits.float().square().mean()


class OwnLoss(Trainer):
    def compute_loss(self, *arguments, **options):
        return super().compute_loss(*arguments, **options)


def without_loss():
    return copy.deepcopy(patched_once(with_loss_times, False, None))


def masking(of, data_collator, data):
    return of(model=patched_tiny("bert", "masked"), data=data, on={"data_collator": data_collator})


class OwnBatches(DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        return super().torch_call(examples)


def labeled_masks():
    return to_mask().map(lambda row: {"labels": row["input_ids"]})


def unlabeled():
    return documents(12).remove_columns("labels")


def own_batches(name):
    return getattr(trl, name).__new__(getattr(trl, name))


ATTACH = [
    ("trainer", lambda _: hfp.attach(None, BUDGET)),
    *(
        ("trainer", lambda _, name=name: hfp.attach(own_batches(name), BUDGET))
        for name in ("GRPOTrainer", "RLOOTrainer", "KTOTrainer", "RewardTrainer", "DPOTrainer")
    ),
    *(
        ("trainer", lambda of, method=method: hfp.attach(of(overriding(method)), BUDGET))
        for method in (
            *("_get_train_sampler", "get_train_dataloader", "get_eval_dataloader"),
            *("get_test_dataloader", "get_batch_samples"),
        )
    ),
    ("trainer", lambda of: hfp.attach(of(type("More", (SFTTrainer,), {"__module__": "trl.experimental"})), BUDGET)),
    ("batching", lambda of: hfp.attach(of(), 64)),
    ("loss", lambda of: hfp.attach(of(), BUDGET, loss="mean")),
    ("trainer.model: prove", lambda of: hfp.attach(of(), BUDGET, prove=True)),
    ("share_prefixes", lambda of: hfp.attach(of(), BUDGET, share_prefixes=True)),
    ("dataset", lambda of: hfp.attach(of(), hfp.BucketBatches(64))),
    ("max_tokens", lambda of: hfp.attach(of(), hfp.TokenBudget(8))),
    ("match_documents_per_step", lambda of: hfp.attach(of(), hfp.BucketBatches(64), match_documents_per_step=4)),
    ("average_tokens_across_devices", lambda of: hfp.attach(of(average_tokens_across_devices=False), BUDGET)),
    ("auto_find_batch_size", lambda of: hfp.attach(of(auto_find_batch_size=True), BUDGET)),
    ("train_sampling_strategy", lambda of: hfp.attach(of(train_sampling_strategy="group_by_length"), BUDGET)),
    ("dispatch_batches", lambda of: hfp.attach(of(accelerator_config={"dispatch_batches": True}), BUDGET)),
    ("split_batches", lambda of: hfp.attach(of(accelerator_config={"split_batches": True}), BUDGET)),
    ("n_gpu", lambda of: hfp.attach(on_two_gpus(of), BUDGET)),
    ("loss_type", lambda of: hfp.attach(of(SFTTrainer, loss_type="dft"), BUDGET, loss="sequence")),
    ("label_smoothing_factor", lambda of: hfp.attach(of(label_smoothing_factor=0.1), BUDGET, loss="sequence")),
    ("column 'loss_weight'", lambda of: hfp.attach(of(data=DATA.add_column("loss_weight", [0.5] * len(DATA))), None)),
    ("packing", lambda of: hfp.attach(of(SFTTrainer, packing=True, max_length=48, packing_strategy="wrapped"), BUDGET)),
    ("eval_packing", lambda of: hfp.attach(of(SFTTrainer, eval_packing=True), BUDGET)),
    ("data_collator", lambda of: hfp.attach(of(on={"data_collator": SimpleNamespace(mlm=True)}), BUDGET)),
    ("data_collator", lambda of: hfp.attach(of(on={"data_collator": MaskingCollator()}), BUDGET)),
    ("data_collator", lambda of: hfp.attach(of(on={"data_collator": lambda rows: rows}), BUDGET)),
    ("data_collator", lambda of: hfp.attach(of(on={"data_collator": collator()}), BUDGET)),
    ("data_collator", lambda of: hfp.attach(masking(of, OwnBatches(TOKENIZER), to_mask()), BUDGET)),
    ("get_train_dataloader", lambda of: hfp.attach(of(on={"get_train_dataloader": list}), BUDGET)),
    ("compute_loss", lambda of: hfp.attach(of(on={"compute_loss": lambda *_, **__: 0}), BUDGET)),
    ("model", lambda of: hfp.attach(of(model=without_loss()), BUDGET)),
    ("tokens", lambda of: hfp.attach(of(), LIMITED, tokens=63, max_segments=8)),
    ("max_segments", lambda of: hfp.attach(of(), LIMITED, tokens=64)),
    ("max_segments", lambda of: hfp.attach(of(), LIMITED, tokens=64, max_segments=7)),
    ("length_schedule", lambda _: hfp.TokenBudget(8, length_schedule=7)),
    ("length_schedule", lambda of: hfp.attach(of(), SCHEDULED, tokens=160, max_segments=8)),
    ("length_schedule", lambda of: hfp.attach(of.of_rows(), SCHEDULED)),
    ("align_tokens", lambda of: hfp.attach(of.of_rows(), hfp.TokenBudget(160, align_tokens=8))),
    ("tokens", lambda of: hfp.attach(of(), ALIGNED, tokens=84, max_segments=99)),
]


def on_two_gpus(of):
    trainer = of()
    trainer.args._n_gpu = 2
    return trainer


def in_rows_of_trees():
    return hfp.pack(RELATED, hfp.BestFit(128), share_prefixes=2)


TREES = [
    ("share_prefixes", lambda _: hfp.TokenBudget(64, share_prefixes="yes")),
    ("length_schedule", lambda _: hfp.TokenBudget(64, share_prefixes=True, length_schedule=SCHEDULE)),
    ("length_schedule", lambda of: hfp.attach(of(data=in_rows_of_trees()), SCHEDULED)),
    ("tokens", lambda of: hfp.attach(of(data=RELATED), SHARED, tokens=128, max_segments=9)),
    ("dataset", lambda of: hfp.attach(of(data=RELATED.to_list()), SHARED)),
    ("dataset", lambda of: hfp.attach(of(data=RELATED.with_transform(lambda rows: rows)), SHARED)),
    ("column 'seq_lengths'", lambda of: hfp.attach(of(data=hfp.pack(RELATED, hfp.BestFit(128))), SHARED)),
    ("column 'tree_input_ids'", lambda of: hfp.attach(of(data=in_rows_of_trees()), SHARED)),
    ("model", lambda of: hfp.attach(of(model=patched_tiny("bert", "masked"), data=RELATED), SHARED)),
]


WHOLE = hfp.TokenBudget(160)


def without_data(of):
    trainer = of()
    return of.noted(Trainer(trainer.model, trainer.args), {"train_dataset": None})


def on_rows(of, change):
    trainer = rows_trainer_of("classifier", of.folder, patched=True)
    return of.noted(trainer, {"train_dataset": change(trainer.train_dataset)})


def with_lengths(data):
    return data.add_column("seq_lengths", [[1]] * ROWS)


def comparing_rows(of):
    return of.of_rows(on={"compute_loss_func": lambda outputs, *_, **__: outputs.logits.var(0).sum()})


def dpo(of, *losses, **settings):
    return of.of_rows("dpo", loss_type=[*losses], loss_weights=[1.0] * len(losses), **settings)


def precomputing(of):
    trainer = dpo(of, "sigmoid", max_length=14)
    trainer.args.precompute_ref_log_probs = True
    return trainer


def overflowing(of):
    """Weights that have overflowed are not called a wrong mean."""
    trainer = of.of_rows()
    with torch.no_grad():
        trainer.model.classifier.weight.mul_(torch.inf)
    return trainer


def sharing_a_configuration(of):
    trainer = of.of_rows("dpo", patched=False)
    trainer.ref_model.config = trainer.ref_model.model.config = trainer.model.config
    for layer in trainer.ref_model.model.layers:
        layer.self_attn.config = trainer.model.config
    return trainer


def mixing_rows(of):
    trainer = of.of_rows(patched=False)
    trainer.model.classifier.register_forward_hook(lambda _, __, output: output + 0.01 * output.mean(0))
    return trainer


WHOLE_ROWS = [
    ("max_tokens", lambda of: hfp.attach(of.of_rows(), hfp.TokenBudget(20))),
    ("max_patches", lambda of: hfp.attach(of.of_rows(), hfp.TokenBudget(160, max_patches=8))),
    ("overflow", lambda of: hfp.attach(of.of_rows(), hfp.TokenBudget(160, overflow="split"))),
    ("batching", lambda of: hfp.attach(of.of_rows(), hfp.BucketBatches(160))),
    ("trainer", lambda of: hfp.attach(of.of_rows("answers"), WHOLE)),  # their loss counts the logits of padding
    ("loss", lambda of: hfp.attach(of.of_rows(), WHOLE, loss="sequence")),
    ("tokens", lambda of: hfp.attach(of.of_rows(), WHOLE, tokens=160, max_segments=9)),
    ("trainer", lambda of: hfp.attach(overflowing(of), WHOLE)),
    ("train_dataset", lambda of: hfp.attach(on_rows(of, lambda _: None), WHOLE)),
    ("train_dataset", lambda of: hfp.attach(on_rows(of, lambda data: data.to_iterable_dataset()), WHOLE)),
    ("train_dataset", lambda of: hfp.attach(on_rows(of, with_lengths), WHOLE)),
    ("trainer", lambda of: hfp.attach(comparing_rows(of), WHOLE)),
    *(
        (name, lambda of, losses=losses: hfp.attach(dpo(of, *losses), hfp.TokenBudget(400)))
        for name, losses in (("trainer", ["sigmoid", "sft"]), ("loss_type", ["aot"]))
    ),
    ("max_length", lambda of: hfp.attach(precomputing(of), hfp.TokenBudget(400))),
    *(
        (name, lambda of, name=name, value=value: hfp.attach(of.of_rows(), None, **{name: value}))
        for name, value in {"loss": "token", "match_documents_per_step": 8, "tokens": 64, "max_segments": 4}.items()
    ),
    ("prove", lambda of: hfp.attach(of.of_rows(), None, prove="all")),
    ("share_prefixes", lambda of: hfp.attach(of.of_rows(), None, share_prefixes=0)),
    ("trainer", lambda of: hfp.attach(of.of_rows(on={"model": None}), None)),
    ("trainer.ref_model", lambda of: hfp.attach(sharing_a_configuration(of), None)),
    ("trainer.model", lambda of: hfp.attach(mixing_rows(of), None)),
]


def stream(shards=8):
    return UNLABELED.to_iterable_dataset(num_shards=shards)


def packed(streams=8, capacity=48):
    return hfp.pack(stream(), hfp.BestFit(capacity), streams=streams, window_packs=2)


def begun():
    found = packed()
    found.load_state_dict(found.state_dict())
    return found


def in_a_later_epoch():
    found = packed()
    found.set_epoch(1)
    return found


def trees(streams=2):
    data = RELATED.to_iterable_dataset(num_shards=2)
    return hfp.pack(data, hfp.BestFit(96), share_prefixes=2, streams=streams, window_packs=4)


WIDE = hfp.TokenBudget(96)
MATCHING = hfp.TokenBudget(48, match_documents_per_step=3)
FEW = hfp.TokenBudget(96, share_prefixes=2, max_documents=3)
STREAMS = [
    ("train_dataset", lambda of: hfp.attach(without_data(of), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=packed(streams=None)), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=packed().filter(bool)), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=stream().map(hfp.BestFit(48), batched=True)), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=packed().shard(num_shards=2, index=0)), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=split_dataset_by_node(packed(), rank=0, world_size=2)), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=begun()), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=in_a_later_epoch()), BUDGET)),
    ("train_dataset", lambda _: training_stream("train_dataset", packed(), BUDGET, ranks=3)),
    ("train_dataset", lambda of: hfp.attach(of(data=stream().shuffle(seed=0, buffer_size=10)), BUDGET)),
    ("train_dataset", lambda of: hfp.attach(of(data=trees(None)), WIDE)),
    ("train_dataset", lambda of: hfp.attach(of(data=trees().filter(bool)), WIDE)),
    ("max_documents", lambda of: hfp.attach(of(data=packed()), hfp.TokenBudget(96, max_documents=8))),
    ("max_tokens", lambda of: hfp.attach(of(data=packed()), hfp.TokenBudget(47))),
    ("max_patches", lambda of: hfp.attach(of(data=stream()), hfp.TokenBudget(48, max_patches=3))),
    ("max_length", lambda of: hfp.attach(of(SFTTrainer, data=stream(), max_length=20), BUDGET)),
    ("batching", lambda of: hfp.attach(of(data=packed()), hfp.BucketBatches(48))),
    ("match_documents_per_step", lambda of: hfp.attach(of(data=stream()), BUDGET, match_documents_per_step=4)),
    ("match_documents_per_step", lambda of: hfp.attach(of(data=stream()), MATCHING)),
    ("eval_dataset", lambda of: hfp.attach(of(data=packed(), on={"eval_dataset": stream().shuffle(seed=0)}), BUDGET)),
    ("share_prefixes", lambda of: hfp.attach(of(data=trees()), hfp.TokenBudget(96, share_prefixes=3))),
    ("length_schedule", lambda of: hfp.attach(of(data=trees()), SCHEDULED)),
    ("max_documents", lambda of: hfp.attach(of(data=stream()), FEW)),
    ("dataset", lambda _: hfp.evaluation_loss(Accelerator(cpu=True), patched(), stream())),
]


class InEpochs(list):
    def set_epoch(self, epoch):
        self[:] = [{name: [(token + epoch) % 90 for token in ids] for name, ids in row.items()} for row in self]


WEIGHTED = DATA.add_column("weight", [float(number) for number in range(45)])
KEEPING = {"remove_unused_columns": False}


def without_features(data):
    return datasets.IterableDataset.from_generator(lambda: iter(data))


def packed_stream():
    return hfp.pack(DATA.to_iterable_dataset(), hfp.BestFit(64), streams=1)


BESIDE = [
    ("train_dataset", lambda of: hfp.attach(of(data=InEpochs(DATA)), BUDGET)),
    ("eval_dataset", lambda of: of.attached().evaluate(InEpochs(DATA))),
    ("dataset", lambda _: hfp.prepare_dataloader(Accelerator(cpu=True), InEpochs(DATA), BUDGET)),
    ("dataset", lambda _: hfp.evaluation_loss(Accelerator(cpu=True), patched(), InEpochs(DATA))),
    ("column 'weight'", lambda of: hfp.attach(of(data=WEIGHTED, **KEEPING), BUDGET)),
    ("column 'weight'", lambda of: hfp.attach(of(data=[*WEIGHTED], **KEEPING), BUDGET)),
    ("column 'weight'", lambda of: hfp.attach(of(data=WEIGHTED.to_iterable_dataset(), **KEEPING), BUDGET)),
    ("column 'weight'", lambda of: hfp.attach(of(OwnLoss, data=WEIGHTED, **KEEPING), BUDGET)),
    ("column 'weight'", lambda of: hfp.attach(of(data=without_features(WEIGHTED), **KEEPING), BUDGET)),
    ("column 'weight'", lambda of: of.attached(**KEEPING).evaluate(WEIGHTED)),
    ("column 'weight'", lambda of: of.attached(**KEEPING).predict(WEIGHTED)),
    ("hyperparameter_search", lambda of: of.attached().hyperparameter_search(n_trials=1)),
    ("model_init", lambda of: hfp.attach(of(on={"model_init": patched}), None)),
    ("max_length", lambda of: hfp.attach(of(data=packed_stream()), hfp.TokenBudget(64, max_length=9))),
    (
        "max_length",
        lambda of: of.attached(hfp.TokenBudget(64, max_length=48)).evaluate(hfp.pack(DATA, hfp.BestFit(64))),
    ),
]


@pytest.mark.parametrize(("argument", "call"), [*ATTACH, *TREES, *WHOLE_ROWS, *STREAMS, *BESIDE])
def test_attach(tmp_path, argument, call):
    trainers = Trainers(tmp_path)
    check_refused(argument, lambda: call(trainers))
    trainers.check()


class WithoutCrossEntropy(Trainer):
    def compute_loss(self, model, inputs, **_):
        labels = inputs.pop("labels")[0, 1:, None]
        return -model(**inputs).logits[0, :-1].log_softmax(-1).gather(1, labels.clamp(min=0)).mean()


def with_jit_checkpoints(of):
    trainer = of.attached(data=stream())
    trainer.args.enable_jit_checkpoint = True
    return trainer


def masking_labels(of):
    trainer = masking(of, collator(), labeled_masks())
    hfp.attach(trainer, BUDGET)
    return trainer


def of_masked_rows(of):
    hide = {"labels": [5, *[-100] * 9], "input_ids": [4] * 10}
    return of.attached(model=patched_tiny("bert", "masked"), data=datasets.Dataset.from_list([hide] * 9))


TOO_LONG = datasets.Dataset.from_dict({"input_ids": [[5] * 9, [5] * 100]})
EMPTY = datasets.IterableDataset.from_generator(lambda: iter(()), features=TOO_LONG.features)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("loss", lambda of: of.attached(kind=WithoutCrossEntropy, loss="sequence").train()),
        ("loss", lambda of: of.attached(SHARED, data=RELATED, label_smoothing_factor=0.1).train()),
        ("trainer", lambda of: of.attached(SHARED, kind=Regularized, data=RELATED).train()),
        slow("BartModel", lambda of: of.attached(model=tiny_model("bart", "masked")).train()),
        ("tokens", lambda of: of.attached(LIMITED, shapes=SHAPES).evaluate(TOO_LONG)),
        ("labels", lambda of: of_masked_rows(of).evaluate(unlabeled())),
        ("data_collator", lambda of: masking_labels(of).train()),
        ("enable_jit_checkpoint", lambda of: with_jit_checkpoints(of).train()),
        ("dataset", lambda of: of.attached(data=EMPTY).train()),
    ],
)
def test_training_and_evaluation(tmp_path, argument, call):
    check_refused(argument, lambda: call(Trainers(tmp_path)))


def test_rows_that_are_split_across_processes(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    parallel = SimpleNamespace(tp_size=1, cp_size=2, sp_size=1)
    monkeypatch.setattr(trainer.accelerator.state, "parallelism_config", parallel)
    check_refused("cp_size", lambda: hfp.attach(trainer, BUDGET))


def test_gradients_that_no_step_would_use():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    check_refused("sync_with_dataloader", lambda: loop(accelerator=accelerator))
    accelerator.gradient_state._reset_state()


def test_processes_that_do_not_know_of_each_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_refused("accelerator", loop)


@pytest.mark.parametrize(
    "collator",
    [
        default_data_collator,
        hfp.PackingCollator(),
        DataCollatorWithPadding(tokenizer()),
        DataCollatorWithFlattening(),
        DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    ],
)
def test_collators_whose_work_is_done_are_taken(tmp_path, collator):
    data = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]] * 4})
    trainer = trainer_of(tmp_path, data=data)
    trainer.data_collator = collator
    assert hfp.attach(trainer, BUDGET).documents == 8


def loop(batching=BUDGET, data=DATA, accelerator=None, **how):
    return hfp.prepare_dataloader(accelerator or Accelerator(cpu=True), data, batching, **how)


def test_a_loop_that_cannot_be_made_leaves_its_model_as_it_was():
    model = build("Llama")
    with pytest.raises(ValueError, match="prefetch_factor"):
        loop(model=model, prefetch_factor=2)
    assert not is_patched(model)


def dispatching():
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))


def collated(*rows, **shapes):
    return hfp.PackingCollator(**shapes)([*rows] or [{"input_ids": [5, 6, 7]}])


def tree_batch(without=None):
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4], [1, 2, 5]]})
    batch = hfp.PackingCollator()(list(hfp.pack(rows, hfp.BestFit(16), share_prefixes=2)))
    return {name: batch[name] for name in batch if name != without}


IDS = torch.tensor([[5, 6]])
LOOPS = [
    *((name, lambda name=name: loop(**{name: 1})) for name in ("batch_size", "shuffle", "collate_fn", "generator")),
    ("accelerator", lambda: hfp.prepare_dataloader(documents(3), Accelerator(cpu=True), BUDGET)),
    ("column 'pixel_values'", lambda: loop(data=DATA.add_column("pixel_values", [[0.5]] * len(DATA)))),
    ("dispatch_batches", lambda: loop(data=DATA.to_iterable_dataset(num_shards=4), accelerator=dispatching())),
    ("prove", lambda: loop(model=build("Llama"), prove=True)),
    ("prove", lambda: hfp.patch_model(build("Llama"), prove=True)),
    ("model", lambda: loop(model=torch.nn.DataParallel(build("Llama")))),
    ("model", lambda: hfp.patch_model(torch.nn.DataParallel(build("Llama")))),
    ("model", lambda: loop(model=without_loss())),
    ("dataset", lambda: loop(data=datasets.Dataset.from_dict({"input_ids": [[]]}))),
    ("tokens", lambda: loop(LIMITED, tokens=63, max_segments=8)),
    ("batches", lambda: loop(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=2)).skip_first_batches(1)),
    ("batches", lambda: loop().skip_first_batches(1000)),
    ("model", lambda: hfp.evaluation_loss(Accelerator(cpu=True), build("Llama"), documents(3))),
    ("dataset", lambda: hfp.evaluation_loss(Accelerator(cpu=True), patched(), documents(1))),  # has no labels
    ("model", lambda: hfp.compute_loss(build("Llama"), collated())),
    *(
        ("batch", lambda call=call, batch=batch: call(patched(), batch))
        for call in (hfp.compute_loss, hfp.document_logps)
        for batch in (None, [1, 2], {}, {"input_ids": IDS}, {"labels": IDS}, {"input_ids": IDS, "labels": IDS})
    ),
    *(
        ("batch", lambda name=name: hfp.compute_loss(patched(trees=True), tree_batch(without=name)))
        for name in ("segment_lengths", "ends", "trained", "tree_labels")
    ),
    ("model", lambda: hfp.compute_loss(patched_tiny("bert", "masked"), tree_batch())),
    ("model", lambda: hfp.document_logps(patched_tiny("bert", "masked"), tree_batch())),
    *(
        ("num_items_in_batch", lambda wrong=wrong: hfp.compute_loss(patched(), collated(), num_items_in_batch=wrong))
        for wrong in (-1, True, "28", torch.ones(2), torch.tensor(True))
    ),
    ("loss", lambda: hfp.compute_loss(patched(), collated(), loss="mean")),
    ("loss", lambda: hfp.compute_loss(patched(), next(iter(loop(loss="token"))), loss="token")),
    ("loss", lambda: hfp.compute_loss(patched(), next(iter(loop(loss="sequence"))), loss="token")),
    ("num_items_in_batch", lambda: hfp.compute_loss(patched(), next(iter(loop())), num_items_in_batch=7)),
    ("model", lambda: hfp.document_logps(build("Llama"), collated())),
    ("column 'weights'", lambda: collated({"input_ids": [1, 2], "weights": [1, 0.5]}, {"input_ids": [3]})),
]


SCORES = [
    ("hidden", lambda: hfp.score(patched(), [[5, 6]], hidden="max")),
    ("max_tokens", lambda: hfp.score(patched(), [[5, 6]], max_tokens=0)),
    ("documents", lambda: hfp.score(patched(), "text")),
    ("column 'input_ids'", lambda: hfp.score(patched(), [["a", "b"]])),
    ("labels", lambda: hfp.score(patched(), [{"input_ids": [5, 6], "labels": [5]}])),
    ("labels", lambda: hfp.score(patched(), [{"input_ids": [5, 6], "labels": [-100, 7]}])),
    ("model", lambda: hfp.score(patched_tiny("bert", "masked"), [[5, 6]])),
    ("model", lambda: hfp.score(patched_tiny("bert", "masked"), [[5, 6]], share_prefixes=True)),
    ("model", lambda: hfp.score(tiny_model("bert", "masked").base_model, [[5, 6]])),
    *(
        ("share_prefixes", lambda wrong=wrong: hfp.score(patched(), [[5, 6]], share_prefixes=wrong))
        for wrong in (0, -1, 1.5, "yes", None)
    ),
]


@pytest.mark.parametrize(("argument", "call"), [*LOOPS, *SCORES])
def test_loops_losses_and_scores(argument, call):
    check_refused(argument, call)


FEW_ROWS, MORE_ROWS = documents(20).to_list(), documents(40).to_list()


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
    "eval_dataset with other rows": lambda trainer: trainer.eval_dataset.extend(MORE_ROWS[20:]),
    "eval_dataset by name": set_to("eval_dataset", {"few": documents(3), "more": documents(9)}),
    "compute_metrics": set_to("compute_metrics", lambda predicted: {"rows": len(predicted.label_ids)}),
    "the loss of the model": set_to("model.loss_function", twice_the_loss),
}
NO_EFFECT = {"dataloader_num_workers", "per_device_train_batch_size", "seed", "per_device_eval_batch_size"}
"""What decides neither losses nor the mean over an evaluation."""


def results(tmp_path, before=lambda _: None, after=lambda _: None):
    trainer = trainer_of(tmp_path, data=list(FEW_ROWS), learning_rate=1e-3)
    trainer.eval_dataset = list(FEW_ROWS)
    before(trainer)
    hfp.attach(trainer, hfp.TokenBudget(64))
    after(trainer)
    trainer.train()
    kept = ("loss", "tokens_per_step")
    trained = [{name: round(entry[name], 4) for name in kept} for entry in trainer.state.log_history if "loss" in entry]
    logs = trainer.evaluate().items()
    evaluated = {name: round(value, 4) for name, value in logs if name.endswith(("_loss", "_rows"))}
    return trained, evaluated, len(trainer.get_eval_dataloader(list(FEW_ROWS)))


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
    "len(train_dataset)": lambda trainer: trainer.train_dataset.extend(MORE_ROWS[20:]),
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


CHANGES = {
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


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_refused(trainer, name):
    if not hasattr(trainer.args, name) and name in ("loss_type", "packing"):
        pytest.skip("an argument of SFTTrainer")
    state = [(each, vars(each).copy()) for each in (trainer, trainer.args, trainer.accelerator.dataloader_config)]
    CHANGES[name](trainer)
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
    rows = list(FEW_ROWS)
    trainer = attached(tmp_path, data=rows, max_steps=-1, num_train_epochs=2)
    hfp.attach(trainer, hfp.TokenBudget(64))
    # what is run before the first step reads rows, too
    on_each_batch(trainer, lambda _: trainer.state.global_step and rows.append(MORE_ROWS[30]))
    try:
        with pytest.raises(hfp.PackingError, match=r"^len\(train_dataset\): "):
            trainer.train()
    finally:
        trainer.accelerator.gradient_state._reset_state()  # else the loader that was broken off stays the active one


def test_changes_that_a_loop_refuses():
    accelerator, data = Accelerator(cpu=True), list(FEW_ROWS)
    loader = hfp.prepare_dataloader(accelerator, data, hfp.TokenBudget(64))
    assert len(list(loader)) == len(loader)
    data.extend(MORE_ROWS[20:])
    with pytest.raises(hfp.PackingError, match="^dataset: "):
        next(iter(loader))
    del data[20:]
    accelerator.gradient_accumulation_steps = 3
    with pytest.raises(hfp.PackingError, match="^gradient_accumulation_steps: "):
        next(iter(loader))
