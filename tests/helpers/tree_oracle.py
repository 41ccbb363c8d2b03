"""Models that take rows of trees by running each document alone, and the losses of documents that share nothing."""

import copy
from functools import partial

import torch
from patched_models import patched_once
from tiny_models import build
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput
from tree_rows import documents_of


def exact(name):
    """Return a model in float64, without the parts of Llama that compute in float32 whatever the model's dtype."""
    model = build(name, torch.float64)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(_norm, module)
    return model


def patched_with_stock(name):
    """Return a patched model; its attribute `stock` has one without a patch that has the same parameters."""
    stock, model = exact(name), copy.deepcopy(patched_once(exact, True, name))
    share_parameters(stock, model)
    model.stock = [stock]  # in a list, so that it is no module of the model
    return model


def oracle(name):
    """Return a patched model that runs each document of a row of trees alone, without a patch.

    The hidden state of a shared token is that of the last document on whose path it is.
    """
    model = patched_with_stock(name)
    (stock,) = model.stock
    without_trees = model.forward

    def forward(
        input_ids, segment_lengths=None, parents=None, position_ids=None, labels=None, num_items_in_batch=None, **others
    ):
        if parents is None:
            items = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            return without_trees(input_ids=input_ids, position_ids=position_ids, labels=labels, **items, **others)
        assert not others
        hidden = [None] * input_ids.shape[1]
        row = {
            "tree_input_ids": input_ids[0].tolist(),
            "segment_lengths": segment_lengths.tolist(),
            "parents": parents.tolist(),
            "ends": [*range(len(parents))],
            "trained": [],
        }
        for tokens, _, path in documents_of(row):
            assert position_ids[0, path].tolist() == [*range(len(path))]
            states = stock.base_model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
            for place, state in zip(path, states, strict=True):
                hidden[place] = state
        logits = model.lm_head(torch.stack(hidden)[None])
        if labels is None:
            return CausalLMOutput(logits=logits)
        vocabulary = model.config.vocab_size
        loss = model.loss_function(logits, labels, vocabulary, num_items_in_batch=num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    model.forward = forward
    return model


def _norm(module, hidden):
    return F.rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


def share_parameters(model, other):
    """Give a model the parameters of another one, so that both collect the same gradients."""
    parameters = dict(other.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name in [name for name, own in module._parameters.items() if own is not None]:
            module._parameters[name] = parameters[f"{prefix}.{name}".removeprefix(".")]


def losses_alone(model, documents, labels):
    """Return, for each document, the cross-entropies of its labels but the first, from a run of the document alone."""
    found = []
    for tokens, wanted in zip(documents, labels, strict=True):
        logits = model.stock[0](input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        each = F.cross_entropy(logits[:-1], torch.tensor(wanted[1:], dtype=torch.int64), reduction="none")
        found.append(each[torch.tensor(wanted[1:], dtype=torch.int64) != -100])
    return found


def loss_alone(model, documents, labels, loss):
    """Return the mean over tokens, or over the means of documents that have labels, and the number of these items."""
    losses = losses_alone(model, documents, labels)
    if loss == "sequence":
        losses = [each.mean()[None] for each in losses if len(each)]
    joined = torch.cat([torch.zeros(0), *losses])
    return joined.sum() / max(len(joined), 1), len(joined)


def gradients(model):
    """Return the gradients of a model, by parameter, and delete them."""
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def check_gradients(found, expected, close=1e-12):
    """Compare gradients by parameter; differences are relative to the largest gradient of all."""
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 1e-3
    for name, each in expected.items():
        assert float((found[name] - each).abs().max()) <= close * largest, name
