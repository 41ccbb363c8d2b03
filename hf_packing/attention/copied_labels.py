"""Refuse labels that only repeat the tokens that a model sees."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.arrow.loss_masks import IGNORED_LABEL
from hf_packing.attention.route import STATE
from hf_packing.errors import PackingError

FEWEST = 3
"""Trained labels below which a batch shows nothing: where 15 % of the tokens are asked for and 10 % of those are kept,
one in 300,000 batches of 3 tokens has all of them asked for and kept."""

MANY = 4096
"""Trained labels in a row that are enough where others have differed from their tokens before: those of a corrector of
spelling repeat its tokens as long as there is no mistake."""


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
