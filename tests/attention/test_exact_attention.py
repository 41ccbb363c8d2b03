"""Exact attention against attention over the whole row with a dense mask, in float64, outputs and gradients."""

from itertools import accumulate

import pytest
import torch
from forests import forests
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_stand_ins import assert_equal_with_gradients
from torch.nn import functional

from hf_packing.attention.exact import TracedRow, attend_exactly, attend_exactly_compiled, gather_tokens, runs_of
from hf_packing.attention.layout import Layout
from hf_packing.trees.segments import TreeSegments


def dense(query, key, value, lengths, *, scale, is_causal, window=None, softcap=None, sinks=None):
    """One softmax over the whole row; every rule is a mask on scores written out."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(segment))
    back = place[:, None] - place[None, :]
    sees = segment[:, None] == segment[None, :]
    if is_causal:
        sees &= back >= 0
    if window:
        sees &= back.abs() < window
    weights = scores.masked_fill(~sees, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp().view(1, -1, 1, 1)
    return weights / total @ value


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.one_of(st.integers(1, 12), st.integers(20, 30)), min_size=1, max_size=9))
    how = {
        "scale": draw(st.sampled_from([0.3, 1.0])),
        "is_causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 1, 3, 8, 50])),
        "softcap": draw(st.sampled_from([None, 2.0])),
    }
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    torch.manual_seed(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        how["sinks"] = torch.randn(heads[0], dtype=torch.float64, requires_grad=True)
    shapes = [
        (1, heads[0], sum(lengths), 8),
        (1, heads[1], sum(lengths), 8),
        (1, heads[1], sum(lengths), draw(st.sampled_from([8, 4]))),
    ]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes], lengths, how


@settings(max_examples=50)
@given(cases())
def test_by_segment_is_dense_with_a_mask(case):
    """Compiled, too."""
    tensors, lengths, how = case
    inputs = [*tensors, *([how["sinks"]] if "sinks" in how else [])]
    row = TracedRow(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths))
    theirs = dense(*tensors, lengths, **how)
    assert_equal_with_gradients(attend_exactly(*tensors, Layout.of(lengths), **how), theirs, inputs)
    assert_equal_with_gradients(attend_exactly_compiled(*tensors, row, **how), theirs, inputs)


@pytest.mark.parametrize(("lengths", "calls"), [([3, 5, 3, 9, 3], 3), ([7] * 30, 1)])
def test_segments_of_equal_length_run_in_one_call(lengths, calls, monkeypatch):
    seen, attend = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda q, *a, **k: seen.append(q) or attend(q, *a, **k)
    )
    tensors = [torch.randn(1, 2, sum(lengths), 4, dtype=torch.float64) for _ in range(3)]
    attend_exactly(*tensors, Layout.of(lengths), scale=0.5, is_causal=True)
    assert len(seen) == calls


def test_dropout_drops_and_keeps_the_mean():
    torch.manual_seed(0)
    lengths = [1000, 1000]
    for softcap in (None, 5.0):
        zeros, ones = torch.zeros(1, 1, sum(lengths), 4), torch.ones(1, 1, sum(lengths), 4)
        how = {"scale": 1.0, "is_causal": False, "softcap": softcap, "dropout": 0.5}
        output = attend_exactly(zeros, zeros, ones, Layout.of(lengths), **how)
        assert output.std() > 0.01
        assert output.mean() == pytest.approx(1, abs=0.01)


limits = st.sampled_from([None, 1, 2, 3, 7])


def seen_by(trees, segment, depth, window, chunk):
    """The tokens that a token at some depth of a segment attends to, literally."""
    path = trees.path_of(segment)
    return [
        int(path[each])
        for each in range(depth + 1)
        if (window is None or depth - each < window) and (chunk is None or each // chunk == depth // chunk)
    ]


@given(forests(), limits, limits)
def test_every_query_has_the_keys_of_its_path(forest, window, chunk):
    trees, begin = TreeSegments(*forest), 0
    segment_of = [segment for segment, length in enumerate(trees.lengths) for _ in range(length)]
    for length, keys in runs_of(trees, window, chunk):
        prefix = len(keys) - length
        for token in range(begin, begin + length):
            last = prefix + token - begin
            seen = keys[max(last - window + 1, 0) if window else 0 : last + 1].tolist()
            assert seen == seen_by(trees, segment_of[token], int(trees.position_ids[token]), window, chunk)
        assert window is None or prefix < window, "no key is gathered in vain"
        begin += length
    assert begin == trees.tokens


def test_gradients_of_shared_keys_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    key = torch.zeros(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = gather_tokens(key, torch.tensor([0] * 600 + [1]))
    gathered.backward(torch.ones_like(gathered))
    assert key.grad.flatten().tolist() == [600, 1]
    assert key.grad.dtype == torch.bfloat16
