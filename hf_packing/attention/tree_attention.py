"""Compute attention in a row of trees, on a kernel where one can, or else exactly, path by path."""

from typing import Any

from torch import Tensor

from hf_packing.attention.choose_kernel import Kernel, choose_kernel
from hf_packing.attention.exact_tree_attention import attend_along_paths
from hf_packing.attention.layout import Layout
from hf_packing.errors import PackingError

ALONG_PATHS = "exact attention, path by path"
"""What `kernel_of` returns for attention that runs without a kernel in a row of trees."""


def attend_in_trees(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Layout,
    where: str,
    *,
    is_causal: bool,
    chunk: int | None = None,
    hub: str | None = None,
    **options: Any,
) -> tuple[Tensor, str]:
    """Compute attention in a row of trees; return the output and what computed it, as `kernel_of` reports it.

    Args:
        query, key, value, row, chunk: arguments of `attend_along_paths`.
        where: the class of the attention layer, for error messages.
        hub: the name of the layer's kernel from the hub, or None.
        is_causal: whether a token attends only to itself and to earlier tokens, as trees require.
        options: further keyword arguments of `attend_along_paths`: scale, window, softcap, sinks and dropout.

    Raises:
        PackingError: attention is not causal, or the tokens are not those of the row.
    """
    if not is_causal:
        raise PackingError(
            f"model: expected causal attention on a row of trees, but {where} attends to later tokens, so a shared "
            "prefix would depend on the documents that continue it"
        )
    if (query.shape[0], query.shape[2]) != (1, row.tokens):
        raise PackingError(
            f"{where}: expected the {row.tokens} tokens of the row of trees that the model currently processes, got "
            f"{query.shape[0]} rows of {query.shape[2]} tokens"
        )
    if (kernel := _kernel_for(query, key, value, hub=hub, **options)) is not None:
        return kernel.attend_in_trees(query, key, value, row, chunk=chunk, **options), kernel.name
    return attend_along_paths(query, key, value, row, chunk=chunk, **options), ALONG_PATHS


def _kernel_for(query: Tensor, key: Tensor, value: Tensor, *, scale: float, **options: Any) -> Kernel | None:  # noqa: ARG001
    """Return the CUDA kernel on which a call runs, or None."""
    return choose_kernel(query, key, value, is_causal=True, in_trees=True, **options) if query.is_cuda else None
