"""The fast search for shared prefixes, beside a literal trie."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from literal_trie import forests, tokens_of_trie

import hf_packing.trees.find as find_module
from hf_packing.planning.lengths import check_lengths, cut_to_pieces
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.trees.find import find_trees


def columns_of(types=(), **columns):
    types = {"weights": "float32"} | dict(types)
    schema = pa.schema([(name, pa.list_(pa.type_for_alias(types.get(name, "int32")))) for name in columns])
    return find_token_columns(pa.table(columns, schema=schema))


def find(documents, least, capacity=10**6, **more):
    columns = columns_of(input_ids=documents, **more)
    pieces = cut_to_pieces(check_lengths(columns["input_ids"].length), capacity, "split")
    return find_trees(columns, pieces, least), pieces


def check_sharing(forest, values):
    """Each document begins with the values that it shares with the one before it."""
    for place in range(1, len(forest.order)):
        left, right, shared = (*(values[each] for each in forest.order[place - 1 : place + 1]), forest.shared[place])
        assert left[:shared] == right[:shared]


@given(forests(longest=16), st.integers(1, 5), st.integers(2, 6) | st.just(16))
def test_as_many_tokens_as_the_trie(documents, least, capacity):
    """Longer documents than the capacity are cut first."""
    found, pieces = find(documents, least, capacity)
    places = zip(pieces.document, pieces.start, pieces.length, strict=True)
    forest, filled = found.forest, [tuple(documents[each][start : start + length]) for each, start, length in places]
    assert sorted(forest.order) == list(range(len(filled)))
    assert [len(filled[each]) for each in forest.order] == forest.length.tolist()
    check_sharing(forest, filled)
    assert forest.sizes.sum() == tokens_of_trie(filled, least)
    assert found.splits == {}
    firsts = [min(forest.order[a:b]) for a, b in zip(forest.offsets[:-1], forest.offsets[1:], strict=True)]
    assert firsts == sorted(firsts)


@given(forests(), st.integers(1, 3), st.data())
def test_values_of_other_columns_split_prefixes(documents, least, data):
    kinds = st.sampled_from([0.5, 0.5, 0.5, 2.0])
    weights = [[data.draw(kinds) for _ in document] for document in documents]
    labels = [[data.draw(st.sampled_from([token, token, -100, 7])) for token in document] for document in documents]
    found, _ = find(documents, least, weights=weights, labels=labels)
    filled = [number for number, document in enumerate(documents) if document]
    keys = [
        tuple(
            (token, weight, label if place and label not in (-100, token) else None)
            for place, (token, weight, label) in enumerate(
                zip(documents[number], weights[number], labels[number], strict=True)
            )
        )
        for number in filled
    ]
    check_sharing(found.forest, keys)
    assert found.forest.sizes.sum() == tokens_of_trie(keys, least)
    with pytest.MonkeyPatch.context() as patch:  # one or two tokens are sorted at a time
        patch.setattr(find_module, "_SORTED_AT_ONCE", 4)
        patch.setattr(find_module, "_FEWEST_AT_ONCE", 1)
        again, _ = find(documents, least, weights=weights, labels=labels)
    assert again.forest.sizes.sum() == found.forest.sizes.sum()
    check_sharing(again.forest, keys)
    assert again.splits == found.splits


def test_splits_are_counted_by_column():
    documents = [[1, 2, 3, 4]] * 3 + [[1, 2, 5]]
    found, _ = find(documents, 2, weights=[[1, 1, 1, 1], [1, 1, 1, 9], [1, 1, 1, 9], [1, 1, 1]])
    assert found.splits == {"weights": 1}
    assert found.forest.shared.tolist() == [0, 4, 2, 2]  # the branching after 3 tokens is too near to that after 2
    masks = [[-100, -100, 3, 4], [-100, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5]]
    assert find(documents, 2, labels=masks)[0].splits == {}  # documents that train on different tokens still share them
    other = [[1, 2, 3, 8], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5]]
    assert find(documents, 2, labels=other)[0].splits == {"labels": 1}
    first = [[9, 2, 3, 4], [8, 2, 3, 4], [7, 2, 3, 4], [6, 2, 5]]
    assert find(documents, 2, labels=first)[0].splits == {}  # nobody trains on a first token


def test_a_branching_close_to_another_moves_up():
    documents = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [1, 2, 8]]
    assert find(documents, 1)[0].forest.shared.tolist() == [0, 4, 3, 2]
    assert find(documents, 2)[0].forest.shared.tolist() == [0, 4, 2, 2]
    assert find(documents, 3)[0].forest.shared.tolist() == [0, 3, 3, 0]
    assert find(documents, 4)[0].forest.shared.tolist() == [0, 4, 0, 0]
    assert find(documents, 5)[0].forest.shared.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64"])
def test_columns_of_every_type(dtype):
    values = list(np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1]], dtype=dtype))
    columns = columns_of({"kinds": dtype}, input_ids=[[1, 2, 3]] * 3, kinds=values)
    found = find_trees(columns, cut_to_pieces(check_lengths([3, 3, 3]), 9, "split"), 1)
    assert sorted(found.forest.shared.tolist()) == [0, 2, 3]
    assert found.splits == {"kinds": 1}


def test_equal_hashes_and_blocks_change_nothing(monkeypatch, rng):
    prefixes = [rng.integers(0, 9, 30).tolist() for _ in range(9)]
    documents = [
        [*prefixes[rng.integers(9)][: rng.integers(30)], *rng.integers(0, 9, rng.integers(20)).tolist()]
        for _ in range(300)
    ]
    whole = find(documents, 4)[0].forest
    assert (whole.shared > 0).sum() > 100
    for name, value in (("_TOKENS_OF_BLOCK", 60), ("_SORTED_AT_ONCE", 60), ("_FEWEST_AT_ONCE", 2)):
        monkeypatch.setattr(find_module, name, value)
        again = find(documents, 4)[0].forest
        assert (again.order == whole.order).all()
        assert (again.shared == whole.shared).all()
        assert np.array_equal(again.length, whole.length)
    monkeypatch.setattr(find_module, "_hash", lambda rows: np.zeros(len(rows), dtype=np.uint64))
    documents = [[1, 2, 3], [4, 5, 6], [1, 2, 9], [7, 5, 6]]
    forest = find(documents, 2)[0].forest
    assert (forest.order.tolist(), forest.shared.tolist()) == ([0, 2, 1, 3], [0, 2, 0, 0])
