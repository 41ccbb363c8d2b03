"""The packed row: which segments share calls, and how its borders are read from the inputs of a model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_packing.attention.kinds.packed import PackedRows, read_layout
from hf_packing.attention.layout import CALL_OVERHEAD, MAX_PADDING, group_lengths
from hf_packing.attention.model import Signature
from hf_packing.attention.route import Method
from hf_packing.batch.segments import borders_from_positions

BORDERS = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])


@given(st.lists(st.integers(1, 99), min_size=1), st.integers(1, 500))
def test_segments_that_share_a_call_get_little_padding(lengths, most):
    groups = group_lengths(lengths, "ragged", most)
    assert sorted(segment for group in groups for segment in group) == [*range(len(lengths))]
    for group in groups:
        longest = max(lengths[segment] for segment in group)
        assert all(longest <= MAX_PADDING * lengths[segment] for segment in group)
        padding = sum(longest - lengths[segment] for segment in group)
        assert padding <= CALL_OVERHEAD * min(lengths[segment] for segment in group)
        assert len(group) == 1 or longest * len(group) <= most


class Anything(torch.nn.Module):
    def forward(self, **inputs):
        return inputs


def told(**inputs):
    """What a model that takes everything is given."""
    rows = PackedRows.of(inputs, read_layout(inputs))
    return Method().build(Signature(Anything()), rows.lay_end_to_end(inputs), rows.layout)


def test_positions_that_go_on_after_a_gap_and_rows_begin_a_segment():
    assert borders_from_positions(torch.tensor([[5, 6, 7, 0, 1, 2, 9]])).tolist() == [0, 3, 6, 7]
    assert borders_from_positions(torch.arange(6).view(2, 3)).tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    "borders",
    [
        {"cu_seq_lens_q": BORDERS},
        {"position_ids": POSITIONS},
        {"seq_idx": torch.tensor([[0] * 5 + [1] * 3 + [2] * 4])},
        {"seq_lengths": torch.tensor([[5, 3, 4]])},
    ],
)
def test_models_get_all_kinds_of_borders(borders):
    inputs = told(input_ids=torch.zeros(1, 12, dtype=torch.long), **borders)
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == BORDERS.tolist()
    assert inputs["max_length_q"] == inputs["max_length_k"] == 5
    assert torch.equal(inputs["position_ids"], POSITIONS)
    assert borders_from_positions(inputs["seq_idx"], step=0).tolist() == BORDERS.tolist()
    assert inputs["use_cache"] is False


def test_rows_of_one_length():
    rows = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "seq_lengths": torch.tensor([[5, 1], [2, 4]])}
    assert read_layout(rows).lengths == (5, 1, 2, 4)
    inputs = told(inputs_embeds=torch.zeros(2, 4, 8), attention_mask=torch.ones(2, 4))
    assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 8]
    assert inputs["inputs_embeds"].shape == (1, 8, 8)
    assert "attention_mask" not in inputs
