"""Cutting trees of documents: optimal for a given order, and only between documents."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from literal_trie import common_prefix, forests, tokens_of_trie

from hf_packing.trees.forest import Forest, cheapest_cuts, cut_large_trees, smallest_first


def forest_of(documents):
    """One forest of all documents with tokens, by plain sorting."""
    order = sorted((number for number, each in enumerate(documents) if each), key=lambda number: documents[number])
    pairs = pairwise(order)
    shared = [0, *(common_prefix([documents[left], documents[right]]) for left, right in pairs)][: len(order)]
    lengths = [len(documents[number]) for number in order]
    return Forest(*(np.array(values, dtype=np.int64) for values in (order, lengths, shared)))


def is_depth_first(forest, documents):
    """Each document begins with what it shares with the one before it."""
    ordered = [documents[number] for number in forest.order]
    pairs = zip(ordered[:-1], ordered[1:], forest.shared[1:], strict=True)
    return all(left[:shared] == right[:shared] for left, right, shared in pairs)


def parts(length, shared, cuts):
    """The size of each part, and the number of tokens that are repeated."""
    borders = [0, *cuts, len(length)]
    own = length - shared
    pairs = list(pairwise(borders))
    return [int(own[first:end].sum() + shared[first]) for first, end in pairs], int(sum(shared[cut] for cut in cuts))


@given(forests(max_documents=9), st.integers(0, 8))
def test_no_cuts_repeat_fewer_tokens(documents, above):
    forest = forest_of(documents)
    assume(len(forest.order))
    length, shared = forest.length, forest.shared
    capacity = int(length.max()) + above
    sizes, repeated = parts(length, shared, cheapest_cuts(length, shared, capacity))
    assert max(sizes) <= capacity
    places = range(1, len(length))
    every = [parts(length, shared, cuts) for number in range(len(length)) for cuts in combinations(places, number)]
    best = min((cost, len(found)) for found, cost in every if max(found) <= capacity)
    assert (repeated, len(sizes)) == best


@given(forests())
def test_small_branches_first_is_depth_first_and_as_small(documents):
    forest = forest_of(documents)
    for first, end in zip(forest.offsets[:-1], forest.offsets[1:], strict=True):
        order, shared = smallest_first(forest.length[first:end], forest.shared[first:end])
        assert sorted(order) == list(range(end - first))
        reordered = Forest(forest.order[first:end][order], forest.length[first:end][order], np.array(shared))
        assert is_depth_first(reordered, documents)
        assert reordered.sizes.sum() == tokens_of_trie([tuple(documents[each]) for each in reordered.order])


def test_turns_of_a_chat_come_before_what_follows_them():
    # each document is a history and an answer; the histories have 4, 8 and 12 tokens
    documents = [[0] * 4 + [9] * 3, [0] * 8 + [9] * 3, [0] * 12 + [9] * 3]
    forest = forest_of(documents)
    assert forest.order.tolist() == [2, 1, 0]
    order, shared = smallest_first(forest.length, forest.shared)
    assert (forest.order[order].tolist(), shared) == ([0, 1, 2], [0, 4, 8])


@given(forests(), st.integers(0, 6))
def test_every_document_is_in_one_tree_that_fits(documents, above):
    forest = forest_of(documents)
    assume(len(forest.order))
    capacity = int(forest.length.max()) + above
    cut = cut_large_trees(forest, capacity)
    assert sorted(cut.order) == sorted(forest.order)
    assert is_depth_first(cut, documents)
    assert (cut.length == [len(documents[each]) for each in cut.order]).all()
    assert cut.sizes.max() <= capacity
    if forest.sizes.max() <= capacity:
        assert (cut.order == forest.order).all()
