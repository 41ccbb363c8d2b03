"""The one promise: whatever the model and the form of its batch, documents have the results that they have alone."""

import copy
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import peft
import pytest
import torch
from forms import FORMS, alone, check, check_gradients, gradients_of, outputs_of, packed, tree
from hypothesis import given, settings
from hypothesis import strategies as st
from model_inputs import CHOICE, QUESTION, SEQUENCE, TOKEN, documents
from tiers import fast_only, rarely
from tiny_models import SUPPORTED, build, enable_checkpointing
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from tree_rows import forests

import hf_packing as hfp
from hf_packing.attention.forward import KeepLayout
from hf_packing.attention.kinds.padded import install_unpadding
from hf_packing.attention.route import route_of
from hf_packing.trees.segments import TreeSegments
from tools.survey.measure import VARIANTS
from tools.tiny_model import tiny_model

TWO_LAYERS = {"num_hidden_layers": 2}
LONG, DYNAMIC = (VARIANTS[name][1] for name in ("phi3 with longrope", "llama with dynamic rope"))
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}

TRAITS = {
    "a state": ("mamba", "causal", {}, "segments", {"MambaMixer": 2}),
    "a state by chunks": ("mamba2", "causal", {}, "segments", {"Mamba2Mixer": 2}),
    "attention and a state": ("jamba", "causal", TWO_LAYERS, "varlen + segments", {"JambaMambaMixer": 1}),
    "linear attention": ("qwen3_next", "causal", {}, "varlen + segments", {"Qwen3NextGatedDeltaNet": 2}),
    "a convolution": ("lfm2", "causal", {}, "varlen + segments", {"Lfm2ShortConv": 2}),
    "a recurrence": ("recurrent_gemma", "causal", {}, "varlen + segments", {"RecurrentGemmaRecurrentBlock": 2}),
    "alibi": ("bloom", "causal", TWO_LAYERS, "segments", {"BloomAttention": 2}),
    "positions along the row": ("bart", "causal", {}, "varlen + segments", {"BartLearnedPositionalEmbedding": 1}),
    "positions with an offset": ("roberta", "masked", TWO_LAYERS, "varlen + segments", {"RobertaEmbeddings": 1}),
    "relative positions": ("deberta-v2", "masked", {}, "segments", {"DisentangledSelfAttention": 4}),
    "an encoder": ("bert", "masked", {}, "varlen", {}),
    "an encoder with windows": ("modernbert", "masked", {}, "varlen", {}),
    "a window in the mask alone": ("qwen2_moe", "causal", EXPERTS, "varlen", {}),
    "a chunk in the mask alone": ("llama4_text", "causal", {"attn_temperature_tuning": False}, "varlen", {}),
    "an indexer that reads the mask": ("deepseek_v32", "causal", {}, "segments", {"DeepseekV32Attention": 4}),
    "longrope": ("phi3", "causal", LONG, "varlen + segments", {"Phi3RotaryEmbedding": 1}),
    "dynamic rope": ("llama", "causal", DYNAMIC, "varlen + segments", {"LlamaRotaryEmbedding": 1}),
    "a network over the row": ("fnet", "masked", {}, "segments", {"FNetBasicFourierTransform": 4}),
}

HEADS = [
    *((name, SEQUENCE) for name in ("bert", "albert", "roberta", "deberta-v2", "llama", "qwen3", "gpt2")),
    *((name, TOKEN) for name in ("bert", "albert", "modernbert", "qwen3", "gpt2")),
    *((name, QUESTION) for name in ("bert", "roberta", "modernbert", "llama")),
    *((name, CHOICE) for name in ("bert", "albert", "deberta-v2")),
    *((name, "masked") for name in ("bert", "roberta", "deberta-v2")),
    *((name, "causal") for name in ("llama", "qwen3", "gpt2", "mamba", "bloom", "jamba")),
]
BACKBONES = [(name, "backbone") for name in ("bert", "albert", "roberta", "deberta-v2", "llama", "xlnet")]
BY_LENGTH = [("xlnet", SEQUENCE), ("funnel", SEQUENCE), ("bart", SEQUENCE), ("fnet", CHOICE), ("t5", TOKEN)]
"""Backbones that take no packed rows. Stock padding is wrong in some of them."""

