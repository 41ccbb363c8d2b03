"""Temporary changes to a model while a training batch is proven: no patch, few logits, embeddings that are leaves."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.inspect_model import embedding_of
from hf_packing.attention.route import PATCH
from hf_packing.attention.snapshot import attention_of, use_attention
from hf_packing.attention.tolerance import computation_dtype

_VOCABULARY_SAMPLE = 64
"""Number of vocabulary entries for which an output layer computes logits. The logits of all entries would need more
memory than the rest of the forward."""


@contextmanager
def unpatched(model: PreTrainedModel, attention: str | None) -> Iterator[None]:
    """Context manager: within the block, a patched model works as before the patch, which stays installed.

    Backward passes may use other threads than the block, so the patch itself is switched off and on again.
    """
    patch = getattr(model, PATCH, None)
    with nullcontext() if patch is None else patch.suspended(), use_attention(attention_of(model)):
        if attention is not None:
            model.set_attn_implementation(attention)
        yield


@contextmanager
def with_sampled_vocabulary(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within the block, the linear layers of the output layer compute only some logits.

    The output layer may consist of several linear layers, such as those of LoRA. All other modules run as usual. If the
    model adds a bias for each vocabulary entry itself, all logits are computed.
    """
    head, size = model.get_output_embeddings(), len(embedding_of(model).weight)
    linears = [
        module
        for module in (() if head is None else head.modules())
        if type(module).forward is nn.Linear.forward and "forward" not in vars(module) and module.out_features == size
    ]
    own = {id(module.bias) for module in linears}
    if any(tensor.numel() == size and id(tensor) not in own for tensor in (*model.parameters(), *model.buffers())):
        linears = []
    for module in linears:
        module.forward = _SampledLinear(module)
    try:
        yield
    finally:
        for module in linears:
            del module.forward


class _SampledLinear:
    """A replacement for the forward of a linear layer, which computes every n-th output only."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        step = max(1, len(weight) // _VOCABULARY_SAMPLE)
        return F.linear(hidden, weight[::step], None if bias is None else bias[::step])


class EmbeddingCut:
    """Makes the embedded tokens of a forward a leaf tensor, with respect to which gradients can be computed.

    The leaf is the output of the module that embeds the tokens. If this module runs segment by segment, the leaf is the
    output of the innermost module around it whose output has all tokens. All forwards are cut at the same module.

    Args:
        model: a model of transformers.
        requires_grad: whether the leaf requires gradients.
    """

    def __init__(self, model: PreTrainedModel, requires_grad: bool) -> None:
        self.dtypes: list[torch.dtype] = []
        """The dtype of the embedded tokens; empty before the first forward."""
        self._model = model
        self._requires_grad = requires_grad
        self._name = ""

    @contextmanager
    def active(self, shape: torch.Size, noisy_rows: slice | None = None) -> Iterator[list[Tensor]]:
        """Context manager: within the block, the embedded tokens of the next forward are a leaf tensor.

        Args:
            shape: numbers of rows and tokens in the forward.
            noisy_rows: rows in which every entry of the embedded tokens is changed by a rounding error.

        Yields:
            A list, to which the forward adds the leaf, float [rows, tokens, embedding size]. The list stays empty if no
            module returns a tensor of this shape.
        """
        leaves: list[Tensor] = []

        def cut_at(name: str) -> Any:
            def replace(_: nn.Module, __: Any, output: Any) -> Any:
                first = output[0] if isinstance(output, tuple) else output
                fits = isinstance(first, Tensor) and first.ndim == 3 and first.shape[:2].numel() == shape.numel()
                if leaves or not fits or self._name not in ("", name):
                    return None
                self._name, self.dtypes = name, [first.dtype]
                leaf = first.detach()
                if noisy_rows is not None:
                    leaf = _with_rounding_errors(leaf, noisy_rows, computation_dtype(self._model, leaf.device))
                leaves.append(leaf.requires_grad_(self._requires_grad))
                given = leaf.clone()  # a module may change its input in place
                return (given, *output[1:]) if isinstance(output, tuple) else given

            return replace

        hooks = [module.register_forward_hook(cut_at(name)) for name, module in _embedding_modules(self._model)]
        try:
            yield leaves
        finally:
            for hook in hooks:
                hook.remove()


def _embedding_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the module that embeds the tokens, and the modules that contain it, from the inside to the outside."""
    embedding = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), "")
    names = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
    return [(each, model.get_submodule(each)) for each in names if each]


def _with_rounding_errors(embedded: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return a copy of `embedded` in which every entry of some rows is multiplied by 1 + eps or 1 - eps at random."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(embedded.dtype).eps)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, embedded[rows].shape, generator=generator).to(embedded) * 2 - 1
    noisy = embedded.clone()
    noisy[rows] *= 1 + signs * eps
    return noisy
