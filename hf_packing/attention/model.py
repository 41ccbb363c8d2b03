"""Inspect a model.

The functions in this file find the model inside its wrappers, the arguments of the model's forward, the model's
embedding, and the place where the weights are stored.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import PreTrainedConfig, PreTrainedModel

from hf_packing.checks import refuse_older
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.upstream.accelerate import device_hook
from hf_packing.upstream.torch import is_compiled_itself, uncompiled

Inputs = Mapping[str, Any]
"""The arguments of a model's forward by name, or a batch."""

Arguments = dict[str, Any]
"""The arguments of a call by name."""

GATHERED = "ds_id"
"""Name of the attribute that DeepSpeed ZeRO-3 sets on a sharded parameter. DeepSpeed gathers such a parameter whenever
the parameter's module is called."""


def inner_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside the wrappers of PEFT, DDP and torch.compile.

    Raises:
        PackingError: `model` contains no transformers model, or uses a PEFT method that treats a packed row as a single
            document; or nn.DataParallel would split batches.
    """
    inner = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, nn.DataParallel):
            raise PackingError(
                "model: expected one process for each GPU, got nn.DataParallel, which would split batches; start the "
                "processes with `accelerate launch` or `torchrun`"
            )
        if hasattr(inner, "get_base_model"):
            refuse_older("peft")
            _check_peft_method(inner)
            inner = inner.get_base_model()
        elif isinstance(wrapped := uncompiled(inner) or getattr(inner, "module", None), nn.Module):
            inner = wrapped
        else:
            modules = inner.named_modules() if isinstance(inner, nn.Module) else ()
            name = next((name for name, each in modules if isinstance(each, PreTrainedModel)), None)
            of = f"; call patch_model of the one inside it, get_submodule({name!r})" if name else ""
            raise PackingError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}{of}")
    return inner


def _check_peft_method(peft_model: Any) -> None:
    config = peft_model.active_peft_config
    if getattr(config, "is_prompt_learning", False):
        raise PackingError(
            f"model: expected a PEFT method that adds no tokens, got {config.peft_type.value}; "
            "with this method, a packed row would get a single prompt for all of its documents. Padded rows would get "
            "theirs outside of the model that is patched, where the proof does not see them. Use another method, such "
            "as LoRA, or train without hf_packing"
        )
    for name, config in peft_model.peft_config.items():
        if invocation := getattr(config, "alora_invocation_tokens", None):
            raise PackingError(
                f"model: expected adapters without alora_invocation_tokens, but adapter {name!r} has {invocation}. In "
                "a packed row, the adapter would be active only after the last occurrence of the invocation tokens, "
                "and not in earlier documents"
            )


def configurations(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configurations of a model and of its modules, including nested configurations, without duplicates."""
    found = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def sees_media(model: nn.Module) -> bool:
    """Return whether a model or an inner model takes pictures or sound."""
    kinds = (each.input_modalities for each in model.modules() if isinstance(each, PreTrainedModel))
    return any({*([kind] if isinstance(kind, str) else kind)} != {"text"} for kind in kinds)


def tower_configurations(model: PreTrainedModel) -> set[int]:
    """Return the `id()` of each configuration of a model's towers, which are the inner models without the embedding of
    tokens in a model that takes pictures or sound. Configurations that other modules share are left out."""
    if not sees_media(model):
        return set()
    embedding = embedding_of(model).weight
    towers = [
        each for each in model.modules() if isinstance(each, PreTrainedModel) and embedding not in {*each.parameters()}
    ]
    inside = {module for tower in towers for module in tower.modules()}
    shared = {id(getattr(module, "config", None)) for module in model.modules() if module not in inside}
    return {id(config) for tower in towers for config in configurations(tower)} - shared


class Signature:
    """The arguments that a module's forward takes. If the forward takes *args and overrides a forward without *args,
    they are those of the overridden forward."""

    def __init__(self, module: nn.Module) -> None:
        self._where = type(module).__name__
        inherited = [vars(cls)["forward"].__get__(module) for cls in type(module).__mro__ if "forward" in vars(cls)]
        found = [[*inspect.signature(each).parameters.values()] for each in (module.forward, *inherited)]
        parameters = next((each for each in found if all(p.kind is not p.VAR_POSITIONAL for p in each)), found[0])
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes_types_from_buffer = self.takes("token_type_ids") and any(
            name.endswith("token_type_ids") for name, _ in module.named_buffers()
        )
        """True if the module, like BERT, reads token_type_ids from a buffer when no token_type_ids are passed. Such a
        buffer may be too short for a packed row, since it is only as long as the model's longest document."""

    def takes(self, name: str) -> bool:
        return self._takes_any or name in self.names

    def without_unknown(self, inputs: Arguments, names: Sequence[str]) -> Arguments:
        """Return the arguments without those of some names that the forward does not take."""
        return {name: value for name, value in inputs.items() if name not in names or self.takes(name)}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def by_name(self, args: Any, kwargs: Arguments) -> Arguments:
        """Return all arguments of a call, positional arguments included, as a dictionary of keyword arguments."""
        if len(args) > len(self.names):
            raise PackingError(
                f"forward: expected at most {len(self.names)} positional arguments, but {self._where} got {len(args)}"
            )
        return {**dict(zip(self.names, args, strict=False)), **kwargs}


