"""A model's own loss: whether the labels of a document are compared with what was made of another."""

from contextlib import suppress

import torch
from torch import Tensor

from hf_packing.attention.as_it_was import as_it_was
from hf_packing.attention.documents import in_one_row
from hf_packing.attention.probe import Probe, embedded
from hf_packing.attention.training_mode import begin_chance
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError

REACHES = 1e-4
"""Gradient in another document, as a share of the largest in its own; 0 where labels are shifted by one, or not."""

MIDDLE = 1


def refuse_a_loss_across_borders(probe: Probe, width: int) -> None:
    """Raise ModelNotSupportedError where the labels of a document train what the model makes of another.

    A head for the token after next does: of two labels at the beginning of a document, the first alone is left out.

    Args:
        probe: of a patched model, of three documents.
        width: how many logits a token has.
    """
    if (reached := reach_of_the_loss(probe, width)) > REACHES:
        raise ModelNotSupportedError(
            f"{type(probe.model).__name__}: {probe.mode}its own loss compares labels of a packed document with what it "
            f"makes of another (gradients reach it, up to {reached:.2g} of those in the document itself), as heads for "
            "the token after next do; give it no labels, and compute the loss of each document yourself"
        )


def reach_of_the_loss(probe: Probe, width: int) -> float:
    """Gradient of the loss of one document's labels in another, as a share of the largest in itself; 0 for models that
    make no loss of labels."""
    if not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.quiet(), embedded(probe.model) as embeddings:
        # two losses of the same tokens: what routers add cancels out
        own, other = (loss_of_the_middle(probe, each[MIDDLE], width) for each in (probe.documents, probe.others))
        found = torch.autograd.grad(own - other, [leaf for _, leaf in embeddings], allow_unused=True)
        size = max(token for document in probe.documents for token in document) + 1
        by_token = torch.zeros(size, embeddings[0][1].shape[-1], device=probe.device)
        for (seen, _), gradient in zip(embeddings, found, strict=True):
            if gradient is not None:
                by_token.index_add_(0, seen.flatten(), gradient.flatten(0, -2).float())
        inside = set(probe.documents[MIDDLE])
        outside = {token for document in probe.documents for token in document} - inside
        reached, most = (by_token[sorted(tokens)].abs().max() for tokens in (outside, inside))
        return float(reached / most)
    return 0.0


def loss_of_the_middle(probe: Probe, labels: list[int], width: int) -> Tensor:
    """Of all documents in a row, with these labels for the one in the middle, but for its first token."""
    batch = in_one_row(probe.documents)
    start = len(probe.documents[0])
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORED_LABEL)
    batch["labels"][0, start + 1 : start + len(labels)] = torch.tensor(labels[1:]) % width
    given = {name: value.to(probe.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with as_it_was(*probe.model.modules()), probe.weights_kept():
        begin_chance(probe.chance)
        loss: Tensor = probe.model(**given).loss
    return loss
