"""StepsOfEpochs: the optimizer steps of each epoch of a run, from which a resumed run finds its place in the data."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hf_packing.sampling.epoch_plan import Trained

_ROUNDING = 1e-6
"""Steps by which a product of floats may be too large; otherwise, rounding would add a step."""


class PlaceInEpoch(NamedTuple):
    """The place of a run after an optimizer step. After the last step of an epoch, it is the start of the next one."""

    epoch: int
    done: int
    """Number of optimizer steps that this run has done in the epoch."""
    steps: int
    """Number of optimizer steps that this run does in the epoch, all in all."""


@dataclass(frozen=True)
class StepsOfEpochs:
    """The numbers of optimizer steps in the epochs of a run, which may go on in an epoch that other runs have begun.

    All epochs after the first one have the same number of steps. The steps of other runs may have had another size.

    Args:
        steps: number of optimizer steps in a whole epoch.
        rest: number of optimizer steps in what earlier runs have left of the run's first epoch.
        epoch: number of the run's first epoch, from 0.
        began: number of optimizer steps that earlier runs have done in all epochs.
        share: share of the first epoch that earlier runs have trained on, from 0 to 1.
        trained: pairs of integers (slots, optimizer steps): the earlier runs of the first epoch, as in `Epoch`.

    Example:
        >>> whole = StepsOfEpochs(steps=10, rest=10)
        >>> whole.place(14), whole.until(2.5)
        (PlaceInEpoch(epoch=1, done=4, steps=10), 25)
        >>> rest = StepsOfEpochs(steps=20, rest=12, epoch=1, began=14, share=0.4, trained=((4, 4),))
        >>> rest.place(26), rest.until(2.5), rest.epochs_at(20)
        (PlaceInEpoch(epoch=2, done=0, steps=20), 36, 1.7)
    """

    steps: int
    rest: int
    epoch: int = 0
    began: int = 0
    share: float = 0.0
    trained: Trained = ()

    @property
    def counts_from_zero(self) -> bool:
        """True if every epoch has begun after a multiple of `steps`, so that a step's number tells its place."""
        return self.rest == self.steps and self.began == self.epoch * self.steps and not self.trained

    def place(self, step: int) -> PlaceInEpoch:
        """Return the place of the run after so many optimizer steps, those of earlier runs included."""
        done = step - self.began
        if done < self.rest:
            return PlaceInEpoch(self.epoch, done, self.rest)
        epochs, done = divmod(done - self.rest, self.steps)
        return PlaceInEpoch(self.epoch + 1 + epochs, done, self.steps)

    def epochs_at(self, step: int) -> float:
        """Return the number of epochs that are done after so many optimizer steps, parts of an epoch included."""
        epoch, done, steps = self.place(step)
        share = self.share if epoch == self.epoch else 0.0
        return epoch + share + (1 - share) * done / steps

    def until(self, epochs: float) -> int:
        """Return the number of optimizer steps after which so many epochs are done; never fewer than were done."""
        whole = self.epoch + 1
        if epochs > whole:
            return self.began + self.rest + math.ceil(self.steps * epochs - self.steps * whole - _ROUNDING)
        left = (epochs - self.epoch - self.share) / (1 - self.share)
        return self.began + max(math.ceil(self.rest * left - _ROUNDING), 0)

    def trained_in(self, epoch: int) -> Trained:
        """Return the earlier runs of an epoch; all but the first epoch have none."""
        return self.trained if epoch == self.epoch else ()

    def to_saved(self) -> dict[str, Any]:
        """Return the values for a checkpoint, as JSON has them."""
        return {**asdict(self), "trained": [list(run) for run in self.trained]}

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any]) -> "StepsOfEpochs":
        """Return the object that `to_saved` was called on."""
        return cls(**{**saved, "trained": tuple((slots, steps) for slots, steps in saved["trained"])})
