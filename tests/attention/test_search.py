"""The search on small modules: which of them are segment-local, which run by segment and how, which cannot."""

import inspect

import pytest
import torch
from torch import nn

from hf_packing.attention.layout import Layout, current_layout, within
from hf_packing.attention.search import Search, WatchFunctions, outputs_differ
from hf_packing.attention.token_axes import TokenAxes

LENGTHS = (5, 8, 4, 6)
WIDTH = 6
POSITIONS = Layout.of(LENGTHS).position_ids


class Model(nn.Module):
    """Token embeddings, and layers."""

    def __init__(self, *inner):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, WIDTH)
        self.inner = nn.ModuleList(each() for each in inner)

    def get_input_embeddings(self):
        return self.words

    def forward(self, ids):
        hidden = self.words(ids)
        for inner in self.inner:
            takes_positions = "positions" in inspect.signature(type(inner).forward).parameters
            hidden = inner(hidden, positions=POSITIONS) if takes_positions else inner(hidden)
        return hidden


def search(*inner, lengths=LENGTHS):
    """The plans of modules that have to run by segment, and errors of those that cannot, both by name."""
    model = Model(*inner).eval()
    ids = torch.randint(32, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    searched = Search(model, Layout.of(lengths))
    with torch.no_grad(), within(current_layout, searched.row):
        plans = searched.run(lambda **_: model(ids))
    assert not any(vars(module).get("forward") for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return {plan.name: plan for plan in plans}, searched.unsliceable


class Sum(nn.Module):
    """Of a token and all before it."""

    def forward(self, hidden):
        return hidden.cumsum(1)


class SumFromTheEnd(nn.Module):
    def forward(self, hidden):
        return hidden.flip(1).cumsum(1).flip(1)


class Convolution(nn.Module):
    """Every token sees three; outside a segment there are zeros, as in padding of zeros."""

    ahead = 0

    def __init__(self):
        super().__init__()
        self.kernel = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, hidden):
        return self.kernel(nn.functional.pad(hidden.transpose(1, 2), (2 - self.ahead, self.ahead))).transpose(1, 2)


class ConvolutionAhead(Convolution):
    ahead = 1


class Centered(nn.Module):
    def forward(self, hidden):
        return hidden - hidden.mean(1, keepdim=True)


class CenteredOverRows(nn.Module):
    """As in batch normalization."""

    def forward(self, hidden):
        return hidden - hidden.mean((0, 1), keepdim=True)


class Best(nn.Module):
    """Adds the token with the largest first entry to all, in the same order as they would be ranked alone."""

    def forward(self, hidden):
        best = hidden[..., 0].topk(1, dim=1).indices
        return hidden + hidden.gather(1, best[..., None].expand(-1, 1, hidden.shape[2]))


class Counted(nn.Module):
    """Learned positions along the row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, hidden):
        return hidden + self.table(torch.arange(hidden.shape[1]))


class Attention(nn.Module):
    """With projections before and after."""

    is_causal = True

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden):
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal))


class AttentionInBothDirections(Attention):
    is_causal = False


class Remembering(nn.Module):
    """Adds what it was given before."""

    def __init__(self):
        super().__init__()
        self.before = torch.zeros(WIDTH)

    def forward(self, hidden):
        hidden = hidden + self.before
        self.before = self.before + hidden[0, -1]
        return hidden


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden * self.weight(hidden).sigmoid()


def norm():
    return nn.LayerNorm(WIDTH)


def layer():
    return nn.Linear(WIDTH, WIDTH)


def block():
    return nn.Sequential(norm(), layer(), nn.GELU(), nn.Dropout(0.5))


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
    """Learned positions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)

    def forward(self, x, positions):
        return x + self.table(positions)