def takes_argument(model: nn.Module, name: str) -> bool:
    """Return whether a model's forward takes an argument of this name. A forward with **kwargs takes every argument."""
    return Signature(model).takes(name)


def embedding_of(model: PreTrainedModel) -> Any:
    """Return the module that embeds the tokens of a model.

    Raises:
        ModelNotSupportedError: `get_input_embeddings` does not return a module with a weight.
    """
    with suppress(NotImplementedError):
        if isinstance(getattr(embedding := model.get_input_embeddings(), "weight", None), Tensor):
            return embedding
    raise ModelNotSupportedError(
        "model: expected get_input_embeddings() to return a module that has a weight and embeds input_ids, but "
        f"{type(model).__name__} returns no such module. Define get_input_embeddings in the model's class, as models "
        "in transformers do"
    )


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model expects its inputs. The result is the device on which the model's embedding
    runs, even if accelerate has offloaded the embedding's weight."""
    embedding = embedding_of(model)
    device: torch.device = embedding.weight.device
    hook = device_hook(embedding)
    return device if device.type != "meta" or hook is None else torch.device(hook.execution_device)


def has_vocabulary(model: PreTrainedModel) -> bool:
    """Return whether a model is a language model, with a head that predicts tokens."""
    with suppress(NotImplementedError):
        return model.get_output_embeddings() is not None
    return False


def backbones_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the inner models that PEFT or other libraries may call directly, the innermost first."""
    decoder = model.get_decoder()
    is_model = isinstance(decoder, nn.Module) and decoder is not model.get_output_embeddings()  # as in ModernBERT
    return [*([decoder] if is_model else []), model.base_model]


def pad_token_of(model: PreTrainedModel) -> int | None:
    token = getattr(model.config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else None


_LENGTHS = ((13, 7, 21), (13, 9, 21), (17, 7, 23), (13, 11, 29))
"""Candidates for the lengths of three documents, in tokens. The lengths in a triple differ, and exceed the usual kernel
sizes of convolutions. The sum of a triple is a prime number, since axes of tensors seldom have prime sizes."""


def _sizes_of(model: nn.Module) -> set[int]:
    """Return the axis sizes and the integer settings of a model."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    return sizes | {value for value in vars(model.config).values() if isinstance(value, int)}


def distinctive_lengths(model: nn.Module) -> list[int]:
    """Return three document lengths. Neither their sum nor, if possible, the largest of them is an axis size or an
    integer setting of the model."""
    sizes = _sizes_of(model)
    return [*min(_LENGTHS, key=lambda lengths: (sum(lengths) in sizes, max(lengths) in sizes))]


ALIGNED = 128
"""A number of tokens that layers in FP8, MXFP8 and NVFP4 take, which ask for a multiple of 16, 32 or 128."""


def distinctive_multiple(model: nn.Module) -> int:
    """Return an odd multiple of ALIGNED that is no axis size or integer setting of a model."""
    sizes = _sizes_of(model)
    return next(tokens for tokens in count(3 * ALIGNED, 2 * ALIGNED) if tokens not in sizes)


def weights_location(model: nn.Module) -> str:
    """Return the place where a model's weights are stored: "in memory", "on the meta device" or "sharded over
    processes", as by FSDP and DeepSpeed ZeRO-3. Weights that accelerate has offloaded count as being in memory, since
    accelerate loads them when they are needed."""
    for module in model.modules():
        if is_fsdp(module):
            return "sharded over processes"
        for parameter in module.parameters(recurse=False):
            if hasattr(parameter, GATHERED) or type(parameter).__name__ == "DTensor":
                return "sharded over processes"
            if parameter.is_meta and device_hook(module) is None:
                return "on the meta device"
    return "in memory"


def has_local_weights(model: nn.Module) -> bool:
    """Return whether this process has all weights of a model. The result is False if a weight is on the meta device, or
    sharded over processes."""
    return weights_location(model) == "in memory"


def is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, (FSDPModule, FullyShardedDataParallel))


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile has compiled a model, or a module of the model."""
    return any(map(compiles_forward, model.modules()))


def compiles_forward(module: nn.Module) -> bool:
    """Return whether torch.compile has compiled the forward of a module."""
    forward = vars(module).get("forward")
    return is_compiled_itself(module, forward, getattr(forward, "before", None))  # a patch may have replaced it


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of DDP and DeepSpeed, whose forwards expect a backward pass.

    FSDP's wrapper is kept, since the wrapper gathers weights.
    """
    inner: Any = getattr(model, "module", None)
    is_wrapper = not isinstance(model, PreTrainedModel) and not is_fsdp(model) and isinstance(inner, nn.Module)
    return without_ddp(inner) if is_wrapper else model


@contextmanager
def failing_on(part: str) -> Iterator[None]:
    """Context manager: if a module that gets a part of the batch at a time fails, the error says on which part.

    Raises:
        ModelNotSupportedError: the module has failed.
    """
    try:
        yield
    except (torch.OutOfMemoryError, PackingError):  # these say nothing about the part
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise ModelNotSupportedError(
            f"model: expected modules that can run on {part}, but one fails: {error}. Train the model on padded "
            "batches without hf_packing"
        ) from error
