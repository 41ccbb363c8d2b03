"""Labels that a model sees: whether it sees the token that a label asks for, and whether labels only repeat tokens."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.as_it_was import as_it_was
from hf_packing.attention.probe import Probe, embedded
from hf_packing.attention.route import STATE
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

SEEN = 1e-4
"""Gradient at the token that a label asks for, as a share of the largest at any token; 0 in a causal model."""

FEWEST = 3
"""Trained labels below which a batch shows nothing: where 15 % of the tokens are asked for and 10 % of those are kept,
one in 300,000 batches of 3 tokens has all of them asked for and kept."""

MANY = 4096
"""Trained labels in a row that are enough where others have differed from their tokens before: those of a corrector of
spelling repeat its tokens as long as there is no mistake."""


def sees_its_labels(probe: Probe, width: int) -> bool:
    """Whether the token that a label asks for has a say in the logits that the label is compared with.

    So it is in masked language models, and in bidirectional ones with a causal loss; found by the gradients of the
    model's own loss. False where a model makes no loss of labels, or has no gradients.

    Args:
        probe: of a model that is not patched.
        width: how many logits a token has.
    """
    return bool(share_of_the_label(probe, width) > SEEN)


def share_of_the_label(probe: Probe, width: int) -> float:
    """Gradient of the loss of one label at the token that it asks for, as a share of the largest at any token."""
    tokens, others = probe.documents[0], probe.others[0]
    place = next((place for place in range(1, len(tokens)) if tokens.count(tokens[place]) == 1), None)
    if place is None or not probe.signature.takes("labels"):
        return 0.0
    with suppress(Exception), probe.quiet(), embedded(probe.model) as embeddings:
        # two labels at one place: what routers add to the loss cancels out
        labels = tokens[place] % width, others[place] % width
        losses = [loss_of_one_label(probe, tokens, place, label) for label in labels]
        found = torch.autograd.grad(losses[0] - losses[1], [leaf for _, leaf in embeddings], allow_unused=True)
        gradients = torch.zeros(max(tokens) + 1, embeddings[0][1].shape[-1], device=probe.device)
        for (seen, _), gradient in zip(embeddings, found, strict=True):
            if gradient is not None:
                gradients.index_add_(0, seen.flatten(), gradient.flatten(0, -2).float())
        of_token = gradients.abs().amax(1)
        return float(of_token[tokens[place]] / of_token.max())
    return 0.0


def loss_of_one_label(probe: Probe, tokens: list[int], place: int, label: int) -> Tensor:
    labels = torch.full((1, len(tokens)), IGNORED_LABEL, device=probe.device)
    labels[0, place] = label
    given = {"input_ids": torch.tensor([tokens], device=probe.device), "labels": labels, "use_cache": False}
    with as_it_was(*probe.model.modules()), probe.weights_kept():
        loss: Tensor = probe.model(**{name: value for name, value in given.items() if probe.signature.takes(name)}).loss
    return loss


@dataclass
class LabelsSeen:
    """What the labels of a model's batches have been, where it sees the tokens that they ask for."""

    differed: bool = False
    """Whether a label was another token than the one in its place, or tokens were left out."""
    repeated: int = 0
    """Trained labels since, all of them the tokens in their places."""

    def refuse_repeated(self, name: str, input_ids: Tensor, labels: Tensor, cu_seq_lens: Tensor) -> None:
        """Count one more batch.

        Args:
            name: of the model's class.
            input_ids: integers [rows, tokens].
            labels: integers [rows, tokens].
            cu_seq_lens: int32 [segments + 1], in the rows laid end to end.

        Raises:
            PackingError: all tokens but first ones are trained on, and each label is the token in its place.
        """
        trained = labels != IGNORED_LABEL
        if bool((trained & (labels != input_ids)).any()) or are_chosen(trained, cu_seq_lens):
            self.differed, self.repeated = True, 0
            return
        self.repeated += int(trained.sum())
        if self.repeated >= (MANY if self.differed else FEWEST):
            raise PackingError(
                f"labels: expected other tokens than those of input_ids, which {name} sees where labels ask for them, "
                f"so that it would learn to copy its input; got {self.repeated} labels that only repeat input_ids. "
                "Mask tokens before they are packed, in a map or with_transform of the dataset, as transformers' "
                "DataCollatorForLanguageModeling does, with labels of -100 where nothing is asked for (or shift labels "
                "by one, for a causal model that does not)"
            )


def note_that_labels_differ(model: PreTrainedModel) -> None:
    """From now on single batches of a patched model may repeat their tokens, since its data has other labels, too."""
    patch: Any = getattr(model, STATE)
    patch.labels.differed = True


def refuse_seen_labels(model: PreTrainedModel, input_ids: Any, labels: Any, cu_seq_lens: Tensor) -> None:
    """Refuse a batch of a patched model that sees the tokens that its labels ask for, where labels only repeat them."""
    patch: Any = getattr(model, STATE)
    both = isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    if patch.route.sees_labels and both and input_ids.shape == labels.shape:
        patch.labels.refuse_repeated(type(model).__name__, input_ids, labels.to(input_ids.device), cu_seq_lens)


def are_chosen(trained: Tensor, cu_seq_lens: Tensor) -> bool:
    """Whether some tokens, beside the first, are not trained on in a segment where others are."""
    each, begin = trained.flatten().cpu().numpy(), cu_seq_lens[:-1].cpu().numpy()
    left_out = ~each
    left_out[begin] = False
    return bool((np.logical_or.reduceat(each, begin) & np.logical_or.reduceat(left_out, begin)).any())
