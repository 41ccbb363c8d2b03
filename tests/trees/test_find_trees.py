"""Trees: found beside a literal trie, cut optimally, walked segment by segment, and how much they shrink documents."""

import json
from itertools import combinations, pairwise

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import assume, given
from hypothesis import strategies as st
from literal_trie import common_prefix, forests, tokens_of_trie
from tree_rows import forests as tree_shapes

import hf_packing as hfp
import hf_packing.trees.find as find_module
import hf_packing.trees.find as measure_module
from hf_packing.cli import main
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import check_lengths, cut_to_pieces
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.trees.find import find_trees, measure_shared_prefixes
from hf_packing.trees.forest import Forest, cheapest_cuts, cut_large_trees, smallest_first
from hf_packing.trees.segments import TreeSegments


def columns_of(types=(), **columns):
    types = {"weights": "float32"} | dict(types)
    schema = pa.schema([(name, pa.list_(pa.type_for_alias(types.get(name, "int32")))) for name in columns])
    return find_token_columns(pa.table(columns, schema=schema))


def find(documents, least, capacity=10**6, **more):
    columns = columns_of(input_ids=documents, **more)
    pieces = cut_to_pieces(check_lengths(columns["input_ids"].length), capacity, "split")
    return find_trees(columns, pieces, least, 10**6), pieces


def check_sharing(forest, values):
    """Each document begins with the values that it shares with the one before it."""
    for place in range(1, len(forest.order)):
        left, right, shared = (*(values[each] for each in forest.order[place - 1 : place + 1]), forest.shared[place])
        assert left[:shared] == right[:shared]


@given(forests(longest=16), st.integers(1, 5), st.integers(2, 6) | st.just(16))
def test_as_many_tokens_as_the_trie(documents, least, capacity):
    """Longer documents than the capacity are cut first."""
    forest, pieces = find(documents, least, capacity)
    places = zip(pieces.document, pieces.start, pieces.length, strict=True)
    filled = [tuple(documents[each][start : start + length]) for each, start, length in places]
    assert sorted(forest.order) == list(range(len(filled)))
    assert [len(filled[each]) for each in forest.order] == forest.length.tolist()
    check_sharing(forest, filled)
    assert forest.sizes.sum() == tokens_of_trie(filled, least)
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
    check_sharing(found, keys)
    assert found.sizes.sum() == tokens_of_trie(keys, least)
    with pytest.MonkeyPatch.context() as patch:  # one or two tokens are sorted at a time
        patch.setattr(find_module, "_SORTED_AT_ONCE", 4)
        patch.setattr(find_module, "_FEWEST_AT_ONCE", 1)
        again, _ = find(documents, least, weights=weights, labels=labels)
    assert again.sizes.sum() == found.sizes.sum()
    check_sharing(again, keys)


def test_branchings_close_to_others_and_other_columns():
    documents = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7], [1, 2, 8]]
    assert find(documents, 1)[0].shared.tolist() == [0, 4, 3, 2]
    assert find(documents, 2)[0].shared.tolist() == [0, 4, 2, 2]
    assert find(documents, 3)[0].shared.tolist() == [0, 3, 3, 0]
    assert find(documents, 4)[0].shared.tolist() == [0, 4, 0, 0]
    assert find(documents, 5)[0].shared.tolist() == [0, 0, 0, 0]
    documents = [[1, 2, 3, 4]] * 3 + [[1, 2, 5]]
    found, _ = find(documents, 2, weights=[[1, 1, 1, 1], [1, 1, 1, 9], [1, 1, 1, 9], [1, 1, 1]])
    assert found.shared.tolist() == [0, 4, 2, 2]  # the branching after 3 tokens is too near to that after 2
    masks = [[-100, -100, 3, 4], [-100, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5]]
    shared = [0, 4, 4, 2]  # documents that train on different tokens still share them
    assert find(documents, 2, labels=masks)[0].shared.tolist() == shared
    other = [[1, 2, 3, 8], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5]]
    assert sorted(find(documents, 2, labels=other)[0].shared.tolist()) == [0, 2, 2, 4]
    first = [[9, 2, 3, 4], [8, 2, 3, 4], [7, 2, 3, 4], [6, 2, 5]]
    assert find(documents, 2, labels=first)[0].shared.tolist() == shared  # nobody trains on a first token


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float64"])
def test_columns_of_every_type(dtype):
    values = list(np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1]], dtype=dtype))
    columns = columns_of({"kinds": dtype}, input_ids=[[1, 2, 3]] * 3, kinds=values)
    forest = find_trees(columns, cut_to_pieces(check_lengths([3, 3, 3]), 9, "split"), 1, 9)
    assert sorted(forest.shared.tolist()) == [0, 2, 3]


def test_equal_hashes_and_blocks_change_nothing(monkeypatch, rng):
    prefixes = [rng.integers(0, 9, 30).tolist() for _ in range(9)]
    documents = [
        [*prefixes[rng.integers(9)][: rng.integers(30)], *rng.integers(0, 9, rng.integers(20)).tolist()]
        for _ in range(300)
    ]
    whole = find(documents, 4)[0]
    assert (whole.shared > 0).sum() > 100
    for name, value in (("_TOKENS_OF_BLOCK", 60), ("_SORTED_AT_ONCE", 60), ("_FEWEST_AT_ONCE", 2)):
        monkeypatch.setattr(find_module, name, value)
        again = find(documents, 4)[0]
        assert (again.order == whole.order).all()
        assert (again.shared == whole.shared).all()
        assert np.array_equal(again.length, whole.length)
    monkeypatch.setattr(find_module, "_hash", lambda rows: np.zeros(len(rows), dtype=np.uint64))
    documents = [[1, 2, 3], [4, 5, 6], [1, 2, 9], [7, 5, 6]]
    forest = find(documents, 2)[0]
    assert (forest.order.tolist(), forest.shared.tolist()) == ([0, 2, 1, 3], [0, 2, 0, 0])