class Rotary(nn.Module):
    """Angles whose scale may depend on the last position."""

    def __init__(self, grows):
        super().__init__()
        self.grows = grows

    def forward(self, x, positions):
        scale = 1 + (positions.max() // 4096) * self.grows
        return x * (positions / scale)[..., None].cos()


class RotaryThatRemembers(nn.Module):
    largest = 0

    def forward(self, x, positions):
        self.largest = max(self.largest, int(positions.max()))
        return x * (positions / (1 + self.largest // 4096))[..., None].cos()


@pytest.mark.parametrize(
    "inner", [layer, norm, Gate, block, nn.Identity, TemperatureByPosition, Table, lambda: Rotary(0)]
)
def test_segment_local_modules_stay_packed(inner):
    assert search(inner, inner) == ({}, {})


@pytest.mark.parametrize("inner", [Temperature, lambda: Rotary(1), RotaryThatRemembers])
def test_rows_that_are_longer_and_far_positions_of_other_documents_are_tried(inner):
    plans, errors = search(inner)
    assert errors == {}
    assert plans.keys() == {"inner.0"}


@pytest.mark.parametrize(
    ("inner", "sharing"),
    [
        (Sum, "ragged"),
        (Convolution, "ragged"),
        (ConvolutionAhead, "equal"),
        (Counted, "ragged"),
        (SumFromTheEnd, "equal"),
        (Centered, "equal"),
        (Best, "equal"),
        (CenteredOverRows, "none"),
        (Attention, "ragged"),
        (AttentionInBothDirections, "equal"),
    ],
)
def test_others_run_by_segment_in_the_calls_that_change_nothing(inner, sharing):
    plans, errors = search(layer, inner, layer)
    assert errors == {}
    assert {name: (plan.kind, plan.sharing) for name, plan in plans.items()} == {"inner.1": (inner.__name__, sharing)}


class Shifted(Attention):
    def forward(self, hidden):
        return super().forward(hidden + hidden.roll(1, 1))


class Twice(Attention):
    def forward(self, hidden):
        return self.query(super().forward(hidden))


@pytest.mark.parametrize(
    ("inner", "packed"),
    [
        (Attention, ["query", "key", "value", "out"]),
        (Shifted, ["out"]),  # the others are given something else
        (Twice, ["key", "value"]),  # the query is called twice
        (Sum, []),
    ],
)
def test_projections_of_tokens_stay_packed(inner, packed):
    plans, _ = search(inner)
    assert plans["inner.0"].packed_modules() == packed


def test_a_module_that_changes_itself_is_noted():
    plans, _ = search(Remembering, Sum)
    assert {name: plan.is_stateful for name, plan in plans.items()} == {"inner.0": True, "inner.1": False}


def test_every_module_is_tried_on_what_it_will_be_given():
    """The second sum is segment-local only once the first one runs by segment."""

    class Normed(nn.Module):
        def forward(self, hidden):
            return hidden / (1 + hidden.abs().amax())

    assert set(search(Sum, layer, Sum, layer)[0]) == {"inner.0", "inner.2"}
    assert set(search(Sum, Normed)[0]) == {"inner.0", "inner.1"}


def test_the_smallest_module_that_does_it_runs_by_segment():
    assert set(search(lambda: nn.Sequential(norm(), Sum()))[0]) == {"inner.0.1"}


def test_a_module_around_another_takes_its_place():
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.sum, self.layer = Sum(), layer()

        def forward(self, hidden):
            return self.sum(hidden) + self.layer(hidden).flip(1)

    plans, _ = search(Around)
    assert set(plans) == {"inner.0"}


def test_a_module_that_cannot_be_cut_leaves_it_to_the_one_around_it():
    class OfOneLength(nn.Module):
        def forward(self, hidden):
            if hidden.shape[1] != sum(LENGTHS):
                raise ValueError("another length")
            return hidden.cumsum(1)

    plans, errors = search(OfOneLength)
    assert plans == {}
    assert errors["inner.0"] == "ValueError: another length"

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = Last()

        def forward(self, hidden):
            return hidden + self.last(hidden)[1]

    class Last(nn.Module):
        """Whose second output has an axis of something else."""

        def forward(self, hidden):
            return hidden, hidden.sum(1).unsqueeze(0).expand(3, -1, -1)[:1]

    plans, errors = search(Around)
    assert set(plans) == {"inner.0"}


def test_a_module_without_tokens_is_left_alone():
    class Constant(nn.Module):
        def forward(self, _):
            return torch.ones(3)

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.constant = Constant()

        def forward(self, hidden):
            return hidden + self.constant(hidden.shape[-1]).sum()

    assert search(Adding) == ({}, {})


ROW = Layout.of((5, 8, 4))


def hidden():
    return torch.randn(1, ROW.tokens, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("function", ["topk", "sort", "argsort", "argmax", "argmin", "kthvalue"])
def test_ranking_is_noticed_along_tokens_only(function):
    arguments = [2] if function in ("topk", "kthvalue") else []
    with WatchFunctions(ROW.tokens) as seen:
        getattr(torch, function)(torch.randn(3, WIDTH), *arguments)
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