IN_TREES = ["gpt2", "llama", "mamba", "qwen3_next", "bloom", "rwkv", "jamba", "falcon_h1", "recurrent_gemma", "lfm2"]
IN_TREES = [*((name, "causal") for name in IN_TREES), "Mistral", "Gemma2", "GptOss", "DeepseekV3"]

CASES = [
    *((name, form) for name in (*SUPPORTED, *TRAITS) for form in ("packed", "two packed rows", "a fixed shape")),
    *((name, "packed") for name in (("bert", TOKEN), ("llama", TOKEN))),
    *((name, form) for name in (*HEADS, *BACKBONES) for form in ("right", "left", "both")),
    *((name, "right, none short") for name in BY_LENGTH),  # Funnel has no documents of two tokens
    *((name, "no padding") for name in ("Llama", ("bert", SEQUENCE))),
    *((name, "a tree") for name in IN_TREES),
]
FAST = [
    *((name, "packed") for name in ("GptOss", "alibi")),
    ("attention and a state", "a fixed shape"),
    (("llama", TOKEN), "packed"),
    *((name, "two packed rows") for name in ("Llama", "a state")),
    *((("bert", SEQUENCE), form) for form in ("left", "both")),
    *((name, "both") for name in (("gpt2", "causal"), ("albert", "backbone"))),
    *((name, "no padding") for name in ("Llama", ("bert", SEQUENCE))),
    (("xlnet", SEQUENCE), "right, none short"),
    ("Mistral", "a tree"),
]

EXACT = {"Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Phi3", "Olmo2", "StableLm", "GPTNeoX", "GPT2"}
"""Parts of other models compute in float32 whatever the dtype is: rotary angles, states, routers, an eager softmax."""


CHANGES = {"t5": {"decoder_start_token_id": 0}, "xlnet": {"n_layer": 1}}
CHANGES |= dict.fromkeys(("bert", "albert", "roberta", "deberta-v2", "llama", "gpt2", "bloom"), TWO_LAYERS)


def stock_of(name):
    if name in SUPPORTED:
        return build(name, torch.float64)
    model_type, kind, changes = TRAITS[name][:3] if name in TRAITS else (*name, CHANGES.get(name[0], {}))
    model = tiny_model(model_type, SEQUENCE if kind == "backbone" else kind, torch.float64, **changes)
    with suppress(ValueError):
        model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.base_model if kind == "backbone" else model


@cache
def once(name, form="packed"):
    stock = stock_of(name)
    proven = {"trees": form == "a tree", "padded": form.startswith(("right", "left", "both"))}
    return stock, hfp.patch_model(copy.deepcopy(stock), **proven)


def stock_and_patched(name, form="packed"):
    """A model as it is, and the same one patched; for one test alone, in training mode, without dropout."""
    models = [copy.deepcopy(each).train() for each in once(name, form)]
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return models


def close_of(name, form):
    exact = name in EXACT and form != "a tree"
    exact |= isinstance(name, tuple) and name[0] in ("bert", "albert", "roberta", "deberta-v2", "gpt2")
    return 1e-12 if exact else 1e-5


def kind_of(name):
    return name[1] if isinstance(name, tuple) else "causal"


def in_tiers(cases):
    """Each model has one form of several rows, and one of padding, in `make test-all`, and the others in the survey."""
    turns = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in cases))}
    forms = [["two packed rows", "a fixed shape"], ["right", "left", "both"]]
    rare = [(name, each) for name, turn in turns.items() for of in forms for each in of if each != of[turn % len(of)]]
    rare = [case for case in rare if case in cases and case not in FAST]
    return [*fast_only([case for case in cases if case not in rare], *FAST), *rarely(rare)]


