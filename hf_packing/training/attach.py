"""attach: planned batches, exact losses and exact evaluation for a Trainer, in one line."""

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import Trainer

from hf_packing.attention import inner_model, is_patched, unpatch_model
from hf_packing.errors import PackingError
from hf_packing.sampling.epoch_plan import Batching, check_batching
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.agreement import PlannedFrom, on_all_ranks
from hf_packing.training.isolate import isolate
from hf_packing.training.losses import Loss, check_loss
from hf_packing.training.model_cost import with_cost_of
from hf_packing.training.planned_batches import PlannedBatches
from hf_packing.training.progress import BatchesOfCheckpoint
from hf_packing.training.ranks import data_rank
from hf_packing.training.refusals import check_trainer, has_loss_of, sft_trainer_of
from hf_packing.training.rows_loader import collator_for
from hf_packing.training.seen_labels import check_labels
from hf_packing.training.settled import settle_loss
from hf_packing.training.summary import EpochSummary, summary_of
from hf_packing.training.trainer import PackedTrainer
from hf_packing.training.trainer_loss import refuse_undivided


def attach(
    trainer: Any,
    batching: Batching,
    *,
    loss: Loss = "token",
    match_documents_per_step: int | None = None,
    prove: bool = True,
) -> EpochSummary:
    """Give a Trainer or an SFTTrainer planned batches; call it once, before `train()`, on all ranks at the same time.

    The trainer then gets its micro-batches from the batching, the same number on every rank and in every epoch, in
    another order each epoch, and goes on with exactly the next one when it is resumed. Its model is patched to keep
    documents apart, where it is now: with FSDP or DeepSpeed that is before it moves to its device. Its gradient does
    not depend on how a step is split into ranks and accumulated batches, and its evaluation loss is the mean over all
    trainable tokens, of per_device_eval_batch_size rows at once; predictions come one flat row for each batch.
    per_device_train_batch_size, seed, data_seed and dataloader_drop_last no longer decide which rows share a batch.
    Labels are those that the trainer would train on by itself: SFTTrainer applies assistant_masks, and completion_mask
    where completion_only_loss is true, or unset and rows are prompts and completions. Datasets and arguments that are
    changed afterwards take effect at the next train(), evaluate() or predict(), or are refused there.

    Args:
        trainer: transformers' Trainer or TRL's SFTTrainer, also subclasses that do not make their own batches.
        batching: TokenBudget or BucketBatches.
        loss: "token", the mean over the trainable tokens of a step, or "sequence", the mean over its documents of each
            one's mean.
        match_documents_per_step: documents in a step of the optimiser, on average and over all ranks, to keep the
            schedule of training without packing; None for as many as the batching takes.
        prove: as in `patch_model`.

    Returns:
        EpochSummary: what the first epoch is made of; print it.

    Raises:
        PackingError: a trainer, an argument or a dataset that cannot be served, with the reason; ranks with different
            data or arguments, on all of them; data without labels, or whose labels only repeat its tokens, for a masked
            language model.
        ModelNotSupportedError: the model cannot be shown to keep documents apart.

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
    planned, kind, summary = on_all_ranks(
        partial(plan_batches, trainer, batching, loss=loss, documents=match_documents_per_step, prove=prove)
    )
    isolate_and_settle(trainer, planned)
    trainer.planned_batches, trainer.data_collator = planned, planned.collator
    trainer.add_callback(BatchesOfCheckpoint(loss))
    trainer.__class__ = kind
    trainer.loss_is_scaled_for_ga = True
    planned.remember(trainer)
    return summary


def plan_batches(
    trainer: Any, batching: Batching, planned_from: PlannedFrom, *, loss: Loss, documents: int | None, prove: bool
) -> tuple[PlannedBatches, type[Trainer], EpochSummary]:
    """What attach gives the trainer, which is left alone."""
    if isinstance(trainer, PackedTrainer):
        raise PackingError("trainer: expected one without batches of ours, attach was called on it before")
    check_loss(loss)
    check_batching(batching)
    check_trainer(trainer, loss)
    if documents is not None:
        batching = matched(batching, documents)
    planned = PlannedBatches(
        batching=with_cost_of(batching, trainer.model),
        loss=loss,
        trainer_has_own=makes_its_own_loss(trainer),
        sums_log_probs=sums_log_probs(trainer),
        prove=prove,
        scaled=bool(getattr(trainer, "loss_is_scaled_for_ga", None)),
        loss_function=trainer.compute_loss_func,
        trained=weakref.ref(inner_model(trainer.model)),
    )
    unpacked = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    sampler = planned.sampler(trainer, planned_from)
    for name, dataset in evaluated_datasets(trainer).items():
        planned.sampler_in_order(trainer, name, dataset, planned_from)
    name = f"{type(trainer).__name__}WithPlannedBatches"
    kind = type(name, (PackedTrainer, type(trainer)), {"__module__": __name__})
    return planned, kind, summary_of(sampler, unpacked * data_rank(trainer.accelerator).world_size)


def isolate_and_settle(trainer: Trainer, planned: PlannedBatches) -> None:
    """Patch the model and settle who makes its loss, on all ranks, or leave both as they were on all ranks."""
    was_patched, took_items = is_patched(inner_model(trainer.model)), trainer.model_accepts_loss_kwargs

    def settle(_: PlannedFrom) -> None:
        isolate(trainer.model, trainer.accelerator, planned.prove)
        planned.collator = collator_for(trainer.model)  # before labels are tried that its head may not have
        settle_loss(trainer, planned)
        for dataset in (trainer.train_dataset, *evaluated_datasets(trainer).values()):
            check_labels(dataset, planned.sizes(dataset), trainer.model)
        refuse_undivided(trainer, planned.divided or planned.scaled)

    try:
        on_all_ranks(settle)
    except Exception:
        if not was_patched and is_patched(inner_model(trainer.model)):
            unpatch_model(trainer.model)
        trainer.model_accepts_loss_kwargs = took_items
        raise


def matched(batching: Batching, documents: int) -> Batching:
    """The batching with so many documents in a step of the optimiser."""
    if not isinstance(batching, TokenBudget):
        raise PackingError(
            f"match_documents_per_step: expected None with {type(batching).__name__}, whose steps are constant in "
            f"tokens, got {documents!r}"
        )
    if batching.match_documents_per_step not in (None, documents):
        raise PackingError(
            f"match_documents_per_step: expected {batching.match_documents_per_step}, as {batching!r} says, got "
            f"{documents!r}"
        )
    return replace(batching, match_documents_per_step=documents)


def makes_its_own_loss(trainer: Trainer) -> bool:
    replaced = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    return not has_loss_of(trainer, Trainer) or replaced or bool(trainer.args.use_liger_kernel)


def sums_log_probs(trainer: Trainer) -> bool:
    """Whether the loss is the sum of the log-probabilities that SFTTrainer's fused head returns."""
    sft_trainer = sft_trainer_of(trainer)
    replaced = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    return (
        sft_trainer is not None
        and has_loss_of(trainer, sft_trainer)
        and trainer.args.loss_type == "nll"
        and not replaced
    )


def evaluated_datasets(trainer: Trainer) -> dict[str, Any]:
    dataset = trainer.eval_dataset
    if isinstance(dataset, dict):
        return {f"eval_dataset[{name!r}]": each for name, each in dataset.items()}
    return {} if dataset is None else {"eval_dataset": dataset}
