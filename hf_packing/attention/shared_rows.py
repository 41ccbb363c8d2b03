"""Compute the prefixes that the rows of a padded batch share only once, such as the prompt of a pair of answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_packing.attention.token_axes import Path, map_leaves
from hf_packing.attention.tree_row import TreeRow
from hf_packing.data.trees.find_in_batch import find_in_batch


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The trees of the rows of a padded batch, whose tokens are laid end to end.

    Args:
        row: the segments of the trees.
        taken: for each token of the trees, its index among the tokens of all rows, int64 [tokens of the trees].
        given: for each token of all rows, its index in the trees, int64 [tokens of all rows].
    """

    row: TreeRow
    taken: Tensor
    given: Tensor

    @classmethod
    def find(cls, inputs: Mapping[str, Any], lengths: tuple[int, ...], min_shared: int) -> "SharedRows | None":
        """Return the trees of a batch; None if its rows share no prefix.

        Rows also share none if the model gets labels, or anything for each token but integers, such as embeddings.

        Args:
            inputs: the arguments of a backbone, with tokens laid end to end.
            lengths: number of tokens in each row that has tokens.
            min_shared: the fewest tokens that rows share.
        """
        tokens = inputs.get("input_ids")
        if not isinstance(tokens, Tensor) or inputs.get("labels") is not None:
            return None
        others: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, Tensor) and tokens.shape[1] in value.shape and name != "input_ids":
                if value.shape != tokens.shape or value.is_floating_point():
                    return None
                others[name] = value[0].cpu().numpy()
        found = find_in_batch(tokens[0].cpu().numpy(), others, lengths, min_shared)
        if not found.trees.has_branches and found.trees.tokens == tokens.shape[1]:
            return None
        taken, given = (torch.from_numpy(each).to(tokens.device) for each in (found.taken, found.given))
        return cls(TreeRow.of(found.trees, tokens.device), taken, given)

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
