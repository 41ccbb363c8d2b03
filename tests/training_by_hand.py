"""Documents, and what training on them gives."""

import torch

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
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
