"""pack with share_prefixes: rows of trees, and the documents again."""

from pathlib import Path

import numpy as np
import pytest
from any_documents import any_documents, with_masks_applied
from any_strategy import few_examples
from datasets import Dataset
from hypothesis import assume, given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.columns import TREE_COLUMNS
from hf_packing.trees.segments import TreeSegments

pytestmark = pytest.mark.filterwarnings("ignore:pack (skips|drops|applies|shares|leaves):UserWarning")

STRATEGIES = [
    hfp.BestFit(9),
    hfp.Optimal(9),
    hfp.NonNegativeLeastSquares(9),
    hfp.ShortestPackFirst(9, overflow="truncate"),
    hfp.FirstCome(9),
    hfp.FirstCome(9, order="dataset", seed=None),
    hfp.FirstCome(9, order="longest_first", overflow="drop"),
    hfp.Multipack(9, window=3),
    hfp.Bucket((4, 9), padding_threshold=1),
    hfp.BestFit(7, seed=None),
]


def expand(row):
    """The documents of a row, as whoever knows only the row sees them: tokens, labels and weights."""
    segments = TreeSegments.from_arrays(row["segment_lengths"], row["parents"])
    runs = np.array(row["trained"]).reshape(-1, 3).tolist()
    for number, end in enumerate(row["ends"]):
        path = segments.path_of(end)
        labels = [-100] * len(path)
        for document, start, length in runs:
            if document == number:
                assert start > 0
                assert length > 0
                labels[start : start + length] = [row["tree_labels"][place] for place in path[start : start + length]]
        of_tokens = {
            name: [row[name][place] for place in path] for name in ("tree_input_ids", "weights") if name in row
        }
        yield {"labels": labels, **of_tokens}


@few_examples
@given(any_documents(), st.sampled_from(STRATEGIES), st.integers(1, 4))
def test_a_row_says_what_its_documents_are(dataset, strategy, least):
    try:
        packed = hfp.pack(dataset, strategy, share_prefixes=least, load_from_cache_file=False)
    except hfp.PackingError as error:  # of a few documents, all labels may be cut off
        assume(" 0 of " not in str(error))
        raise
    plain = with_masks_applied(dataset)
    plan = plan_of(packed)
    segment = 0
    for row in packed:
        assert len(row["tree_input_ids"]) == len(row["tree_labels"]) == sum(row["segment_lengths"]) <= 9
        trains = set()
        segments = TreeSegments.from_arrays(row["segment_lengths"], row["parents"])
        for number, document in enumerate(expand(row)):
            source = {name: values[plan.segment_document[segment]] for name, values in plain.items()}
            part = slice(*(plan.segment_start[segment] + [0, plan.segment_length[segment]]))
            assert document["tree_input_ids"] == source["input_ids"][part]
            assert document.get("weights") == source.get("weights", [None])[part] if "weights" in row else True
            labels = source.get("labels", source["input_ids"])[part]
            assert document["labels"] == [-100, *labels[1:]]
            path = segments.path_of(row["ends"][number])
            trains |= {place for place, label in zip(path, document["labels"], strict=True) if label != -100}
            segment += 1
        assert {place for place, label in enumerate(row["tree_labels"]) if label != -100} == trains
        check_smallest(row)
    assert segment == plan.num_segments


def check_smallest(row):
    """No segment could be joined with the one below it: a document ends there, or several continue."""
    parents, ends = row["parents"], row["ends"]
    for segment in range(len(parents)):
        assert segment in ends or parents.count(segment) > 1


def plan_of(packed):
    (file,) = packed.cache_files
    return hfp.PackingPlan.load(Path(file["filename"]).parent / "plan")


DOCUMENTS = [[1, 2, 3, 4], [1, 2, 5], [9, 8], [1, 2, 3], [9, 8], []]


def on_trees(**more):
    return Dataset.from_dict({"input_ids": DOCUMENTS, **more})


def test_columns_types_values_and_metrics():
    packed = hfp.pack(on_trees(), hfp.BestFit(8, seed=None), share_prefixes=1)
    assert packed.column_names == list(TREE_COLUMNS)
    assert {str(feature.feature.dtype) for feature in packed.features.values()} == {"int32"}
    assert packed[:] == {
        "tree_input_ids": [[1, 2, 3, 4, 5, 9, 8]],
        "tree_labels": [[-100, 2, 3, 4, 5, -100, 8]],
        "segment_lengths": [[2, 1, 1, 1, 2]],
        "parents": [[-1, 0, 1, 0, -1]],
        "ends": [[1, 2, 3, 4, 4]],
        "trained": [[0, 1, 2, 1, 1, 3, 2, 1, 2, 3, 1, 1, 4, 1, 1]],
    }
    assert hfp.unpack(packed)[:] == {"input_ids": DOCUMENTS}
    packed = hfp.pack(on_trees(), hfp.BestFit(5), share_prefixes=1)
    metrics, unique = plan_of(packed).metrics(), sum(map(len, packed["tree_input_ids"]))
    assert metrics.shared_ratio == 14 / unique
    assert metrics.num_padding_slots == 5 * len(packed) - unique
    assert metrics.num_documents == 6


def test_true_means_sixteen_tokens_and_what_is_not_shared_is_said():
    documents = Dataset.from_dict(
        {"input_ids": [[*range(16), 1], [*range(16), 2], [*range(50, 65), 1], [*range(50, 65), 2]]}
    )
    packed = hfp.pack(documents, hfp.BestFit(99), share_prefixes=True)
    assert sorted(len(row) for row in packed["tree_input_ids"]) == [18 + 32]
    assert hfp.pack(documents, hfp.BestFit(99), share_prefixes=15)["tree_input_ids"][0] != packed["tree_input_ids"][0]
    weights = [[1, 1, 1, 1], [1, 1, 1], [1, 1], [1, 2, 1], [1, 1], []]
    with pytest.warns(UserWarning, match="pack shares . tokens less, since other columns differ where tokens agree"):
        packed = hfp.pack(on_trees(weights=weights), hfp.BestFit(8), share_prefixes=2)
    assert hfp.unpack(packed)["weights"][:] == weights
