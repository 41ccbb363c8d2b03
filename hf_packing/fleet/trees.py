"""The trees of one file: documents that share prefixes, which are found among the documents of this file.

If files share packs, a tree is to the plan of all files what a document is without shared prefixes: it has a number of
tokens, and goes to one place in one pack. If each file is packed by itself, its trees and packs are those of `pack`.
"""

import io
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hf_packing.columns import INPUT_IDS
from hf_packing.fleet.parts import DamagedFileError
from hf_packing.fleet.run import Run, Settings
from hf_packing.planning.lengths import IntArray, check_fitting, check_lengths, cut_to_pieces
from hf_packing.planning.metrics import pack_totals, segment_totals
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.token_columns import TokenColumns
from hf_packing.trees.find import find_trees
from hf_packing.trees.forest import cut_large_trees, place_pieces
from hf_packing.trees.rows import plan_trees


class TreesOfFile(NamedTuple):
    """The trees of one file."""

    plan: PackingPlan
    """The plan of the file; if files share packs, each tree is a pack of its own, of just its size."""
    splits: Mapping[str, int]
    """By the name of a column: how many shared prefixes ended early because values in this column differ."""


def find_trees_of_file(columns: TokenColumns, settings: Settings) -> TreesOfFile:
    """Find the trees of a file.

    A tree is cut where it is larger than a pack.

    Args:
        columns: the token columns of the file.
        settings: the settings of the run.

    Raises:
        PackingError: a document is too long, for a strategy with overflow="error".
    """
    strategy, fewest = settings.build_strategy(), settings.share_prefixes
    assert fewest is not None
    if not settings.exchange:
        return TreesOfFile(*plan_trees(columns, strategy, fewest))
    capacity, overflow = strategy.tree_limits()
    lengths = check_lengths(columns[INPUT_IDS].length)
    check_fitting(lengths, capacity, overflow)
    pieces = cut_to_pieces(lengths, capacity, overflow)
    found = find_trees(columns, pieces, fewest)
    forest = cut_large_trees(found.forest, capacity)
    return TreesOfFile(place_pieces(forest, pieces, lengths, _each_alone(forest.sizes)), found.splits)


def sizes_of(plan: PackingPlan) -> IntArray:
    """Return the number of tokens of each tree of a plan, int64 [trees]; tokens that documents share count once."""
    own = plan.segment_own().astype(np.int64)
    return np.add.reduceat(own, plan.tree_offsets()[:-1]) if len(own) else own


def totals_of(plan: PackingPlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the totals of a file's plan: those that do not depend on packs, and the others."""
    shared = plan.segment_shared
    segments = segment_totals(plan.document_length, plan.segment_document, plan.segment_length, shared)
    return segments, pack_totals(plan.segment_length, plan.pack_capacity, plan.proven_lower_bound, shared)


def write_trees(run: Run, number: int, plan: PackingPlan) -> int:
    """Write the plan of a file, and return the checksum of what was written."""
    content = io.BytesIO()
    arrays: dict[str, Any] = {**plan.arrays()}
    np.savez(content, **arrays)
    run.store.put(run.file("trees", number), content.getvalue())
    return zlib.crc32(content.getvalue())


def load_trees(run: Run, number: int, check: int) -> PackingPlan:
    """Return the plan that `write_trees` has written for a file; `check` is its checksum.

    Raises:
        DamagedFileError: the plan is gone or damaged.
    """
    name = run.file("trees", number)
    try:
        content = run.store.read(name)
    except FileNotFoundError:
        raise DamagedFileError(name) from None
    if zlib.crc32(content) != check:
        raise DamagedFileError(name)
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return PackingPlan(**arrays)


def _each_alone(sizes: IntArray) -> PackingPlan:
    """Return the plan that puts each tree into a pack of its own."""
    trees = np.arange(len(sizes))
    return PackingPlan(
        document_length=sizes,
        segment_document=trees,
        segment_start=np.zeros_like(trees),
        segment_length=sizes,
        pack_offsets=np.arange(len(sizes) + 1),
        pack_capacity=sizes,
    )
