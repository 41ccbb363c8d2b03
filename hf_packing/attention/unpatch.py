"""Remove the patch that `patch_model` has installed in a model, for good or within a block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from hf_packing.attention.forward import install, remove
from hf_packing.attention.inspect_model import inner_model
from hf_packing.attention.patch import patch_model
from hf_packing.attention.route import Route, is_patched
from hf_packing.attention.snapshot import attention_of
from hf_packing.errors import PackingError

Model = TypeVar("Model", bound=nn.Module)


def unpatch_model(model: Model) -> AbstractContextManager[Model]:
    """Remove the patch that `patch_model` has installed, and restore the model to its state before the patch.

    Args:
        model: a patched model.

    Returns:
        A context manager, which may be ignored. If it is used in a `with` statement, the model is patched again at the
        end of the block.

    Raises:
        PackingError: the model is not patched.

    Example:
        >>> import hf_packing as hfp, torch, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> model = hfp.patch_model(model)
        >>> with hfp.unpatch_model(model):
        ...     model.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=2, max_new_tokens=2).shape
        torch.Size([1, 5])
    """
    inner = inner_model(model)
    if not is_patched(inner):
        raise PackingError(f"model: expected a model patched by patch_model, but {type(inner).__name__} is not patched")
    return _Unpatched(model, remove(inner))


@contextmanager
def patched(model: Model) -> Iterator[Model]:
    """Context manager: within the block, the model is patched by `patch_model`. After the block, the patch is removed,
    unless the model was already patched before the block.

    Example:
        >>> import hf_packing as hfp, transformers
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=99, **sizes))
        >>> with hfp.patched(model):
        ...     hfp.check_isolation(model).isolated
        True
    """
    inner = inner_model(model)
    if is_patched(inner):
        yield model
        return
    patch_model(model)
    try:
        yield model
    finally:
        if is_patched(inner):
            unpatch_model(model)


class _Unpatched(AbstractContextManager[Any]):
    """The context manager that `unpatch_model` returns. At the end of the block, the model is patched with the same
    route as before. The route is not proven again."""

    def __init__(self, model: nn.Module, route: Route) -> None:
        self.model = model
        self.route = route

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        inner = inner_model(self.model)
        if not is_patched(inner):
            install(inner, self.route, attention_of(inner))
