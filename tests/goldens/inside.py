"""The only names of the goldens that are not public. If modules move, change the imports here, and nothing else."""

from collections.abc import Iterable, Iterator
from typing import Any

import hf_packing as hfp
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.rows import TreesOfDocuments
from hf_packing.sampling.sizes import sizes_of


def epochs_of(batching: Any, dataset: Any, splits: Iterable[tuple[int, int]]) -> Iterator[list[hfp.EpochPlan]]:
    sizes = sizes_of(dataset)
    for split in splits:
        yield [batching.plan(sizes, Epoch(number, *split)) for number in (0, 1)]


def trees_of(dataset: Any, budget: hfp.TokenBudget) -> Any:
    """Return the trees of documents that `attach` and `prepare_dataloader` make for TokenBudget(share_prefixes=...)."""
    return TreesOfDocuments.find(dataset, budget.max_tokens, budget.fewest_shared, budget.overflow, (), ())