@pytest.mark.parametrize(("name", "form"), in_tiers(CASES))
def test_documents_are_as_alone(name, form):
    stock, model = stock_and_patched(name, form)
    model.train(form != "no padding")  # in training mode, something has to tell of documents
    check(stock, model, FORMS[form](), kind_of(name), close_of(name, form))
    if form == "packed":
        report = hfp.check_isolation(model)
        assert report.reason == "changing one document did not change the logits of other documents"
        assert (report.route.name, report.route.modules) == (TRAITS[name][-2:] if name in TRAITS else ("varlen", {}))


@given(forests(), st.integers(0, 10))
@settings(max_examples=10)
def test_random_trees(forest, seed):
    check(*once(("gpt2", "causal"), "a tree"), tree(TreeSegments(*forest), seed))


@pytest.mark.parametrize("name", fast_only(TRAITS, "a state", "alibi"))
def test_rows_as_long_as_the_model_is_wide(name):
    """Axes of tokens are known by their place: sizes may coincide at run time."""
    stock, model = stock_and_patched(name)
    for tokens in (64, 16, 8, 4, 128):
        rows = documents(lengths=(tokens // 4, tokens // 4, tokens - 2 * (tokens // 4)))
        check(stock, model, packed(rows), close=1e-5)


def with_fsdp(implementation, model):
    """Wrap layers as FSDP does."""
    layers = model.base_model.layers
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=implementation)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda each: each in list(layers))


WAYS = {
    "reentrant": partial(enable_checkpointing, use_reentrant=True),
    "not reentrant": partial(enable_checkpointing, use_reentrant=False),
    "reentrant of FSDP": partial(with_fsdp, CheckpointImpl.REENTRANT),
    "not reentrant of FSDP": partial(with_fsdp, CheckpointImpl.NO_REENTRANT),
}
RIGHT_BY_LENGTH = "right, by length"
"""The modules that run by segment in packed rows do not where the rows of a padded batch run by their length."""
CHECKPOINTED = [
    *((name, "packed", way) for name in ("Llama", "attention and a state", "a state") for way in WAYS),
    *(
        (*case, way)
        for case in (
            *((name, "packed") for name in ("Gemma2", "linear attention", "alibi", "positions along the row")),
            *((name, RIGHT_BY_LENGTH) for name in ("alibi", "a state")),
            *((("llama", SEQUENCE), "both"), (("gpt2", "causal"), "a tree")),
        )
        for way in [*WAYS][:2]
    ),
]
FAST_WAYS = [("Llama", "packed", way) for way in WAYS]
FAST_WAYS += [("alibi", form, "reentrant") for form in ("packed", RIGHT_BY_LENGTH)]
FAST_WAYS += [(("gpt2", "causal"), "a tree", "not reentrant"), (("llama", SEQUENCE), "both", "reentrant")]


@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")  # of torch 2.9
@pytest.mark.parametrize(("name", "form", "way"), fast_only(CHECKPOINTED, *FAST_WAYS))
def test_layers_that_run_again_in_the_backward_pass(name, form, way):
    """Also where another row has come in between."""
    (stock, model), kind = stock_and_patched(name, form), kind_of(name)
    batch = FORMS[form.removesuffix(", by length")]()
    if form == RIGHT_BY_LENGTH:
        assert route_of(model).by_segment
        install_unpadding(model, replace(route_of(model).facts.proven["padded batch"], by_length=True))
    WAYS[way](model)
    model.enable_input_require_grads()
    found = outputs_of(model, batch, kind)
    if kind == "causal":
        model(**packed([[5, 6, 7], [9]]).inputs)
    found = {key.replace("_checkpoint_wrapped_module.", ""): each for key, each in gradients_of(model, found).items()}
    check_gradients(found, gradients_of(stock, alone(stock, batch.documents, kind)), 10 * close_of(name, form))
    hfp.unpatch_model(model)
    kept = [vars(m).get(key) for m in model.modules() for key in ("_gradient_checkpointing_func", "checkpoint_fn")]
    assert any(kept)
    assert not any(isinstance(each, KeepLayout) for each in kept)


