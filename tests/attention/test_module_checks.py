"""What modules do on rows that the probe does not have, found on small modules."""

import pytest
import torch
from torch import nn

from hf_packing.attention.by_segment import ModulePlan, SegmentedForward
from hf_packing.attention.module_checks import (
    _FAR,
    _NoteRanking,
    depends_on_far_positions,
    differs_on_other_rows,
    outputs_differ,
    run_one_by_one,
)
from hf_packing.attention.packed_row import PackedRow
from hf_packing.attention.token_axes import TokenAxes

ROW = PackedRow.from_lengths((5, 8, 4))
WIDTH = 6


def given(*tensors, **named):
    return tensors, named


def hidden():
    return torch.randn(1, ROW.tokens, WIDTH, generator=torch.Generator().manual_seed(0))


def forward_of(module, inputs):
    """The forward by segment of a module that was called with these inputs."""
    plan = ModulePlan.record("name", module, ROW.tokens)
    plan.inputs.record(inputs)
    with torch.no_grad():
        plan.outputs.record(module(*inputs[0], **inputs[1]))
    return SegmentedForward(module, plan)


class Sum(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


def test_segments_one_by_one():
    inputs = given(hidden())
    found = run_one_by_one(forward_of(Sum(), inputs), inputs, ROW)
    assert torch.equal(found, torch.cat([inputs[0][0][:, start:end].cumsum(1) for start, end in ROW.slices], 1))


class Temperature(nn.Module):
    """Scales what is at position 8192 or later, and counts by itself."""

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        return x * (1 + (positions // 8192).float().clamp(max=1))[:, None]


class TemperatureByPosition(nn.Module):
    """The same, of positions that it is given."""

    def forward(self, x, positions):
        return x * (1 + (positions // 8192).float().clamp(max=1))[..., None]


class Table(nn.Module):
    """Learned positions, of which there are some."""

    def __init__(self, positions, is_given):
        super().__init__()
        self.table = nn.Embedding(positions, WIDTH)
        self.is_given = is_given

    def forward(self, x, positions):
        return x + self.table(positions if self.is_given else torch.arange(x.shape[1]) % ROW.tokens)


class PastTheEnd(Table):
    """Reads one after another, from the start of the row."""

    def forward(self, x, positions):  # noqa: ARG002
        return x + self.table.weight[: x.shape[1]]


class Stack(nn.Module):
    """Layers, which are tried one by one."""

    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, *inputs):
        return self.layers[0](*inputs)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Temperature(), True),
        (Stack(Temperature()), False),
        (nn.Linear(WIDTH, WIDTH), False),
    ],
)
def test_counting_from_afar(module, expected):
    inputs = given(hidden())
    with torch.no_grad():
        assert differs_on_other_rows(forward_of(module, inputs), inputs, ROW, None) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (TemperatureByPosition(), False),
        (Table(64, is_given=True), False),
        (PastTheEnd(64, is_given=False), True),
        (PastTheEnd(16384, is_given=False), False),
        (Stack(PastTheEnd(64, is_given=False)), False),
    ],
)
def test_rows_that_are_longer_than_a_table_of_positions(module, expected):
    inputs = given(hidden(), ROW.position_ids)
    with torch.no_grad():
        assert differs_on_other_rows(forward_of(module, inputs), inputs, ROW, None) == expected


def test_the_embedding_of_tokens_is_no_table_of_positions():
    module = PastTheEnd(64, is_given=False)
    inputs = given(hidden(), ROW.position_ids)
    with torch.no_grad():
        assert not differs_on_other_rows(forward_of(module, inputs), inputs, ROW, module.table)


class Rotary(nn.Module):
    """Angles whose scale may depend on the last position."""

    def __init__(self, grows):
        super().__init__()
        self.grows = grows

    def forward(self, x, positions):
        scale = 1 + (positions.max() // 4096) * self.grows
        return x * 0 + (positions / scale)[..., None].cos()


class RotaryThatRemembers(nn.Module):
    largest = 0

    def forward(self, x, positions):
        self.largest = max(self.largest, int(positions.max()))
        return x * 0 + (positions / (1 + self.largest // 4096))[..., None].cos()


@pytest.mark.parametrize(
    ("module", "expected"),
    [(Rotary(1), True), (RotaryThatRemembers(), True), (Rotary(0), False), (Table(64, is_given=True), False)],
)
def test_far_positions_of_another_segment(module, expected):
    inputs = given(hidden(), positions=ROW.position_ids)
    with torch.no_grad():
        assert depends_on_far_positions(forward_of(module, inputs), inputs, ROW) == expected
    if isinstance(module, RotaryThatRemembers):
        assert module.largest < _FAR


def test_without_positions_none_are_far():
    inputs = given(hidden())
    assert not depends_on_far_positions(forward_of(Sum(), inputs), inputs, ROW)


@pytest.mark.parametrize("function", ["topk", "sort", "argsort", "argmax", "argmin", "kthvalue"])
def test_ranking_is_noticed_along_tokens_only(function):
    arguments = [2] if function in ("topk", "kthvalue") else []
    with _NoteRanking(ROW.tokens) as seen:
        getattr(torch, function)(torch.randn(3, WIDTH), *arguments)
        torch.randn(3, ROW.tokens).cumsum(1)
        assert not seen.seen
        getattr(torch, function)(torch.randn(3, ROW.tokens), *arguments)
    assert seen.seen


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
    one = torch.ones(1, ROW.tokens, WIDTH, dtype=torch.bfloat16)
    axes = TokenAxes("Module (name)", ROW.tokens)
    at_borders, elsewhere = one.clone(), one.clone()
    at_borders[:, [5, 13]] += 1
    elsewhere[:, [2, 7, 9, 15]] += 1
    assert outputs_differ(one, at_borders, axes, ROW.slices)
    assert not outputs_differ(one, elsewhere, axes, ROW.slices)


def test_what_has_no_tokens_is_not_compared():
    axes = TokenAxes("Module (name)", ROW.tokens)
    one, other = ({"hidden": hidden(), "state": torch.full((1, 4), value)} for value in (0.0, 1.0))
    assert not outputs_differ(one, other, axes, ROW.slices)
    assert outputs_differ(one["state"], other["state"])


def test_numbers_beyond_counting_are_minus_infinity():
    mask = torch.tensor([0.0, torch.finfo().min, -torch.inf])
    assert not outputs_differ(mask, torch.tensor([0.0, -torch.inf, torch.finfo().min]))
    assert outputs_differ(mask, torch.tensor([torch.finfo().min, 0.0, -torch.inf]))
