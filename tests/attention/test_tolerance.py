"""What rounding explains is measured on the model in hand; a fault in its attention is found beside it."""

from contextlib import nullcontext, suppress
from itertools import product

import pytest
import torch
from tiers import fast_only, slow
from tiny_models import SUPPORTED, build

import hf_packing as hfp
from hf_packing.attention import cases, function
from hf_packing.attention.cases import RowCase
from hf_packing.attention.route import Method, route_of
from hf_packing.attention.runs import Runner
from hf_packing.attention.tolerance import ALWAYS_ALLOWED, BATCH, NEVER_ALLOWED, PROBE, Tolerance, apart


def model_in_which_roundings_grow(**changes):
    """Rounding moves its logits further than what is always allowed between packed and alone."""
    model = build("Mistral", num_hidden_layers=4, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
    return model


def case_of(model):
    case = RowCase(Runner(model))
    case.examine()
    return case


def test_rounding_is_measured_on_the_model():
    usual, growing, double = (
        case_of(model).known[0].noise
        for model in (build("Mistral"), model_in_which_roundings_grow(), model_in_which_roundings_grow().double())
    )
    assert 0 < usual < ALWAYS_ALLOWED[torch.float32] / PROBE.factor < growing
    assert double < 1e-10


@pytest.mark.parametrize("measured", fast_only([True, False], True))
def test_other_roundings_are_no_fault(monkeypatch, measured):
    """As on another processor: scores off by one rounding, and nothing allowed but what is measured. Where nothing is,
    kernels of some processors leave no route at all."""
    exact = function.attend_exactly

    def rounded(query, *args, **options):
        ups = torch.randint(2, query.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return exact(query * (1 + ups * torch.finfo(query.dtype).eps), *args, **options)

    monkeypatch.setattr(function, "attend_exactly", rounded)
    monkeypatch.setitem(ALWAYS_ALLOWED, torch.float32, 1e-7)
    if not measured:
        monkeypatch.setattr(cases, "isfinite", lambda _: False)  # as if the effect of rounding were unknown
    taken = ""
    with nullcontext() if measured else suppress(hfp.ModelNotSupportedError):
        taken = route_of(hfp.patch_model(build("Mistral"))).name
    assert (taken == "varlen") == measured


def sees_the_end_of_the_previous_document(exact):
    def attend(query, key, value, layout, **options):
        key, value = key.clone(), value.clone()
        for start, _ in layout.slices[1:]:
            key[:, :, start], value[:, :, start] = key[:, :, start - 1], value[:, :, start - 1]
        return exact(query, key, value, layout, **options)

    return attend


def has_another_first_key(exact):
    def attend(query, key, value, layout, **options):
        key = key.clone()
        key[:, :, [start for start, _ in layout.slices]] *= 0.9
        return exact(query, key, value, layout, **options)

    return attend


def has_a_window_one_wider(exact):
    return lambda *args, window, **options: exact(*args, window=None if window is None else window + 1, **options)


def scaled_by_one_percent(exact):
    return lambda query, *args, **options: exact(query * 1.01, *args, **options)


def with_options(**changes):
    return lambda exact: lambda *tensors, **options: exact(*tensors, **options | changes)


NOISY = "noisy Mistral"

FAULTS = [
    *(("Llama", fault) for fault in (with_options(scale=0.2), with_options(is_causal=False), scaled_by_one_percent)),
    *((name, with_options(window=None)) for name in ("Mistral", "Gemma2", "GptOss")),
    *((name, has_a_window_one_wider) for name in ("Mistral", NOISY)),
    *((name, has_another_first_key) for name in ("Mistral", NOISY)),
    *((name, sees_the_end_of_the_previous_document) for name in ("Mistral", NOISY)),
    ("GptOss", with_options(sinks=None)),
    ("Mixtral", with_options(scale=0.2)),
]


def model_of(name, dtype=torch.float32):
    if name == NOISY:
        return model_in_which_roundings_grow()
    return build(name, dtype, **({} if "layer_types" in SUPPORTED[name] else {"num_hidden_layers": 1}))


COARSE = [(*case, torch.bfloat16) for case in FAULTS if "with_options" in case[1].__qualname__]


@pytest.mark.parametrize(
    ("name", "fault", "dtype"),
    [*fast_only([(*case, torch.float32) for case in FAULTS], *[(*FAULTS[n], torch.float32) for n in (1, 2, 6)])]
    + [slow(*case) for case in COARSE],
)
def test_wrong_attention_is_found(monkeypatch, name, fault, dtype):
    """Attention that computes something else than the model's own is not taken: its modules run by segment."""
    monkeypatch.setattr(function, "attend_exactly", fault(function.attend_exactly))
    model = hfp.patch_model(model_of(name, dtype))
    route = route_of(model)
    assert list(route.modules.values()) == [model.config.num_hidden_layers]
    if fault is sees_the_end_of_the_previous_document:  # a leak: the modules that leak are the ones that run by segment
        assert (route.name, route.tried) == ("varlen + segments", ())
    else:
        assert route.name == "segments"
        assert "a document's logits differ" in route.tried[0]


@pytest.mark.parametrize("name", fast_only(["Mistral", NOISY], "Mistral"))
def test_one_wrong_position_is_found(monkeypatch, name):
    exact = Method.build

    def one_off(*args):
        inputs = exact(*args)
        if inputs.get("position_ids") is not None:
            inputs["position_ids"] = inputs["position_ids"].clone()
            inputs["position_ids"][0, -1] += 1
        return inputs

    monkeypatch.setattr(Method, "build", one_off)
    route = route_of(hfp.patch_model(model_of(name)))
    assert not route.method.positions
    assert "a document's logits differ by" in route.tried[0]


def test_what_is_allowed():
    for noise, limit in (
        (1e-6, ALWAYS_ALLOWED[torch.float32]),
        (1e-4, PROBE.factor * 1e-4),
        (0.1, NEVER_ALLOWED[torch.float32]),
    ):
        assert Tolerance(torch.float32, False, noise).limit == limit
    assert Tolerance(torch.float32, False, 0.1, BATCH).limit == BATCH.factor * 0.1
    usual, logits = Tolerance(torch.float32, False, 1e-6), torch.randn(5, 7)
    assert usual.explains(apart(logits + 5e-5, logits))
    assert not usual.explains(apart(logits + 5e-4, logits))
    assert not usual.explains(apart(logits * torch.nan, logits))


def test_half_precision():
    exact = torch.randn(50, 64)
    assert Tolerance(torch.bfloat16).explains(apart(exact + 0.04, exact))
    assert not Tolerance(torch.bfloat16).explains(apart(exact + 0.3, exact))
    moved = exact.clone()
    moved[:1] += 1  # a token that went to another expert
    for profile, has_experts in product((PROBE, BATCH), (True, False)):
        assert Tolerance(torch.bfloat16, has_experts, profile=profile).explains(apart(moved, exact)) == has_experts


class Quantised(torch.nn.Module):
    """As layers of QLoRA: given and giving float32, computing in half precision."""

    def __init__(self, linear, dtype):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().to(dtype))

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight).to(hidden.dtype)


@pytest.mark.parametrize("dtype", fast_only([torch.bfloat16, torch.float16], torch.float16))
def test_layers_that_compute_in_half_precision_in_a_model_that_does_not(dtype):
    model = build("Llama")
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.model.layers.set_submodule(name, Quantised(module, dtype))
    assert case_of(model).runner.dtype == dtype
    assert hfp.check_isolation(hfp.patch_model(model)).isolated
    assert case_of(build("Llama")).runner.dtype == torch.float32
