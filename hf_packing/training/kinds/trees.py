"""The labels of a batch of trees: the next token of a document may be anywhere in the row, and one token may predict
several next tokens, one for each branch. A token counts once for every document that trains on it."""

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_packing.batch.collate import is_tree_batch
from hf_packing.columns import (
    ENDS,
    IGNORED_LABEL,
    LABELS,
    LOSS_WEIGHTS,
    PARENTS,
    SEGMENT_LENGTHS,
    TRAINED,
    TREE_LABELS,
)
from hf_packing.planning.lengths import indices_in_ranges
from hf_packing.sampling.rows import trees_of_documents
from hf_packing.training.kinds.packed import Document, NextTokens, PackedLabels
from hf_packing.training.losses import Batch, Loss, exact_type
from hf_packing.trees.segments import Places, TreeSegments


class TreeLabels(PackedLabels):
    """The labels of a batch of trees."""

    own_key = TREE_LABELS
    borders = SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED
    of_loss = ENDS, TRAINED, TREE_LABELS, LOSS_WEIGHTS
    replaces_loss = shares_tokens = True

    @classmethod
    def takes(cls, batch: Batch) -> bool:
        return is_tree_batch(batch)

    @cached_property
    def trees(self) -> TreeSegments:
        """The segments of the trees. Waits for the device of the batch."""
        return TreeSegments.from_arrays(self.batch[SEGMENT_LENGTHS].cpu().numpy(), self.batch[PARENTS].cpu().numpy())

    @cached_property
    def trained(self) -> tuple[Places, Places]:
        """The document and the token of everything that documents train on, both int64 [trained tokens of all
        documents]."""
        runs = self.batch[TRAINED].cpu().numpy()
        ranges = self.trees.find_runs(self.batch[ENDS].cpu().numpy(), runs)
        return np.repeat(runs[ranges.part, 0], ranges.length), indices_in_ranges(ranges.begin, ranges.length)

    def num_documents(self) -> Tensor:
        return torch.tensor(len(self.batch[ENDS]), device=self.batch[ENDS].device)

    def _own_weights(self, loss: Loss) -> Tensor:
        device, (documents, tokens) = self.batch[ENDS].device, self.trained
        shares = 1 / np.bincount(documents)[documents] if loss == "sequence" else None
        weights = torch.from_numpy(np.bincount(tokens, shares, minlength=self.trees.tokens))
        return weights[None].to(exact_type(device)).to(device)

    def _predictors(self, _: bool) -> Tensor:
        return torch.from_numpy(self.trees.predecessors).to(self.labels.device)

    def of_documents(self, following: NextTokens) -> tuple[Tensor, Tensor]:
        documents, tokens = (torch.from_numpy(each).to(following.tokens.device) for each in self.trained)
        return documents, torch.searchsorted(following.tokens, tokens)

    def _sizes(self) -> tuple[Any, Any, Any]:
        return self.trees.tokens, self.num_documents(), self.trees.attention_cost

    def documents(self) -> list[Document]:
        found, columns, (documents, tokens) = [], self._columns(), self.trained
        for number, end in enumerate(self.batch[ENDS].tolist()):
            own, trained = self.trees.path_of(end), tokens[documents == number]
            columns[LABELS] = torch.full_like(self.labels, IGNORED_LABEL)
            columns[LABELS][:, trained] = self.labels[:, trained]
            found.append({name: each[:, own] for name, each in columns.items()})
        return found

    @staticmethod
    def rows_of(documents: list[Any]) -> list[Any]:
        return trees_of_documents(documents)
