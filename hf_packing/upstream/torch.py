"""What is private in torch, or differs between its versions: parts of modules, hooks, and marks for torch.compile."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._pytree import tree_leaves, tree_map

try:
    from torch.fx.experimental.sym_node import DynamicInt
except ImportError:  # torch 2.9, where an int of any other class is compiled anew for each value
    DynamicInt = int  # type: ignore[assignment,misc]

__all__ = ["Dropout", "DynamicInt", "PlainTensors", "tree_leaves", "tree_map"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module with the hooks that may run in a proof. Without them, hooks of users would run in proofs."""

CHANGED_IN_PLACE = (
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""Attributes of a module that are dictionaries, and that a forward may change in place, as transformers adds hooks when
a caller requests hidden states. Without them, proofs would leave something behind."""

PARAMETERS = "_parameters"
"""The attribute of a module with its own parameters."""

WITHOUT_VALUES = ("_base", "_backward_hooks", "_is_view")
"""Attributes and methods of a tensor that torch reads, and that need no values."""


def global_hooks() -> dict[str, Any]:
    """Return the hooks of all modules together, by the names of `HOOKS`."""
    return {name: vars(nn.modules.module)["_global" + name] for name in HOOKS}


def parts_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules directly inside a module, by name: the dictionary itself.

    Without it, modules that are put in after the patch would read other documents in silence.
    """
    return module._modules


def backward_hooks(of: Any) -> list[Any]:
    """Return the backward hooks of a module or a tensor. Without them, they would see gradients of parts of a row."""
    return [*(of._backward_hooks or {}).values(), *(getattr(of, "_backward_pre_hooks", None) or {}).values()]


def gradient_hooks(parameter: Tensor) -> list[dict[int, Any]]:
    """Return the dictionaries of a parameter's hooks on its gradient. Without them, optimizers would step in proofs."""
    return [each for each in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if each]


def uncompiled(module: Any) -> Any:
    """Return the module inside the wrapper of torch.compile; None if there is none."""
    return getattr(module, "_orig_mod", None)


def is_compiled_itself(module: nn.Module, *forwards: Any) -> bool:
    """Return whether torch.compile has wrapped a module, or compiled its calls or one of some forwards.

    Without it, proofs would compile a model again for each of their shapes.
    """
    compiled = any(hasattr(each, "_torchdynamo_orig_callable") for each in forwards)
    return compiled or uncompiled(module) is not None or module._compiled_call_impl is not None


def inside_fsdp(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of the first version of FSDP; the module itself if it is none.

    Without it, backward passes with checkpointing would run layers again without the borders of their documents.
    """
    return module._modules.get("_fsdp_wrapped_module") or module


def subclassed(kind: type[Tensor], values: Tensor) -> Tensor:
    """Return a tensor of a subclass, with the storage of another one."""
    return Tensor._make_subclass(kind, values)


def mark_static(tensor: Tensor) -> None:
    """Tell torch.compile that the sizes of a tensor never change. Without it, masks would be compiled for each row."""
    torch._dynamo.mark_static(tensor)


def mark_changing(tensor: Tensor, axes: list[int]) -> None:
    """Tell torch.compile that sizes of a tensor change. Without it, a model would be compiled for its first batch."""
    torch._dynamo.maybe_mark_dynamic(tensor, axes)


def trace_only_inside(function: Any) -> None:
    """Let torch.compile trace a function only where it is called from traced code."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def timeout_of(group: Any) -> timedelta | None:
    """Return the time-out of a process group; None if its backend has none. Without it, blocks of ranks would wait for
    as long as torch decides."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)
