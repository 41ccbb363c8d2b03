"""Rows of trees as inputs of a model."""

import torch

from hf_packing.trees.segments import TreeSegments

CHAT = TreeSegments((9, 14, 6, 17, 5, 12), (-1, 0, 0, 2, 2, 4))
"""Three turns: each has thinking of its own, and the next turn goes on without it."""


def inputs_of(trees, seed=0, vocabulary=100):
    ids = torch.randint(8, vocabulary, (1, trees.tokens), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "segment_lengths": torch.tensor(trees.lengths),
        "parents": torch.tensor(trees.parents),
    }
