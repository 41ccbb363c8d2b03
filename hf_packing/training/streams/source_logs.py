"""Count what a training reads of each source of a mixture, and sum the losses of each source, for the logs.

Each rank counts on its own. The ranks sum their counts when all of them log, and when they save a state.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from hf_packing.columns import IGNORED_LABEL
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray
from hf_packing.training.losses import exact_type
from hf_packing.training.ranks import data_rank
from hf_packing.training.token_losses import TokenLosses

_TOKENS, _DOCUMENTS, _EPOCHS = range(3)
"""Rows of counts. Epochs are summed over documents."""

_ENDS = ("", "_tokens", "_documents", "_epoch", "_loss")
"""The ends of the names in the logs."""


def check_names(names: Sequence[str]) -> None:
    """Refuse sources of which two would have the same name in the logs, such as "web" and "web_loss"."""
    logged = Counter(f"source_{name}{end}" for name in names for end in _ENDS)
    for twice in (name for name, count in logged.items() if count > 1):
        raise PackingError(
            f"train_dataset: expected sources with different names in the logs, but two of {', '.join(names)} would "
            f"log {twice}; rename one of them in mix"
        )


def source_of_tokens(documents: IntArray, tokens: int) -> Tensor:
    """Return the source of each token of a batch, int64 [1, tokens]; 0 for tokens that only fill the batch.

    Args:
        documents: the documents of the batch, as `MicroBatch.documents` has them.
        tokens: number of tokens in the batch.
    """
    source, lengths, *_ = documents
    of_token = np.zeros((1, tokens), dtype=np.int64)
    of_token[0, : lengths.sum()] = np.repeat(source, lengths)
    return torch.from_numpy(of_token)


class SourceCounts:
    """Counts of what a training has read of each source of a mixture: tokens, documents, and their epochs, summed.

    The epoch of a document is the number of times that its logical stream has begun to read the source before, also in
    earlier epochs of the mixture.

    Args:
        names: the names of the sources; none without a mixture.
        streams: number of logical streams on all ranks.
    """

    def __init__(self, names: Sequence[str], streams: int) -> None:
        self.names = list(names)
        self.before = np.zeros((3, len(names)), dtype=np.int64)
        """The counts of all ranks up to the state that was loaded, int64 [3, sources]."""
        self.here = np.zeros_like(self.before)
        """The counts of this rank since then, int64 [3, sources]."""
        self.passes = np.zeros((2, streams, len(names)), dtype=np.int64)
        """How often the logical streams of this rank have begun to read each source: in the epochs of the mixture that
        have ended, and in this one; int64 [2, streams, sources]."""

    def add(self, documents: IntArray) -> None:
        """Count the documents of a micro-batch, as `MicroBatch.documents` has them."""
        source, tokens, epoch, stream = documents
        finished, begun = self.passes
        np.maximum.at(begun, (stream, source), epoch + 1)
        sums = (tokens, np.ones_like(tokens), epoch + finished[stream, source])
        self.here += np.stack([np.bincount(source, each, len(self.names)) for each in sums]).astype(np.int64)

    def end_epoch(self) -> None:
        """Note that this epoch of the mixture has ended: the next one reads every source again."""
        self.passes[0] += self.passes[1]
        self.passes[1] = 0

    def saved(self, ranks: Mapping[int, "SourceCounts"]) -> dict[str, Any]:
        """Return the state of the counts of all ranks, given the counts of each data rank."""
        passes = self.passes.copy()
        for rank, counts in ranks.items():
            passes[:, rank :: len(ranks)] = counts.passes[:, rank :: len(ranks)]
        totals = self.before + sum(counts.here for counts in ranks.values())
        return {"names": self.names, "totals": totals.tolist(), "passes": passes.tolist()}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Go on at a state that `saved` has returned; begin again without one, or with one of other sources."""
        self.before[:], self.here[:], self.passes[:] = 0, 0, 0
        if saved is not None and saved["names"] == self.names:
            self.before[:], self.passes[:] = saved["totals"], saved["passes"]


class SourceLogs:
    """The logs of the sources of a mixture: what was counted up to now, and the losses since the last log."""

    def __init__(self) -> None:
        self._losses: Tensor | None = None
        """float [2, sources]: the sum of the losses, and the number of labels, on this rank."""
        self._last: IntArray | None = None
        """The counts at the last log, int64 [3, sources]; None before the first one."""
        self._logs: dict[str, float] = {}

    def add_losses(self, labels: Tensor, source: Tensor, number: int, losses: TokenLosses) -> None:
        """Add the losses of a micro-batch.

        Args:
            labels: int64 [1, tokens].
            source: int64 [1, tokens], as `source_of_tokens` returns it, on the device of the labels.
            number: the number of sources.
            losses: the losses of the labels.
        """
        of_labels = losses.of_labels[0]
        if self._losses is None:
            self._losses = of_labels.new_zeros(2, number)
        values = torch.stack([of_labels, (labels[0] != IGNORED_LABEL).to(of_labels)])
        self._losses.index_add_(1, source[0], values)

    def gather(self, counts: SourceCounts, accelerator: Accelerator) -> None:
        """Sum the counts and losses of all ranks, which call this together, for `take`."""
        device, names = accelerator.device, counts.names
        here = torch.tensor(counts.here, device=device)
        found = self._losses
        if found is None:  # all micro-batches of this rank were without rows
            found = torch.zeros(2, len(names), dtype=exact_type(device), device=device)
        ranks_of_a_model = accelerator.num_processes // data_rank(accelerator).world_size
        everywhere = accelerator.reduce(here, reduction="sum").cpu().numpy() // ranks_of_a_model
        losses, labels = accelerator.reduce(found, reduction="sum").tolist()
        totals = counts.before + everywhere
        since = totals - (counts.before if self._last is None else self._last)
        self._last, self._losses = totals, None
        for number, name in enumerate(names):
            key = f"source_{name}"
            self._logs[key] = float(since[_TOKENS, number] / max(since[_TOKENS].sum(), 1))
            self._logs[f"{key}_tokens"] = int(totals[_TOKENS, number])
            self._logs[f"{key}_documents"] = int(totals[_DOCUMENTS, number])
            if since[_DOCUMENTS, number]:
                self._logs[f"{key}_epoch"] = float(since[_EPOCHS, number] / since[_DOCUMENTS, number])
            if labels[number]:
                self._logs[f"{key}_loss"] = losses[number] / labels[number]

    def take(self) -> dict[str, float]:
        """Return what `gather` has found, by its names in the logs; nothing if it was taken already."""
        logs, self._logs = self._logs, {}
        return logs
