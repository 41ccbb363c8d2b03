"""What three short documents cannot show: thresholds, long rows, weights of zero, ties, interruptions."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forms import packed
from model_inputs import documents
from patched_models import patched_tiny
from tiers import fast_only
from training_by_hand import batch_of

import hf_packing as hfp
from hf_packing.attention.route import route_of
from tools.tiny_model import tiny_model

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}

THRESHOLDS = {
    "a temperature that grows with the position": ("llama4_text", "causal", {"floor_scale": 64}),
    "a window": ("qwen2_moe", "causal", {"sliding_window": 64, "num_experts": 4}),
    "a window in both directions": ("modernbert", "masked", {"local_attention": 128}),
    "a chunk": ("llama4_text", "causal", {"attention_chunk_size": 64, "floor_scale": 64}),
    "an index of the best tokens": ("deepseek_v32", "causal", {"index_topk": 64}),
    "an index with ties": ("glm_moe_dsa", "causal", {}),
    "an index that layers share": ("glm_moe_dsa", "causal", {"index_topk": 64}),
    "token types of a table": ("convbert", "masked", {"max_position_embeddings": 128}),
    "token types of a table without attention": ("fnet", "masked", {"max_position_embeddings": 128}),
    "ALiBi in half precision": ("falcon", "causal", {"alibi": True, "multi_query": True}),
    "ALiBi": ("bloom", "causal", {}),
    "dynamic rope of several kinds": (
        "olmo3",
        "causal",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"sliding_attention": dict(DYNAMIC), "full_attention": dict(DYNAMIC)},
        },
    ),
    "learned positions": ("roberta", "masked", {"max_position_embeddings": 128}),
    "learned positions in a decoder": ("bart", "causal", {"max_position_embeddings": 128}),
    "positions given": ("bert", "masked", {"max_position_embeddings": 128}),
    "a scan by chunks": ("mamba2", "causal", {"chunk_size": 64}),
}


def alone(model, rows):
    options = {"use_cache": False} if model.config.model_type != "bert" else {}
    with torch.no_grad():
        return torch.cat([copy.deepcopy(model)(torch.tensor([tokens]), **options).logits[0] for tokens in rows])


def packed_logits(model, rows):
    with torch.no_grad():
        return model(**packed(rows).inputs).logits[0]


def difference(model, rows):
    """The largest of a logit of a document packed and alone, unpatched."""
    unpatched = copy.deepcopy(model)
    hfp.unpatch_model(unpatched)
    return float((packed_logits(model, rows) - alone(unpatched, rows)).abs().max())


@pytest.mark.parametrize("architecture", fast_only(["llama", "gemma4", "mamba", "opt", "gpt_oss"], "llama"))
def test_what_a_trainer_gives(architecture):
    model = patched_tiny(architecture, "causal")
    batch = batch_of(documents(lengths=[9, 4, 7]))
    output = model(**batch, num_items_in_batch=torch.tensor(17))
    loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], batch["labels"][0, 1:], reduction="sum") / 17
    torch.testing.assert_close(output.loss, loss)


PADS = [("xlm", "causal"), ("flaubert", "masked"), ("llama", "causal"), ("roberta", "masked"), ("jamba", "causal")]


@pytest.mark.parametrize(("model_type", "kind"), fast_only(PADS, PADS[0], PADS[3]))
def test_pad_tokens_are_tokens_like_others_or_refused(model_type, kind):
    """XLM and Flaubert take them for padding."""
    alone_it_is_padding = model_type in ("xlm", "flaubert")
    layers = {"n_layers": 1} if alone_it_is_padding else {"num_hidden_layers": 2}
    model, rows = patched_tiny(model_type, kind, **layers), documents(lengths=[5, 9, 7])
    assert difference(model, rows) <= 1e-4
    for tokens in rows:
        tokens[-1] = model.config.pad_token_id
    if not alone_it_is_padding:
        assert difference(model, rows) <= 1e-4
        return
    with pytest.raises(hfp.PackingError, match=r"input_ids: expected no pad token \(0\)"):
        packed_logits(model, rows)


ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
ONCE = [("llama", "causal", {"max_position_embeddings": 32, "rope_parameters": ROPE, "num_hidden_layers": 1})]
ONCE += [
    ("big_bird", kind, {"attention_type": "block_sparse", "block_size": size})
    for size in (2, 16)
    for kind in ("causal", "masked")
]


@pytest.mark.parametrize(("model_type", "kind", "changes"), fast_only(ONCE, ONCE[0]))
def test_a_model_that_changes_itself_for_some_documents(model_type, kind, changes):
    """Rope is scaled by the longest document; BigBird gives up its blocks for good at the first short row."""
    model = hfp.patch_model(tiny_model(model_type, kind, **changes))
    for lengths in ([200, 21, 40, 150, 100], [100], [10]):
        assert difference(model, documents(lengths=lengths)) <= 1e-4


@pytest.mark.slow
def test_patching_in_two_threads_leaves_dropout_on():
    dropout = torch.nn.functional.dropout
    models = [tiny_model(architecture, "causal") for architecture in ("llama", "mamba", "llama", "jamba")]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(hfp.patch_model, models))
    assert torch.nn.functional.dropout is dropout
    assert all(hfp.check_isolation(model).isolated for model in models)


@pytest.mark.parametrize("trait", fast_only(THRESHOLDS, "a window"))
def test_documents_longer_than_a_threshold_and_rows_longer_than_positions(trait):
    model_type, kind, changes = THRESHOLDS[trait]
    model = tiny_model(model_type, kind, **changes)
    rows = documents(lengths=[100, 40, 40, 7, 100, 90])
    expected = alone(model, rows)
    found = packed_logits(hfp.patch_model(model), rows)
    assert (found - expected).abs().max() <= 1e-4 * max(1, float(expected.abs().max()))


def test_what_is_hidden_in_another_document():
    """ESM scales all embeddings by the share of mask tokens in a row."""
    model = tiny_model("esm", "masked", token_dropout=True, num_hidden_layers=1)
    rows = documents(lengths=[10, 20])
    rows[0][3] = model.config.mask_token_id
    assert not hfp.check_isolation(model).isolated
    assert difference(hfp.patch_model(model), rows) <= 1e-4


CONV = "conv"
NORM = r"(mixer|attn|mamba)\.norm\.weight$"
OUT = r"(out_proj|o_proj|output)\.weight$"

HIDING = [
    *((name, CONV) for name in ("lfm2", "recurrent_gemma", "inkling_text", "bamba")),
    *((name, NORM) for name in ("minimax", "nemotron_h", "bamba")),
    *((name, OUT) for name in ("mamba", "jamba", "rwkv", "deepseek_v32")),
]


@pytest.mark.parametrize(("architecture", "names"), fast_only(HIDING, ("lfm2", CONV), ("mamba", OUT)))
def test_weights_that_hide_a_leak_until_they_are_trained(architecture, names):
    """Such as convolutions that begin as the identity, and norms and projections that begin at zero."""
    model = tiny_model(architecture, "causal")
    ndim = {CONV: 3, NORM: 1, OUT: 2}[names]
    hiding = [each for name, each in model.named_parameters() if re.search(names, name) and each.ndim == ndim]
    assert hiding
    trained = [weight.detach().clone() for weight in hiding]
    with torch.no_grad():
        for weight in hiding:
            weight.zero_()[..., -1] = names == CONV
    before = copy.deepcopy(model.state_dict())
    hfp.patch_model(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        for weight, own in zip(hiding, trained, strict=True):
            weight.copy_(own)
    assert difference(model, documents(lengths=[13, 21, 9])) <= 1e-4


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
@pytest.mark.parametrize("interruption", fast_only([KeyboardInterrupt, RuntimeError], KeyboardInterrupt))
def test_an_interrupted_forward_leaves_no_borders(architecture, interruption):
    model = patched_tiny(architecture, "causal")
    first, second = documents(lengths=[10, 20, 5]), documents(lengths=[5, 20, 10])
    expected = packed_logits(model, second)

    def interrupt(*_):
        raise interruption

    hook = model.base_model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(interruption):
        packed_logits(model, first)
    hook.remove()
    assert torch.equal(packed_logits(model, second), expected)


@pytest.mark.parametrize("architecture", fast_only(["mamba", "pegasus", "jamba", "lfm2"], "mamba"))
def test_a_module_that_was_exchanged(architecture):
    """Also for one of its kind."""
    model = patched_tiny(architecture, "causal")
    name = route_of(model).by_segment[0].name
    fresh = copy.deepcopy(model.get_submodule(name))
    del fresh.forward
    for other in (fresh, torch.nn.Identity()):
        model.set_submodule(name, other)
        with pytest.raises(hfp.PackingError, match=f"{name}: expected the modules that were there"):
            packed_logits(model, documents(lengths=[3, 4]))
