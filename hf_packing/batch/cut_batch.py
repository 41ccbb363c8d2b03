"""Cut the segments of a batch by extra borders, as a LengthSchedule asks for. Tokens and labels stay as they are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from hf_packing.columns import COPIED_SEGMENT, CU_SEQ_LENS, MAX_LENGTHS, POSITION_IDS, SEQ_IDX


def with_segments_cut(batch: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    """Return a copy of a batch in which no segment is longer than a limit.

    Only the columns that give the borders differ. The last token of a piece still predicts the first token of the next
    piece, since both are of one document; so no label is lost.

    Args:
        batch: a batch of a `PackingCollator`, without fixed shapes.
        longest: the largest length of a segment, in tokens; None for no limit.

    Example:
        >>> import hf_packing as hfp
        >>> batch = hfp.PackingCollator()([{"input_ids": [5, 6, 7, 8, 9]}, {"input_ids": [1, 2]}])
        >>> cut = with_segments_cut(batch, 2)
        >>> cut["cu_seq_lens_q"].tolist(), cut["position_ids"].tolist(), cut["labels"].tolist()
        ([0, 2, 4, 5, 7], [[0, 1, 0, 1, 0, 0, 1]], [[-100, 6, 7, 8, 9, -100, 2]])
    """
    if longest is None or batch[MAX_LENGTHS[0]] <= longest:
        return dict(batch)
    positions = batch[POSITION_IDS] % longest
    begins, is_own = positions[0] == 0, batch[SEQ_IDX][0] >= 0
    numbers = torch.where(is_own, (begins & is_own).cumsum(0) - 1, COPIED_SEGMENT + 1 - begins.cumsum(0))
    cu_seq_lens = F.pad(begins.nonzero()[:, 0], (0, 1), value=len(begins)).to(batch[CU_SEQ_LENS[0]].dtype)
    return {
        **batch,
        POSITION_IDS: positions,
        **dict.fromkeys(CU_SEQ_LENS, cu_seq_lens),
        **dict.fromkeys(MAX_LENGTHS, longest),
        SEQ_IDX: numbers[None].to(batch[SEQ_IDX].dtype),
    }
