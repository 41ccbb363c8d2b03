"""How documents become rows: plan the documents, then build the rows of the plan.

`pack`, `map`, streams, the fleet and the command all make their rows with `Packing`. A row is a packed row, or a row of
trees if documents share prefixes.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.checks import expect
from hf_packing.columns import BUCKET, INPUT_IDS, TREE_COLUMNS, refuse_columns
from hf_packing.planning.lengths import IntArray, check_lengths, sums_of
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.packed_rows import Rows, pack_rows
from hf_packing.rows.token_columns import TokenColumns, blocks_of_rows, find_token_columns
from hf_packing.strategies.base import Strategy, check_strategy
from hf_packing.trees.forest import check_fewest_shared
from hf_packing.trees.rows import plan_trees, tokens_not_shared, tree_rows


@dataclass(frozen=True)
class Packing:
    """The way in which rows are made of documents."""

    strategy: Strategy
    position_ids: bool = True
    """Whether packed rows have a column `position_ids`."""
    fewest_shared: int | None = None
    """The fewest tokens of a prefix that documents share; None to share no prefixes."""
    keep_first_labels: bool = False
    """Whether the first token of a segment keeps its label."""

    @classmethod
    def of(
        cls, strategy: Any, position_ids: bool = True, share_prefixes: Any = False, keep_first_labels: bool = False
    ) -> "Packing":
        """Check the arguments of `pack`, and return the Packing that they describe.

        Raises:
            PackingError: `strategy` is no strategy, `share_prefixes` is neither a bool nor an integer of at least 1, or
                the strategy cannot pack trees, or these would keep first labels.
        """
        strategy, fewest_shared = check_strategy(strategy), check_fewest_shared(share_prefixes)
        if fewest_shared is not None:
            strategy.check_packs_trees()
            causal = "with share_prefixes, which is for models that predict the next token"
            expect(False, causal, keep_first_labels=keep_first_labels)
        return cls(strategy, position_ids, fewest_shared, keep_first_labels)

    def check_names(self, names: Collection[str]) -> None:
        """Raise PackingError if documents have a column whose name the rows need for something else."""
        made = [BUCKET] if self.strategy.has_buckets else []
        if self.fewest_shared is not None:
            made += TREE_COLUMNS
        refuse_columns(
            made,
            names,
            "no such column in the documents, since packed rows have a column of this name; rename or remove the "
            "column of the documents",
        )

    def plan(self, columns: TokenColumns) -> PackingPlan:
        """Plan documents, given their token columns."""
        if self.fewest_shared is not None:
            return plan_trees(columns, self.strategy, self.fewest_shared)
        return self.strategy.plan_lengths(check_lengths(columns[INPUT_IDS].length))

    def tokens_not_shared(self, columns: TokenColumns, plan: PackingPlan) -> int:
        """Count the tokens that rows of trees repeat because values of other columns differ."""
        return 0 if self.fewest_shared is None else tokens_not_shared(columns, plan, self.fewest_shared)

    def rows(self, columns: TokenColumns, plan: PackingPlan, packs: IntArray) -> Rows:
        """Build one row for each of some packs of a plan.

        Args:
            columns: the token columns of the documents.
            plan: the plan of the documents.
            packs: integers [rows]: numbers of packs, in any order.
        """
        if self.fewest_shared is None:
            rows = pack_rows(columns, plan, packs, self.position_ids, self.keep_first_labels)
        else:
            rows = tree_rows(columns, plan, packs)
        if self.strategy.has_buckets:
            capacity = pa.array(plan.pack_capacity[packs], type=pa.int32())
            rows = rows._replace(table=rows.table.append_column(BUCKET, capacity))
        return rows

    def blocks(self, columns: TokenColumns, plan: PackingPlan, tokens: int) -> Iterator[Rows]:
        """Build all rows of a plan in order, in blocks whose segments have at most so many tokens, or of one row."""
        for first, end in blocks_of_rows(sums_of(plan.segment_length, plan.pack_offsets), tokens):
            yield self.rows(columns, plan, np.arange(first, end))

    def schema(self, documents: pa.Schema) -> pa.Schema:
        """Return names and types of the columns of rows, given those of the documents."""
        columns = find_token_columns(documents.empty_table())
        return self.rows(columns, self.plan(columns), np.arange(0)).table.schema
