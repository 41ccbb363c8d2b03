"""Batches for a loop of one's own: the right ones on every rank, with their share in the loss of a whole step."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from hf_packing.attention import has_local_weights, inner_model, is_patched, unpatch_model
from hf_packing.errors import PackingError
from hf_packing.sampling.epoch_plan import Batching, check_batching
from hf_packing.sampling.row_sizes import RowSizes, sizes_of
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.training.agreement import PlannedFrom, on_all_ranks
from hf_packing.training.isolate import isolate
from hf_packing.training.loss_of_model import own_loss, refuse_unknown_loss
from hf_packing.training.losses import Loss, check_loss
from hf_packing.training.model_cost import with_cost_of
from hf_packing.training.packed_loader import PackedLoader
from hf_packing.training.ranks import check_accelerator, data_rank
from hf_packing.training.rows_loader import rows_loader
from hf_packing.training.seen_labels import check_labels

OF_BATCHES = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "in_order", "generator"}
"""Arguments of DataLoader that planned batches have no use for."""


def labels_for_model(model: nn.Module | None, loss: Loss) -> bool:
    """Whether a model that is given labels makes the right loss of them itself."""
    if model is None or loss == "sequence":
        return loss == "token"
    own = own_loss(model)
    return own is not None and own.divided_by_items


def prepare_dataloader(
    accelerator: Accelerator,
    dataset: Any,
    batching: Batching,
    *,
    loss: Loss = "token",
    model: nn.Module | None = None,
    **options: Any,
) -> PackedLoader:
    """Batches of this rank for a loop of one's own, ready to be given to the model; all ranks must call this together.

    The loop is the usual one: `accelerator.accumulate(model)`, `accelerator.backward(loss)`. The loss is that of
    `compute_loss(model, batch)`, right for every split into ranks and accumulated steps. With loss="token" it is
    also `model(**batch).loss` for models that divide by `num_items_in_batch`; others get no labels in their batches.

    Args:
        accelerator: of the loop; its gradient_accumulation_steps count.
        dataset: map-style, packed or of documents.
        batching: TokenBudget or BucketBatches.
        loss: "token", the mean over trainable tokens, or "sequence", the mean over documents of each one's mean.
        model: patched here, unless it is already. Its own loss is looked at once, so that compute_loss is the same, and
            its configuration, for the ratio that attention is balanced by. None leaves the model to you, trusts the
            kind of its class, and takes a common ratio.
        options: further arguments of torch's DataLoader, such as num_workers.

    Returns:
        PackedLoader: len(loader) batches an epoch, on every rank and in every epoch.

    Raises:
        PackingError: dispatch_batches, split_batches, context or sequence parallelism; no map-style dataset; fewer rows
            than ranks; a row longer than a batch; a model that makes its loss in another way, or is sharded already;
            ranks with different data or arguments, on all of them; data without labels for a masked language model.
        ModelNotSupportedError: the model cannot be shown to keep documents apart.

    Example:
        >>> import accelerate, datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> loader = hfp.prepare_dataloader(accelerate.Accelerator(cpu=True), documents, hfp.TokenBudget(5))
        >>> len(loader), sorted(batch["input_ids"].shape[1] for batch in loader)
        (2, [4, 5])
    """

    def plan(planned_from: PlannedFrom) -> RankBatchSampler:
        if not isinstance(accelerator, Accelerator):
            raise PackingError(f"accelerator: expected an Accelerator, got {type(accelerator).__name__}")
        check_accelerator(accelerator)
        if planned := OF_BATCHES & options.keys():
            raise PackingError(f"{min(planned)}: expected none, since the batching decides which rows share a batch")
        balanced, accumulation = with_cost_of(check_batching(batching), model), accelerator.gradient_accumulation_steps
        planned_from.note_settings(batching=balanced, gradient_accumulation_steps=accumulation, loss=check_loss(loss))
        sizes = sizes_of(dataset)
        planned_from.note_data("dataset", dataset, sizes)
        rank, world_size = data_rank(accelerator)
        return RankBatchSampler(balanced, sizes, world_size, rank, accumulation)

    sampler = on_all_ranks(plan)
    if model is not None:
        isolate_and_check(accelerator, model, loss, dataset, sampler.sizes)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        if settings.get("train_micro_batch_size_per_gpu") == "auto":
            settings["train_micro_batch_size_per_gpu"] = 1  # a packed row
    pinned = {"pin_memory": accelerator.device.type == "cuda"}
    rows = rows_loader(dataset, sampler, model, **(pinned | options))
    loader = PackedLoader(accelerator, rows, sampler, loss, labels_for_model(model, loss))
    accelerator.register_for_checkpointing(loader)
    return loader


def isolate_and_check(accelerator: Accelerator, model: nn.Module, loss: Loss, dataset: Any, sizes: RowSizes) -> None:
    """Patch a model whose loss can be served, for labels that it does not see, or leave it as it was, on all ranks."""
    was_patched = is_patched(inner_model(model))

    def settle(_: PlannedFrom) -> None:
        isolate(model, accelerator)
        if own_loss(model) is None and has_local_weights(model):
            refuse_unknown_loss(model, loss)
        check_labels(dataset, sizes, model)

    try:
        on_all_ranks(settle)
    except Exception:
        if not was_patched and is_patched(inner_model(model)):
            unpatch_model(model)
        raise
