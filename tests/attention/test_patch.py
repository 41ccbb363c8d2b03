"""patch_model in every setting: dtypes, devices, attention functions, configurations and few positions."""

import copy

import pytest
import torch
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import build
from training_by_hand import DOCUMENTS, batch_of
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_packing as hfp
from hf_packing.attention.by_segment import ModulePlan
from hf_packing.attention.route import Facts, Method, Route, route_of
from hf_packing.attention.token_axes import TokenAxes


@pytest.mark.parametrize("name", fast_only(["Llama", "Mixtral", "GptOss"], "Llama"))
def test_half_precision_and_autocast(name):
    """Where rounding sends a token to another expert, its logits differ; that is no leak."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            assert route_of(hfp.patch_model(build(name, dtype))).name == "varlen"


@pytest.mark.filterwarnings("ignore:patch_model proved isolation on a small")
@pytest.mark.parametrize("prove", fast_only(["model", "small"], "model"))
def test_an_attention_of_the_users_own_is_not_replaced(prove):
    def twice(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, 2 * query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("twice", twice)
    AttentionMaskInterface.register("twice", sdpa_mask)
    model = build("Llama", num_hidden_layers=1)
    model.set_attn_implementation("twice")
    hfp.patch_model(model, prove=prove)
    assert model.config._attn_implementation == "twice"
    route = route_of(model)
    assert route.modules == {"LlamaAttention": 1}
    assert "a document's logits differ" in route.tried[0]


def test_gradients_are_compared_in_inference_mode():
    model = build("Llama")
    with torch.inference_mode():
        report = hfp.check_isolation(hfp.patch_model(model))
        assert torch.is_inference_mode_enabled()
    assert report.route.unproven == ""
    assert report.max_gradient_leak == 0


def test_the_meta_device_is_named():
    with torch.device("meta"):
        model = build("Llama")
    with pytest.raises(hfp.PackingError, match="model: expected weights in memory, .* call check_isolation after"):
        hfp.check_isolation(model)


def test_few_positions():
    """Documents of 21 tokens are tested."""
    assert hfp.check_isolation(hfp.patch_model(build("GPT2", n_positions=27))).isolated


def test_a_call_that_asks_for_tuples():
    assert isinstance(patched()(**batch_of(DOCUMENTS), return_dict=False), tuple)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_model_built_from_a_patched_models_configuration_is_told_the_cause(name):
    model = patched(name)
    built = type(model)(copy.deepcopy(model.config))
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])
    with pytest.raises(hfp.PackingError, match="its configuration is that of a patched model: build each model from"):
        built(ids, attention_mask=(ids > 0).long())
    built.set_attn_implementation("sdpa")
    built(ids, attention_mask=(ids > 0).long())


def test_models_that_share_a_configuration():
    config = build("Llama").config
    first, second = LlamaForCausalLM(config), LlamaForCausalLM(config)
    hfp.patch_model(first)
    with pytest.raises(hfp.PackingError, match=r"configuration of its own, .*copy.deepcopy\(config\)"):
        hfp.patch_model(second)
    hfp.unpatch_model(first)
    assert config._attn_implementation == "sdpa"
    hfp.patch_model(second)


@pytest.mark.parametrize("architecture", fast_only(["llama", "jamba", "lfm2", "qwen3_next", "bart"], "llama", "bart"))
def test_positions_of_one_row_for_all(architecture):
    model = patched_tiny(architecture, "causal")
    ids, positions = torch.tensor([[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]), torch.tensor([[0, 1, 2, 0, 1]])
    expected = model(input_ids=ids, position_ids=positions.expand(2, -1)).logits
    assert torch.equal(model(input_ids=ids, position_ids=positions).logits, expected)


@pytest.mark.parametrize("architecture", fast_only(["llama", "mamba"], "llama"))
def test_labels_of_rows_have_the_stock_loss(architecture):
    """Rows are laid end to end, but none of them predicts the first token of the next one."""
    model = patched_tiny(architecture, "causal")
    ids = torch.tensor([[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]])
    found = model(input_ids=ids, labels=ids).loss
    with hfp.unpatch_model(model):
        assert torch.allclose(model(input_ids=ids, labels=ids).loss, found)


def test_a_route_in_one_line_and_in_several():
    plans = tuple(ModulePlan(f"layers.{i}.mixer", "Mixer", TokenAxes("", 41), TokenAxes("", 41)) for i in range(2))
    route = Route(Method("hf_packing_varlen"), plans, 0.5, facts=Facts(unproven="the model draws random numbers"))
    assert repr(route) == "Route('varlen + segments', modules={'Mixer': 2}, packed_share=0.50)"
    assert route.describe().splitlines() == [
        "route: varlen + segments, 50% of the parameters stay packed",
        "by segment: 2 Mixer",
        "training mode not proven: the model draws random numbers",
    ]
