"""Trees of the documents of a dataset, as rows for a sampler, so that nothing has to be packed before training."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt

from hf_packing.columns import INPUT_IDS, LABELS, LOSS_MASKS, TOKEN_TYPE_IDS, TREE_INPUT_IDS, TREE_LABELS
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Overflow, check_lengths, cut_to_pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.rows.lazy import DocumentRows
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import token_columns_of
from hf_packing.sampling.sizes import RowSizes, sizes_of_planned
from hf_packing.strategies.greedy import BestFit
from hf_packing.trees.find import find_trees
from hf_packing.trees.forest import cut_large_trees

_READ = (INPUT_IDS, LABELS, TOKEN_TYPE_IDS, *LOSS_MASKS)
"""The columns that are read, beside those that are passed on."""


class TreesOfDocuments(DocumentRows):
    """A map-style dataset with one row for each tree of documents that begin with the same tokens.

    A document that shares no prefix is a tree, too. Rows are built when they are read, from the documents' own columns.
    """

    @classmethod
    def find(
        cls,
        dataset: Any,
        max_tokens: int,
        fewest_shared: int,
        overflow: Overflow,
        unread: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> "TreesOfDocuments":
        """Find the trees of a dataset. Trees that are too large are cut where the fewest tokens are repeated.

        Args:
            dataset: the dataset.
            max_tokens: the most tokens of a tree.
            fewest_shared: the fewest tokens that documents share.
            overflow: treatment of documents with more than max_tokens tokens.
            unread: names of columns that are not read.
            more: names of further columns to read, which are passed on. Documents share no token whose values differ.

        Raises:
            PackingError: the dataset is not a Dataset of documents, or a document is too long and overflow is "error".
        """
        if not isinstance(dataset, datasets.Dataset):
            raise PackingError(
                f"dataset: expected a Dataset of documents with share_prefixes, got {type(dataset).__name__}"
            )
        names = {*_READ, *more}.difference(unread)
        columns = {name: column for name, column in token_columns_of(dataset).items() if name in names}
        lengths = check_lengths(columns[INPUT_IDS].length)
        pieces = cut_to_pieces(lengths, max_tokens, overflow)
        forest = cut_large_trees(find_trees(columns, pieces, fewest_shared).forest, max_tokens)
        segments = pieces.take(forest.order)
        plan = PackingPlan(
            document_length=lengths,
            segment_document=segments.document,
            segment_start=segments.start,
            segment_length=segments.length,
            pack_offsets=forest.offsets,
            pack_capacity=np.full(len(forest.offsets) - 1, max_tokens),
            segment_shared=forest.shared,
        )
        return cls(dataset, Packing(BestFit(max_tokens), fewest_shared=fewest_shared), plan, columns)

    @property
    def sizes(self) -> RowSizes:
        """The sizes of all trees: unique tokens, documents, and twice the pairs of tokens that attention computes."""
        plan = self.plan
        sizes = sizes_of_planned(self, np.arange(plan.num_packs), (TREE_INPUT_IDS, TREE_LABELS))
        assert sizes.trees is not None
        counts = replace(
            sizes.trees,
            left_out=plan.num_documents - len(np.unique(plan.segment_document)),
            lost_tokens=int(plan.document_length.sum(dtype=np.int64)) - sizes.trees.raw_tokens,
        )
        return replace(sizes, sample=sizes.sample + plan.fingerprint.encode(), trees=counts)

    def __len__(self) -> int:
        return self.plan.num_packs

    def __getitem__(self, number: int) -> dict[str, npt.NDArray[Any]]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, npt.NDArray[Any]]]:
        """Return rows of trees by their numbers, as dicts of NumPy arrays."""
        return self.read(np.array(numbers, dtype=np.int64))
