"""Refuse labels that only repeat the input tokens, for models that see the input token at each label's position.

Masked language models see this token. In training, they would only learn to copy it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from hf_packing.attention.route import PATCH, sees_labels
from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError

_FEWEST = 3
"""The number of successive trained labels at which `LabelCheck` raises an error if all of them repeat the input. Masked
language models are usually trained on 15 % of the tokens, and 10 % of the trained tokens are left unchanged. In only
one of 300,000 correct batches of 3 tokens, all tokens are trained on and left unchanged."""

_MANY = 4096
"""The number of successive trained labels at which `LabelCheck` raises an error if all of them repeat the input, but an
earlier batch had labels that differ from the input. The number is large since correct labels may repeat many tokens:
the labels of a spelling corrector, for example, repeat the input wherever the text has no mistake."""


@dataclass
class LabelCheck:
    """A check, over successive batches, for labels that only repeat the input tokens at their positions."""

    differed: bool = False
    """True if an earlier batch had a label that differs from the input token at its position, or a document in which
    only some tokens have labels."""
    repeated: int = 0
    """The number of trained labels since the last batch that set `differed`. All of these labels repeat the input token
    at their position. A label is trained if it is not -100."""

    def add(self, model_name: str, input_ids: Tensor, labels: Tensor, cu_seq_lens: Tensor) -> None:
        """Count the trained labels of one more batch, and raise an error if too many of them only repeat the input.

        The count goes on from batch to batch. It restarts at 0 after a batch in which a label differs from the input
        token at its position, or in which only some tokens of a document have labels (see `_are_selected`).

        Args:
            model_name: name of the model's class, for the error message.
            input_ids: integers [rows, tokens].
            labels: integers [rows, tokens].
            cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.

        Raises:
            PackingError: the count reaches `_FEWEST`, or `_MANY` if a label has differed from its input
                token before.
        """
        trained = labels != IGNORED_LABEL
        if bool((trained & (labels != input_ids)).any()) or _are_selected(trained, cu_seq_lens):
            self.differed, self.repeated = True, 0
            return
        self.repeated += int(trained.sum())
        if self.repeated >= (_MANY if self.differed else _FEWEST):
            raise PackingError(
                f"labels: expected labels that differ from input_ids, got {self.repeated} successive labels that only "
                f"repeat input_ids. {model_name} sees the input token at each label's position, and would only learn "
                "to copy this token. "
                "For a masked language model, mask tokens before packing, with Dataset.map or Dataset.with_transform, "
                "and set the labels of all other tokens to -100, as DataCollatorForLanguageModeling does. "
                "For a causal model that does not shift labels itself, shift the labels by one token"
            )


def refuse_copied_labels(
    model: PreTrainedModel, input_ids: Any, labels: Any, cu_seq_lens: Tensor, *, is_sample: bool = False
) -> None:
    """Raise PackingError if a model would only learn to copy its input.

    The check is made only for models that see the input token at each label's position, such as masked language models,
    and only if input_ids and labels are tensors of the same shape.

    Args:
        model: a patched model.
        input_ids: integers [rows, tokens].
        labels: integers [rows, tokens].
        cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.
        is_sample: whether the batch is a sample of the whole dataset. A sample is checked separately from the training
            batches. If labels of the sample differ from the input, the limit for the training batches rises from
            `_FEWEST` to `_MANY` repeated labels.

    Raises:
        PackingError: too many successive labels only repeat the input tokens; see `LabelCheck.add`.
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
    """Return whether any segment has labels for only some tokens. A missing label at the first token is ignored.

    Args:
        trained: bool [rows, tokens], True for tokens with labels.
        cu_seq_lens: int32 [segments + 1], borders of the segments in the rows laid end to end.
    """
    each, borders = trained.flatten().cpu().numpy(), cu_seq_lens.cpu().numpy()
    starts = borders[:-1][np.diff(borders) > 0]  # without the empty segments of fixed shapes
    left_out = ~each
    left_out[starts] = False
    return bool((np.logical_or.reduceat(each, starts) & np.logical_or.reduceat(left_out, starts)).any())
