"""InOrder, a batching for evaluation."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hf_packing.checks import check_optional_number, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import offsets_of
from hf_packing.sampling.batching import Batching, Epoch, EpochPlan, FittedRows, keep_rows
from hf_packing.sampling.sizes import RowSizes


@dataclass(frozen=True)
class InOrder(Batching):
    """A batching for evaluation: a micro-batch has rows_per_batch successive rows, or as many as fit into its limits.

    Ranks, or blocks of ranks, take micro-batches in turn. The last micro-batch may have fewer rows. If there are too
    few micro-batches for all of them, copies of the first row with masked labels are added.

    Args:
        rows_per_batch: number of rows in a micro-batch; None if tokens or documents are limited.
        max_tokens: the most tokens in a micro-batch; None for no limit.
        max_documents: the most documents in a micro-batch; None for no limit.
        ranks: number of consecutive ranks that run a micro-batch together.

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
    ranks: int = field(default=1, kw_only=True)

    @property
    def ranks_per_block(self) -> int:
        return self.ranks

    def __post_init__(self) -> None:
        super().__post_init__()
        set_fields(
            self,
            rows_per_batch=check_optional_number("rows_per_batch", self.rows_per_batch),
            max_tokens=check_optional_number("max_tokens", self.max_tokens),
        )

    def fit(self, sizes: RowSizes) -> FittedRows:
        for name, unit, has, most in (
            ("tokens", "tokens", self.in_batches(sizes).tokens, self.max_tokens),
            ("max_segments", "documents", sizes.segments, self.max_documents),
        ):
            if most is not None and (has > most).any():
                row = int((has > most).argmax())
                raise PackingError(f"{name}: expected at most {most} {unit} in each row, but row {row} has {has[row]}")
        return keep_rows(sizes, sizes.tokens > 0)

    def plan_fitted(self, rows: FittedRows, epoch: Epoch) -> EpochPlan:
        number = len(rows.kept)
        begins = [*range(0, number, self.rows_per_batch or number)]
        if self.rows_per_batch is None:
            limited = (self.in_batches(rows.sizes).tokens, self.max_tokens), (rows.sizes.segments, self.max_documents)
            totals = [(offsets_of(has[rows.kept]).tolist(), most) for has, most in limited if most is not None]
            while (end := min(bisect_right(total, total[begins[-1]] + most) for total, most in totals) - 1) < number:
                begins.append(end)
        copies = -len(begins) % (epoch.world_size // self.ranks)
        return EpochPlan(
            epoch.world_size,
            rows=np.append(rows.kept, np.repeat(rows.kept[:1], copies)),
            is_copy=np.arange(number + copies) >= number,
            offsets=np.append(begins, number + np.arange(copies + 1)),
            left_out=rows.left_out,
            ranks_per_block=self.ranks,
        )
