"""Patch the model that will be trained in the precision it will run in, and undo that where a rank fails."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from torch import nn

from hf_packing.attention import check_isolation, has_local_weights, inner_model, is_patched, patch_model, unpatch_model
from hf_packing.errors import ModelNotSupportedError, PackingError


def isolate(model: nn.Module, accelerator: Accelerator, prove: bool = True) -> None:
    """Patch a model; if it will run in mixed precision, check isolation in that precision, too.

    Args:
        model: as in `patch_model`.
        accelerator: the one that will run the model.
        prove: as in `patch_model`.

    Raises:
        ModelNotSupportedError: isolation cannot be verified; the model is as it was before.
    """
    with unpatched_on_error(model):
        patch_model(model, prove=prove)
        if accelerator.mixed_precision == "no" or not has_local_weights(model):
            return
        with accelerator.autocast():
            report = check_isolation(model)
        if not report.isolated:
            raise ModelNotSupportedError(f"in {accelerator.mixed_precision} mixed precision: {report.reason}")


@contextmanager
def unpatched_on_error(model: nn.Module) -> Iterator[None]:
    """Unpatch a model that was patched within the block if the block raises."""
    was_patched = is_patched(inner_model(model))
    try:
        yield
    except Exception:
        if not was_patched and is_patched(inner_model(model)):
            unpatch_model(model)
        raise


def check_patched(model: nn.Module) -> None:
    """Raise PackingError for a model that is not patched."""
    inner = inner_model(model)
    if not is_patched(inner):
        raise PackingError(
            f"model: expected one that was patched by patch_model, {type(inner).__name__} is not, so its documents may "
            "attend to each other; prepare_dataloader(..., model=model) patches it, too"
        )
