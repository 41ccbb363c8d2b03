"""Loss masks become labels, beside TRL's rule written out, through pack, map and unpack."""

import datasets
import numpy as np
import pytest
from any_strategy import few_examples
from hypothesis import given
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.columns import apply_loss_masks

NAMES = ("completion_mask", "assistant_masks")


@st.composite
def documents(draw):
    """A few documents with a loss mask or both, with and without labels, in the types that users have."""
    rows = draw(st.lists(st.lists(st.integers(3, 99), min_size=0, max_size=6), min_size=1, max_size=6))
    names = draw(st.sampled_from([NAMES[:1], NAMES[1:], NAMES]))
    bit = draw(st.sampled_from([st.integers(0, 1), st.booleans()]))
    columns = {"input_ids": rows}
    columns |= {name: [draw(st.lists(bit, min_size=len(row), max_size=len(row))) for row in rows] for name in names}
    if draw(st.booleans()):
        columns["labels"] = [draw(st.lists(st.sampled_from([-100, 7]), min_size=len(r), max_size=len(r))) for r in rows]
    return columns


def labels_by_hand(columns):
    """TRL's rule, token by token; labels that are there already are masked in the same way."""
    masks = [columns[name] for name in NAMES if name in columns]
    return [
        [label if all(bits) else -100 for label, *bits in zip(labels, *kept, strict=True)]
        for labels, *kept in zip(columns.get("labels", columns["input_ids"]), *masks, strict=True)
    ]


@given(documents())
@few_examples
@pytest.mark.filterwarnings("ignore:pack applies", "ignore:pack skips", "ignore:packing applies")
def test_pack_and_map_apply_masks(columns):
    expected = labels_by_hand(columns)
    features = {name: datasets.List(datasets.Value("bool" if name in NAMES else "int64")) for name in columns}
    dataset = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    strategy = hfp.BestFit(8, seed=None)
    packed = hfp.pack(dataset, strategy)
    assert set(NAMES).isdisjoint(packed.column_names)
    again = hfp.unpack(packed)
    assert again.column_names == ["input_ids", "labels"]
    assert (again["input_ids"][:], again["labels"][:]) == (columns["input_ids"], expected)
    mapped = strategy(columns)
    assert mapped["labels"] == packed["labels"][:]
    assert set(NAMES).isdisjoint(mapped)


def test_map_and_pack_say_so_and_pack_also_from_the_cache(tmp_path):
    with pytest.warns(UserWarning, match="packing applies assistant_masks to labels: tokens with a 0 are not"):
        assert hfp.BestFit(8)({"input_ids": [[5, 6]], "assistant_masks": [[0, 1]]})["labels"] == [[-100, 6]]
    columns = {"input_ids": [[5, 6, 7, 8], [9, 10]], "completion_mask": [[0, 0, 1, 1], [1, 1]]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "documents")
    dataset = datasets.load_from_disk(tmp_path / "documents")
    for _ in range(2):
        with pytest.warns(UserWarning, match="pack applies completion_mask to labels: 3 of 6 tokens are trained on"):
            packed = hfp.pack(dataset, hfp.BestFit(8))
    assert sorted(label for row in packed["labels"] for label in row) == [-100, -100, -100, 7, 8, 10]


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.uint32, np.int32, np.int64])
def test_any_integers_are_masked(kind):
    labels = np.array([5, 6, 7], dtype=kind)
    masks = {"completion_mask": np.array([True, False, True]), "assistant_masks": np.array([1, 1, 0])}
    assert apply_loss_masks(labels, masks).tolist() == [5, -100, -100]
    assert labels.tolist() == [5, 6, 7]
