"""A DataLoader of one rank, from a sampler that already knows all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hf_packing.attention import inner_model
from hf_packing.collate import PackingCollator
from hf_packing.columns import TOKEN_TYPE_IDS
from hf_packing.sampling.sampled_rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler
from hf_packing.training.loss_of_model import predicts_next


def collator_for(model: nn.Module | None) -> PackingCollator:
    """The collator of batches for a model; for one that predicts the next token where there is none."""
    return PackingCollator(keep_first_labels=model is not None and not predicts_next(model))


def takes_token_types(model: nn.Module | None) -> bool:
    """Whether the model embeds token types; others give them other meanings, or none."""
    return model is None or bool(getattr(inner_model(model).config, "type_vocab_size", 0))


def rows_loader(
    dataset: Any,
    sampler: RankBatchSampler,
    model: nn.Module | None = None,
    *,
    unread: Sequence[str] = (),
    apply_masks: bool = True,
    **options: Any,
) -> DataLoader[dict[str, Any]]:
    """Batches of the sampler's rows.

    Args:
        dataset: map-style, the rows the sampler was made for.
        sampler: of this rank.
        model: that the batches are for.
        unread: columns that are left out of rows.
        apply_masks: whether loss masks make the labels of rows without any.
        options: further arguments of DataLoader; collate_fn is `collator_for(model)` where it is not given. The seeds
            of workers come from a generator of their own: one that dropout uses would be elsewhere after a resume.
    """
    unread = [*unread, *([] if takes_token_types(model) else [TOKEN_TYPE_IDS])]
    return DataLoader(
        SampledRows(dataset, sampler, unread, apply_masks),
        batch_sampler=sampler,
        **{"collate_fn": collator_for(model), "generator": torch.Generator(), **options},
    )
