"""Packed rows, whose borders stand in cu_seq_lens_q, position_ids, seq_idx or seq_lengths.

Several rows run as a single one, laid end to end. Reading the borders waits for the device; a batch of PackingCollator
brings the lengths of its segments, and after the first one, its borders are not read.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import unwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_packing.attention.batch_proof import BatchCase
from hf_packing.attention.kinds.kind import Batch, itself_uncompiled, refuse_earlier_tokens, tokens_of
from hf_packing.attention.kinds.rows import Rows
from hf_packing.attention.layout import Layout, roots, within
from hf_packing.attention.model import Arguments, Inputs
from hf_packing.batch.segments import fillers_in, lengths_between, positions_of, read_borders, segments_in
from hf_packing.checks import expect
from hf_packing.columns import CU_SEQ_LENS, IGNORED_LABEL, MAX_LENGTHS, PADDING_SEGMENT, SEQ_IDX
from hf_packing.errors import PackingError
from hf_packing.trees.segments import TreeSegments

needs_borders: ContextVar[bool] = ContextVar("needs_borders", default=False)
"""Whether rows without borders are refused in evaluation mode, too."""


def borders_required() -> AbstractContextManager[None]:
    """Return a context manager: within the block, which runs models on packed rows, rows without borders are refused in
    every mode. A teacher in evaluation mode may get only some columns of a batch."""
    return within(needs_borders, True)


@dataclass(frozen=True, eq=False)
class PackedLayout(Layout):
    """The segments of packed rows.

    Args:
        bound: the max_length that comes with the batch. Batches of fixed shapes have the same one, which may be larger
            than the longest segment.
        fillers: number of segments that only fill up the batch, at its end.
    """

    bound: int = 0
    fillers: int = 0

    @property
    def documents(self) -> TreeSegments:
        return roots(self.lengths[: len(self.lengths) - self.fillers])

    @property
    def max_length(self) -> int:
        return max(self.longest, self.bound)

    @property
    def has_fixed_shapes(self) -> bool:
        return self.bound > self.longest or super().has_fixed_shapes

    @cached_property
    def position_ids(self) -> Tensor:
        return self._of_tokens(positions_of(self.lengths, self.fillers))


@dataclass(frozen=True, eq=False)
class PackedRows(Batch):
    """One or more packed rows.

    Args:
        layout: the segments of all rows.
        rows: the places of the tokens in several rows; None for a single row.
    """

    layout: PackedLayout
    rows: Rows | None = None

    @classmethod
    def read(cls, forward: Any, inputs: Inputs) -> "PackedRows":
        """Read the batch. Compare it once with what PackingCollator knows of its batch."""
        refuse_earlier_tokens(inputs)
        known, patch = layout_of_collator(inputs), forward.patch
        if known is not None and patch.trusts_collator:
            return cls.of(inputs, known)
        layout = read_layout(inputs, forward.module.training)
        if known is not None:
            patch.trusts_collator = (known.lengths, known.fillers) == (layout.lengths, layout.fillers)
        return cls.of(inputs, layout)

    @classmethod
    def of(cls, inputs: Inputs, layout: PackedLayout) -> "PackedRows":
        """Return the batch of the arguments of a model, given its layout."""
        tokens = tokens_of(inputs)
        return cls(layout, None if len(tokens) == 1 else Rows(np.ones(tokens.shape, np.bool_), tokens.device))

    @classmethod
    def case(cls, model: nn.Module, batch: Mapping[str, Any], training: bool) -> BatchCase:
        return BatchCase(model, batch, training, partial(read_layout, training=True))

    def check(self, forward: Any, inputs: Inputs) -> None:  # noqa: ARG002
        keep = inputs.get("logits_to_keep")
        if self.rows is not None and (isinstance(keep, Tensor) or keep):
            raise PackingError(
                "logits_to_keep: expected None or 0 for several packed rows, since a patched model runs the rows as a "
                f"single row; got {keep}"
            )

    def lay_end_to_end(self, value: Any) -> Any:
        return value if self.rows is None else self.rows.lay_end_to_end(value)

    @itself_uncompiled
    def run(self, forward: Any, inputs: Arguments) -> Any:
        if self.rows is not None:
            return self.rows.put_back(forward.run_row(self.rows.lay_end_to_end(inputs), self.layout))
        if not self.layout.fillers:
            return forward.run_row(inputs, self.layout)
        return self._run_filled(forward, inputs)

    @itself_uncompiled
    def _run_filled(self, forward: Any, inputs: Arguments) -> Any:
        """Run the forward on a batch that is filled up, so that a model computes no loss of routers for the fillers."""
        mask = _mask_for_routers(forward, inputs)
        output = forward.run_row(inputs, self.layout, mask)
        if not mask and getattr(output, "aux_loss", None) is not None:
            raise PackingError(
                f"aux_loss: expected none with batches that are filled up, since {type(forward.model).__name__} would "
                "also compute the loss of its routers for the filled tokens; pass output_router_logits=False, or "
                "batches without tokens and align_tokens"
            )
        if forward.module is not forward.model and getattr(output, "router_logits", None) is not None:
            # called alone, as by the head of SFTTrainer, which computes the loss of routers itself
            is_real = inputs[SEQ_IDX][0] != PADDING_SEGMENT
            output.router_logits = tuple(each[is_real.to(each.device)] for each in output.router_logits)
        return output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mask_for_routers(forward: Any, inputs: Inputs) -> Arguments:
    """Return the attention_mask with which a model leaves filled tokens out of the loss of its routers, if it has one
    in transformers' way. Its layers do not get the mask."""
    filled = inputs.get(SEQ_IDX) if forward.module is forward.model else None
    code = unwrap(type(forward.model).forward).__code__
    if filled is None or "load_balancing_loss_func" not in code.co_names:
        return {}
    return {"attention_mask": (filled != PADDING_SEGMENT).long().to(tokens_of(inputs).device)}


