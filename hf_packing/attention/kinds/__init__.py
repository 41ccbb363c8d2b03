"""The kinds of batches that a patched model runs, with one file for each kind.

| file | kind | a query sees |
|---|---|---|
| packed.py | packed rows | the tokens of its segment |
| padded.py | padded batches, whose rows are documents | the tokens of its row that are no padding |
| trees.py | rows of trees, in which documents share prefixes | the tokens above it on its path |
| split.py | rows on several ranks | the tokens of its document, also those of other ranks |

kind.py says what a kind answers, and rows.py lays several rows end to end. Attention, kernels and modules that run by
segment ask the `Layout` of a batch, and know no kind by name. `training/kinds` has the labels of each kind.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_packing.attention.batch_proof import prove_batch
from hf_packing.attention.kinds.kind import Batch, proving
from hf_packing.attention.kinds.packed import PackedRows
from hf_packing.attention.kinds.padded import PaddedRows
from hf_packing.attention.kinds.split import PartOfRow
from hf_packing.attention.kinds.trees import TreeRow
from hf_packing.attention.layout import within
from hf_packing.attention.proof import Proof

KINDS: tuple[type[Batch], ...] = (PaddedRows, PartOfRow, TreeRow, PackedRows)
"""The kinds of batches, in the order in which they are asked whether a batch is theirs. The last one takes any."""


@torch.inference_mode(False)  # gradients are compared
def prove_on_batch(model: nn.Module, batch: Mapping[str, Any], training: bool = True) -> Proof:
    """Prove isolation on a training batch, and return what was proven. See `BatchCase` for the calls of the model.

    All ranks that shard a model have to call this function at the same time; all of them make the same calls.

    Args:
        model: a model as a training loop calls it, patched or not, with or without wrappers.
        batch: a batch of any kind but padded ones, as a loader makes it. Labels are ignored.
        training: whether to run the model in training mode.
    """
    cases = (kind.case(model, batch, training) for kind in KINDS)
    with within(proving, True):
        return prove_batch(next(filter(None, cases)))
