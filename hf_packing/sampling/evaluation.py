"""InOrder, a batching for evaluation."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hf_packing.checks import check_optional_number, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, offsets_of
from hf_packing.sampling.batching import Batching, Epoch, EpochPlan, FittedRows, keep_rows
from hf_packing.sampling.sizes import RowSizes


@dataclass(frozen=True)
class InOrder(Batching):
    """A batching for evaluation: a micro-batch has rows_per_batch successive rows, or as many as fit into its limits.

    Ranks take micro-batches in turn. The last micro-batch may have fewer rows. If micro-batches are too few for all
    ranks, copies of the first row with masked labels are added.

    Args:
        rows_per_batch: number of rows in a micro-batch; None if tokens or documents are limited.
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
        if self.rows_per_batch is not None:
            return np.arange(0, len(rows.kept), self.rows_per_batch)
        limited = (rows.sizes.tokens, self.max_tokens), (rows.sizes.segments, self.max_documents)
        totals = [(offsets_of(has[rows.kept]), most) for has, most in limited if most is not None]
        begins = [0]
        while begins[-1] < len(rows.kept):
            ends = (np.searchsorted(total, total[begins[-1]] + most, side="right") for total, most in totals)
            begins.append(int(min(ends)) - 1)
        return np.array(begins[:-1], dtype=np.int64)
