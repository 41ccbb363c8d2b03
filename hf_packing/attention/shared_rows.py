"""Compute the prefixes that the rows of a padded batch share only once, such as the prompt of a pair of answers."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packing.attention.layout import Layout
from hf_packing.attention.token_axes import Path, map_leaves
from hf_packing.trees.find import find_in_batch


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The trees of the rows of a padded batch, whose tokens are laid end to end.

    Args:
        row: the segments of the trees.
        taken: for each token of the trees, its index among the tokens of all rows, int64 [tokens of the trees].
        given: for each token of all rows, its index in the trees, int64 [tokens of all rows].
    """

    row: Layout
    taken: Tensor
    given: Tensor

    @classmethod
    def find(cls, inputs: Mapping[str, Any], lengths: tuple[int, ...], min_shared: int) -> "SharedRows | None":
        """Return the trees of a batch; None if its rows share no prefix.

        Rows also share none if the model gets labels, or anything for each token but integers, such as embeddings. A
        warning then says so.

        Args:
            inputs: the arguments of a backbone, with tokens laid end to end.
            lengths: number of tokens in each row that has tokens.
            min_shared: the fewest tokens that rows share.
        """
        raw = sum(lengths)
        values = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and raw in each.shape}
        if kept := _not_shared(values, raw):
            warnings.warn(  # Python shows the same warning once
                f"share_prefixes: expected input_ids and other integers of the same shape, got {kept}; the prefixes of "
                "such a batch are computed for each row",
                stacklevel=2,
            )
            return None
        others = {name: each[0].cpu().numpy() for name, each in values.items()}
        tokens = values["input_ids"]
        found = find_in_batch(others.pop("input_ids"), others, lengths, min_shared)
        if not found.trees.has_branches and found.trees.tokens == raw:
            return None
        taken, given = (torch.from_numpy(each).to(tokens.device) for each in (found.taken, found.given))
        return cls(Layout.of(found.trees, tokens.device), taken, given)

    def take(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a backbone for the trees, given those for all rows laid end to end."""
        raw = len(self.given)

        def take(_: Path, leaf: Any) -> Any:
            return leaf[:, self.taken] if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, raw) else leaf

        taken: dict[str, Any] = map_leaves(dict(inputs), take)
        return taken

    def give(self, outputs: Any) -> Any:
        """Return the outputs of a backbone for all rows laid end to end, given those for the trees."""

        def give(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim < 2:
                return leaf
            if leaf.shape[:2] == (1, self.row.tokens):
                return leaf[:, self.given]
            return leaf[self.given] if path[:1] == ("router_logits",) and len(leaf) == self.row.tokens else leaf

        return map_leaves(outputs, give)


def _not_shared(values: Mapping[str, Tensor], tokens: int) -> str:
    """Return what keeps the rows of a batch from sharing their prefixes; an empty string if nothing does.

    Args:
        values: the arguments of a backbone that have a value for each token.
        tokens: number of tokens in all rows.
    """
    if "input_ids" not in values:
        return "inputs_embeds"
    if "labels" in values:
        return "labels, with which the model computes a loss by itself"
    other = next((n for n, each in values.items() if each.shape != (1, tokens) or each.is_floating_point()), None)
    return "" if other is None else f"{values[other].dtype} {other} of shape {list(values[other].shape)}"
