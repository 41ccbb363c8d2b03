"""patch_model on tiny models: equal to the unpacked model, and isolated however it is fed."""

import copy
from functools import partial

import pytest
import torch
from patched_models import patched, patched_tiny
from tiers import fast_only
from tiny_models import SUPPORTED, build, enable_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from training_by_hand import DOCUMENTS, batch_of, losses_and_gradients
from transformers import AttentionInterface, AttentionMaskInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_packing as hfp
from hf_packing.attention.patched_forward import KeepRow
from hf_packing.attention.tiny_model import tiny_model

FAST = "Llama", "Gemma2", "GPT2", "GptOss"

PARTLY_FLOAT32 = {"Gemma2", "GptOss", "DeepseekV3"}
"""transformers' eager softmax and DeepSeek's router compute in float32 whatever the model's dtype."""


@pytest.mark.parametrize("name", fast_only(SUPPORTED, *FAST))
def test_loss_and_gradients_are_those_of_documents_alone(name):
    """In float64; what parts of a model compute in float32 is compared as such."""
    model = build(name, torch.float64).train()
    tolerance = 1e-6 if name in PARTLY_FLOAT32 else 1e-12
    alone = [
        {"input_ids": torch.tensor([tokens]), "labels": torch.tensor([tokens]), "use_cache": False}
        for tokens in DOCUMENTS
    ]
    expected, expected_gradients = losses_and_gradients(model, alone)
    hfp.patch_model(model)
    assert model.training
    loss, gradients = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    assert loss == pytest.approx(expected, rel=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        largest = max(float(g.abs().max()) for g in expected_gradients.values())
        assert (gradient - expected_gradients[parameter]).abs().max() <= tolerance * largest, parameter


@pytest.mark.parametrize("name", fast_only(SUPPORTED, *FAST))
def test_isolated_however_it_is_fed(name):
    model = patched(name).eval()
    full = batch_of(DOCUMENTS)
    other = batch_of([[61, 62, 63, 64, 65], *DOCUMENTS[1:]])
    feedings = [["position_ids"], ["cu_seq_lens_q"], ["seq_idx"], ["position_ids", "seq_idx"], list(full)]
    with torch.no_grad():
        expected = model(**full).logits
        for names in feedings:
            inputs = {key: full[key] for key in {"input_ids", *names}}
            logits = model(**inputs).logits
            assert torch.allclose(logits, expected, atol=1e-5), names
            changed = model(**{**inputs, "input_ids": other["input_ids"]}).logits
            assert not torch.allclose(changed[:, :5], logits[:, :5])
            assert torch.allclose(changed[:, 5:], logits[:, 5:], atol=1e-5), names
        kept = model(input_ids=full["input_ids"], position_ids=full["position_ids"], use_cache=True).logits
        assert torch.allclose(kept, expected, atol=1e-5)
        ones = model(
            input_ids=full["input_ids"],
            position_ids=full["position_ids"],
            attention_mask=torch.ones_like(full["input_ids"]),
        ).logits
        assert torch.allclose(ones, expected, atol=1e-5)


def test_two_packed_rows():
    model = patched("Llama").eval()
    rows = [batch_of([[5, 6, 7], [8, 9]]), batch_of([[4], [1, 2, 3, 9]])]
    together = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        logits = model(**together).logits
        for row, alone in zip(logits, rows, strict=True):
            assert torch.allclose(row, model(**alone).logits[0], atol=1e-5)


def test_unpadded_batches_of_plain_documents():
    model, rows = build("Llama").eval(), torch.randint(5, 99, (3, 12))
    with torch.no_grad():
        stock = model(rows).logits
        assert torch.allclose(hfp.patch_model(model)(rows).logits, stock, atol=1e-5)


def test_bad_borders_are_refused():
    model = patched("Llama")
    for borders in ([0, 2], [0, 2, 1, 3], [1, 3]):
        with pytest.raises(hfp.PackingError, match="cu_seq_lens_q: expected .* lengths that rise from 0 to 3 tokens"):
            model(torch.tensor([[5, 6, 7]]), cu_seq_lens_q=torch.tensor(borders))


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_gradient_checkpointing(name):
    model = patched(name, torch.float64).train()
    expected = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    enable_checkpointing(model)
    loss, gradients = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    assert loss == expected[0]
    assert all(torch.allclose(gradient, expected[1][name], atol=1e-12) for name, gradient in gradients.items())


@pytest.mark.parametrize("name", fast_only(["Llama", "Mixtral", "GptOss"], "Llama"))
def test_half_precision(name):
    """Where rounding sends a token to another expert, its logits differ; that is no leak."""
    for dtype in (torch.bfloat16, torch.float16):
        assert hfp.check_isolation(hfp.patch_model(build(name, dtype))).isolated


def test_under_autocast():
    model = build("Llama")
    with torch.autocast("cpu", torch.bfloat16):
        assert hfp.check_isolation(hfp.patch_model(model)).isolated


def test_borders_given_again_are_checked_again():
    """The same tensor with other tokens is not taken for the one that was checked."""
    model = patched("Llama").eval()
    borders = torch.tensor([0, 2, 5], dtype=torch.int32)
    model(torch.tensor([[5, 6, 7, 8, 9]]), cu_seq_lens_q=borders)
    with pytest.raises(hfp.PackingError, match="rise from 0 to 4 tokens"):
        model(torch.tensor([[5, 6, 7, 8]]), cu_seq_lens_q=borders)


@pytest.mark.parametrize("name", ["Llama", "StableLm", "GPT2"])
def test_calls_past_the_outer_model(name):
    """PEFT calls forward, others the inner model; neither runs hooks of the outer one."""
    model = patched(name).eval()
    full = batch_of(DOCUMENTS)
    with torch.no_grad():
        expected = model.base_model(**{key: full[key] for key in ("input_ids", "position_ids")})[0]
        for key in ("cu_seq_lens_q", "seq_idx"):
            inputs = {"input_ids": full["input_ids"], key: full[key]}
            assert torch.allclose(model.base_model(**inputs)[0], expected, atol=1e-5)
            assert torch.allclose(model.forward(**inputs).logits, model(**full).logits, atol=1e-5)


def test_training_without_borders_is_refused():
    model = patched("Llama").train()
    with pytest.raises(hfp.PackingError, match="in training mode, got none of them, so the borders between packed"):
        model(torch.tensor([[5, 6, 7]]))


def test_attention_set_by_somebody_else_is_noticed():
    model = patched("Llama")
    model.set_attn_implementation("eager")
    with pytest.raises(hfp.PackingError, match="attention: expected 'packed_varlen' on a patched model, .* 'eager'"):
        model(**batch_of(DOCUMENTS))


@pytest.mark.filterwarnings("ignore:patch_model proved isolation on a small")
@pytest.mark.parametrize("prove", fast_only(["model", "small"], "model"))
def test_an_attention_of_the_users_own_is_not_replaced(prove):
    def twice(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, 2 * query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("twice", twice)
    AttentionMaskInterface.register("twice", sdpa_mask)
    model = build("Llama")
    model.set_attn_implementation("twice")
    hfp.patch_model(model, prove=prove)
    assert model.config._attn_implementation == "twice"
    route = hfp.check_isolation(model).route
    assert route.modules == {"LlamaAttention": 2}
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
        for function in (hfp.patch_model, hfp.check_isolation):
            with pytest.raises(hfp.PackingError, match="device: expected a default device with memory, got 'meta'"):
                function(model)
    with pytest.raises(hfp.PackingError, match="model: expected weights in memory, .* call check_isolation after"):
        hfp.check_isolation(model)


@pytest.mark.parametrize("positions", [12, 27])
def test_too_few_positions_are_named(positions):
    model = build("GPT2", n_positions=positions)
    reason = f"tested on up to 29 tokens, but max_position_embeddings is {positions}"
    if positions < 21:  # otherwise documents of 21 tokens are tested
        with pytest.raises(hfp.ModelNotSupportedError, match=reason):
            hfp.patch_model(model)
        assert reason in hfp.check_isolation(model).reason
    else:
        assert hfp.check_isolation(hfp.patch_model(model)).isolated


def test_a_configuration_that_asks_for_tuples_is_named():
    model = build("Llama")
    model.config.return_dict = False
    with pytest.raises(hfp.PackingError, match="return_dict: expected True in the configuration of LlamaForCausalLM"):
        hfp.patch_model(model)
    model.config.return_dict = True
    outputs = hfp.patch_model(model)(**batch_of(DOCUMENTS), return_dict=False)
    assert isinstance(outputs, tuple)


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


def test_positions_that_do_not_restart_at_0_on_a_model_that_counts_itself():
    model = patched_tiny("bart", "causal")
    with pytest.raises(hfp.PackingError, match=r"position_ids: expected positions that restart at 0"):
        model(
            input_ids=torch.tensor([[5, 6, 7, 8]]),
            position_ids=torch.tensor([[5, 6, 5, 6]]),
            cu_seq_lens_q=torch.tensor([0, 2, 4]),
        )


@pytest.mark.parametrize("architecture", fast_only(["llama", "jamba", "mamba"], "llama"))
@pytest.mark.parametrize("implementation", CheckpointImpl)
@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")  # of torch 2.9
def test_the_checkpointing_that_fsdp_uses(architecture, implementation):
    model = patched_tiny(architecture, "causal").train()
    expected, gradients = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    layers = model.base_model.layers
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=implementation),
        check_fn=lambda module: any(module is layer for layer in layers),
    )
    if implementation is CheckpointImpl.REENTRANT:
        model.enable_input_require_grads()
    loss, found = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    assert loss == pytest.approx(expected, rel=1e-6)
    found = {name.replace("_checkpoint_wrapped_module.", ""): each for name, each in found.items()}
    assert found.keys() == gradients.keys()
    assert all(torch.allclose(found[name], gradients[name], atol=1e-5) for name in gradients)
    hfp.unpatch_model(model)
    assert all(not isinstance(vars(m).get("checkpoint_fn"), KeepRow) for m in model.modules())


KINDS = [
    *((name, "causal") for name in ("llama", "jamba", "bart", "mamba", "xlm")),
    *((name, "masked") for name in ("bert", "roberta")),
]


@pytest.mark.parametrize(("architecture", "kind"), fast_only(KINDS, ("llama", "causal"), ("roberta", "masked")))
def test_embeddings_given_and_hidden_states_asked_for(architecture, kind):
    model = tiny_model(architecture, kind)
    options = {"use_cache": False} if kind == "causal" else {}
    states = len(model(torch.tensor([[9, 8, 7]]), output_hidden_states=True, **options).hidden_states)
    hfp.patch_model(model)
    batch = {name: value for name, value in batch_of(DOCUMENTS).items() if name != "labels"}
    expected = model(**batch).logits
    output = model(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == states
    assert all(each.shape[1] == batch["input_ids"].shape[1] for each in output.hidden_states)
    torch.testing.assert_close(output.logits, expected)
    embeddings = model.get_input_embeddings()(batch.pop("input_ids"))
    torch.testing.assert_close(model(**batch, inputs_embeds=embeddings).logits, expected)
