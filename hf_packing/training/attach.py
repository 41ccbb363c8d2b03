"""attach: planned batches, exact losses and exact evaluation for a Trainer, in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from transformers import Trainer

from hf_packing.errors import PackingError
from hf_packing.sampling.epoch_plan import Batching, check_batching
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.checkpoint import BatchesOfCheckpoint
from hf_packing.training.checks import check_trainer
from hf_packing.training.isolate import unpatched_on_error
from hf_packing.training.losses import Loss, check_loss
from hf_packing.training.model_cost import with_cost_of
from hf_packing.training.planned_batches import PlannedBatches
from hf_packing.training.ranks import PlannedFrom, data_rank, on_all_ranks
from hf_packing.training.summary import EpochSummary, summary_of
from hf_packing.training.trainer import PackedTrainer, packed_class


def attach(
    trainer: Any,
    batching: Batching,
    *,
    loss: Loss = "token",
    match_documents_per_step: int | None = None,
    prove: bool = True,
) -> EpochSummary:
    """Give a Trainer or an SFTTrainer planned batches. Call it once, before `train()`, on all ranks at the same time.

    The trainer then gets its micro-batches from the batching: the same number on every rank and in every epoch, in a
    new order each epoch; resumed, it goes on with exactly the next one. Its model is patched to isolate documents, on
    the device where it is now: with FSDP or DeepSpeed that is before it moves to its device. The gradient does not
    depend on how an optimizer step is split into ranks and accumulated micro-batches, and the evaluation loss is the
    mean over all trainable tokens, of per_device_eval_batch_size rows at once; predictions come as one flat row for
    each batch. per_device_train_batch_size, seed, data_seed and dataloader_drop_last no longer decide which rows share
    a batch. Labels are those that the trainer would train on by itself: SFTTrainer applies assistant_masks, and applies
    completion_mask if completion_only_loss is true, or unset and rows are prompts and completions. Datasets and
    arguments that change afterwards take effect at the next train(), evaluate() or predict(), or raise there.

    Args:
        trainer: transformers' Trainer or TRL's SFTTrainer, also a subclass that does not make its own batches.
        batching: TokenBudget or BucketBatches.
        loss: "token", the mean over the trainable tokens of an optimizer step, or "sequence", the mean over its
            documents of each one's mean.
        match_documents_per_step: documents in an optimizer step, on average and over all ranks, to keep the schedule
            of training without packing; None for as many as the batching takes.
        prove: as in `patch_model`.

    Returns:
        EpochSummary: what the first epoch is made of; print it.

    Raises:
        PackingError: a trainer, an argument or a dataset that cannot be served, with the reason; ranks with different
            data or arguments, on all of them; data without labels, or whose labels only repeat its tokens, for a masked
            language model.
        ModelNotSupportedError: isolation of the documents cannot be verified for the model.

    Example:
        >>> import datasets, hf_packing as hfp, tempfile, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> trainer = transformers.Trainer(
        ...     transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)),
        ...     transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none"),
        ...     train_dataset=documents,
        ... )
        >>> hfp.attach(trainer, hfp.TokenBudget(5)).num_micro_batches
        2
    """
    check_and_plan = partial(
        _check_and_plan, trainer, batching, loss=loss, documents_per_step=match_documents_per_step, prove=prove
    )
    planned = on_all_ranks(check_and_plan)
    with _as_it_was_on_error(trainer):
        on_all_ranks(partial(_isolate_and_settle, trainer, planned.batches))
    _install(trainer, planned)
    return planned.summary


class _Planned(NamedTuple):
    """What attach gives a trainer."""

    batches: PlannedBatches
    kind: type[PackedTrainer]
    summary: EpochSummary


def _check_and_plan(
    trainer: Any,
    batching: Batching,
    planned_from: PlannedFrom,
    *,
    loss: Loss,
    documents_per_step: int | None,
    prove: bool,
) -> _Planned:
    """Check the arguments and plan the first epoch and the evaluations; the trainer does not change."""
    if isinstance(trainer, PackedTrainer):
        raise PackingError("trainer: expected one that is not attached yet, attach was already called on it")
    check_loss(loss)
    check_batching(batching)
    check_trainer(trainer, loss)
    if documents_per_step is not None:
        batching = _with_documents_per_step(batching, documents_per_step)
    batches = PlannedBatches(trainer, with_cost_of(batching, trainer.model), loss, prove)
    sampler = batches.sampler(trainer, planned_from)
    for name, dataset in _evaluation_datasets(trainer).items():
        batches.sampler_in_order(trainer, name, dataset, planned_from)
    unpacked = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    summary = summary_of(sampler, unpacked * data_rank(trainer.accelerator).world_size)
    return _Planned(batches, packed_class(type(trainer)), summary)


def _isolate_and_settle(trainer: Trainer, batches: PlannedBatches, _: PlannedFrom) -> None:
    """Patch the model, settle who computes its loss, and check the datasets against it."""
    batches.settle(trainer)
    for dataset in (trainer.train_dataset, *_evaluation_datasets(trainer).values()):
        batches.check_labels(trainer, dataset)
    batches.check_divided(trainer)


@contextmanager
def _as_it_was_on_error(trainer: Trainer) -> Iterator[None]:
    """Restore the trainer and its model if the block raises."""
    accepts_items = trainer.model_accepts_loss_kwargs
    try:
        with unpatched_on_error(trainer.model):
            yield
    except Exception:
        trainer.model_accepts_loss_kwargs = accepts_items
        raise


def _install(trainer: Trainer, planned: _Planned) -> None:
    """Change the trainer, on this rank: nothing can fail from here on."""
    trainer.planned_batches, trainer.data_collator = planned.batches, planned.batches.collator
    trainer.add_callback(BatchesOfCheckpoint(planned.batches.decided.loss))
    trainer.__class__ = planned.kind
    trainer.loss_is_scaled_for_ga = True
    planned.batches.remember_settings(trainer)


def _with_documents_per_step(batching: Batching, documents: int) -> Batching:
    """Return the batching with so many documents in an optimizer step."""
    if not isinstance(batching, TokenBudget):
        raise PackingError(
            f"match_documents_per_step: expected None with {type(batching).__name__}, whose optimizer steps have a "
            f"constant number of tokens, got {documents!r}"
        )
    if batching.match_documents_per_step not in (None, documents):
        raise PackingError(
            f"match_documents_per_step: expected {batching.match_documents_per_step}, as in {batching!r}, got "
            f"{documents!r}"
        )
    return replace(batching, match_documents_per_step=documents)


def _evaluation_datasets(trainer: Trainer) -> dict[str, Any]:
    """Return the evaluation datasets of a trainer, by the name that errors call them."""
    dataset = trainer.eval_dataset
    if isinstance(dataset, dict):
        return {f"eval_dataset[{name!r}]": each for name, each in dataset.items()}
    return {} if dataset is None else {"eval_dataset": dataset}
