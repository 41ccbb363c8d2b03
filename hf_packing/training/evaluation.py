"""The mean loss over the trainable tokens of a dataset: the same at any batch size and on any number of ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets.utils import tqdm
from torch import nn

from hf_packing.errors import PackingError
from hf_packing.sampling.row_sizes import sizes_of
from hf_packing.sampling.sampler import InOrder, RankBatchSampler
from hf_packing.training.agreement import PlannedFrom, on_all_ranks
from hf_packing.training.loss_of_model import check_patched, predicts_next
from hf_packing.training.losses import exact_type, trainable_per_document, weighted_loss, weights_of
from hf_packing.training.ranks import check_accelerator, data_rank
from hf_packing.training.rows_loader import rows_loader
from hf_packing.training.seen_labels import check_labels


class TokenMean:
    """A mean over tokens that are seen batch by batch, on several ranks."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros(2, dtype=exact_type(device), device=device)
        self.batches = 0

    def add(self, summed_loss: torch.Tensor, tokens: torch.Tensor) -> None:
        self.total += torch.stack([summed_loss.detach().to(self.total), tokens.to(self.total)])
        self.batches += 1

    def over_ranks(self, accelerator: Accelerator) -> tuple[float, float]:
        """The summed loss and the tokens it is of; all ranks must ask for them."""
        summed_loss, tokens = accelerator.reduce(self.total, reduction="sum").tolist()
        return summed_loss, tokens


def summed_loss(logits: torch.Tensor, batch: Mapping[str, Any], shift: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a packed batch, summed over its trainable tokens, and how many those are."""
    total = weighted_loss(logits, batch["labels"], weights_of(batch, "token"), shift)
    return total, trainable_per_document(batch).sum()


def evaluation_loss(accelerator: Accelerator, model: nn.Module, dataset: Any, *, rows_per_batch: int = 1) -> float:
    """The mean loss over all trainable tokens of a dataset, for a loop of one's own; `attach` does this for a Trainer.

    Args:
        accelerator: of the loop.
        model: a causal or masked language model of transformers, patched, as accelerate has wrapped it.
        dataset: map-style, packed or of documents.
        rows_per_batch: rows that are given to the model at once; it changes nothing but speed and memory.

    Returns:
        The same number on all ranks. Its exponential is the perplexity.

    Raises:
        PackingError: no row, no trainable token, a model that is not patched, labels that only repeat the tokens that a
            masked language model sees, or ranks with different data.

    Example:
        >>> import accelerate, datasets, hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = hfp.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes)))
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]})
        >>> round(hfp.evaluation_loss(accelerate.Accelerator(cpu=True), model, documents))
        5
    """

    def plan(planned_from: PlannedFrom) -> RankBatchSampler:
        check_accelerator(accelerator)
        check_patched(model)
        planned_from.note_settings(rows_per_batch=rows_per_batch)
        sizes = sizes_of(dataset)
        planned_from.note_data("dataset", dataset, sizes)
        check_labels(dataset, sizes, model)
        rank, world_size = data_rank(accelerator)
        return RankBatchSampler(InOrder(rows_per_batch), sizes, world_size, rank)

    sampler = on_all_ranks(plan)
    mean, shift = TokenMean(accelerator.device), predicts_next(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            loader = rows_loader(dataset, sampler, model)
            for batch in tqdm(loader, desc="Evaluating", disable=not accelerator.is_main_process):
                batch = send_to_device(batch, accelerator.device)
                outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
                mean.add(*summed_loss(outputs.logits, batch, shift))
    finally:
        model.train(was_training)
    summed, tokens = mean.over_ranks(accelerator)
    if not tokens:
        raise PackingError("dataset: expected a label to evaluate on, all are -100")
    return summed / tokens
