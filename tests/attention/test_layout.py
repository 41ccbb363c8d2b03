"""The packed row: which segments share calls, and how its borders are read from the inputs of a model."""

import pytest
import torch
import transformers

import hf_packing as hfp
from hf_packing.attention.inspect_model import Signature
from hf_packing.attention.layout import (
    CACHES,
    CALL_OVERHEAD,
    MAX_PADDING,
    Layout,
    borders_from_positions,
    current_layout,
    group_lengths,
    read_layout,
    use_layout,
)
from hf_packing.attention.route import Method

BORDERS = torch.tensor([0, 5, 8, 12], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])


class TestSharing:
    def test_equal(self):
        assert group_lengths([3, 5, 3, 3, 2], "equal") == [[0, 2, 3], [1], [4]]

    @pytest.mark.parametrize("seed", range(60))
    def test_segments_of_similar_length_share_calls_at_the_least_cost(self, seed):
        """Against all ways to cut up to seven sorted segments."""
        generator = torch.Generator().manual_seed(seed)
        number = int(torch.randint(1, 8, (), generator=generator))
        lengths = torch.randint(1, 10 ** (1 + seed % 3), (number,), generator=generator).tolist()

        def cost(calls):
            if any(max(call) > MAX_PADDING * min(call) for call in calls):
                return float("inf")
            return sum(max(call) * (CALL_OVERHEAD + len(call)) for call in calls)

        def cuts(rest):
            yield [rest]
            for end in range(1, len(rest)):
                yield from ([rest[:end], *others] for others in cuts(rest[end:]))

        found = [[lengths[segment] for segment in call] for call in group_lengths(lengths, "ragged")]
        assert cost(found) == min(map(cost, cuts(sorted(lengths))))

    def test_a_row_is_what_runs_inside(self):
        row = Layout.of([2, 3])
        assert row.position_ids.tolist() == [[0, 1, 0, 1, 2]]
        assert row.seq_idx.tolist() == [[0, 0, 1, 1, 1]]
        with use_layout(row):
            assert current_layout.get() is row
        assert current_layout.get() is None


class Anything(torch.nn.Module):
    def forward(self, **inputs):
        return inputs


def told(**inputs):
    """What a model that takes everything is given."""
    return Method().build(Signature(Anything()), *read_layout(inputs))


def full_cache():
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    return cache


class TestBorders:
    @pytest.mark.parametrize("name", CACHES)
    def test_a_cache_with_tokens_is_refused(self, name):
        inputs = {"input_ids": torch.zeros(1, 12, dtype=torch.long), "position_ids": POSITIONS}
        assert read_layout({**inputs, name: transformers.DynamicCache()})[1].lengths == (5, 3, 4)
        for cache in (full_cache(), [torch.zeros(1, 4)]):
            with pytest.raises(hfp.PackingError, match=f"{name}: expected no earlier tokens on a patched model, got"):
                read_layout({**inputs, name: cache})

    def test_positions_that_go_on_after_a_gap_begin_a_segment(self):
        assert borders_from_positions(torch.tensor([[5, 6, 7, 0, 1, 2, 9]])).tolist() == [0, 3, 6, 7]

    def test_rows_always_begin_a_segment(self):
        assert borders_from_positions(torch.arange(6).view(2, 3)).tolist() == [0, 3, 6]

    @pytest.mark.parametrize(
        "given",
        [
            {"cu_seq_lens_q": BORDERS},
            {"position_ids": POSITIONS},
            {"seq_idx": torch.tensor([[0] * 5 + [1] * 3 + [2] * 4])},
            {"seq_lengths": torch.tensor([[5, 3, 4]])},
        ],
    )
    def test_inputs_get_all_of_them(self, given):
        inputs = told(input_ids=torch.zeros(1, 12, dtype=torch.long), **given)
        assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == BORDERS.tolist()
        assert inputs["max_length_q"] == inputs["max_length_k"] == 5
        assert torch.equal(inputs["position_ids"], POSITIONS)
        assert borders_from_positions(inputs["seq_idx"], step=0).tolist() == BORDERS.tolist()
        assert inputs["use_cache"] is False
        rows = {"input_ids": torch.zeros(2, 6, dtype=torch.long), "seq_lengths": torch.tensor([[5, 1], [2, 4]])}
        assert read_layout(rows)[1].lengths == (5, 1, 2, 4)

    def test_plain_rows_are_one_segment_each(self):
        inputs = told(inputs_embeds=torch.zeros(2, 4, 8), attention_mask=torch.ones(2, 4))
        assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 8]
        assert inputs["inputs_embeds"].shape == (1, 8, 8)
        assert "attention_mask" not in inputs
        assert inputs["use_cache"] is False
