"""Documents, and what training on them gives."""

import pytest
import torch
from tiny_models import build

import hf_packing as hfp

DOCUMENTS = [[11, 5, 9, 30, 31], [7, 8, 21], list(range(40, 60)), [3]]


def batch_of(documents):
    return hfp.PackingCollator()([{"input_ids": tokens} for tokens in documents])


def losses_and_gradients(model, batches):
    """Loss summed over all predicted tokens, in the logits' own dtype, and its gradient, parameter by parameter."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:], ignore_index=-100, reduction="sum")
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def gradients_of(model):
    """By parameter, whatever wraps the model."""
    names = {name.removeprefix("module.").removeprefix("_orig_mod."): each for name, each in model.named_parameters()}
    return {name: each.grad.clone() for name, each in names.items() if each.grad is not None}


def losses_alone(model):
    rows = [torch.tensor([tokens]) for tokens in DOCUMENTS]
    return losses_and_gradients(model, [{"input_ids": row, "labels": row, "use_cache": False} for row in rows])


def check_packed(model, alone, close=1e-4):
    loss, gradients = losses_and_gradients(model, [batch_of(DOCUMENTS)])
    assert loss == pytest.approx(alone[0], rel=close)
    assert largest_difference(gradients, alone[1]) <= close


def gradients_of_a_padded_batch(rows, loss):
    """Gradients and loss of all documents in one padded batch, through the stock model and its logits alone."""
    model = build("Llama", torch.float64)
    width = max(map(len, rows["input_ids"]))
    ids, labels, mask = (torch.full((len(rows), width), fill) for fill in (0, -100, 0))
    for row, (tokens, wanted) in enumerate(zip(rows["input_ids"], rows["labels"], strict=True)):
        ids[row, : len(tokens)], labels[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(wanted)
        mask[row, : len(tokens)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels = labels[:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    trained = (labels != -100).sum(1)
    of_documents = (each.sum(1) / trained.clamp(min=1)).sum() / (trained > 0).sum()
    total = each.sum() / trained.sum() if loss == "token" else of_documents
    total.backward()
    return gradients_of(model), total.item()


def largest_difference(found, expected):
    """Of gradients by parameter, as a share of the largest expected one."""
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest
