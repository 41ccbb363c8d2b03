"""Fill batches so that all of them have the same shapes, for torch.compile."""

from collections.abc import Mapping
from typing import Any

import torch

from hf_packing.checks import check_whole_number
from hf_packing.columns import (
    CU_SEQ_LENS,
    IGNORED_LABEL,
    INPUT_IDS,
    LABELS,
    MAX_LENGTHS,
    PADDING_SEGMENT,
    POSITION_IDS,
    SEQ_IDX,
)
from hf_packing.errors import PackingError


def check_shapes(tokens: Any, max_segments: Any) -> None:
    """Raise PackingError unless `tokens` and `max_segments`, the sizes of every batch, are two valid numbers."""
    for name, value, other, given in (
        ("tokens", tokens, "max_segments", max_segments),
        ("max_segments", max_segments, "tokens", tokens),
    ):
        if value is None:
            raise PackingError(f"{name}: expected an integer together with {other}={given!r}, got None")
    check_whole_number("tokens", tokens)
    check_whole_number("max_segments", max_segments, minimum=2)


def fill_to_shape(batch: Mapping[str, Any], tokens: int, max_segments: int) -> dict[str, Any]:
    """Fill a batch up to `tokens` tokens with one segment without labels, and up to max_segments with empty segments.

    The filling repeats the first token of the batch, since a pad token changes the result of some models. Its positions
    start again before they exceed those of all documents, since some models depend on the largest position, or have no
    embedding for it. Other columns with a value for each token are filled with 0.

    Args:
        batch: a batch with one row, as PackingCollator makes it.
        tokens: number of tokens in every batch.
        max_segments: number of segments in every batch.

    Returns:
        The batch with the same columns. cu_seq_lens_q and cu_seq_lens_k are int32 [max_segments + 1], the columns with
        a value for each token are [1, tokens], and max_length_q and max_length_k are `tokens`.

    Raises:
        PackingError: the batch has more than `tokens` tokens, or more segments than max_segments.
    """
    borders = batch[CU_SEQ_LENS[0]]
    given, segments = int(borders[-1]), len(borders) - 1
    if given > tokens:
        raise PackingError(f"tokens: expected at most {tokens} tokens in the rows of a batch, got {given} tokens")
    if segments + (given < tokens) > max_segments:
        one_more = f" and one more to fill the batch up to {tokens} tokens" if given < tokens else ""
        raise PackingError(
            f"max_segments: expected at most {max_segments} segments in a batch, got {segments} segments{one_more}"
        )
    filling = {
        INPUT_IDS: batch[INPUT_IDS][0, 0],
        LABELS: IGNORED_LABEL,
        POSITION_IDS: torch.arange(tokens - given) % borders.diff().max(),
        SEQ_IDX: PADDING_SEGMENT,
    }
    filled = dict(batch)
    for name, values in batch.items():
        if isinstance(values, torch.Tensor) and values.shape == (1, given):
            filled[name] = values.new_empty(1, tokens)
            filled[name][:, :given] = values
            filled[name][:, given:] = filling.get(name, 0)
    empty = borders.new_full((max_segments - segments,), tokens)
    return {
        **filled,
        **dict.fromkeys(CU_SEQ_LENS, torch.cat([borders, empty])),
        **dict.fromkeys(MAX_LENGTHS, tokens),
    }
