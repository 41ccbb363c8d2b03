"""Find out which tokens a model's own loss depends on: those of other documents, or the input at a label's place."""

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from hf_packing.attention.cases import RowCase, pack_in_one_row
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import ModelNotSupportedError

_REACHES = 1e-4
"""A loss depends on a token if its gradient with respect to the token exceeds this share of the largest gradient with
respect to the document with the label. Otherwise, the gradient is usually 0."""


Loss = Callable[[list[int]], Tensor]
"""A function that returns a model's own loss for some labels."""


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
    first, middle, last = case.segments
    other_middle = case.by_segment(case.others)[1].tolist()

    def loss(labels: list[int]) -> Tensor:
        """Return the loss of a packed row in which only the middle document has labels, from its second token."""
        batch = pack_in_one_row([first, middle, last])
        batch["labels"] = torch.full_like(batch["input_ids"], IGNORED_LABEL)
        batch["labels"][0, len(first) + 1 : len(first) + len(middle)] = torch.tensor(labels[1:]) % width
        found: Tensor = case.runner(batch).loss
        return found

    for training, mode in ((False, ""), (True, in_training.mode)):
        share = _gradient_share(case, training, loss, (middle, other_middle), 1, None)
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
    tokens, own = case.segments[0], case.own_tokens[0].tolist()
    place = next((place for place in range(1, len(tokens)) if tokens.count(tokens[place]) == 1), None)
    if place is None or tokens[place] not in own or not case.runner.signature.takes("labels"):
        return False

    def loss(labels: list[int]) -> Tensor:
        """Return the loss of the first document alone, if only one of its tokens has a label."""
        given = torch.full((1, len(tokens)), IGNORED_LABEL)
        given[0, place] = labels[place] % width
        found: Tensor = case.runner({"input_ids": torch.tensor([tokens]), "labels": given, "use_cache": False}).loss
        return found

    labels = tokens, case.others[: len(tokens)].tolist()
    return _gradient_share(case, case.training, loss, labels, 0, own.index(tokens[place])) > _REACHES


def _gradient_share(
    case: RowCase, training: bool, loss: Loss, labels: tuple[list[int], list[int]], document: int, at: int | None
) -> float:
    """Return the largest gradient of a loss with respect to other documents than one or, if `at` is given, with respect
    to one of its own tokens, as a share of the largest one with respect to all of its tokens; 0 if the model computes
    no loss or no gradients.

    If the result for the first of two lists of labels is not small, auxiliary losses, such as those of routers, may be
    the reason. The result is then computed for the difference to the loss with the other labels, in which auxiliary
    losses cancel out.
    """
    runner = case.runner

    def share(score: Tensor) -> float:
        found = case.gradients(score, embedded, [document])
        if found is None:
            return 0.0
        (own,), elsewhere = found
        return (elsewhere if at is None else float(own[at].abs().max())) / float(own.abs().max())

    with suppress(Exception), runner.undisturbed(training), torch.enable_grad(), runner.leaves() as embedded:
        first = loss(labels[0])
        found = share(first)
        return found if found <= _REACHES else share(first - loss(labels[1]))
    return 0.0
