"""The only names of the goldens that are not public. If modules move, change the imports here, and nothing else."""

from typing import Any

import hf_packing as hfp
from hf_packing.sampling.batching import Epoch
from hf_packing.sampling.sizes import sizes_of
from hf_packing.sampling.trees_of_documents import TreesOfDocuments


def epoch_plan(batching: Any, dataset: Any, epoch: int, world_size: int, accumulation: int) -> hfp.EpochPlan:
    """Return the micro-batches that `attach` and `prepare_dataloader` would use on this number of ranks."""
    return batching.plan(sizes_of(dataset), Epoch(epoch, world_size, accumulation))


def trees_of(dataset: Any, budget: hfp.TokenBudget) -> Any:
    """Return the trees of documents that `attach` and `prepare_dataloader` make for TokenBudget(share_prefixes=...)."""
    return TreesOfDocuments.find(dataset, budget.max_tokens, budget.fewest_shared, budget.overflow, (), ())