ADAPTED = [(("llama", SEQUENCE), "right"), (("gpt2", "causal"), "a tree"), (("bert", TOKEN), "packed")]
ADAPTED += [(name, "packed") for name in ("Llama", "attention and a state", "a state", "alibi")]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out:UserWarning")  # of PEFT
@pytest.mark.parametrize(("name", "form"), fast_only(ADAPTED, ADAPTED[0], ADAPTED[3]))
def test_adapters(name, form):
    """Of a model that is patched afterwards, or, in packed rows, before."""
    stock, patched = stock_and_patched(name)
    names = "c_attn q_proj v_proj in_proj x_proj query_key_value query value"
    config = peft.LoraConfig(r=4, target_modules=names.split(), init_lora_weights=False)

    def adapted(model):
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)

    stock = adapted(stock)
    model = adapted(patched) if form == "packed" else hfp.patch_model(copy.deepcopy(stock), trees=form == "a tree")
    check(stock, model, FORMS[form](), kind_of(name), close_of(name, form))
    batch = FORMS[form]()
    with model.disable_adapter(), stock.disable_adapter():
        found, expected = outputs_of(model, batch, kind_of(name)), alone(stock, batch.documents, kind_of(name))
    assert torch.allclose(found[0][0], expected[0][0], atol=1e-5)


EMBEDDED = [
    *((name, "packed") for name in ("Llama", *(each for each, trait in TRAITS.items() if trait[1] == "causal"))),
    *((name, "packed") for name in ("an encoder", "positions with an offset", ("xlm", "causal"))),
    *((("llama", "causal"), form) for form in ("right", "left")),
    (("gpt2", "causal"), "a tree"),
]
FAST_EMBEDDED = [
    ("Llama", "packed"),
    ("positions with an offset", "packed"),
    (("llama", "causal"), "left"),
    EMBEDDED[-1],
]


@pytest.mark.parametrize(("name", "form"), fast_only(EMBEDDED, *FAST_EMBEDDED))
def test_embeddings_given_and_hidden_states_asked_for(name, form):
    stock, model = stock_and_patched(name, form)
    inputs = FORMS[form]().inputs
    ids, kind = inputs["input_ids"], kind_of(name)
    expected = model(**inputs).logits
    output = model(**inputs, output_hidden_states=True)
    options = {"use_cache": False} if kind == "causal" else {}
    assert len(output.hidden_states) == len(stock(ids[:1], output_hidden_states=True, **options).hidden_states)
    assert all(each.shape[:2] == ids.shape for each in output.hidden_states)
    assert torch.allclose(output.logits, expected, atol=1e-9)
    del inputs["input_ids"]
    assert torch.allclose(model(**inputs, inputs_embeds=model.get_input_embeddings()(ids)).logits, expected, atol=1e-9)


FEEDINGS = [("position_ids",), ("cu_seq_lens_q",), ("seq_idx",), ("position_ids", "seq_idx")]


@pytest.mark.parametrize("name", fast_only([*SUPPORTED, *TRAITS], "Llama", "GptOss", "a state", "alibi"))
def test_isolated_however_it_is_fed(name):
    """Also past the outer model: PEFT calls its forward, others the inner model, where hooks do not run."""
    _, model = stock_and_patched(name)
    full = packed().inputs
    ids = full.pop("input_ids")
    feedings = [{key: full[key] for key in keys} for keys in FEEDINGS]
    feedings.append({"position_ids": full["position_ids"], "attention_mask": torch.ones_like(ids)})
    with torch.no_grad():
        expected = model(ids, **full).logits
        inner = model.base_model(ids, **full)[0] if name in SUPPORTED else None
        for feeding in feedings:
            assert torch.allclose(model(ids, **feeding).logits, expected, atol=1e-9)
            assert torch.allclose(model.forward(ids, **feeding).logits, expected, atol=1e-9)
            if inner is not None and len(feeding) == 1:
                assert torch.allclose(model.base_model(ids, **feeding)[0], inner, atol=1e-9)
