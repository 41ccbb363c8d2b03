"""The segments route: models that no attention function can keep apart, equal to their documents alone, however fed."""

import copy
import inspect
from functools import cache

import pytest
import torch
import transformers
from tiers import fast_only
from tiny_models import enable_checkpointing
from training_by_hand import DOCUMENTS, batch_of, losses_and_gradients

import hf_packing as hfp
from hf_packing.attention.packed_row import PackedRow, use_row
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


FAST = "a state", "alibi", "positions with an offset"


def model_of(trait, dtype=torch.float32):
    model_type, *kind, changes, route, modules = TRAITS[trait]
    return tiny_model(model_type, kind[0] if kind else "causal", dtype, **changes), route, modules


@cache
def stock_and_patched_once(trait):
    model = model_of(trait)[0]
    return model, hfp.patch_model(copy.deepcopy(model))


def patched(trait):
    return copy.deepcopy(stock_and_patched_once(trait)[1])


def alone(model, documents=DOCUMENTS):
    """[tokens, vocabulary]: what one document leaves behind in the model is not for the next."""
    with torch.no_grad():
        return torch.cat([stock(copy.deepcopy(model), tokens).logits[0] for tokens in documents])


def stock(model, tokens):
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(torch.tensor([tokens]), **options)


def packed(documents):
    return {name: value for name, value in batch_of(documents).items() if name != "labels"}


@pytest.fixture(scope="module", params=fast_only(TRAITS, *FAST))
def stock_and_patched(request):
    """A model as it is and the same one patched, for tests that leave them so."""
    return stock_and_patched_once(request.param)


@pytest.mark.parametrize("trait", fast_only(TRAITS, *FAST))
def test_loss_and_gradients_are_those_of_documents_alone(trait):
    """Gradients in every parameter. Parts of these models compute in float32 whatever their dtype."""
    model, route, modules = model_of(trait, torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one has no float64
    expected, sums = 0.0, {}
    for tokens in DOCUMENTS:
        own = copy.deepcopy(model)
        logits = stock(own, tokens).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens)[1:], reduction="sum")
        expected += loss.item()
        loss.backward()
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad
    hfp.patch_model(model)
    found = hfp.check_isolation(model).route
    assert (found.name, found.modules) == (route, modules)
    loss, gradients = losses_and_gradients(model.train(), [batch_of(DOCUMENTS)])
    assert loss == pytest.approx(expected, rel=1e-6)
    assert gradients.keys() == sums.keys()
    largest = max(float(gradient.abs().max()) for gradient in sums.values())
    for name, gradient in gradients.items():
        assert (gradient - sums[name]).abs().max() <= 1e-6 * largest, name


def test_isolated_however_it_is_fed(stock_and_patched):
    stock_model, model = stock_and_patched
    expected = alone(stock_model)
    full = batch_of(DOCUMENTS)
    ones = torch.ones_like(full["input_ids"])
    feedings = [
        {name: full[name] for name in names}
        for names in (
            ["position_ids"],
            ["cu_seq_lens_q"],
            ["seq_idx"],
            ["position_ids", "seq_idx"],
            full.keys() - {"labels"},
        )
    ]
    feedings.append({"position_ids": full["position_ids"], "attention_mask": ones})
    with torch.no_grad():
        for feeding in feedings:
            logits = model(**{**feeding, "input_ids": full["input_ids"]}).logits[0]
            assert (logits - expected).abs().max() < 1e-4 * max(1, float(expected.abs().max())), feeding.keys()


def test_two_packed_rows(stock_and_patched):
    stock_model, model = stock_and_patched
    documents = [[5, 6, 7], [8, 9], [4], [11, 12, 13, 19]]
    expected = alone(stock_model, documents)
    with torch.no_grad():
        rows = [batch_of(documents[:2]), batch_of(documents[2:])]
        together = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
        logits = model(**together).logits
    assert logits.shape[:2] == (2, 5)
    assert torch.allclose(logits.flatten(0, 1), expected, atol=2e-4)


