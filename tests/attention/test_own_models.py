"""Models of one's own: built of torch's modules, with losses of their own, or with modules exchanged."""

import copy
from collections import deque

import pytest
import torch
from forms import check, packed
from tiny_models import SIZES, build
from torch import nn
from training_by_hand import batch_of
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.mistral.modeling_mistral import MistralAttention

import hf_packing as hfp
from hf_packing.attention.route import route_of

DOCUMENTS = [list(range(10, 70)), [9, 8, 7, 6], [5], list(range(30, 41))]


class OwnModel(PreTrainedModel):
    config_class = LlamaConfig

    def __init__(self, layer, config=None):
        super().__init__(config or LlamaConfig(**SIZES))
        self.words = nn.Embedding(128, 64)
        self.layers = nn.ModuleList([layer(), layer()])
        self.head = nn.Linear(64, 128)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids=None):
        hidden, loss = self.words(input_ids), None
        for layer in self.layers:
            hidden = layer(hidden)
            if isinstance(hidden, tuple):
                hidden, loss = hidden
        return CausalLMOutput(loss=loss, logits=self.head(hidden))


def causal(hidden):
    return torch.full((hidden.shape[1], hidden.shape[1]), float("-inf")).to(hidden).triu(1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)

    def forward(self, hidden):
        return self.inner(hidden, src_mask=causal(hidden), is_causal=True)


class WithLoss(nn.Module):
    """Attention that returns the mean of what it makes, as routers return a loss."""

    def __init__(self, returned):
        super().__init__()
        self.returned = returned
        self.query, self.value = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, hidden):
        scores = self.query(hidden) @ hidden.mT + causal(hidden)
        attended = scores.softmax(-1) @ self.value(hidden)
        return hidden + attended, self.returned(attended)


def own(layer):
    torch.manual_seed(0)
    return OwnModel(layer).double().eval()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(64, 64, batch_first=True)

    def forward(self, hidden):
        return hidden + self.inner(hidden)[0]


@pytest.mark.parametrize("layer", [Layer, Recurrent])
def test_layers_of_torch(layer):
    """Encoder layers go past the forwards inside them in evaluation mode; recurrent ones return their states."""
    model = own(layer)
    stock = copy.deepcopy(model)
    hfp.patch_model(model)
    check(stock, model, packed(DOCUMENTS), close=1e-10)
    check(stock, copy.deepcopy(model), packed(DOCUMENTS), close=1e-10)
    hfp.unpatch_model(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


class Leaving(WithLoss):
    """Leaves the loss in an attribute."""

    loss = 0.0

    def forward(self, hidden):
        hidden, self.loss = super().forward(hidden)
        return hidden


def mean(attended):
    return attended.pow(2).mean()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: WithLoss(mean), r"WithLoss \(layers.0\).* (an output of shape \[\]|returns a number)"),
        (lambda: WithLoss(lambda attended: attended.mean((0, 1))), r"WithLoss.*an output of shape \[64\]"),
        (lambda: Leaving(mean), r"Leaving \(layers.0\).* one in the attribute loss"),
    ],
)
def test_a_loss_of_all_tokens_made_inside_what_runs_by_segment(make, reason):
    """That of the last segment would stand for all."""
    with pytest.raises(hfp.ModelNotSupportedError, match=reason):
        hfp.patch_model(own(make))


class InclusiveWindow(MistralAttention):
    """A window with one more token than the kernels get that the configuration asks for."""

    def forward(self, hidden_states, position_embeddings, attention_mask, **others):
        if isinstance(attention_mask, torch.Tensor):
            places = torch.arange(hidden_states.shape[1])
            distance = places[:, None] - places
            hidden = (distance < 0) | (distance > self.config.sliding_window)
            attention_mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
        return super().forward(hidden_states, position_embeddings, attention_mask, **others)


class WithInclusiveWindow(MistralForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.__class__ = InclusiveWindow


@pytest.mark.slow
def test_a_window_that_only_long_documents_feel():
    """It is tested in a small copy of the model, in which the window is short."""
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=32, attn_implementation="eager")
    model = WithInclusiveWindow(config)
    stock = copy.deepcopy(model)
    hfp.patch_model(model)
    assert route_of(model).modules == {"InclusiveWindow": 2}
    assert "a document's logits differ" in route_of(model).tried[0]
    check(stock, model, packed(DOCUMENTS), close=1e-5)


