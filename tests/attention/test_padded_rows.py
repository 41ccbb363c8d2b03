"""Laws of padded batches: tokens are taken out and put back where they were; rows of equal length run together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_packing as hfp
from hf_packing.attention.kinds.padded import read_padded_rows, run_by_length


@st.composite
def masks(draw):
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    mask = torch.zeros(rows, tokens, dtype=torch.long)
    for row in mask:
        length = draw(st.integers(0, tokens))
        start = draw(st.integers(0, tokens - length))
        row[start : start + length] = 1
    return mask


@settings(max_examples=60, deadline=None)
@given(masks())
def test_tokens_are_taken_out_and_put_back(mask):
    ids = torch.arange(mask.numel()).view(mask.shape)
    if not mask.any():
        with pytest.raises(hfp.PackingError, match="at least one token"):
            read_padded_rows({"input_ids": ids, "attention_mask": mask})
        return
    rows = read_padded_rows({"input_ids": ids, "attention_mask": mask})
    values = torch.randn(*mask.shape, 3)
    inputs = {"ids": ids, "values": [values, 7], "position_ids": torch.stack([ids, ids + 1, ids + 2])}
    laid = rows.lay_end_to_end(inputs)
    expected = [each for row, keep in zip(ids, mask, strict=True) for each in row[keep == 1].tolist()]
    assert laid["ids"].tolist() == [expected]
    assert laid["position_ids"].tolist() == [[expected], [[n + 1 for n in expected]], [[n + 2 for n in expected]]]
    assert laid["values"][1] == 7
    assert sum(rows.layout.lengths) == len(expected) == rows.layout.tokens
    back = rows.put_back({"hidden": laid["values"][0], "none": 1})
    assert torch.equal(back["hidden"], values * mask[..., None])
    sides = {"right": bool((mask.diff(dim=1) <= 0).all()), "left": bool((mask.diff(dim=1) >= 0).all())}
    assert sides.get(rows.side, True)
    assert rows.side != "both" or not any(sides.values())


@settings(max_examples=60, deadline=None)
@given(masks().filter(lambda mask: bool(mask.any())))
def test_rows_of_equal_length_run_together(mask):
    """Against a loop over rows."""
    values = torch.randn(*mask.shape, 10)  # wider than any row
    rows, calls = read_padded_rows({"inputs_embeds": values, "attention_mask": mask}), []

    def forward(given, other):
        calls.append(tuple(given.shape[:2]))
        assert other == 7
        return {"tokens": given.cumsum(1), "rows": given.sum(1), "same": other}

    found = run_by_length(forward, {"given": values, "other": 7}, rows)
    tokens, sums = torch.zeros_like(values), torch.zeros(len(mask), 10)
    for number, keep in enumerate(mask == 1):
        tokens[number, keep] = values[number, keep].cumsum(0)
        sums[number] = values[number, keep].sum(0)
    assert torch.allclose(found["tokens"], tokens, atol=1e-6)
    assert torch.allclose(found["rows"], sums, atol=1e-6)
    assert found["same"] == 7
    assert len({length for _, length in calls}) == len(calls)
    assert sum(rows for rows, _ in calls) == int(mask.any(1).sum())