@given(tree_shapes())
def test_every_path_is_the_literal_one(forest):
    lengths, parents = forest
    trees = TreeSegments(lengths, parents)
    begins = [sum(lengths[:segment]) for segment in range(len(lengths))]
    for segment in range(len(lengths)):
        above, walk = segment, []
        while above >= 0:
            walk = [*range(begins[above], begins[above] + lengths[above]), *walk]
            above = parents[above]
        assert trees.path_of(segment).tolist() == walk
        assert trees.position_ids[walk].tolist() == [*range(len(walk))]
        assert trees.predecessors[walk].tolist() == [-1, *walk[:-1]]
        below = [other for other in range(len(lengths)) if segment in trees.segments_of(other)]
        assert below == [*range(segment, trees.ends_below[segment])]
        assert (segment in trees.leaves) == (below == [segment])
    assert trees.tokens == sum(lengths)
    assert trees.has_branches == any(parent >= 0 for parent in parents)


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((2, 2), (-1,), "expected one parent for each of the 2 segments in segment_lengths, got 1"),
        ((2, 0), (-1, 0), "expected at least 1 token in each segment, got 0 in segment 1"),
        ((2, 2), (1, -1), "depth-first order.*got parent 1 for segment 0"),
        ((2, 2), (-1, 1), "got parent 1 for segment 1"),
        ((2, 2), (-1, -2), "got parent -2 for segment 1"),
        ((1, 1, 1, 1), (-1, 0, 0, 1), "got parent 1 for segment 3"),
    ],
)
def test_what_is_no_forest_is_refused(lengths, parents, message):
    with pytest.raises(PackingError, match=message):
        TreeSegments.from_arrays(lengths, parents)


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


HEADER = list(range(100, 160))
DOCUMENTS = [[*HEADER, question, answer] for question in range(10) for answer in range(2)]
LENGTHS = [len(document) for document in DOCUMENTS]
SHRUNK = "documents share prefixes: with share_prefixes=True, your data would shrink"


def test_the_ratio_is_that_of_packed_rows(monkeypatch):
    dataset = Dataset.from_dict({"input_ids": DOCUMENTS})
    packed = hfp.pack(dataset, hfp.BestFit(80), share_prefixes=True)
    ratio = 20 * 62 / sum(map(len, packed["tree_input_ids"]))
    assert ratio == 20 * 62 / 160  # two rows, with the header in each
    found = measure_shared_prefixes(dataset, 80)
    assert (found.ratio, found.documents, found.is_sample) == (ratio, 20, False)
    assert measure_shared_prefixes(dataset.select(range(0, 20, 2)), 80).documents == 10
    unlike = measure_shared_prefixes(Dataset.from_dict({"input_ids": [[1, 2], [3]]}), 80)
    assert (unlike.ratio, unlike.sentence()) == (1, "")
    monkeypatch.setattr(measure_module, "MEASURED_TOKENS", 310)
    found = measure_shared_prefixes(dataset, 800)
    assert (found.documents, found.is_sample) == (4, True)
    assert found.sentence().endswith("times (measured on the first 4 documents)")


def test_the_report_says_it(tmp_path, monkeypatch):
    report = hfp.packing_report(Dataset.from_dict({"input_ids": DOCUMENTS}), 800)
    assert str(report).splitlines()[-1] == f"{SHRUNK} 12.4 times"
    assert f"<p>{SHRUNK} 12.4 times</p>" in report._repr_html_()
    assert report.to_dict()["shared_prefixes"] == {"ratio": 12.4, "documents": 20, "is_sample": False}
    assert hfp.packing_report(LENGTHS, 800).to_dict()["shared_prefixes"] is None
    unlike = Dataset.from_dict({"input_ids": [[number] * 9 for number in range(9)]})
    assert "shrink" not in str(hfp.packing_report(unlike, 80))
    monkeypatch.setattr("hf_packing.report.render.picture", lambda *_: ("<svg></svg>", b""))
    report.save(tmp_path / "report.html")
    assert f"<p>{SHRUNK} 12.4 times.</p>" in (tmp_path / "report.html").read_text()


def test_the_command_reports_and_packs(tmp_path, capsys):
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in DOCUMENTS))
    assert main(["report", str(file), "--max-length", "800"]) == 0
    assert f"{SHRUNK} 12.4 times" in capsys.readouterr().out.replace("\n", " ")
    given = ["pack", str(file), "--max-length", "80", "--output", str(tmp_path / "packed")]
    assert main([*given, "--share-prefixes"]) == 0
    assert "prefixes shared: 7.75 times fewer tokens in packs" in capsys.readouterr().out
    packed = datasets.load_from_disk(tmp_path / "packed")
    plan = hfp.PackingPlan.load(tmp_path / "packed" / "plan")
    assert hfp.unpack(packed, plan)["input_ids"][:] == DOCUMENTS
    assert main([*given, "--overwrite", "--share-prefixes", "61", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shared_ratio"] == 20 * 62 / (10 * 63)
