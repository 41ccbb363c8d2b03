"""Rows of trees are measured before training: tokens, documents and the pairs of tokens that attention computes."""

import datasets
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plain_dataset import Plain
from tree_rows import documents_of, labeled_documents, tree_row

from hf_packing.sampling.sizes import sizes_of
from hf_packing.trees.segments import TreeSegments

ROW, _ = tree_row([[5, 6, 7], [5, 6, 8, 9], [3]])


@given(st.lists(labeled_documents(), min_size=1, max_size=3))
def test_sizes_are_those_of_the_documents(rows):
    rows = [tree_row(*documents)[0] for documents in rows]
    for made in (datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in ROW}), Plain(rows)):
        sizes = sizes_of(made)
        assert sizes.tokens.tolist() == [len(row["tree_input_ids"]) for row in rows]
        assert sizes.segments.tolist() == [len(row["ends"]) for row in rows]
        for row, work in zip(rows, sizes.squared_lengths, strict=True):
            position = TreeSegments(tuple(row["segment_lengths"]), tuple(row["parents"])).position_ids
            own = sum(np.square(row["segment_lengths"]))  # tokens of a segment attend to each other, and to those above
            above = 2 * sum(position - np.concatenate([np.arange(length) for length in row["segment_lengths"]]))
            assert work == own + above
        assert sizes.trees.raw_tokens == sum(len(tokens) for row in rows for tokens, *_ in documents_of(row))
        assert (sizes.trees.unique_tokens, sizes.trees.documents) == (sizes.tokens.sum(), sizes.segments.sum())
