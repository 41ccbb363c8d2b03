"""What is private in accelerate."""

from typing import Any

from accelerate import Accelerator
from torch import nn


def device_hook(module: nn.Module) -> Any:
    """Return accelerate's hook that loads offloaded weights of a module; None if there is none.

    Without it, offloaded models would be refused as models without weights.
    """
    return getattr(module, "_hf_hook", None)


def prepared_models(accelerator: Accelerator) -> Any:
    """Return the models that an accelerator has prepared. Without it, isolation would be proven without FSDP."""
    return accelerator._models


def prepared_loaders(accelerator: Accelerator) -> Any:
    """Return the list of the loaders that an accelerator has prepared. Without it, proofs would leave theirs behind."""
    return accelerator._dataloaders
