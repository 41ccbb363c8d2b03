"""check_isolation, and the proof of patch_model: what they see, what does not fool them, what they leave alone."""

import pytest
import torch
from model_state import state_of
from tiers import fast_only
from tiny_models import SUPPORTED, build
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_packing as hfp
from hf_packing.attention import forward, is_patched
from hf_packing.attention.cases import RowCase
from hf_packing.attention.layout import Layout, read_layout
from hf_packing.attention.route import route_of
from hf_packing.attention.runs import Runner
from hf_packing.attention.search import Search
from tools.tiny_model import tiny_model


def llama(**changes):
    return build("Llama", num_hidden_layers=1, **changes)


@pytest.mark.parametrize("name", fast_only(sorted(set(SUPPORTED) - {"GptOss"}), "GPT2", "Gemma2", "Llama", "Mixtral"))
def test_stock_models_leak_through_their_default_cache(name):
    report = hfp.check_isolation(build(name))
    assert not report.isolated
    assert report.max_leak > 1e-3
    assert "use_cache=True. hf_packing.patch_model" in report.reason
    assert hfp.check_isolation(build(name, use_cache=False)).isolated


@pytest.mark.parametrize(("name", "changes"), [("GptOss", {}), ("Mamba", {"state_size": 8})])
def test_masks_made_without_positions_and_states_leak_whatever_the_cache(name, changes):
    report = hfp.check_isolation(build(name, **changes))
    assert not report.isolated
    assert "with attention 'eager'" in report.reason


def test_a_model_that_cannot_be_called_so():
    model = llama()
    model.model.layers[0].self_attn.forward = None
    report = hfp.check_isolation(model)
    assert not report.isolated
    assert "the model cannot be called on a packed row" in report.reason


def test_a_backbone_is_checked_by_its_hidden_states():
    backbone = llama().model
    assert not hfp.check_isolation(backbone).isolated
    assert hfp.check_isolation(hfp.patch_model(backbone)).isolated


def test_a_classifier_is_checked_on_a_padded_batch():
    """Stock rows do not affect each other, unless the model mixes the rows of a batch."""

    class Mixing(torch.nn.Module):
        def forward(self, hidden):
            return hidden + 0.01 * hidden.mean(0)

    model = tiny_model("bert", "sequence classification", num_hidden_layers=1)
    assert hfp.check_isolation(model).isolated
    model.classifier = torch.nn.Sequential(Mixing(), model.classifier)
    report = hfp.check_isolation(model)
    assert not report.isolated
    assert "changing one document changed the logits of another document" in report.reason
    with pytest.raises(hfp.ModelNotSupportedError, match="padded batches are not supported: changing one"):
        hfp.patch_model(model)
    assert not is_patched(model)
    assert "forward" not in vars(model.bert.pooler)


@pytest.mark.usefixtures("one_method")
def test_nothing_is_proven_where_nothing_could_leak():
    """With attention that adds nothing, documents cannot be seen to leak; such a proof is worth nothing."""
    model = llama()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.o_proj.weight, 1e-12)
    with pytest.raises(hfp.ModelNotSupportedError, match="isolation cannot be tested, since changing the first tokens"):
        hfp.patch_model(model)


@pytest.mark.usefixtures("one_method")
def test_a_leak_in_the_patch_itself_is_found(monkeypatch):
    """If borders were lost on the way, the proof would fail."""

    def lose_borders(*inputs):
        return Layout.of([read_layout(*inputs).tokens])

    monkeypatch.setattr(forward, "read_layout", lose_borders)
    with pytest.raises(hfp.ModelNotSupportedError, match="changing one document changed the logits of another"):
        hfp.patch_model(llama())


@pytest.mark.usefixtures("one_method")
def test_nan_logits_are_no_proof():
    model = llama()
    torch.nn.init.constant_(model.model.layers[0].mlp.down_proj.weight, float("nan"))
    with pytest.raises(hfp.ModelNotSupportedError, match="LlamaForCausalLM returns no finite logits"):
        hfp.patch_model(model)


def test_logits_set_to_minus_infinity_are_left_out():
    model = llama()

    def ban_some(_, __, output):
        output.logits[..., :5] = torch.finfo().min
        output.logits[..., 5:9] = -torch.inf

    model.register_forward_hook(ban_some)
    assert not hfp.check_isolation(model).isolated
    assert hfp.check_isolation(hfp.patch_model(model)).isolated


