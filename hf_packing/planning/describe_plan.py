"""Describe a plan in a few lines of text, for `print` and for notebooks."""

import numpy as np

from hf_packing.planning.lengths import IntArray
from hf_packing.planning.metrics import PackingMetrics


def describe_plan(
    metrics: PackingMetrics, segments_per_pack: IntArray, pack_capacity: IntArray, trees: int | None, note: str
) -> str:
    """Return a description of a plan in a few lines of text.

    Args:
        metrics: the metrics of the plan.
        segments_per_pack: integers [packs]: number of segments in each pack.
        pack_capacity: integers [packs]: capacity of each pack, in tokens.
        trees: number of trees of segments that share tokens; None if no segments share tokens.
        note: remark of the strategy; an empty string if there is none.
    """
    capacities, packs = np.unique(pack_capacity, return_counts=True)
    each = [f"{number:,} of {capacity:,} tokens" for capacity, number in zip(capacities, packs, strict=True)]
    holding = f" of {capacities[0]:,} tokens" if len(each) == 1 else f": {', '.join(each) or 'none'}"
    fewest, most = segments_per_pack.min(initial=metrics.num_segments), segments_per_pack.max(initial=0)
    lines = [
        f"{metrics.num_documents:,} documents, {metrics.num_tokens:,} tokens, in {metrics.num_packs:,} packs{holding}",
        f"padding {metrics.padding_ratio:.2%}, {metrics.concatenation_ratio:.2f} documents per pack, "
        f"{fewest:,} to {most:,} segments in a pack",
        f"{metrics.num_cut_documents:,} documents cut ({metrics.truncation_ratio:.2%}), "
        f"{metrics.num_dropped_tokens:,} tokens dropped, {metrics.num_empty_documents:,} empty documents skipped",
    ]
    if trees is not None:
        lines.append(f"prefixes shared: {metrics.shared_ratio:.2f} times fewer tokens in packs, in {trees:,} trees")
    if len(capacities) == 1:
        same = "segments" if trees is None else "trees"
        lines.append(
            f"no plan for the same {same} has fewer than {metrics.lower_bound:,} packs of this size; "
            f"this plan has {metrics.num_packs / max(metrics.lower_bound, 1) - 1:.2%} more"
        )
    return "\n".join(lines + ([note] if note else []))
