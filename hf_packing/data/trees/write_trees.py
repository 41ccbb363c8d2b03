"""Plan a dataset whose documents share prefixes, and write its rows of trees."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from datasets.table import MemoryMappedTable
from datasets.utils import tqdm

from hf_packing.columns import INPUT_IDS, LABELS, LOSS_MASKS
from hf_packing.data.cache import PLAN_KEY, CachedPacks
from hf_packing.data.packed_rows import Origin
from hf_packing.data.token_columns import TOKENS_AT_ONCE, TokenColumns, blocks_of_rows
from hf_packing.data.trees.find_trees import find_trees
from hf_packing.data.trees.tree_rows import tree_rows
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, check_fitting, check_lengths, cut_to_pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.tree_plan import TreeLimits, check_fewest_shared, plan_forest


@runtime_checkable
class PlansTrees(Protocol):
    """A strategy that can pack trees of documents as if they were documents."""

    def tree_limits(self) -> TreeLimits:
        """Return the size of the largest tree, and the treatment of longer documents.

        Raises:
            PackingError: the strategy, or one of its arguments, cannot be used with trees.
        """
        ...

    def plan_trees(self, sizes: IntArray) -> PackingPlan:
        """Return the plan for trees of these sizes. No tree is cut."""
        ...


class TreesPlan(NamedTuple):
    """The plan of documents that share prefixes."""

    plan: PackingPlan
    splits: dict[str, int]
    """By the name of a column: how many shared prefixes ended early because values in this column differ."""


def check_share_prefixes(share_prefixes: Any, strategy: Any) -> int | None:
    """Return the fewest tokens that documents share, or None if no prefixes are shared.

    Args:
        share_prefixes: the argument of `pack`.
        strategy: the strategy, which must be able to pack trees.

    Raises:
        PackingError: share_prefixes is neither a bool nor an integer of at least 1, or the strategy cannot pack trees.
    """
    fewest = check_fewest_shared(share_prefixes)
    if fewest is None:
        return None
    if not isinstance(strategy, PlansTrees):
        raise PackingError(
            "strategy: expected a strategy with a method tree_limits, such as BestFit(8192), with share_prefixes, got "
            f"{strategy!r}"
        )
    strategy.tree_limits()
    return fewest


def plan_trees(columns: TokenColumns, strategy: PlansTrees, fewest: int) -> TreesPlan:
    """Find the prefixes that documents share, and plan the documents.

    Args:
        columns: the token columns of the documents.
        strategy: the strategy.
        fewest: the fewest tokens that documents share.
    """
    capacity, overflow = strategy.tree_limits()
    lengths = check_lengths(columns[INPUT_IDS].length)
    check_fitting(lengths, capacity, overflow)
    pieces = cut_to_pieces(lengths, capacity, overflow)
    found = find_trees(columns, pieces, fewest)
    return TreesPlan(plan_forest(found.forest, pieces, lengths, capacity, strategy.plan_trees), found.splits)


def write_tree_rows(
    columns: TokenColumns, found: TreesPlan, strategy: str, bucket: bool, cache: CachedPacks
) -> MemoryMappedTable:
    """Build rows of trees block by block, write them to the cache, and return them.

    A thread writes a block while the next one is built.

    Args:
        columns: the token columns of the documents.
        found: the plan.
        strategy: the strategy's repr.
        bucket: whether rows get a column `bucket`.
        cache: where to write.
    """
    plan = found.plan
    schema = tree_rows(columns, plan, 0, 0, bucket).table.schema.with_metadata({PLAN_KEY: plan.fingerprint.encode()})
    first_labels, trained_tokens = [], 0
    raw = plan.segment_length
    tokens = np.add.reduceat(raw, plan.pack_offsets[:-1], dtype=np.int64) if plan.num_packs else raw
    with (
        cache.create(schema) as (stream, folder),
        tqdm(total=plan.num_packs, desc=f"Packing {plan.num_documents:,} documents", unit=" packs") as progress,
        ThreadPoolExecutor(max_workers=1) as writer,
    ):
        written: Future[None] | None = None
        for first, end in blocks_of_rows(tokens, TOKENS_AT_ONCE):
            rows = tree_rows(columns, plan, first, end, bucket)
            if rows.first_labels is not None:
                first_labels.append(rows.first_labels)
            trained_tokens += rows.trained_tokens
            if written:
                written.result()
            written = writer.submit(stream.write_table, rows.table.replace_schema_metadata(schema.metadata))
            progress.update(end - first)
        if written:
            written.result()
        masks = tuple(name for name in LOSS_MASKS if name in columns)
        origin = Origin(
            plan=plan,
            strategy=strategy,
            labels_made=LABELS not in columns and not masks,
            first_labels=np.concatenate(first_labels) if first_labels else None,
            loss_masks=masks,
            trained_tokens=trained_tokens,
            splits=found.splits,
        )
        cache.save_origin(origin, folder)
    return MemoryMappedTable.from_file(str(cache.rows))
