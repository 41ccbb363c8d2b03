"""The search on small modules: which of them are segment-local, which run by segment and how, which cannot."""

from functools import partial

import pytest
import torch
from torch import nn

from hf_packing.attention.layout import Layout, current_layout, within
from hf_packing.attention.search import Search, WatchFunctions, outputs_differ
from hf_packing.attention.token_axes import TokenAxes

LENGTHS = (5, 8, 4, 6)
WIDTH = 6
POSITIONS = Layout.of(LENGTHS).position_ids


class Of(nn.Module):
    """Computes a function of tokens."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, hidden):
        return self.function(hidden)


class At(Of):
    """Computes a function of tokens and their positions."""

    def forward(self, hidden, positions):
        return self.function(hidden, positions)


class Model(nn.Module):
    """Token embeddings, and layers."""

    def __init__(self, *inner):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(32, WIDTH)
        self.inner = nn.ModuleList(each if isinstance(each, nn.Module) else each() for each in inner)

    def get_input_embeddings(self):
        return self.words

    def forward(self, ids):
        hidden = self.words(ids)
        for inner in self.inner:
            hidden = inner(hidden, positions=POSITIONS) if isinstance(inner, At) else inner(hidden)
        return hidden


def search(*inner):
    """The plans of modules that have to run by segment, and errors of those that cannot, both by name."""
    model = Model(*inner).eval()
    ids = torch.randint(32, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    searched = Search(model, Layout.of(LENGTHS))
    with torch.no_grad(), within(current_layout, searched.row):
        plans = searched.run(lambda **_: model(ids))
    assert not any(vars(module).get("forward") for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return {plan.name: plan for plan in plans}, searched.unsliceable


class Convolution(nn.Module):
    """Every token sees three; outside a segment there are zeros, as in padding of zeros."""

    def __init__(self, ahead=0):
        super().__init__()
        self.kernel, self.ahead = nn.Conv1d(WIDTH, WIDTH, 3), ahead

    def forward(self, hidden):
        return self.kernel(nn.functional.pad(hidden.transpose(1, 2), (2 - self.ahead, self.ahead))).transpose(1, 2)


class Table(At):
    """Learned positions."""

    def __init__(self):
        super().__init__(nn.Embedding(64, WIDTH))

    def forward(self, hidden, positions):
        return hidden + self.function(positions)


class Counted(Of):
    """Learned positions along the row."""

    def __init__(self):
        super().__init__(nn.Embedding(64, WIDTH))

    def forward(self, hidden):
        return hidden + self.function(torch.arange(hidden.shape[1]))


class Attention(nn.Module):
    """With projections before and after."""

    def __init__(self, is_causal=True):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.is_causal = is_causal

    def forward(self, hidden):
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden * self.weight(hidden).sigmoid()


class RotaryThatRemembers(At):
    largest = 0

    def forward(self, hidden, positions):
        self.largest = max(self.largest, int(positions.max()))
        return hidden * (positions / (1 + self.largest // 4096))[..., None].cos()


def temperature(hidden, positions):
    """Scales what is at position 8192 or later."""
    return hidden * (1 + (positions // 8192).float().clamp(max=1))[..., None]


def rotary(hidden, positions, grows):
    """Angles whose scale may depend on the last position."""
    return hidden * (positions / (1 + (positions.max() // 4096) * grows))[..., None].cos()


def with_the_best(hidden):
    """Adds the token with the largest first entry to all, in the same order as they would be ranked alone."""
    best = hidden[..., 0].topk(1, dim=1).indices
    return hidden + hidden.gather(1, best[..., None].expand(-1, 1, hidden.shape[2]))


norm, layer = partial(nn.LayerNorm, WIDTH), partial(nn.Linear, WIDTH, WIDTH)
total = partial(Of, partial(torch.cumsum, dim=1))


@pytest.mark.parametrize(
    "inner",
    [
        *(layer, norm, Gate, nn.Identity, Table),
        lambda: nn.Sequential(norm(), layer(), nn.GELU(), nn.Dropout(0.5)),
        lambda: At(temperature),
        lambda: At(partial(rotary, grows=0)),
    ],
)
def test_segment_local_modules_stay_packed(inner):
    assert search(inner, inner) == ({}, {})


@pytest.mark.parametrize(
    "inner",
    [
        lambda: Of(lambda hidden: temperature(hidden, torch.arange(hidden.shape[1]))),
        lambda: At(partial(rotary, grows=1)),
        lambda: RotaryThatRemembers(None),
    ],
)
def test_rows_that_are_longer_and_far_positions_of_other_documents_are_tried(inner):
    plans, errors = search(inner)
    assert (plans.keys(), errors) == ({"inner.0"}, {})


SHARING = {
    "sum": (total, "ragged"),
    "convolution": (Convolution, "ragged"),
    "convolution ahead": (lambda: Convolution(1), "equal"),
    "positions along the row": (Counted, "ragged"),
    "sum from the end": (lambda: Of(lambda hidden: hidden.flip(1).cumsum(1).flip(1)), "equal"),
    "centered": (lambda: Of(lambda hidden: hidden - hidden.mean(1, keepdim=True)), "equal"),
    "best": (lambda: Of(with_the_best), "equal"),
    "batch norm": (lambda: Of(lambda hidden: hidden - hidden.mean((0, 1), keepdim=True)), "none"),
    "attention": (Attention, "ragged"),
    "attention in both directions": (lambda: Attention(False), "equal"),
}


@pytest.mark.parametrize("name", SHARING)
def test_others_run_by_segment_in_the_calls_that_change_nothing(name):
    inner, sharing = SHARING[name]
    plans, errors = search(layer, inner, layer)
    assert errors == {}
    assert {name: plan.sharing for name, plan in plans.items()} == {"inner.1": sharing}


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
        (total, []),
    ],
)
def test_projections_of_tokens_stay_packed(inner, packed):
    plans, _ = search(inner)
    assert plans["inner.0"].packed_modules() == packed


def test_a_module_that_changes_itself_is_noted():
    class Remembering(nn.Module):
        """Adds what it was given before."""

        def __init__(self):
            super().__init__()
            self.before = torch.zeros(WIDTH)

        def forward(self, hidden):
            hidden = hidden + self.before
            self.before = self.before + hidden[0, -1]
            return hidden

    plans, _ = search(Remembering, total)
    assert {name: plan.is_stateful for name, plan in plans.items()} == {"inner.0": True, "inner.1": False}


class Around(nn.Module):
    """A function of tokens and of what another module makes of them."""

    def __init__(self, inner, function):
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, hidden):
        return self.function(hidden, self.inner(hidden))


def of_one_length(hidden):
    if hidden.shape[1] != sum(LENGTHS):
        raise ValueError("another length")
    return hidden.cumsum(1)


def with_an_axis_of_something_else(hidden):
    return hidden, hidden.sum(1).unsqueeze(0).expand(3, -1, -1)[:1]


WHICH = {
    "the second sum is local once the first runs by segment": ([total, layer, total, layer], ["inner.0", "inner.2"]),
    "every module is tried on what it will be given": (
        [total, Of(lambda hidden: hidden / (1 + hidden.abs().amax()))],
        ["inner.0", "inner.1"],
    ),
    "the smallest module that does it": ([nn.Sequential(norm(), total())], ["inner.0.1"]),
    "a module around another takes its place": (
        [Around(total(), lambda hidden, summed: summed + hidden.flip(1))],
        ["inner.0"],
    ),
    "one that cannot be cut leaves it to the one around it": (
        [Around(Of(with_an_axis_of_something_else), lambda hidden, outputs: hidden + outputs[1])],
        ["inner.0"],
    ),
    "a module without tokens is left alone": (
        [Around(Of(lambda _: torch.ones(3)), lambda hidden, ones: hidden + ones.sum())],
        [],
    ),
}


@pytest.mark.parametrize("trait", WHICH)
def test_which_modules_run_by_segment(trait):
    inner, names = WHICH[trait]
    assert sorted(search(*inner)[0]) == names


def test_a_module_that_cannot_be_cut():
    assert search(Of(of_one_length)) == ({}, {"inner.0": "ValueError: another length"})


ROW = Layout.of((5, 8, 4))


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
    one, other = (
        {"hidden": torch.ones(1, ROW.tokens, WIDTH), "state": torch.full((1, 4), value)} for value in (0.0, 1.0)
    )
    assert not outputs_differ(one, other, axes, ROW.slices)
    assert outputs_differ(one["state"], other["state"])


def test_numbers_beyond_counting_are_minus_infinity():
    mask = torch.tensor([0.0, torch.finfo().min, -torch.inf])
    assert not outputs_differ(mask, torch.tensor([0.0, -torch.inf, torch.finfo().min]))
    assert outputs_differ(mask, torch.tensor([torch.finfo().min, 0.0, -torch.inf]))
