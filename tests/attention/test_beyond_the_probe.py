"""What three short documents cannot show: thresholds, long rows, weights of zero, ties, interruptions."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from patched_models import patched_tiny
from tiers import fast_only
from training_by_hand import batch_of

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.attention.layout import Layout
from hf_packing.attention.model import Signature
from hf_packing.attention.route import Method, route_of
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


def alone(model, documents):
    options = {"use_cache": False} if model.config.model_type != "bert" else {}
    with torch.no_grad():
        return torch.cat([copy.deepcopy(model)(torch.tensor([tokens]), **options).logits[0] for tokens in documents])


def documents_of(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, 120, (length,), generator=generator).tolist() for length in lengths]


def packed_logits(model, documents):
    with torch.no_grad():
        return model(**{name: value for name, value in batch_of(documents).items() if name != "labels"}).logits[0]


@pytest.mark.parametrize("architecture", fast_only(["llama", "gemma4", "mamba", "opt", "gpt_oss"], "llama"))
def test_what_a_trainer_gives(architecture):
    model = patched_tiny(architecture, "causal")
    documents = documents_of([9, 4, 7])
    batch = batch_of(documents)
    output = model(**batch, num_items_in_batch=torch.tensor(17))
    assert torch.equal(output.logits[0], packed_logits(model, documents))
    loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], batch["labels"][0, 1:], reduction="sum") / 17
    torch.testing.assert_close(output.loss, loss)


def test_an_argument_that_nobody_knows_is_passed_on():
    class Plain(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    row = Layout.of([2, 3])
    given = {"input_ids": torch.arange(5)[None], "position_ids": row.position_ids, "labls": 1}
    assert Method().build(Signature(Plain()), given, row).keys() == {"input_ids", "labls"}


def difference(model, documents):
    """The largest of a logit of a document packed and alone, unpatched."""
    unpatched = copy.deepcopy(model)
    hfp.unpatch_model(unpatched)
    return float((packed_logits(model, documents) - alone(unpatched, documents)).abs().max())


@pytest.mark.parametrize(
    ("model_type", "kind"), fast_only([("xlm", "causal"), ("flaubert", "masked")], ("xlm", "causal"))
)
def test_a_pad_token_that_a_model_alone_takes_for_padding(model_type, kind):
    model = patched_tiny(model_type, kind, n_layers=1)
    documents = documents_of([5, 9, 7])
    assert difference(model, documents) <= 1e-4
    documents[1][4] = model.config.pad_token_id
    with pytest.raises(hfp.PackingError, match=r"input_ids: expected no pad token \(0\)"):
        packed_logits(model, documents)


ORDINARY_PADS = [("llama", "causal"), ("roberta", "masked"), ("jamba", "causal")]


@pytest.mark.parametrize(("model_type", "kind"), fast_only(ORDINARY_PADS, ("roberta", "masked")))
def test_a_pad_token_that_is_a_token_like_others(model_type, kind):
    model = patched_tiny(model_type, kind, num_hidden_layers=2)
    documents = documents_of([5, 9, 7])
    for document in documents:
        document[-1] = model.config.pad_token_id
    assert difference(model, documents) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize("kind", ["causal", "masked"])
def test_a_model_that_changes_itself_for_short_documents(kind, block_size):
    """BigBird gives up its blocks for good at the first short row."""
    model = tiny_model("big_bird", kind, attention_type="block_sparse", block_size=block_size)
    hfp.patch_model(model)
    assert difference(model, documents_of([200, 21, 40, 150, 100])) <= 1e-4


def test_a_scale_of_a_longer_document_is_not_remembered():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", "causal", max_position_embeddings=32, rope_parameters=rope, num_hidden_layers=1)
    hfp.patch_model(model)
    for length in (100, 10):
        assert difference(model, documents_of([length])) <= 1e-4


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
    documents = documents_of([100, 40, 40, 7, 100, 90])
    expected = alone(model, documents)
    hfp.patch_model(model)
    found = packed_logits(model, documents)
    assert (found - expected).abs().max() <= 1e-4 * max(1, float(expected.abs().max()))


class ReadsBefore(torch.nn.Module):
    """Every token of a row of more than `above` tokens reads the token before it."""

    def __init__(self, inner, above):
        super().__init__()
        self.inner, self.above = inner, above

    def forward(self, hidden):
        before = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return self.inner(hidden) + (0.1 * before if hidden.shape[1] > self.above else 0)


class OfLongRows(transformers.MistralForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mlp = ReadsBefore(self.model.layers[0].mlp, config.sliding_window)


class MixesLongRows(transformers.MistralForCausalLM):
    """The model itself, which cannot run by segment, mixes the documents of long rows."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **others):
        outputs = super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache, **others)
        if outputs.logits.shape[1] > self.config.sliding_window:
            outputs.logits = outputs.logits + outputs.logits.mean(1, keepdim=True)
        return outputs