class ScaledWhenLong(nn.Module):
    """Rotary embeddings that are others for all documents where one is long."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, position_ids):
        cos, sin = self.inner(hidden, position_ids)
        return (cos * 0.5, sin) if position_ids.max() > 40 else (cos, sin)


def test_a_route_that_is_known_of_other_modules():
    """The search looks at far positions, which a proof does not."""
    hfp.patch_model(build("Llama", num_hidden_layers=1))
    model = build("Llama", num_hidden_layers=1).double().eval()
    model.float()
    model.model.rotary_emb = ScaledWhenLong(model.model.rotary_emb)
    stock = copy.deepcopy(model)
    stock.config.use_cache = False
    check(stock, hfp.patch_model(model), packed(DOCUMENTS), close=1e-4)
    assert route_of(model).modules == {"ScaledWhenLong": 1}


class AcrossRows(nn.Module):
    def forward(self, hidden):
        return hidden if len(hidden) == 1 else hidden + hidden.mean(0, keepdim=True)


def test_what_mixes_the_rows_of_a_batch():
    """It takes a route that lays rows end to end."""
    model = build("Llama", use_cache=False).double().eval()
    model.model.norm = nn.Sequential(model.model.norm, AcrossRows())
    rows, positions = torch.tensor([[5, 6, 7, 8, 9], [9, 10, 11, 12, 13]]), torch.tensor([[0, 1, 2, 0, 1]] * 2)
    with torch.no_grad():
        alone = [torch.cat([model(part).logits[0] for part in row[None].split([3, 2], 1)]) for row in rows]
        hfp.patch_model(model)
        packed = model(rows, position_ids=positions).logits
    assert torch.allclose(packed, torch.stack(alone), atol=1e-10)


def test_what_modules_note_in_their_collections_is_put_back():
    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.list, self.dictionary, self.set, self.deque = [1.0], {"calls": 1}, {1.0}, deque([1.0], maxlen=5)

        def forward(self, hidden):
            self.list.append(float(hidden.mean()))
            self.dictionary[len(self.list)] = hidden
            self.set.add(float(hidden.mean()))
            self.deque.append(hidden)
            return hidden

    model = build("Llama")
    noting = Noting()
    kept = noting.list, noting.dictionary, noting.set, noting.deque
    model.model.norm = nn.Sequential(model.model.norm, noting)
    hfp.check_isolation(hfp.patch_model(model))
    assert kept == ([1.0], {"calls": 1}, {1.0}, deque([1.0]))
    assert all(one is other for one, other in zip(kept, (noting.list, noting.dictionary, noting.set), strict=False))
    assert noting.deque.maxlen == 5


def test_a_forward_that_passes_on_whatever_it_is_given():
    class Passing(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    model = Passing(LlamaConfig(**SIZES)).eval()
    ids = torch.tensor([DOCUMENTS[0]])
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.allclose(hfp.patch_model(model)(ids).logits, expected, atol=1e-5)


def test_another_attention_for_a_part_of_the_model():
    """Of models with several configurations, such as those that see images."""
    model = build("Llama")
    model.model.config = own = copy.deepcopy(model.config)
    hfp.patch_model(model)
    own._attn_implementation_internal = "eager"
    with pytest.raises(hfp.PackingError, match="in its LlamaConfig, got 'eager'"):
        model(**batch_of(DOCUMENTS))


def test_a_configuration_without_a_vocabulary():
    class Config(PreTrainedConfig):
        model_type = "own"

    assert hfp.check_isolation(hfp.patch_model(OwnModel(Layer, Config()))).isolated


def test_a_model_that_does_not_tell_where_its_embeddings_are():
    class WithoutWords(OwnModel):
        def get_input_embeddings(self):
            return PreTrainedModel.get_input_embeddings(self)

    for call in (hfp.patch_model, hfp.check_isolation):
        with pytest.raises(hfp.ModelNotSupportedError, match=r"expected get_input_embeddings\(\) to .* WithoutWords"):
            call(WithoutWords(Layer))
