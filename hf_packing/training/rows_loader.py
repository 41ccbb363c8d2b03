"""A DataLoader of one rank, from a sampler that already knows all ranks."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_packing.collate import PackingCollator
from hf_packing.sampling.rows import SampledRows
from hf_packing.sampling.sampler import RankBatchSampler


def rows_loader(dataset: Any, sampler: RankBatchSampler, **options: Any) -> DataLoader[dict[str, Any]]:
    """Batches of the sampler's rows.

    Args:
        dataset: map-style, the rows the sampler was made for.
        sampler: of this rank.
        options: further arguments of DataLoader; collate_fn is PackingCollator() where it is not given. The seeds of
            workers come from a generator of their own: one that dropout uses would be elsewhere after a resume.
    """
    return DataLoader(
        SampledRows(dataset, sampler),
        batch_sampler=sampler,
        **{"collate_fn": PackingCollator(), "generator": torch.Generator(), **options},
    )