def of_long_rows(kind, layers=2):
    """A model that changes with the length of rows, with a module of the user's own that its small copy lacks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "sliding_window": 64}
    model = kind(transformers.MistralConfig(vocab_size=128, pad_token_id=0, **sizes, **heads)).eval()
    model.model.layers[-1].mlp = ReadsBefore(model.model.layers[-1].mlp, 0)
    return model


def test_a_module_of_the_user_beside_one_that_changes_with_the_length():
    """The small copy lacks the module of the user."""
    with pytest.raises(hfp.ModelNotSupportedError, match="changing one document changed the logits"):
        hfp.patch_model(of_long_rows(OfLongRows))


@pytest.mark.usefixtures("one_method")
def test_long_documents_that_cannot_be_kept_apart_are_refused():
    """Also for the second model of its kind."""
    for _ in range(2):
        model = of_long_rows(MixesLongRows, layers=1)
        with pytest.raises(hfp.ModelNotSupportedError, match="small copy of the model: MixesLongRows: "):
            hfp.patch_model(model)
        assert not is_patched(model)


def test_what_is_hidden_in_another_document():
    """ESM scales all embeddings by the share of mask tokens in a row."""
    model = tiny_model("esm", "masked", token_dropout=True, num_hidden_layers=1)
    documents = documents_of([10, 20])
    documents[0][3] = model.config.mask_token_id
    expected = alone(model, documents)
    assert not hfp.check_isolation(model).isolated
    hfp.patch_model(model)
    assert torch.allclose(packed_logits(model, documents), expected, atol=1e-4)


def zero(weight):
    weight.zero_()


def identity(weight):
    weight.zero_()[..., -1] = 1


CONV = "conv"
NORM = r"(mixer|attn|mamba)\.norm\.weight$"
OUT = r"(out_proj|o_proj|output)\.weight$"

HIDING = [
    *((name, CONV, identity) for name in ("lfm2", "recurrent_gemma", "inkling_text", "bamba")),
    *((name, NORM, zero) for name in ("minimax", "nemotron_h", "bamba")),
    *((name, OUT, zero) for name in ("mamba", "jamba", "rwkv", "deepseek_v32")),
]


@pytest.mark.parametrize(
    ("architecture", "names", "begin"), fast_only(HIDING, ("lfm2", CONV, identity), ("mamba", OUT, zero))
)
def test_weights_that_hide_a_leak_until_they_are_trained(architecture, names, begin):
    """Such as convolutions that begin as the identity, and norms and projections that begin at zero."""
    model = tiny_model(architecture, "causal")
    ndim = {CONV: 3, NORM: 1, OUT: 2}[names]
    hiding = [each for name, each in model.named_parameters() if re.search(names, name) and each.ndim == ndim]
    assert hiding
    trained = [weight.detach().clone() for weight in hiding]
    with torch.no_grad():
        for weight in hiding:
            begin(weight)
    before = copy.deepcopy(model.state_dict())
    hfp.patch_model(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with torch.no_grad():
        for weight, own in zip(hiding, trained, strict=True):
            weight.copy_(own)
    assert difference(model, documents_of([13, 21, 9])) <= 1e-4


@pytest.mark.parametrize("architecture", ["llama", "mamba"])
@pytest.mark.parametrize("interruption", fast_only([KeyboardInterrupt, RuntimeError], KeyboardInterrupt))
def test_an_interrupted_forward_leaves_no_borders(architecture, interruption):
    model = patched_tiny(architecture, "causal")
    first, second = documents_of([10, 20, 5]), documents_of([5, 20, 10])
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
        with pytest.raises(hfp.PackingError, match=f"{name}: expected the same module"):
            packed_logits(model, documents_of([3, 4]))