def read_layout(inputs: Inputs, training: bool = False) -> PackedLayout:
    """Read the segments of packed rows from a model's inputs, which waits for the device. Several rows are counted as
    one long row.

    Args:
        inputs: keyword arguments of a model's forward, with input_ids or inputs_embeds, and without padding.
        training: whether the model is in training mode. In training mode, and within `borders_required`, borders are
            required. Otherwise, a row without borders counts as a single document.

    Raises:
        PackingError: input_ids and inputs_embeds are both missing; or borders are missing where they are required,
            contradict each other, or do not fit the tokens.
    """
    tokens = tokens_of(inputs)
    rows, length = tokens.shape
    borders = read_borders(rows, inputs)
    if borders is None:
        if training or needs_borders.get():
            raise PackingError(
                "position_ids: expected position_ids, cu_seq_lens_q or seq_idx in training mode and for packed rows of "
                "a trainer, got none of them, so the borders between documents are not known. PackingCollator and "
                "SFTConfig(padding_free=True) add position_ids to every batch; pass them to all models that get the "
                "batch, such as a teacher. If every row is one document, pass an attention_mask of ones"
            )
        return PackedLayout.of([length] * rows, tokens.device)
    known, total, bound = borders.tolist(), rows * length, inputs.get(MAX_LENGTHS[0])
    lengths, ends = lengths_between(known), range(0, total + 1, length)
    if sum(lengths) != total or min(lengths) < 1 or not {*ends} <= {*known}:
        raise PackingError(
            f"cu_seq_lens_q: expected cumulative lengths that rise from 0 to {total} tokens, with a border at "
            f"the end of every row of {length} tokens, got {known}"
        )
    return PackedLayout(
        borders.to(tokens.device, torch.int32),
        roots(lengths),
        bound=bound if isinstance(bound, int) else 0,
        fillers=fillers_in(inputs, known),
    )


def layout_of_collator(inputs: Inputs) -> PackedLayout | None:
    """Return the layout of a batch of PackingCollator without reading its tensors; None for other batches."""
    known, borders, tokens = segments_in(inputs), inputs.get(CU_SEQ_LENS[0]), tokens_of(inputs)
    if known is None or borders is None or len(borders) <= len(known.lengths):
        return None
    is_written = not borders.is_inference() and borders._version  # in place, so the lengths may be of an earlier batch
    if is_written or tokens.shape != (1, sum(known.lengths)):
        return None
    bound = int(inputs[MAX_LENGTHS[0]])
    return PackedLayout(borders.to(tokens.device), roots(known.lengths), bound=bound, fillers=known.fillers)


def check_has_first_labels(inputs: Inputs) -> None:
    """Raise PackingError if PackingCollator has taken away labels of first tokens from a classifier of tokens."""
    if (known := segments_in(inputs)) is not None and inputs.get("labels") is not None:
        of_model = "in PackingCollator, since the model does not predict tokens"
        expect(True, of_model, keep_first_labels=known.first_labels)


def without_first_labels(inputs: Arguments, layout: Layout) -> Arguments:
    """Return the arguments for a packed row, in which no document has a label at its first token, which a model would
    predict from the document before. PackingCollator makes such labels only if it is told to."""
    labels = inputs.get("labels")
    if segments_in(inputs) is not None or not isinstance(labels, Tensor) or labels.shape != (1, layout.tokens):
        return inputs
    first = layout.cu_seq_lens[: len(layout.lengths)].long().to(labels.device)
    return {**inputs, "labels": labels.index_fill(1, first, IGNORED_LABEL)}
