"""InOrder, a batching for evaluation."""

from bisect import bisect_right
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from hf_packing.checks import check_optional_number, expect, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, Overflow, offsets_of
from hf_packing.sampling.batching import (
    CUT_WHEN_PACKED,
    Batching,
    Epoch,
    EpochPlan,
    FittedRows,
    cut_rows,
    keep_rows,
)
from hf_packing.sampling.sizes import RowSizes


@dataclass(frozen=True)
class InOrder(Batching):
    """A batching for evaluation: a micro-batch has as many successive rows as fit into its limits.

    Ranks take micro-batches in turn. The last micro-batch may have fewer rows. If there are too few micro-batches for
    all of them, copies of the first row with masked labels are added.

    Args:
        rows_per_batch: the most rows in a micro-batch; None if tokens and documents are the only limits.
        max_tokens: the most tokens in a micro-batch, which is rounded down to a multiple of align_tokens; None for no
            limit. With rows_per_batch, a row of more tokens is not refused, but alone in a micro-batch.
        max_documents: the most documents in a micro-batch; None for no limit.
        max_length: the most tokens that a document may have; None for no limit, and for packed rows.
        overflow: treatment of documents with more tokens.

    Raises:
        PackingError: a row alone is above a limit, without rows_per_batch; or a document has more than max_length
            tokens, and `overflow` is "error".

    Example:
        >>> import numpy as np
        >>> from hf_packing.sampling.sizes import sizes_of_documents
        >>> sizes = sizes_of_documents(np.array([5, 3, 2, 2, 2]))
        >>> plan = InOrder(2).plan(sizes, Epoch(0, world_size=2))
        >>> plan.micro_batch(1, rank=0), plan.num_copies
        ([(4, False)], 1)
        >>> [list(InOrder(max_tokens=8).plan(sizes).micro_batches(rank=0))]
        [[[(0, False), (1, False)], [(2, False), (3, False), (4, False)]]]
    """

    needs_row_per_rank: ClassVar[bool] = False  # one row is enough, since the other ranks get copies of this row

    rows_per_batch: int | None = None
    _: KW_ONLY
    max_tokens: int | None = None
    max_length: int | None = None
    overflow: Overflow = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        set_fields(
            self,
            rows_per_batch=check_optional_number("rows_per_batch", self.rows_per_batch),
            max_tokens=check_optional_number("max_tokens", self.max_tokens),
        )
        if self.max_tokens is not None:
            set_fields(self, max_tokens=self.aligned("max_tokens"))

    def _limits(self, sizes: RowSizes) -> dict[str, tuple[IntArray, int]]:
        """Return what is limited: what each row has of it, integers [rows], and the limit, by unit."""
        limits = {
            "tokens": (sizes.tokens, self.max_tokens),
            "documents": (sizes.segments, self.max_documents),
            "rows": (np.ones_like(sizes.tokens), self.rows_per_batch),
        }
        return {unit: (has, most) for unit, (has, most) in limits.items() if most is not None}

    def fit(self, sizes: RowSizes) -> FittedRows:
        if sizes.packed:
            expect(None, CUT_WHEN_PACKED, max_length=self.max_length)
        if self.max_length is not None:
            return cut_rows(sizes, self.max_length, self.overflow)
        for unit, (has, most) in self._limits(sizes).items():
            if self.rows_per_batch is None and (has > most).any():
                row, name = int((has > most).argmax()), "tokens" if unit == "tokens" else "max_segments"
                raise PackingError(f"{name}: expected at most {most} {unit} in each row, but row {row} has {has[row]}")
        return keep_rows(sizes, sizes.tokens > 0)

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        number = len(rows.kept)
        totals = [(offsets_of(has[rows.kept]).tolist(), most) for has, most in self._limits(rows.sizes).values()]
        begins, end = [], 0
        while end < number:
            begins.append(end)
            fitting = min(bisect_right(total, total[end] + most) for total, most in totals) - 1
            end = max(fitting, end + 1)
        copies = -len(begins) % epoch.world_size
        return EpochPlan(
            epoch.world_size,
            rows=np.append(rows.kept, np.repeat(rows.kept[:1], copies)),
            is_copy=np.arange(number + copies) >= number,
            offsets=np.append(begins, number + np.arange(copies + 1)),
            left_out=rows.left_out,
        )
