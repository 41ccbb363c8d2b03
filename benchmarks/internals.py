"""What benchmarks use of the inside of hf_packing. When the package moves one of these, its line here follows.

Benchmarks go through public names where they measure what a user waits for. Some measure a single piece, which has no
public name: planning without reading the data, the loader without a trainer, an attention function without a model. A
piece is imported when it is first used, so that a benchmark loads what it measures and nothing else.
"""

import importlib
from typing import Any

HOME_OF = {
    # lengths and pieces, and the window in which a stream is planned: streams, trees, long_documents
    "Pieces": "planning.lengths",
    "check_lengths": "planning.lengths",
    "cut_to_pieces": "planning.lengths",
    "WindowSize": "planning.windows",
    "choose_waiting": "planning.windows",
    # columns of tokens, rows made from a plan, and shared prefixes: trees
    "TOKENS_AT_ONCE": "rows.token_columns",
    "find_token_columns": "rows.token_columns",
    "Packing": "rows.packing",
    "find_trees": "trees.find",
    "plan_trees": "trees.rows",
    # the logical streams of a mixture: mixtures
    "examples_of": "upstream.datasets",
    # micro-batches of sizes alone: samplers, shapes, long_documents
    "Epoch": "sampling.batching",
    "RowSizes": "sampling.sizes",
    "sizes_of_documents": "sampling.sizes",
    "sizes_of_packs": "sampling.sizes",
    # how rollouts are divided: rollouts
    "divide": "training.leveling",
    "linear_cost_of": "sampling.token_budget",
    "mean_over_max": "sampling.fill",
    # documents on several ranks: long_documents
    "RankLayout": "planning.rank_layout",
    "plan_exchange": "planning.rank_layout",
    # the loader, and the masks that its rows draw, without a trainer: loader, lazy, masking, alignment
    "sizes_of": "sampling.sizes",
    "RankBatchSampler": "sampling.sampler",
    "SampledRows": "sampling.rows",
    "batches_loader": "training.loader",
    "EpochSampler": "training.masking",
    "MaskedRows": "training.masking",
    "Masking": "training.masking",
    # ranks that step together, and the items of a batch: lockstep, tree_training
    "Answer": "training.lockstep",
    "in_lockstep": "training.lockstep",
    "labels_of": "training.kinds",
    # attention, its mask and the proof on a batch, without a trainer: attention, block_mask, first_batch, gpu_kernels
    "Layout": "attention.layout",
    "current_layout": "attention.layout",
    "within": "attention.layout",
    "packed_varlen": "attention.function",
    "attend_exactly": "attention.exact",
    "KERNELS": "attention.kernels",
    "Call": "attention.kernels",
    "kernel_of": "attention.kernels",
    "TreeLayout": "attention.kinds.trees",
    "TreeSegments": "trees.segments",
    "Borders": "attention.flex",
    "row_mask": "attention.flex",
    "prove_on_batch": "attention",
}


def __getattr__(name: str) -> Any:
    if name not in HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"hf_packing.{HOME_OF[name]}"), name)
