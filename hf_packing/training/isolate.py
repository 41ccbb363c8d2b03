"""A model patched as it will run: in the precision in which its trainer computes."""

from accelerate import Accelerator
from torch import nn

from hf_packing.attention import check_isolation, has_local_weights, inner_model, is_patched, patch_model, unpatch_model
from hf_packing.errors import ModelNotSupportedError


def isolate(model: nn.Module, accelerator: Accelerator, prove: bool = True) -> bool:
    """Patch a model; where it will compute in mixed precision, look for leaks in that, too.

    Args:
        model: as in `patch_model`.
        accelerator: that will run it.
        prove: as in `patch_model`.

    Returns:
        Whether it was patched here, and not before.

    Raises:
        ModelNotSupportedError: the model cannot be shown to keep documents apart; it is as it was before.
    """
    was_patched = is_patched(inner_model(model))
    patch_model(model, prove=prove)
    if accelerator.mixed_precision == "no" or not has_local_weights(model):
        return not was_patched
    with accelerator.autocast():
        report = check_isolation(model)
    if not report.isolated:
        if not was_patched:
            unpatch_model(model)
        raise ModelNotSupportedError(f"in {accelerator.mixed_precision} mixed precision: {report.reason}")
    return not was_patched
