"""Which axes of nested tensors are tokens, cutting segments out of them, and joining them again."""

from itertools import accumulate, count
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from hf_packing.attention.token_axes import TokenAxes, counts_along, cut_inputs, join_outputs, tensors_in
from hf_packing.errors import PackingError

TOKENS = 7
SLICES = [(0, 3), (3, 5), (5, 7)]


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


def recorded(value, tokens=TOKENS):
    """The axes of what a row of so many tokens was given as, or has returned."""
    axes = TokenAxes("Module (name)", tokens)
    axes.found_in(value)
    axes.row_length = None
    return axes


def row(*shape):
    """Numbers that are all different, and rise nowhere in equal steps."""
    size = int(torch.tensor(shape).prod())
    return (torch.arange(1, size + 1).float() ** 1.5).view(shape)


def test_axes_are_known_by_their_place_once_they_were_seen():
    value = {"hidden": row(1, TOKENS, 4), "scores": row(1, TOKENS, TOKENS), "width": row(4), "number": TOKENS}
    axes = recorded(value)
    assert {path[0]: found for path, _, found in axes.found_in(value)} == {
        "hidden": (1,),
        "scores": (1, 2),
        "number": (0,),
    }
    assert axes.of(("hidden",), row(1, 4, 4)) == (1,)
    assert axes.of(("width",), row(TOKENS)) == ()
    message = r"Module \(name\): the tensor other.0 of shape \[7, 2\] did not occur when the model was patched"
    with pytest.raises(PackingError, match=message):
        axes.of(("other", 0), row(TOKENS, 2))


@pytest.mark.parametrize(
    ("at_first", "fits", "wrong", "message"),
    [
        (row(1, 7, 4), row(1, 9, 4), row(1, 7, 4), r"9 tokens along axis 1 of the tensor each, got shape \[1, 7"),
        (
            torch.arange(7)[None],
            torch.arange(2, 11)[None],
            torch.arange(9)[None] % 5,
            "the values of each to rise by 1",
        ),
    ],
)
def test_rows_of_another_length_and_positions_that_no_longer_count_are_refused(at_first, fits, wrong, message):
    axes = recorded({"each": at_first})
    axes.check_row({"each": fits}, 9)
    with pytest.raises(PackingError, match=f"expected {message}"):
        axes.check_row({"each": wrong}, 9)


PLACES, SLOPES = torch.arange(41), torch.tensor([0.7, 0.1])[:, None, None]
CAUSAL = torch.full((41, 41), -torch.inf).triu(1)


@pytest.mark.parametrize(
    ("tensor", "along", "expected"),
    [
        (torch.arange(5), (0,), True),
        (torch.arange(5)[None] + 3, (1,), True),
        (torch.stack([torch.arange(5), torch.arange(1, 6)]), (1,), False),
        (torch.arange(5) * 2, (0,), False),
        (torch.arange(5) * 0.5, (0,), True),
        (torch.zeros(5), (0,), False),
        (torch.tensor([True, False]), (0,), False),
        (torch.arange(1), (0,), False),
        (torch.arange(5), (), False),
        (torch.arange(4.0) - torch.arange(4.0)[:, None], (0, 1), False),
        (torch.arange(4.0).expand(4, 4), (0, 1), True),
        ((SLOPES * PLACES).to(torch.bfloat16), (2,), True),
        ((CAUSAL + SLOPES * PLACES).to(torch.bfloat16), (1, 2), True),
        (torch.cat([PLACES[:20], PLACES[:21]]), (0,), False),
        (CAUSAL, (0, 1), False),
        (torch.randn(41, 41), (0, 1), False),
    ],
)
def test_what_counts_along_a_row(tensor, along, expected):
    assert counts_along(tensor, along) == expected


def test_segments_that_share_a_call_are_padded_on_the_right():
    value = {"hidden": row(1, TOKENS, 2), "number": TOKENS}
    for filler, fill in ((0, []), (-1, [lambda tensor, shape: torch.full(shape, -1.0).to(tensor)])):
        batch = cut_inputs(value, recorded(value), SLICES, *fill)
        assert (batch["hidden"].shape, batch["number"]) == ((3, 3, 2), 3)
        assert torch.equal(batch["hidden"][0], value["hidden"][0, :3])
        assert torch.equal(batch["hidden"][1, :2], value["hidden"][0, 3:5])
        assert batch["hidden"][1, 2].tolist() == [filler] * 2


def run(value, slices_of_calls, tokens=TOKENS):
    """What a module returns that returns what it is given, in calls with these slices."""
    axes, calls, number = recorded(value, tokens), [], count()
    for slices in slices_of_calls:
        lengths = [end - start for start, end in slices]
        calls.append(([next(number) for _ in slices], lengths, cut_inputs(value, axes, slices)))
    return join_outputs(calls[::-1], axes)  # in any order


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=3), min_size=1, max_size=3))
@example([[3, 4], [5, 5]])
def test_what_was_cut_is_joined_again(lengths_of_calls):
    """Of a module that returns what it is given, in calls with one segment or several; positions begin anew."""
    lengths = [length for call in lengths_of_calls for length in call]
    ends, tokens = [*accumulate(lengths)], sum(lengths)
    places = iter(zip([0, *ends], ends, strict=False))
    calls = [[next(places) for _ in call] for call in lengths_of_calls]
    value = {
        "hidden": Pair(row(1, tokens, 60), [row(1, 55, tokens, 60)]),
        "output": BaseModelOutput(row(1, tokens, 60)),
    }
    value |= {"scores": row(1, tokens, tokens), "number": tokens}
    value |= {"positions": torch.arange(tokens)[None] + 2, "state": row(1, 56), "text": "a", "flag": True}
    found = run(value, calls, tokens)
    assert (type(found["hidden"]), type(found["output"])) == (Pair, BaseModelOutput)
    assert all(map(torch.equal, tensors_in(found["hidden"]), tensors_in(value["hidden"])))
    assert torch.equal(found["output"].last_hidden_state, value["output"].last_hidden_state)
    same = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
    assert torch.equal(found["scores"], value["scores"].where(same, 0))
    assert torch.equal(found["state"], value["state"])
    assert (found["number"], found["text"], found["flag"]) == (tokens, "a", True)
    assert found["positions"].tolist() == [[2 + place for length in lengths for place in range(length)]]
