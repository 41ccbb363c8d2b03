"""When outputs of a module differ, and when it ranks tokens."""

import pytest
import torch

from hf_packing.attention.layout import Layout
from hf_packing.attention.module_checks import WatchFunctions, outputs_differ
from hf_packing.attention.token_axes import TokenAxes

ROW = Layout.of((5, 8, 4))


@pytest.mark.parametrize("function", ["topk", "sort", "argsort", "argmax", "argmin", "kthvalue"])
def test_ranking_is_noticed_along_tokens_only(function):
    arguments = [2] if function in ("topk", "kthvalue") else []
    with WatchFunctions(ROW.tokens) as seen:
        getattr(torch, function)(torch.randn(3, 6), *arguments)
        torch.randn(3, ROW.tokens).cumsum(1)
        assert not seen.ranks
        getattr(torch, function)(torch.randn(3, ROW.tokens), *arguments)
    assert seen.ranks


@pytest.mark.parametrize(
    ("dtype", "difference", "expected"),
    [
        (torch.float32, 1e-6, False),
        (torch.float32, 1e-2, True),
        (torch.bfloat16, 1e-3, False),
        (torch.bfloat16, 1.0, True),
        (torch.int64, 1, True),
    ],
)
def test_outputs_that_differ_by_more_than_rounding(dtype, difference, expected):
    one = torch.arange(1, 11).to(dtype)
    assert not outputs_differ([one], [one])
    assert outputs_differ([one], [one + difference]) == expected
    assert outputs_differ([one], [one[:5]])


def test_in_half_precision_most_of_the_tokens_beside_borders_differ():
    one = torch.ones(1, ROW.tokens, 6, dtype=torch.bfloat16)
    axes = TokenAxes("Module (name)", ROW.tokens)
    at_borders, elsewhere = one.clone(), one.clone()
    at_borders[:, [5, 13]] += 1
    elsewhere[:, [2, 7, 9, 15]] += 1
    assert outputs_differ(one, at_borders, axes, ROW.slices)
    assert not outputs_differ(one, elsewhere, axes, ROW.slices)


def test_what_has_no_tokens_is_not_compared():
    axes = TokenAxes("Module (name)", ROW.tokens)
    one, other = ({"hidden": torch.ones(1, ROW.tokens, 6), "state": torch.full((1, 4), value)} for value in (0.0, 1.0))
    assert not outputs_differ(one, other, axes, ROW.slices)
    assert outputs_differ(one["state"], other["state"])


def test_numbers_beyond_counting_are_minus_infinity():
    mask = torch.tensor([0.0, torch.finfo().min, -torch.inf])
    assert not outputs_differ(mask, torch.tensor([0.0, -torch.inf, torch.finfo().min]))
    assert outputs_differ(mask, torch.tensor([torch.finfo().min, 0.0, -torch.inf]))