def test_rows_as_long_as_the_model_is_wide(stock_and_patched):
    """Axes of tokens are known by their place: sizes may coincide at run time."""
    stock_model, model = stock_and_patched
    generator = torch.Generator().manual_seed(1)
    for tokens in (64, 16, 8, 4, 128):
        lengths = [tokens // 4, tokens // 4, tokens - 2 * (tokens // 4)]
        documents = [torch.randint(8, 120, (length,), generator=generator).tolist() for length in lengths]
        expected = alone(stock_model, documents)
        with torch.no_grad():
            logits = model(**packed(documents)).logits[0]
        assert (logits - expected).abs().max() < 1e-4 * max(1, float(expected.abs().max())), tokens


UNDONE = ("a state", "attention and a state", "positions along the row", "dynamic rope")


@pytest.mark.parametrize("trait", fast_only(UNDONE, "a state", "dynamic rope"))
def test_undone_completely(trait):
    model, *_ = model_of(trait)
    before = [dict(vars(module)) for module in model.modules()]
    buffers = copy.deepcopy(list(model.buffers()))
    hfp.unpatch_model(hfp.patch_model(model))
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(map(torch.equal, model.buffers(), buffers))


@pytest.mark.parametrize("trait", fast_only(["a state", "attention and a state", "a convolution"], "a state"))
def test_generation(trait):
    model, *_ = model_of(trait)
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model.generate(ids, max_new_tokens=5, do_sample=False)
    hfp.patch_model(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), before)
    with hfp.unpatch_model(model):
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), before)
    assert hfp.check_isolation(model).isolated


CHECKPOINTED = ("attention and a state", "linear attention", "alibi", "positions along the row", "an encoder")


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("trait", fast_only(CHECKPOINTED, "alibi"))
def test_gradient_checkpointing(trait, use_reentrant):
    """Layers run again in the backward pass, when another row has come in between."""
    model = patched(trait).train()
    expected = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    enable_checkpointing(model, use_reentrant=use_reentrant)
    model.zero_grad()
    batch = batch_of(DOCUMENTS)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[0, :-1]
    model(**{name: value for name, value in batch_of([[5, 6, 7], [9]]).items() if name != "labels"})
    torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], ignore_index=-100, reduction="sum").backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameter.grad, expected[1][name], atol=1e-4), name
    hfp.unpatch_model(model)
    checkpointing = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    assert any(checkpointing)
    assert not any(type(each).__name__ == "KeepRow" for each in checkpointing)


def test_a_wrapped_module_called_past_its_model():
    model = patched("a state")
    with pytest.raises(hfp.PackingError, match=r"MambaMixer \(backbone.layers.0.mixer\) was called outside its model"):
        model.backbone.layers[0].mixer(torch.zeros(1, 5, 64))


def test_a_padding_token_in_a_document_of_a_model_that_does_not_count_them():
    model, documents = model_of("positions with an offset")[0], [[5, 0, 7], [8, 9, 0, 4]]
    expected = alone(model, documents)
    hfp.patch_model(model)
    with torch.no_grad():
        assert torch.allclose(model(**packed(documents)).logits[0], expected, atol=1e-4)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_is_refused(name):
    model = patched("attention and a state")
    inputs = {k: v for k, v in batch_of(DOCUMENTS).items() if k != "labels"}
    with pytest.raises(hfp.PackingError, match=f"{name}: expected no cache on this patched model"):
        model(**inputs, **{name: transformers.DynamicCache()})


def test_an_argument_that_was_not_there_when_it_was_patched():
    model = patched("attention and a state")
    name = hfp.check_isolation(model).route.by_segment[0].name
    mixer = model.get_submodule(name)
    with (
        use_row(PackedRow.from_lengths([2, 3])),
        pytest.raises(hfp.PackingError, match=f"{name}.*: the tensor 1.gate of shape .* did not occur when"),
    ):
        mixer(hidden_states=torch.zeros(1, 5, 64), gate=torch.zeros(1, 5))


def test_labels_that_would_be_predicted_from_the_row_before():
    model, ids = patched("a state"), torch.tensor([[5, 6, 7], [8, 9, 4]])
    with pytest.raises(hfp.PackingError, match="labels: expected -100 at the first token of every packed row"):
        model(ids, position_ids=torch.tensor([[0, 1, 0], [0, 1, 0]]), labels=ids)


@pytest.mark.slow
def test_the_route_is_found_once():
    first = hfp.check_isolation(hfp.patch_model(model_of("a state")[0])).route
    second = hfp.check_isolation(hfp.patch_model(model_of("a state")[0])).route
    assert second is first
