"""Refuse sharded models in which processes would gather weights a different number of times, and wait forever."""

from collections.abc import Sequence

import torch.distributed
from torch import nn

from hf_packing.attention.by_segment import ModulePlan
from hf_packing.attention.inspect_model import GATHERED, is_fsdp
from hf_packing.errors import PackingError

_GATHERED_AT_ONCE = "_z3_leaf"
"""Name of the attribute that DeepSpeed ZeRO-3 sets on a module if DeepSpeed gathers all parameters of the module,
including the parameters of inner modules, at once."""


def refuse_uneven_gathers(model: nn.Module, plans: Sequence[ModulePlan]) -> None:
    """Raise PackingError if processes of a distributed training run would wait for each other forever.

    The inner modules of a module that runs segment by segment are called more often for some packed rows than for
    others, so the number of calls may differ between processes. But if FSDP or DeepSpeed gathers the weights of an
    inner module at every call, all processes have to make the same number of calls.

    Args:
        model: the patched model, sharded or not.
        plans: a `ModulePlan` for each module that runs segment by segment.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() < 2:
        return
    for plan in plans:
        module = model.get_submodule(plan.name)
        packed = plan.packed_modules()
        for name, inner in module.named_modules():
            if not name or any(name == each or name.startswith(f"{each}.") for each in packed):
                continue
            where = f"{type(inner).__name__} ({plan.name}.{name})"
            if is_fsdp(inner):
                raise PackingError(
                    f"model: expected FSDP to wrap no module inside {plan.kind}, but FSDP wraps {where}. {plan.kind} "
                    "runs segment by segment, so processes would call the wrapped module a different number of times, "
                    f"and wait for each other forever. Wrap {plan.kind} itself, or a module that contains {plan.kind}"
                )
            gathered = any(hasattr(parameter, GATHERED) for parameter in inner.parameters(recurse=False))
            if gathered and not _is_gathered_at_once(model, plan.name):
                raise PackingError(
                    f"model: expected DeepSpeed to gather all weights of {plan.kind} at once, but DeepSpeed gathers "
                    f"the weights of {where} at every call. {plan.kind} runs segment by segment, so processes would "
                    "make a different number of calls, and wait for each other forever. Call "
                    f"deepspeed.utils.set_z3_leaf_modules(model, [{plan.kind}])"
                )


def _is_gathered_at_once(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    outer = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return any(getattr(model.get_submodule(each), _GATHERED_AT_ONCE, False) for each in outer)