def test_documents_of_the_probe_and_their_replacements_differ_everywhere():
    case = RowCase(Runner(llama()))
    assert case.trees.lengths == (13, 7, 21)
    assert (case.tokens != case.others).all()
    used = [
        {*old.tolist(), *new.tolist()}
        for old, new in zip(*map(case.by_segment, (case.tokens, case.others)), strict=True)
    ]
    assert len(set.union(*used)) == sum(map(len, used))
    other = RowCase(Runner(llama(intermediate_size=41)))
    assert (sum(case.lengths), sum(other.lengths)) == (41, 43), "no size of the model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collator": lambda rows: {"input_ids": torch.tensor([rows[0]["input_ids"][5:]])}}, "collator: .*whole"),
        ({"rows": 0}, "rows: expected an integer of at least 1, got 0"),
    ],
)
def test_bad_collators_and_rows_are_refused(options, message):
    with pytest.raises(hfp.PackingError, match=message):
        hfp.check_isolation(llama(), **options)


class OtherGradient(torch.nn.Module):
    """Returns what it is given; its gradient is another one, always or in training mode alone."""

    def __init__(self, norm, change, only_training=False):
        super().__init__()
        self.norm, self.change, self.only_training = norm, change, only_training

    def forward(self, hidden):
        hidden = self.norm(hidden)
        if hidden.requires_grad and (self.training or not self.only_training):
            hidden.register_hook(self.change)
        return hidden


def with_gradient(*how):
    model = llama(use_cache=False)
    model.model.norm = OtherGradient(model.model.norm, *how)
    return model


def from_the_next_token(gradient):
    return gradient + 0.5 * gradient.roll(1, dims=1)


@pytest.mark.parametrize("only_training", fast_only([False, True], True))
def test_gradients_that_cross_borders(only_training):
    mode = "in training mode, " if only_training else ""
    report = hfp.check_isolation(with_gradient(from_the_next_token, only_training))
    assert not report.isolated
    assert report.max_leak < 1e-4
    assert report.max_gradient_leak > 1e-3
    assert f"{mode}gradients of one document reach another" in report.reason
    with pytest.raises(hfp.ModelNotSupportedError, match=f"{mode}gradients of one document reach another"):
        hfp.patch_model(with_gradient(from_the_next_token, only_training))


@pytest.mark.usefixtures("one_method")
def test_gradients_that_are_not_those_of_documents_alone_are_refused():
    with pytest.raises(hfp.ModelNotSupportedError, match="a document's gradients differ by"):
        hfp.patch_model(with_gradient(lambda gradient: gradient * (1.5 if gradient.shape[1] > 30 else 1.0)))


def test_the_attention_written_out_is_a_reference_beside_the_models_own(monkeypatch):
    """Others have had gaps: transformers 5.17 lets "sdpa" ignore Gemma 2's soft cap."""
    model = llama(attn_implementation="sdpa")
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS,
        "sdpa",
        lambda module, query, *args, **kwargs: own(module, query * 0.9, *args, **kwargs),
    )
    assert route_of(hfp.patch_model(model)).name == "varlen"


def test_a_model_that_does_not_look_at_its_tokens():
    model = llama()

    def forget(_, __, output):
        output.logits = torch.arange(output.logits[0].numel()).view_as(output.logits).float()

    model.register_forward_hook(forget)
    assert "isolation cannot be tested, since changing the first tokens" in hfp.check_isolation(model).reason


def stop(*_, **__):
    raise KeyboardInterrupt


INTERRUPTED = [(Search, "run"), (RowCase, "alone"), (RowCase, "run")]


@pytest.mark.parametrize(("where", "name"), fast_only(INTERRUPTED, INTERRUPTED[0]))
@pytest.mark.parametrize("architecture", fast_only(["llama", "jamba"], "llama"))
def test_an_interruption_leaves_the_model_as_it_was(monkeypatch, where, name, architecture):
    model = tiny_model(architecture, "causal")
    before = state_of(model)
    monkeypatch.setattr(where, name, stop)
    with pytest.raises(KeyboardInterrupt):
        hfp.patch_model(model)
    assert not is_patched(model)
    assert state_of(model) == before
    monkeypatch.undo()
    assert hfp.check_isolation(hfp.patch_model(model)).isolated
