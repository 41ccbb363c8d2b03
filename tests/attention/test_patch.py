"""patch_model on tiny models: the logits, losses and gradients of documents alone, however a model is fed."""

import copy
import inspect
from functools import cache, partial

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
from tools.survey.measure import VARIANTS

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}

TRAITS = {
    "a state": ("mamba", "causal", {}, "segments", {"MambaMixer": 2}),
    "a state by chunks": ("mamba2", "causal", {}, "segments", {"Mamba2Mixer": 2}),
    "attention and a state": ("jamba", "causal", {}, "varlen + segments", {"JambaMambaMixer": 2}),
    "linear attention": ("qwen3_next", "causal", {}, "varlen + segments", {"Qwen3NextGatedDeltaNet": 2}),
    "a convolution": ("lfm2", "causal", {}, "varlen + segments", {"Lfm2ShortConv": 2}),
    "a recurrence": ("recurrent_gemma", "causal", {}, "varlen + segments", {"RecurrentGemmaRecurrentBlock": 2}),
    "alibi": ("bloom", "causal", {}, "segments", {"BloomAttention": 4}),
    "positions along the row": ("bart", "causal", {}, "varlen + segments", {"BartLearnedPositionalEmbedding": 1}),
    "positions with an offset": ("roberta", "masked", {}, "varlen + segments", {"RobertaEmbeddings": 1}),
    "relative positions": ("deberta-v2", "masked", {}, "segments", {"DisentangledSelfAttention": 4}),
    "an encoder": ("bert", "masked", {}, "varlen", {}),
    "an encoder with windows": ("modernbert", "masked", {}, "varlen", {}),
    "a window in the mask alone": ("qwen2_moe", "causal", EXPERTS, "varlen", {}),
    "a chunk in the mask alone": ("llama4_text", "causal", {"attn_temperature_tuning": False}, "varlen", {}),
    "an indexer that reads the mask": ("deepseek_v32", "causal", {}, "segments", {"DeepseekV32Attention": 4}),
    "longrope": (*VARIANTS["phi3 with longrope"], "varlen + segments", {"Phi3RotaryEmbedding": 1}),
    "dynamic rope": (*VARIANTS["llama with dynamic rope"], "varlen + segments", {"LlamaRotaryEmbedding": 1}),
    "a network over the row": ("fnet", "masked", {}, "segments", {"FNetBasicFourierTransform": 4}),
}

MODELS = {**dict.fromkeys(SUPPORTED, (None, None, None, "varlen", {})), **TRAITS}

FAST = "Llama", "Gemma2", "GPT2", "GptOss", "a state", "alibi", "positions with an offset"

EXACT = {"Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Phi3", "Olmo2", "StableLm", "GPTNeoX", "GPT2"}
"""Parts of the others, such as an eager softmax or a router, compute in float32 whatever the model's dtype."""


def model_of(name, dtype=torch.float32):
    if name in SUPPORTED:
        return build(name, dtype)
    model_type, kind, changes, _, _ = TRAITS[name]
    model = tiny_model(model_type, kind, dtype, **changes)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one has no float64
    return model


@cache
def stock_and_patched(name):
    """A model as it is and the same one patched, for tests that leave them so."""
    model = model_of(name)
    return model.eval(), hfp.patch_model(copy.deepcopy(model))


