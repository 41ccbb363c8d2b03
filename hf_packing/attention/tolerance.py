"""Decide whether rounding explains the differences between two outputs of a model."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

LARGEST_FINITE = 1e30
"""Values of larger magnitude count as infinite, since masks contain the most negative float in place of minus
infinity."""

LARGEST_GRADIENT_LEAK = 1e-6
"""Largest allowed gradient of a document's outputs with respect to another document, as a share of the largest gradient
with respect to the document itself. Without a leak, the gradient is exactly 0 in any precision."""

LEAST_SEEN = 1e-6
"""An output that changes by less than this number of standard deviations would not show a leak."""

GRADIENT_LENIENCE = 10
"""Differences of gradients are divided by this number, since rounding also affects the backward pass."""

ALWAYS_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4}
"""A difference between the outputs of a packed document and of the same document alone that is always allowed, by
dtype, in standard deviations of the outputs. There are two reasons for the difference: kernels get tensors of other
shapes if documents are packed, and most models compute some parts in float32, whatever their dtype is."""

NEVER_ALLOWED = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Upper limit of the allowed difference on a few short documents, by dtype. The limit also applies if the effect of
rounding is larger, since faults in attention can cause such differences, too."""

HALF_MAX, HALF_RMS = 0.2, 0.05
"""Differences that are always allowed in half precision: for the largest difference and for the root mean square. One
of the two is enough. On tiny bfloat16 models of 2 to 12 layers, rounding caused a largest difference of up to 0.25 and
a root mean square of up to 0.04. When attention ignored a window, a scale or an attention sink by mistake, these values
were at least 0.4 and 0.07."""


class Profile(NamedTuple):
    """The numbers that the limits of a comparison depend on."""

    factor: float
    """Outputs may differ by this number times the measured effect of rounding."""
    half_factor: float
    """The same number in half precision, in which rounding has almost as large an effect as some faults."""
    is_bounded: bool
    """Whether `NEVER_ALLOWED` applies."""
    rerouted: float
    """In models with experts, this share of the values may differ by more. Rounding may send a token to another expert,
    whose output is unrelated."""


PROBE = Profile(factor=4, half_factor=0, is_bounded=True, rerouted=0)
"""A few short documents. On 210 tiny architectures, and on small copies of large models, their outputs differed from
the same documents alone by up to twice the effect of rounding."""

BATCH = Profile(factor=8, half_factor=2, is_bounded=False, rerouted=0.02)
"""A training batch, in which the largest of many more differences is compared."""

_REROUTED_IN_HALF = 0.5
"""In half precision, the same share on a few short documents, of which single tokens are a large share. Then the other
values have to be within `HALF_RMS`."""


class Tolerance(NamedTuple):
    """The limits up to which rounding explains differences, in standard deviations of the outputs."""

    dtype: torch.dtype
    """Dtype in which the model computes."""
    has_experts: bool = False
    noise: float = 0.0
    """The measured effect of rounding: the largest difference that it causes."""
    profile: Profile = PROBE

    @property
    def limit(self) -> float:
        """The largest difference that is allowed."""
        if self.dtype not in ALWAYS_ALLOWED:
            return max(HALF_MAX, self.profile.half_factor * self.noise)
        found = max(ALWAYS_ALLOWED[self.dtype], self.profile.factor * self.noise)
        return min(found, NEVER_ALLOWED[self.dtype]) if self.profile.is_bounded else found

    def explains(self, apart: Tensor) -> bool:
        """Return whether rounding explains the differences `apart`, as `apart` returns them."""
        if not apart.numel() or float(apart.max()) <= self.limit:
            return True
        share, limit = self.profile.rerouted, self.limit
        if self.dtype not in ALWAYS_ALLOWED:
            rms = limit * HALF_RMS / HALF_MAX
            if float(apart.double().square().mean().sqrt()) <= rms:
                return True
            if not share:
                share, limit = _REROUTED_IN_HALF, rms
        return self.has_experts and float((~(apart <= limit)).double().mean()) <= share


def comparable(values: Tensor) -> Tensor:
    """Return which values have a magnitude below `LARGEST_FINITE`. Larger values stand for infinity, and cannot be
    compared."""
    return values.abs() < LARGEST_FINITE


def differences(left: Tensor, right: Tensor) -> Tensor:
    """Return the absolute differences between two tensors of equal shape: 0 for a value that is infinite in both, and
    infinity for a value that is infinite in only one of them."""
    one, other = comparable(left), comparable(right)
    return (left - right).abs().where(one & other, 0).where(one == other, torch.inf)


def spread(values: Tensor) -> float:
    """Return the standard deviation of the values that are comparable; nan if there are none."""
    finite = values[comparable(values)]
    return float(finite.std()) if len(finite) > 1 else math.nan


def apart(left: Tensor, right: Tensor, unit: float | None = None) -> Tensor:
    """Return the differences between two tensors in standard deviations of `right`, or in `unit`."""
    found = differences(left, right)
    return found.where(found == 0, found / (spread(right) if unit is None else unit))  # gradients may all be 0


def has_experts(model: nn.Module) -> bool:
    return any(kind in type(module).__name__ for module in model.modules() for kind in ("Expert", "Router"))
