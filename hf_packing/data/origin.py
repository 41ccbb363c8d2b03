"""Facts about packed rows that are stored beside them: what `unpack` needs, and what `pack` warns about."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_packing.planning.plan import PackingPlan

FACT_NAMES = {
    "strategy",
    "labels_made",
    "first_labels",
    "loss_masks",
    "trained_tokens",
    "packed_tokens",
    "dropped_tokens",
    "tokens",
    "empty_documents",
}
"""The keys of the dict that `Origin.facts` returns."""


@dataclass(frozen=True)
class Origin:
    """The plan and other facts about packed rows, stored beside the rows so that `unpack` can restore documents."""

    plan: PackingPlan
    strategy: str
    """The strategy's repr."""
    labels_made: bool
    """True if the labels were copied from input_ids, since the documents had neither labels nor loss masks."""
    first_labels: npt.NDArray[np.int32] | None
    """int32 [segments]: the original label of each segment's first token, now -100; None if `labels_made` is True."""
    loss_masks: tuple[str, ...]
    """Names of the mask columns that were applied to the labels and then dropped."""
    trained_tokens: int | None
    """The number of labels in the rows that are not -100; None if lazy packs have no masks, and are not read."""

    def facts(self) -> dict[str, Any]:
        """Return the strategy, token counts and other facts as a dict to save as JSON, without the plan's arrays."""
        tokens = int(self.plan.document_length.sum(dtype=np.int64))
        packed_tokens = int(self.plan.segment_length.sum(dtype=np.int64))
        return {
            "strategy": self.strategy,
            "labels_made": self.labels_made,
            "loss_masks": list(self.loss_masks),
            "trained_tokens": self.trained_tokens,
            "packed_tokens": packed_tokens,
            "dropped_tokens": tokens - packed_tokens,
            "tokens": tokens,
            "empty_documents": int((self.plan.document_length == 0).sum()),
            "first_labels": self.first_labels is not None,
        }


def describe_changes(facts: Mapping[str, Any]) -> list[str]:
    """Return phrases that say, in warnings, what `pack` did to the documents, such as "drops 5 of 11 tokens".

    Args:
        facts: the dict that `Origin.facts` returned.
    """
    said = []
    if facts["loss_masks"]:
        names, trained, packed = " and ".join(facts["loss_masks"]), facts["trained_tokens"], facts["packed_tokens"]
        said.append(f"applies {names} to labels: {trained:,} of {packed:,} tokens are trained on")
    if facts["dropped_tokens"]:
        dropped, tokens = facts["dropped_tokens"], facts["tokens"]
        said.append(f"drops {dropped:,} of {tokens:,} tokens, as configured by {facts['strategy']}")
    if (empty := facts["empty_documents"]) == 1:
        said.append("skips 1 document without a token")
    elif empty:
        said.append(f"skips {empty:,} documents without a token")
    return said
