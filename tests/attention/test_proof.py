"""check_isolation, and the proof of patch_model: what they see, what does not fool them, what they leave alone."""

import pytest
import torch
from model_state import state_of
from tiers import fast_only
from tiny_models import SUPPORTED, build
from transformers import BertModel, BertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.attention.cases import RowCase
from hf_packing.attention.kinds import packed
from hf_packing.attention.kinds.packed import PackedLayout, read_layout
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


@pytest.mark.parametrize("kind", ["sequence classification", "question answering"])
def test_the_backbone_of_a_classifier_is_checked_on_packed_rows(kind):
    """Padded rows, with a document in each, say nothing about packed ones. A patched classifier takes only these."""
    model = tiny_model("bert", kind, num_hidden_layers=1)
    report = hfp.check_isolation(model)
    assert (report.isolated, report.checked) == (False, "packed rows of the backbone")
    assert report.max_leak > 0.1
    report = hfp.check_isolation(hfp.patch_model(model))
    assert (report.isolated, report.checked) == (True, "padded rows")
    assert "checked on padded rows in evaluation and training mode" in str(report)
    head = model.classifier if kind == "sequence classification" else model.qa_outputs
    head.register_forward_pre_hook(lambda _, given: (given[0] + 0.01 * given[0].mean(0),))
    report = hfp.check_isolation(model)
    assert not report.isolated
    assert "changing one document changed the logits of another document" in report.reason


class Tagger(BertPreTrainedModel):
    """A model whose backbone is not where `base_model_prefix` says."""

    base_model_prefix = ""

    def __init__(self, config):
        super().__init__(config)
        self.encoder, self.head = BertModel(config), torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def get_input_embeddings(self):
        return self.encoder.get_input_embeddings()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None):
        hidden = self.encoder(input_ids, attention_mask=attention_mask, position_ids=position_ids)[0]
        return SequenceClassifierOutput(logits=self.head(hidden.mean(1)))


def test_a_stock_model_is_not_called_isolated_by_padded_rows():
    model = Tagger(tiny_model("bert", "sequence classification").config)
    report = hfp.check_isolation(model)
    assert not report.isolated
    assert "neither the model nor its backbone can be called on packed rows" in report.reason


def test_what_was_not_measured_is_not_shown():
    """A stock encoder-decoder for classification cannot be called on packed rows."""
    report = hfp.check_isolation(tiny_model("bart", "sequence classification"))
    assert not report.isolated
    assert "nan" not in str(report)


@pytest.mark.usefixtures("one_method")
def test_a_leak_in_the_patch_itself_is_found(monkeypatch):
    """If borders were lost on the way, the proof would fail."""

    def lose_borders(*inputs):
        return PackedLayout.of([read_layout(*inputs).tokens])

    monkeypatch.setattr(packed, "read_layout", lose_borders)
    with pytest.raises(hfp.ModelNotSupportedError, match="changing one document changed the logits of another"):
        hfp.patch_model(llama())


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
        for old, new in zip(*(each.split([*case.trees.lengths]) for each in (case.tokens, case.others)), strict=True)
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


def test_the_attention_written_out_is_a_reference_beside_the_models_own(monkeypatch):
    """Others have had gaps: transformers 5.17 lets "sdpa" ignore Gemma 2's soft cap."""
    model = llama(attn_implementation="sdpa")
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    scaled = lambda module, query, *args, **kwargs: own(module, query * 0.9, *args, **kwargs)  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", scaled)
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
