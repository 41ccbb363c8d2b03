"""Refuse labels that only repeat the input, on models that see the tokens that their labels ask for."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.route import PATCH, route_of
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

_FEWEST = 3
"""Trained labels below which a batch shows nothing. If 15 % of the tokens are trained on, and 10 % of those are kept as
they are, one in 300,000 batches of 3 tokens has only tokens that are trained on and kept."""

_MANY = 4096
"""Trained labels in a row that must repeat the input if labels have differed from it before. The labels of a spelling
corrector repeat its input as long as there is no mistake."""


@dataclass
class LabelCheck:
    """Counts the labels of successive batches that repeat the input."""

    differed: bool = False
    """Whether a label has differed from the token in its place, or tokens were left out."""
    repeated: int = 0
    """Trained labels since then, all of which repeat the tokens in their places."""

    def add(self, model_name: str, input_ids: Tensor, labels: Tensor, cu_seq_lens: Tensor) -> None:
        """Count one more batch.

        Args:
            model_name: class of the model, for the message.
            input_ids: integers [rows, tokens].
            labels: integers [rows, tokens].
            cu_seq_lens: int32 [segments + 1], in the rows laid end to end.

        Raises:
            PackingError: all tokens but first ones are trained on, and each label is the token in its place.
        """
        trained = labels != IGNORED_LABEL
        if bool((trained & (labels != input_ids)).any()) or _are_selected(trained, cu_seq_lens):
            self.differed, self.repeated = True, 0
            return
        self.repeated += int(trained.sum())
        if self.repeated >= (_MANY if self.differed else _FEWEST):
            raise PackingError(
                f"labels: expected other tokens than those of input_ids, since {model_name} sees the tokens that its "
                f"labels ask for, and would learn to copy its input; got {self.repeated} labels that only repeat "
                "input_ids. "
                "Mask tokens before they are packed, in a map or with_transform of the dataset, as transformers' "
                "DataCollatorForLanguageModeling does, with labels of -100 where nothing is asked for (or shift labels "
                "by one, for a causal model that does not)"
            )


def sees_labels(model: PreTrainedModel) -> bool:
    """Return whether a patched model sees the tokens that its labels ask for, as masked language models do."""
    route = route_of(model)
    return route is not None and route.sees_labels


def refuse_copied_labels(
    model: PreTrainedModel, input_ids: Any, labels: Any, cu_seq_lens: Tensor, *, is_sample: bool = False
) -> None:
    """Refuse the labels of a training batch if they only repeat tokens that the patched model sees.

    Args:
        model: patched.
        input_ids: integers [rows, tokens]; anything else is not checked.
        labels: integers [rows, tokens]; anything else is not checked.
        cu_seq_lens: int32 [segments + 1], in the rows laid end to end.
        is_sample: whether this is a sample of a whole dataset. It is judged alone then, and if its labels differ from
            the tokens anywhere, later batches may repeat their tokens.

    Raises:
        PackingError: all labels of this batch, and enough of those before it, repeat the tokens in their places.
    """
    both = isinstance(input_ids, Tensor) and isinstance(labels, Tensor)
    if not sees_labels(model) or not both or input_ids.shape != labels.shape:
        return
    patch: Any = getattr(model, PATCH)
    check = LabelCheck() if is_sample else patch.label_check
    check.add(type(model).__name__, input_ids, labels.to(input_ids.device), cu_seq_lens)
    if is_sample and check.differed:
        patch.label_check.differed = True


def _are_selected(trained: Tensor, cu_seq_lens: Tensor) -> bool:
    """Return whether a segment has both tokens that are trained on and tokens, besides the first, that are not."""
    each, starts = trained.flatten().cpu().numpy(), cu_seq_lens[:-1].cpu().numpy()
    left_out = ~each
    left_out[starts] = False
    return bool((np.logical_or.reduceat(each, starts) & np.logical_or.reduceat(left_out, starts)).any())
