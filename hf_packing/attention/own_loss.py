"""Find out which tokens a model's own loss depends on: those of other documents, or the input at a label's place."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from hf_packing.attention.cases import RowCase, pack_in_one_row
from hf_packing.attention.runs import gradient_by_token
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError

_REACHES = 1e-4
"""Largest allowed gradient of one document's loss with respect to another document, as a share of the largest gradient
with respect to the document itself. Usually, it is 0."""

_SEES = 1e-4
"""A model sees the input token at a label's position if the gradient of the label's loss with respect to this token
exceeds this share of the largest gradient with respect to any token. In a causal model, the share is 0."""


def refuse_loss_across_borders(case: RowCase, in_training: RowCase, width: int) -> None:
    """Raise an error if a model's own loss compares labels of one packed document with outputs of another document.

    A head that predicts the token after the next token has such a loss, since the collator masks only the first label
    of a document, and not the second label.

    Args:
        case: three documents in a row of a patched model, one of which gets labels.
        in_training: a case of the same model in training mode.
        width: number of logits for each token.

    Raises:
        ModelNotSupportedError: the loss on one document's labels has a gradient with respect to another document.
    """
    if not case.runner.signature.takes("labels"):
        return
    (first, middle, last), (other, other_middle, another) = case.tokens, case.others
    own_loss: float | None = None
    for training, mode in ((case.training, case.mode), (in_training.training, in_training.mode)):

        def loss(labels: list[int], before: list[int] = first, after: list[int] = last) -> Tensor:
            """Return the loss of a packed row in which only the middle document has labels, from its second token."""
            batch = pack_in_one_row([before, middle, after])
            batch["labels"] = torch.full_like(batch["input_ids"], IGNORED_LABEL)
            batch["labels"][0, len(first) + 1 : len(first) + len(middle)] = torch.tensor(labels[1:]) % width
            found: Tensor = case.runner(batch).loss
            return found

        with suppress(Exception), case.runner.undisturbed(training):
            known, own_loss = own_loss, float(loss(middle).detach())
            if own_loss == known or own_loss == float(loss(middle, before=other, after=another).detach()):
                continue  # the same loss as in evaluation mode, or as with other documents
        labels = middle, other_middle
        share = _gradient_share(case, training, loss, labels, {*first, *last}, set(middle), _REACHES)
        if share > _REACHES:
            raise ModelNotSupportedError(
                f"{type(case.model).__name__}: {mode}the model's own loss compares labels of a packed document "
                "with outputs of another document: for the loss on one document's labels, the largest gradient at "
                f"another document's tokens is {share:.2g} times the largest gradient at the document's own tokens. A "
                "head that predicts the token after the next token, for example, has such a loss. Pass no labels, and "
                "compute the loss of each document yourself"
            )


def model_sees_labels(case: RowCase, width: int) -> bool:
    """Return whether the input token at a label's position affects the logits that the label is compared with.

    This is so in masked language models, and in bidirectional models with a causal loss. The result is computed from
    the gradients of the model's own loss. If the model computes no loss or no gradients, the result is False.

    Args:
        case: documents of a model that is not patched.
        width: number of logits for each token.
    """
    tokens, takes = case.tokens[0], case.runner.signature.takes
    place = next((place for place in range(1, len(tokens)) if tokens.count(tokens[place]) == 1), None)
    if place is None or not takes("labels"):
        return False

    def loss(labels: list[int]) -> Tensor:
        """Return the loss of the first document alone, if only one of its tokens has a label."""
        given = torch.full((1, len(tokens)), IGNORED_LABEL)
        given[0, place] = labels[place] % width
        found: Tensor = case.runner({"input_ids": torch.tensor([tokens]), "labels": given, "use_cache": False}).loss
        return found

    labels = tokens, case.others[0]
    return _gradient_share(case, case.training, loss, labels, {tokens[place]}, set(tokens), _SEES) > _SEES


def _gradient_share(
    case: RowCase,
    training: bool,
    loss: Callable[[list[int]], Tensor],
    labels: tuple[list[int], list[int]],
    at: set[int],
    among: set[int],
    limit: float,
) -> float:
    """Return the largest gradient of a loss at the tokens `at`, divided by its largest gradient at the tokens `among`;
    0 if the model computes no loss or no gradients.

    The function `loss` takes labels, and returns the model's own loss. If its result for the first of two lists of
    labels exceeds `limit`, auxiliary losses, such as those of routers, may be the reason. The result is then computed
    for the difference to the loss with the other labels, in which auxiliary losses cancel out.
    """
    runner = case.runner
    with (
        suppress(Exception),
        runner.undisturbed(training),
        torch.enable_grad(),
        runner.embeddings.leaves() as embedded,
    ):

        def share(score: Tensor) -> float:
            gradient = gradient_by_token(score, embedded, max(at | among), keep=True)
            if gradient is None:
                return 0.0
            return float(gradient[sorted(at)].abs().max() / gradient[sorted(among)].abs().max())

        own, other = labels
        first = loss(own)
        found = share(first)
        return found if found <= limit else share(first - loss(other))
    return 0.0
