"""Find out which tokens a model's own loss depends on: those of other documents, or the input at a label's place."""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hf_packing.attention.cases import RowCase, pack_in_one_row
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError

_REACHES = 1e-4
"""A loss depends on a token if its gradient with respect to the token exceeds this share of the largest gradient with
respect to the document with the label. Otherwise, the gradient is usually 0."""


def refuse_loss_across_borders(case: RowCase, in_training: RowCase, width: int) -> None:
    """Raise an error if a model's own loss compares labels of one packed document with outputs of another document.

    A head that predicts the token after the next token has such a loss, since the collator masks only the first label
    of a document, and not the second label.

    Args:
        case: three documents in a row of a patched model, one of which gets labels, from its second token.
        in_training: a case of the same model in training mode, which the loss is computed in if it was run.
        width: number of logits for each token.

    Raises:
        ModelNotSupportedError: the loss on one document's labels has a gradient with respect to another document.
    """
    row, begins = pack_in_one_row(case.segments), case.trees.begins
    labeled = slice(begins[1] + 1, begins[2])
    own, elsewhere = _gradients_of_loss(case, bool(in_training.known), row, labeled, width, document=1)
    if elsewhere > _REACHES * own.amax():
        raise ModelNotSupportedError(
            f"{type(case.model).__name__}: the model's own loss compares labels of a packed document with outputs of "
            "another document: the loss on one document's labels has a gradient at another document's tokens. A head "
            "that predicts the token after the next token, for example, has such a loss. Pass no labels, and compute "
            "the loss of each document yourself"
        )


def model_sees_labels(case: RowCase, width: int) -> bool:
    """Return whether the input token at a label's position affects the logits that the label is compared with.

    This is so in masked language models, and in bidirectional models with a causal loss. The result is computed from
    the gradients of the model's own loss. If the model computes no loss or no gradients, the result is False.

    Args:
        case: documents of a model that is not patched.
        width: number of logits for each token.
    """
    tokens, owned = case.segments[0], case.owned_by(0)
    place = next((at for at in range(1, len(tokens)) if tokens.count(tokens[at]) == 1 and owned[tokens[at]]), None)
    if place is None:
        return False
    alone = {"input_ids": torch.tensor([tokens]), "use_cache": False}
    own, _ = _gradients_of_loss(case, case.training, alone, slice(place, place + 1), width, document=0)
    return bool(own[owned[: tokens[place]].sum()] > _REACHES * own.amax())


def _gradients_of_loss(
    case: RowCase, training: bool, inputs: dict[str, Any], labeled: slice, width: int, document: int
) -> tuple[Tensor, float]:
    """Return the largest gradient of a model's own loss with respect to each token of a document, in the order of their
    ids, and the largest one with respect to tokens of other documents; zeros if there are none.

    Only some tokens have labels. The loss with other labels is subtracted, so that auxiliary losses, such as those of
    routers, cancel out.
    """
    labels = torch.full((2, *inputs["input_ids"].shape), IGNORED_LABEL)
    labels[:, 0, labeled] = torch.stack([case.tokens, case.others])[:, labeled] % width
    runner = case.runner
    with suppress(Exception), runner.undisturbed(training), torch.enable_grad(), runner.leaves() as embedded:
        one, other = (runner({**inputs, "labels": each}).loss for each in labels)
        if found := case.gradients(one - other, embedded, [document]):
            return found[0][0].abs().amax(1), found[1]
    return torch.zeros(int(case.owned_by(document).sum())), 0.0
