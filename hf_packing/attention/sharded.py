"""Models whose weights are elsewhere: on the meta device, or spread over processes by FSDP or DeepSpeed ZeRO-3."""

from collections.abc import Sequence

import torch.distributed
from torch import nn

from hf_packing.attention.by_segment import Step
from hf_packing.errors import PackingError

GATHERED = "ds_id"
"""What DeepSpeed ZeRO-3 sets on a parameter that it gathers when a module is called."""

GATHERED_AT_ONCE = "_z3_leaf"
"""What it sets on a module whose parameters it gathers before all that is inside."""


def where_weights_are(model: nn.Module) -> str | None:
    """ "on the meta device" or "sharded over processes"; None for weights in memory, and for offloaded ones, which
    accelerate brings back."""
    for module in model.modules():
        if is_fsdp(module):
            return "sharded over processes"
        for parameter in module.parameters(recurse=False):
            if is_sharded(parameter):
                return "sharded over processes"
            if parameter.is_meta and not hasattr(module, "_hf_hook"):
                return "on the meta device"
    return None


def is_fsdp(module: nn.Module) -> bool:
    return any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(module).__mro__)


def is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, GATHERED) or type(parameter).__name__ == "DTensor"


def refuse_uneven_gathers(model: nn.Module, steps: Sequence[Step]) -> None:
    """Raise PackingError where processes would wait for each other for ever.

    A module inside one that runs by segment is called as often as the process has segments. Where its weights are
    gathered at every call, all processes have to call it equally often, and they have other segments each.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() < 2:
        return
    for step in steps:
        module = model.get_submodule(step.name)
        packed = step.packed_inside()
        for name, inner in module.named_modules():
            if not name or any(name == each or name.startswith(f"{each}.") for each in packed):
                continue
            where = f"{type(inner).__name__} ({step.name}.{name})"
            if is_fsdp(inner):
                raise PackingError(
                    f"model: expected FSDP around {step.kind}, which runs by segment, or further out; it is around "
                    f"{where} inside"
                )
            gathered = any(hasattr(parameter, GATHERED) for parameter in inner.parameters(recurse=False))
            if gathered and not is_gathered_at_once(model, step.name):
                raise PackingError(
                    f"model: expected DeepSpeed to gather {step.kind}, which runs by segment, at once; it gathers "
                    f"{where} at every call. Call deepspeed.utils.set_z3_leaf_modules(model, [{step.kind}])"
                )


def is_gathered_at_once(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return any(getattr(model.get_submodule(each), GATHERED_AT_ONCE, False) for each in outer)
