"""Batches for a loop of one's own: the right ones on every rank, with their share in the loss of a whole step."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import DistributedType, send_to_device
from torch import nn
from torch.utils.data import DataLoader

from hf_packing.attention.patch import unpatch_model
from hf_packing.attention.sharded import where_weights_are
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_whole_number
from hf_packing.sampling.batching import Batching, check_batching
from hf_packing.sampling.epoch_plan import EpochPlan
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.sampling.sizes import sizes_of
from hf_packing.training.isolate import isolate
from hf_packing.training.loss_of_model import own_loss, refuse_unknown_loss
from hf_packing.training.losses import Loss, check_loss, exact_type, items_in, with_share
from hf_packing.training.model_cost import with_cost_of
from hf_packing.training.progress import LOSS, check_same_loss
from hf_packing.training.ranks import check_accelerator, data_rank
from hf_packing.training.rows_loader import rows_loader

Batch = dict[str, Any]

OF_BATCHES = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "in_order", "generator"}
"""Arguments of DataLoader that planned batches have no use for."""


class PackedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate has no types
    """Batches of one rank, on its device; made by `prepare_dataloader`.

    Iterating over it is one epoch, and the next iteration the next one. Its state is (epoch, step):
    `accelerator.save_state` saves it, and after `accelerator.load_state` the next iteration goes on at that step,
    without reading what comes before.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        loader: DataLoader[Batch],
        sampler: RankBatchSampler,
        loss: Loss,
        keep_labels: bool,
    ) -> None:
        self.accelerator = accelerator
        self.loader = loader
        self.dataset = loader.dataset
        self.batches = sampler
        self.loss = loss
        self.keep_labels = keep_labels
        self.gradient_state = GradientState()
        self.epoch = 0
        """Which epoch the next iteration is about."""
        self.step = 0
        """Batches of this epoch that were yielded."""
        self.begin_at = 0

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def plan(self) -> EpochPlan:
        """The batches of all ranks in this epoch."""
        self.batches.set_epoch(self.epoch)
        return self.batches.plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; without it the loader counts them itself."""
        if epoch != self.epoch:
            self.epoch, self.step, self.begin_at = check_whole_number("epoch", epoch, minimum=0), 0, 0

    def __iter__(self) -> Iterator[Batch]:
        self.check_accumulation()
        self.batches.set_epoch(self.epoch)
        self.batches.first_step = self.step = self.begin_at
        self.begin_at = 0
        self.begin()
        try:
            self.loader.generator.manual_seed(self.epoch)
            batches = iter(self.loader)
            while together := list(islice(batches, self.left_of_update())):
                together = [send_to_device(batch, self.accelerator.device) for batch in together]
                items = self.items(together)
                for batch in together:
                    self.step += 1
                    self.end_of_dataloader = self.step == len(self)
                    yield with_share(batch, self.loss, items, self.keep_labels)
        finally:
            if self.step == len(self):
                self.epoch, self.step = self.epoch + 1, 0
            self.batches.first_step = 0
            self.end()

    def check_accumulation(self) -> None:
        """A step of the optimiser begins with the next batch, and has as many as were planned for it.

        Raises:
            PackingError: accelerate accumulates another number of batches now.
        """
        accumulated = self.accelerator.gradient_accumulation_steps
        if accumulated != self.batches.accumulation:
            raise PackingError(
                f"gradient_accumulation_steps: expected {self.batches.accumulation}, as when prepare_dataloader was "
                f"called, got {accumulated}, which DeepSpeed may have set; give Accelerator the same"
            )
        if self.gradient_state.active_dataloader is None:  # else another loader is in the middle of its steps
            self.accelerator.step = 0

    def left_of_update(self) -> int:
        """Batches until the next update of the optimiser."""
        return self.batches.accumulation - self.step % self.batches.accumulation

    def items(self, batches: list[Batch]) -> torch.Tensor:
        """What the losses of these batches are divided by, so that accelerate's averages make them a mean of all."""
        here = torch.stack([items_in(batch, self.loss) for batch in batches]).sum()
        everywhere = self.accelerator.reduce(here, reduction="sum").clamp(min=1)
        averaged_over = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        share: torch.Tensor = everywhere.to(exact_type(everywhere.device)) / averaged_over
        return share

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the epoch, the batches yielded of it, and what decides which batches those are.

        Raises:
            PackingError: between two updates of the optimiser, where no checkpoint has the gradients of the first.
        """
        if self.step % self.batches.accumulation and self.step != len(self) and not self.accelerator.sync_gradients:
            raise PackingError(
                f"step: expected a checkpoint after {self.batches.accumulation} accumulated batches, got one after "
                f"{self.step % self.batches.accumulation}"
            )
        done = self.step == len(self)
        return {
            "epoch": self.epoch + done,
            "step": 0 if done else self.step,
            **self.batches.what_decides(),
            LOSS: self.loss,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state.

        Raises:
            PackingError: the state of other batches: another dataset, batching or loss, or in the middle of an epoch
                another accumulation or number of ranks.
        """
        if missing := {"epoch", "step"} - state.keys():
            raise PackingError(f"state: expected one that state_dict returned, it has no {min(missing)!r}")
        self.batches.check_same(state, whole_epochs=not state["step"])
        check_same_loss(state, self.loss)
        self.epoch, self.step, self.begin_at = state["epoch"], state["step"], state["step"]


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
    """Batches of this rank for a loop of one's own, ready to be given to the model.

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
            than ranks; a row longer than a batch; a model that makes its loss in another way, or is sharded already.
        ModelNotSupportedError: the model cannot be shown to keep documents apart.

    Example:
        >>> import accelerate, datasets, hf_packing as hfp
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> loader = hfp.prepare_dataloader(accelerate.Accelerator(cpu=True), documents, hfp.TokenBudget(5))
        >>> len(loader), sorted(batch["input_ids"].shape[1] for batch in loader)
        (2, [4, 5])
    """
    if not isinstance(accelerator, Accelerator):
        raise PackingError(f"accelerator: expected an Accelerator, got {type(accelerator).__name__}")
    check_accelerator(accelerator)
    check_loss(loss)
    if planned := OF_BATCHES & options.keys():
        raise PackingError(f"{min(planned)}: expected none, since the batching decides which rows share a batch")
    batching = with_cost_of(check_batching(batching), model)
    sizes = sizes_of(dataset)
    if model is not None:
        patched_here = isolate(model, accelerator)
        if own_loss(model) is None and where_weights_are(model) is None:
            if patched_here:
                unpatch_model(model)
            refuse_unknown_loss(model, loss)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        if settings.get("train_micro_batch_size_per_gpu") == "auto":
            settings["train_micro_batch_size_per_gpu"] = 1  # a packed row
    rank, world_size = data_rank(accelerator)
    sampler = RankBatchSampler(batching, sizes, world_size, rank, accelerator.gradient_accumulation_steps)
    pinned = {"pin_memory": accelerator.device.type == "cuda"}
    rows = rows_loader(dataset, sampler, model, **(pinned | options))
    loader = PackedLoader(accelerator, rows, sampler, loss, labels_for_model(model, loss))
    accelerator.register_for_checkpointing(loader)
    return loader
