"""InOrder, a batching for evaluation."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hf_packing.checks import check_optional_number, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.sampling.batching import Epoch, EpochPlan, FittedRows, LimitedBatching, keep_rows
from hf_packing.sampling.sizes import RowSizes


@dataclass(frozen=True)
class InOrder(LimitedBatching):
    """A batching for evaluation: each micro-batch has as many successive rows of the dataset as fit into its limits.

    Ranks take micro-batches in turn. The last micro-batch may have fewer rows. If micro-batches are too few for all
    ranks, copies of the first row with masked labels are added.

    Args:
        rows_per_batch: the most rows in a micro-batch; None for no limit.
        max_tokens: the most tokens in a micro-batch; None for no limit.
        max_documents: the most documents in a micro-batch; None for no limit.

    Raises:
        PackingError: a row alone is above a limit.

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
    max_tokens: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        set_fields(
            self,
            rows_per_batch=check_optional_number("rows_per_batch", self.rows_per_batch),
            max_tokens=check_optional_number("max_tokens", self.max_tokens),
        )

    def fit(self, sizes: RowSizes) -> FittedRows:
        for name, unit, has, most in (
            ("tokens", "tokens", sizes.tokens, self.max_tokens),
            ("max_segments", "documents", sizes.segments, self.max_documents),
        ):
            if most is not None and (has > most).any():
                row = int((has > most).argmax())
                raise PackingError(f"{name}: expected at most {most} {unit} in each row, but row {row} has {has[row]}")
        return keep_rows(sizes, sizes.tokens > 0)

    def num_micro_batches(self, rows: FittedRows, epoch: Epoch) -> int:
        return -(-len(self._begins(rows)) // epoch.world_size)

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        begins = self._begins(rows)
        copies = -len(begins) % epoch.world_size
        return EpochPlan(
            epoch.world_size,
            rows=np.concatenate([rows.kept, np.repeat(rows.kept[:1], copies)]),
            is_copy=np.arange(len(rows.kept) + copies) >= len(rows.kept),
            offsets=np.concatenate([begins, len(rows.kept) + np.arange(copies + 1)]),
            left_out=rows.left_out,
        )

    def _begins(self, rows: FittedRows) -> IntArray:
        """Return the index of the first row of each micro-batch among the kept rows, int64 [micro-batches]."""
        limits = (self.rows_per_batch, self.max_tokens, self.max_documents)
        of_rows = (np.ones_like(rows.kept), rows.sizes.tokens[rows.kept], rows.sizes.segments[rows.kept])
        ends = [(np.cumsum(of_row), most) for of_row, most in zip(of_rows, limits, strict=True) if most is not None]
        begins, row = [], 0
        while row < len(rows.kept):
            begins.append(row)
            before = [int(end[row - 1]) if row else 0 for end, _ in ends]
            stops = [np.searchsorted(end, b + most, side="right") for (end, most), b in zip(ends, before, strict=True)]
            row = int(min(stops))
        return np.array(begins, dtype=np.int64)
