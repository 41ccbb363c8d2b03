"""Datasets that would teach a model to copy: without labels, or with labels that only repeat the tokens it sees."""

from typing import Any

import numpy as np
from torch import nn

from hf_packing.attention import inner_model, refuse_copied_labels, sees_labels
from hf_packing.collate import PackingCollator
from hf_packing.columns import LOSS_MASKS, TOKEN_TYPE_IDS
from hf_packing.sampling.row_sizes import RowSizes
from hf_packing.sampling.sampled_rows import SampledRows
from hf_packing.sampling.sampler import InOrder, RankBatchSampler

ROWS_READ = 16


def check_labels(dataset: Any, sizes: RowSizes, model: nn.Module) -> None:
    """Read a few rows from all over a dataset, where a patched model sees the tokens that its labels ask for.

    Args:
        dataset: map-style, packed or of documents.
        sizes: of its rows.
        model: patched.

    Raises:
        PackingError: all tokens of these rows are labels of themselves.
    """
    inner = inner_model(model)
    rows = np.flatnonzero(sizes.tokens)
    if not sees_labels(inner) or not len(rows):
        return
    numbers = rows[np.unique(np.linspace(0, len(rows) - 1, ROWS_READ).astype(np.int64))].tolist()
    read = SampledRows(dataset, RankBatchSampler(InOrder(1), sizes, world_size=1, rank=0), (TOKEN_TYPE_IDS,))
    labelled = [
        {name: row[name] for name in row if name not in LOSS_MASKS}
        for row in read.__getitems__([(number, False) for number in numbers])
    ]
    batch = PackingCollator(keep_first_labels=True)(labelled)
    refuse_copied_labels(inner, batch["input_ids"], batch["labels"], batch["cu_seq_lens_q"], is_sample=True)