def stock(model, tokens):
    """Logits of one document. What it leaves behind in the model is not for the next."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(torch.tensor([tokens]), **options).logits[0]


def check_logits(logits, model, documents=DOCUMENTS):
    with torch.no_grad():
        expected = torch.cat([stock(copy.deepcopy(model), tokens) for tokens in documents])
    assert (logits - expected).abs().max() < 1e-4 * max(1, float(expected.abs().max()))


@pytest.mark.parametrize("name", fast_only(MODELS, *FAST))
def test_loss_and_gradients_are_those_of_documents_alone(name):
    """Gradients in every parameter, in float64."""
    model, *_, route, modules = model_of(name, torch.float64), *MODELS[name]
    expected, sums = 0.0, {}
    for tokens in DOCUMENTS:
        own = copy.deepcopy(model)
        loss = torch.nn.functional.cross_entropy(stock(own, tokens)[:-1], torch.tensor(tokens)[1:], reduction="sum")
        expected += loss.item()
        loss.backward()
        for each, parameter in own.named_parameters():
            if parameter.grad is not None:
                sums[each] = sums.get(each, 0) + parameter.grad
    hfp.patch_model(model.train())
    assert model.training
    report = hfp.check_isolation(model)
    assert (report.isolated, report.route.name, report.route.modules) == (True, route, modules)
    assert report.reason == "changing one document did not change the logits of other documents"
    loss, gradients = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    tolerance = 1e-12 if name in EXACT else 1e-6
    assert loss == pytest.approx(expected, rel=tolerance)
    assert gradients.keys() == sums.keys()
    largest = max(float(gradient.abs().max()) for gradient in sums.values())
    for each, gradient in gradients.items():
        assert (gradient - sums[each]).abs().max() <= tolerance * largest, each


FEEDINGS = {
    **{name: (name,) for name in ("position_ids", "cu_seq_lens_q", "seq_idx")},
    "two of them": ("position_ids", "seq_idx"),
    "a collator": ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}


@pytest.mark.parametrize("name", fast_only(MODELS, *FAST))
def test_isolated_however_it_is_fed(name):
    stock_model, model = stock_and_patched(name)
    full = batch_of(DOCUMENTS)
    assert set(FEEDINGS["a collator"]) == full.keys() - {"input_ids", "labels"}
    feedings = [{key: full[key] for key in keys} for keys in FEEDINGS.values()]
    feedings.append({"position_ids": full["position_ids"], "attention_mask": torch.ones_like(full["input_ids"])})
    if name in SUPPORTED:  # modules that run by segment refuse a cache
        feedings.append({"position_ids": full["position_ids"], "use_cache": True})
    with torch.no_grad():
        for feeding in feedings:
            check_logits(model(**feeding, input_ids=full["input_ids"]).logits[0], stock_model)


@pytest.mark.parametrize("name", fast_only(MODELS, "Llama", "a state", "positions with an offset"))
def test_two_packed_rows(name):
    stock_model, model = stock_and_patched(name)
    documents = [[5, 6, 7], [8, 9], [4], [11, 12, 13, 19]]
    rows = [batch_of(documents[:2]), batch_of(documents[2:])]
    together = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    with torch.no_grad():
        logits = model(**together).logits
    assert logits.shape[:2] == (2, 5)
    check_logits(logits.flatten(0, 1), stock_model, documents)


@pytest.mark.parametrize("name", fast_only(TRAITS, "a state", "alibi"))
def test_rows_as_long_as_the_model_is_wide(name):
    """Axes of tokens are known by their place: sizes may coincide at run time."""
    stock_model, model = stock_and_patched(name)
    generator = torch.Generator().manual_seed(1)
    for tokens in (64, 16, 8, 4, 128):
        lengths = [tokens // 4, tokens // 4, tokens - 2 * (tokens // 4)]
        documents = [torch.randint(8, 120, (length,), generator=generator).tolist() for length in lengths]
        with torch.no_grad():
            check_logits(model(**without_labels(documents)).logits[0], stock_model, documents)


CHECKPOINTED = ("Llama", "Gemma2", "attention and a state", "linear attention", "alibi", "positions along the row")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", fast_only(CHECKPOINTED, "Llama", "alibi"))
def test_gradient_checkpointing(name, use_reentrant):
    """Layers run again in the backward pass, when another row has come in between."""
    model = copy.deepcopy(stock_and_patched(name)[1]).train()
    expected = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    enable_checkpointing(model, use_reentrant=use_reentrant)
    model.zero_grad()
    batch = batch_of(DOCUMENTS)
    logits = model(**without_labels(DOCUMENTS)).logits[0, :-1]
    model(**without_labels([[5, 6, 7], [9]]))
    torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], ignore_index=-100, reduction="sum").backward()
    for each, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, expected[1][each], atol=1e-4), each
    hfp.unpatch_model(model)
    checkpointing = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    assert any(checkpointing)
    assert not any(type(each).__name__ == "KeepRow" for each in checkpointing)


def without_labels(documents):
    return {name: value for name, value in batch_of(documents).items() if name != "labels"}


def test_unpadded_batches_of_plain_documents():
    model, rows = build("Llama").eval(), torch.randint(5, 99, (3, 12))
    with torch.no_grad():
        stock = model(rows).logits
        assert torch.allclose(hfp.patch_model(model)(rows).logits, stock, atol=1e-5)


AT_5 = {"position_ids": torch.tensor([[5, 6, 5]]), "cu_seq_lens_q": torch.tensor([0, 2, 3])}

REFUSED = [
    *(
        ("llama", {"cu_seq_lens_q": torch.tensor(borders)}, "cu_seq_lens_q")
        for borders in ([0, 2], [0, 2, 1, 3], [1, 3])
    ),
    ("llama", {"training": True}, "position_ids"),
    ("llama", {"attention": "eager"}, "attention"),
    ("bart", AT_5, "position_ids"),  # which counts by itself
]


@pytest.mark.parametrize(("architecture", "inputs", "argument"), REFUSED)
def test_what_does_not_fit_is_refused(architecture, inputs, argument):
    model, inputs = patched_tiny(architecture), dict(inputs)
    model.train(inputs.pop("training", False))
    if other := inputs.pop("attention", None):
        model.set_attn_implementation(other)
    with pytest.raises(hfp.PackingError, match=f"^{argument}: expected"):
        model(torch.tensor([[5, 6, 7]]), **inputs)


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
