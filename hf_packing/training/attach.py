"""attach: planned batches, exact losses and exact evaluation for a Trainer, in one line."""

from dataclasses import replace
from typing import Any

from transformers import Trainer

from hf_packing.attention.patch import unpatch_model
from hf_packing.attention.sharded import where_weights_are
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, check_batching
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.isolate import isolate
from hf_packing.training.loss_of_model import own_loss, refuse_unknown_loss
from hf_packing.training.losses import Loss, check_loss
from hf_packing.training.model_cost import with_cost_of
from hf_packing.training.planned_batches import PlannedBatches
from hf_packing.training.progress import BatchesOfCheckpoint
from hf_packing.training.ranks import data_rank
from hf_packing.training.refusals import check_trainer, has_loss_of, sft_trainer_of
from hf_packing.training.rows_loader import collator_for
from hf_packing.training.summary import EpochSummary, summary_of
from hf_packing.training.trainer import PackedTrainer
from hf_packing.training.trainer_loss import check_trainer_loss


def attach(
    trainer: Any,
    batching: Batching,
    *,
    loss: Loss = "token",
    match_documents_per_step: int | None = None,
    prove: bool = True,
) -> EpochSummary:
    """Give a Trainer or an SFTTrainer planned batches; call it once, before `train()`.

    The trainer then gets its micro-batches from the batching, the same number on every rank and in every epoch, in
    another order each epoch, and goes on with exactly the next one when it is resumed. Its model is patched to keep
    documents apart, where it is now: with FSDP or DeepSpeed that is before it moves to its device. Its gradient does
    not depend on how a step is split into ranks and accumulated batches, and its evaluation loss is the mean over all
    trainable tokens, of per_device_eval_batch_size rows at once; predictions come one flat row for each batch.
    per_device_train_batch_size, seed, data_seed and dataloader_drop_last no longer decide which rows share a batch.

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
        PackingError: a trainer, an argument or a dataset that cannot be served, with the reason.
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
        >>> hfp.attach(trainer, hfp.TokenBudget(5)).micro_batches
        2
    """
    if isinstance(trainer, PackedTrainer):
        raise PackingError("trainer: expected one without batches of ours, attach was called on it before")
    check_loss(loss)
    check_batching(batching)
    check_trainer(trainer, loss)
    if match_documents_per_step is not None:
        batching = matched(batching, match_documents_per_step)
    planned = PlannedBatches(
        batching=with_cost_of(batching, trainer.model),
        loss=loss,
        loss_of_trainer=makes_its_own_loss(trainer),
        sums_log_probs=sums_log_probs(trainer),
        prove=prove,
        loss_function=trainer.compute_loss_func,
    )
    unpacked = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    summary = summary_of(planned.sampler(trainer), unpacked * data_rank(trainer.accelerator).world_size)
    for dataset in evaluated_datasets(trainer):
        planned.sizes(dataset)
    name = f"{type(trainer).__name__}WithPlannedBatches"
    kind = type(name, (PackedTrainer, type(trainer)), {"__module__": __name__})
    patched_here = isolate(trainer.model, trainer.accelerator, prove)
    try:
        settle_loss(trainer, planned)
    except PackingError:
        if patched_here:
            unpatch_model(trainer.model)
        raise
    planned.collator = collator_for(trainer.model)
    trainer.planned_batches, trainer.data_collator = planned, planned.collator
    trainer.add_callback(BatchesOfCheckpoint(loss))
    trainer.__class__ = kind
    return summary


def settle_loss(trainer: Trainer, planned: PlannedBatches) -> None:
    """Decide who makes the loss, and that it is divided by what is in a whole step of the optimiser."""
    if not planned.loss_of_trainer:
        if own_loss(trainer.model) is not None or where_weights_are(trainer.model) is not None:
            trainer.model_accepts_loss_kwargs = True
            return
        if planned.loss == "sequence":
            refuse_unknown_loss(trainer.model, planned.loss)
        planned.loss_of_trainer = True
    check_trainer_loss(trainer)


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


def evaluated_datasets(trainer: Trainer) -> list[Any]:
    dataset = trainer.eval_dataset
    if isinstance(dataset, dict):
        return list(dataset.values())
    return [] if dataset is None else [dataset]
