"""Plan a forest of documents that share prefixes, with a strategy that packs its trees as if they were documents."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hf_packing.checks import check_whole_number
from hf_packing.errors import PackingError
from hf_packing.planning.forest import Forest, cut_large_trees
from hf_packing.planning.lengths import IntArray, Overflow, Pieces, check_lengths, indices_in_ranges, offsets_of
from hf_packing.planning.plan import PackingPlan

FEWEST_SHARED = 16
"""The fewest tokens that documents share, with share_prefixes=True. A smaller number saves hardly any more tokens."""


def check_fewest_shared(share_prefixes: Any) -> int | None:
    """Return the fewest tokens that documents share, or None if no prefixes are shared.

    Args:
        share_prefixes: the argument of `pack` and `TokenBudget`: False, True or an integer of at least 1.

    Raises:
        PackingError: it is none of these.
    """
    if share_prefixes is False:
        return None
    if share_prefixes is True:
        return FEWEST_SHARED
    try:
        return check_whole_number("share_prefixes", share_prefixes)
    except PackingError:
        raise PackingError(
            "share_prefixes: expected False, True, or the fewest tokens to share as an integer of at least 1, got "
            f"{share_prefixes!r}"
        ) from None


class TreeLimits(NamedTuple):
    """Limits of a strategy for the trees that it can pack."""

    capacity: int
    """The most tokens that a tree may have, which is the largest capacity of a pack."""
    overflow: Overflow
    """Treatment of documents that are longer than a pack, before trees are made."""


def plan_forest(
    forest: Forest, pieces: Pieces, lengths: IntArray, capacity: int, plan_lengths: Callable[[IntArray], PackingPlan]
) -> PackingPlan:
    """Plan documents that share prefixes, and return a plan with `segment_shared`.

    Trees that are larger than a pack are cut where the fewest tokens are repeated.

    Args:
        forest: the forest of the pieces; no piece is longer than `capacity`.
        pieces: the pieces of the documents.
        lengths: integers [documents]: length of each document before cutting, in tokens.
        capacity: the most tokens that a tree may have.
        plan_lengths: function of a strategy that plans trees of the given sizes; it must not cut or drop any of them.

    Raises:
        PackingError: the strategy has cut or dropped a tree.
    """
    forest = cut_large_trees(forest, capacity)
    sizes = check_lengths(forest.sizes)
    plan = plan_lengths(sizes)
    if plan.num_segments != len(sizes) or (plan.segment_length != sizes[plan.segment_document]).any():
        raise PackingError(
            "strategy: expected a strategy that cuts and drops no document that fits in a pack, since a tree of "
            f"documents can be cut only between documents, got a plan with {plan.num_segments} segments for "
            f"{len(sizes)} trees"
        )
    return place_pieces(forest, pieces, lengths, plan)


def place_pieces(forest: Forest, pieces: Pieces, lengths: IntArray, trees_plan: PackingPlan) -> PackingPlan:
    """Return the plan of the documents whose trees are packed by another plan.

    Args:
        forest: the forest of the pieces.
        pieces: the pieces of the documents.
        lengths: integers [documents]: length of each document before cutting, in tokens.
        trees_plan: a plan whose documents are the trees of the forest, none of them cut.
    """
    trees = trees_plan.segment_document
    sizes = np.diff(forest.offsets)[trees]
    places = indices_in_ranges(forest.offsets[trees], sizes)
    segments = pieces.take(forest.order[places])
    return PackingPlan(
        document_length=lengths,
        segment_document=segments.document,
        segment_start=segments.start,
        segment_length=segments.length,
        pack_offsets=offsets_of(sizes)[trees_plan.pack_offsets],
        pack_capacity=trees_plan.pack_capacity,
        segment_shared=forest.shared[places],
        proven_lower_bound=trees_plan.proven_lower_bound,
        note=trees_plan.note,
    )
