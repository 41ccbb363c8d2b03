"""attach: planned batches, exact losses and exact evaluation for a Trainer, in one line."""

from dataclasses import replace
from typing import Any

from hf_packing.attention.patch import patch_model
from hf_packing.collate import PackingCollator
from hf_packing.errors import PackingError
from hf_packing.sampling.batching import Batching, check_batching
from hf_packing.sampling.token_budget import TokenBudget
from hf_packing.training.losses import Loss, check_loss, predicts_next
from hf_packing.training.model_cost import with_cost_of
from hf_packing.training.progress import PlannedBatches
from hf_packing.training.ranks import data_rank
from hf_packing.training.refusals import check_trainer, makes_its_own_loss
from hf_packing.training.summary import EpochSummary, summary_of
from hf_packing.training.trainer import Attached, PackedTrainer


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
    documents apart. Its gradient does not depend on how a step is split into ranks and accumulated batches, and its
    evaluation loss is the mean over all tokens. per_device_train_batch_size no longer means anything.

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
        if not isinstance(batching, TokenBudget):
            raise PackingError(
                f"match_documents_per_step: expected None with {type(batching).__name__}, whose steps have a constant "
                f"number of tokens, got {match_documents_per_step!r}"
            )
        batching = replace(batching, match_documents_per_step=match_documents_per_step)
    replaced = trainer.compute_loss_func is not None or trainer.label_smoother is not None
    loss_of_trainer = makes_its_own_loss(trainer) or replaced or trainer.args.use_liger_kernel
    if not loss_of_trainer:
        predicts_next(trainer.model)
    attached = Attached(
        batching=with_cost_of(batching, trainer.model),
        loss=loss,
        collator=PackingCollator(),
        loss_of_trainer=loss_of_trainer,
        loss_replaced=replaced,
    )
    unpacked = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    kind = type(trainer)
    changed = type(f"Packed{kind.__name__}", (PackedTrainer, kind), {"__module__": kind.__module__})
    trainer.__class__, trainer.attached, trainer.data_collator = changed, attached, attached.collator
    try:
        summary = summary_of(trainer.train_sampler(), unpacked * data_rank(trainer.accelerator).world_size)
        patch_model(trainer.model, prove=prove)
    except BaseException:
        trainer.__class__ = kind
        raise
    trainer.model_accepts_loss_kwargs = trainer.model_accepts_loss_kwargs or not loss_of_trainer
    trainer.add_callback(PlannedBatches())
    return summary
