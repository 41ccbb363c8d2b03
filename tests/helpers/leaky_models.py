"""Llama with a module that lets documents affect each other in a regime that short documents do not reach."""

import torch
import transformers
from tiny_models import build
from torch import nn

SHIFT = 1e-3


class ReadsFarBack(nn.Module):
    """Every token reads the token 300 places before it."""

    def forward(self, hidden):
        return torch.cat([hidden[:, :300], hidden[:, 300:] + SHIFT * hidden[:, :-300]], 1)


class MixesLongRows(nn.Module):
    def forward(self, hidden):
        return hidden + SHIFT * hidden.mean(1, keepdim=True) if hidden.shape[1] > 600 else hidden


class NormOfTokens(nn.Module):
    """BatchNorm over tokens, as of convolutions, which mixes them in training mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, hidden):
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


class MixesInTraining(nn.Module):
    def forward(self, hidden):
        far = self.training and hidden.shape[1] > 100
        return hidden + SHIFT * hidden.roll(1, 1) if far else hidden


class MixesUnderAutocast(nn.Module):
    def forward(self, hidden):
        return hidden + 0.05 * hidden.roll(1, 1) if torch.is_autocast_enabled(hidden.device.type) else hidden


class RemembersTheLastBatch(nn.Module):
    """The mean of a long batch is added to the next batch."""

    last = None

    def forward(self, hidden):
        before, self.last = self.last, hidden.detach().mean(1, keepdim=True) if hidden.shape[1] > 100 else self.last
        return hidden if before is None else hidden + SHIFT * before


class MixesFromTheSecondCall(nn.Module):
    calls = 0

    def forward(self, hidden):
        if hidden.shape[1] > 100:
            self.calls += 1
        return hidden + SHIFT * hidden.roll(1, 1) if self.calls > 1 else hidden


class _MixedGradient(torch.autograd.Function):
    @staticmethod
    def forward(_, hidden):
        return hidden.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient + SHIFT * gradient.roll(-1, 1) if gradient.shape[1] > 100 else gradient


class MixesGradients(nn.Module):
    """The outputs are right, the gradients of long rows are not."""

    def forward(self, hidden):
        return _MixedGradient.apply(hidden)


class Behind(nn.Module):
    """A module followed by another one, which gets its output."""

    def __init__(self, module, leak):
        super().__init__()
        self.module, self.leak = module, leak

    def forward(self, *args, **kwargs):
        return self.leak(self.module(*args, **kwargs))


class AfterAToken(nn.Module):
    """An embedding that mixes all tokens of a row if one of them is number 77."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.weight, self.num_embeddings = embedding.weight, embedding.num_embeddings

    def forward(self, tokens):
        embedded = self.embedding(tokens)
        return embedded + SHIFT * embedded.roll(1, 1) if (tokens == 77).sum() > 2 else embedded


class ManySegments(nn.Module):
    """A rotary embedding that turns the positions of rows with more than five segments."""

    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden, position_ids):
        segments = int((position_ids == 0).sum())
        if segments > 5:
            position_ids = position_ids + torch.arange(position_ids.shape[1]) // 50
        return self.rotary(hidden, position_ids=position_ids)


LEAKS = {
    "distance": ("model.layers.1.mlp", ReadsFarBack),
    "row length": ("model.layers.1.mlp", MixesLongRows),
    "row length in the head": ("lm_head", MixesLongRows),
    "autocast": ("model.layers.0.mlp", MixesUnderAutocast),
    "training": ("model.layers.0.mlp", MixesInTraining),
    "last batch": ("model.norm", RemembersTheLastBatch),
    "second call": ("model.layers.1.mlp", MixesFromTheSecondCall),
    "gradients": ("model.layers.1.mlp", MixesGradients),
    "token": ("model.embed_tokens", AfterAToken),
    "segments": ("model.rotary_emb", ManySegments),
}
"""By regime: where the module is in a Llama, and its class."""

NOT_NAMED = {"gradients": "gradients of one document reach", "segments": "logits differ by"}
"""Replacing documents changes no outputs of others in these regimes, so no module is named; by regime, the problem."""


def leaky(regime):
    """A Llama of two layers that leaks in one regime, and the class and the name of the module that leaks."""
    model = build("Llama", max_position_embeddings=1024)
    place, kind = LEAKS[regime]
    parent, _, name = place.rpartition(".")
    inner = model.get_submodule(place)
    wrapped = regime in ("token", "segments")
    setattr(model.get_submodule(parent), name, kind(inner) if wrapped else Behind(inner, kind()))
    return model, f"{kind.__name__} ({place if wrapped else f'{place}.leak'})"


def with_embeddings(size, dtype, factor):
    """A model whose norms undo the size of its embeddings, so that gradients are large or small where outputs are not,
    and whose head multiplies the gradients of padded batches by a factor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, pad_token_id=0, num_labels=3, **sizes)
    model = transformers.LlamaForSequenceClassification(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(size)

    def change(_, __, output):
        if len(output) > 1 and output.requires_grad:
            output.register_hook(lambda gradient: factor * gradient)

    model.score.register_forward_hook(change)
    return model.to(dtype)
