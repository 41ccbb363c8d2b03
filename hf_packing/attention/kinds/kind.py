"""What the forward of a patched model asks a kind of batch.

A kind reads its batches from the arguments of a model, refuses those that it cannot run, says in a `Layout` which keys
tokens see and how modules get whole documents, runs the forward, and has the case that proves isolation.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_packing.attention.batch_proof import BatchCase
from hf_packing.attention.layout import CACHES, Layout
from hf_packing.attention.model import Arguments, Inputs, has_local_weights
from hf_packing.errors import ModelNotSupportedError, PackingError

_Method = Callable[..., Any]

itself_uncompiled: Callable[[_Method], _Method] = torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
"""Decorator: torch.compile compiles what a function calls, but not the function."""

proving: ContextVar[bool] = ContextVar("proving", default=False)
"""Whether a proof runs, so that batches run whose kind is not proven yet."""


class Batch:
    """A batch of one kind. By default, it is a single row of segments.

    In the methods, `forward` is the `PatchedForward` that is called, and `inputs` are its arguments by name.
    """

    layout: Layout
    """The segments of the batch."""

    @property
    def has_padding(self) -> bool:
        return False

    @classmethod
    def read(cls, forward: Any, inputs: Inputs) -> "Batch | None":  # noqa: ARG003
        """Return the batch in the arguments of a model; None if it is of another kind.

        Raises:
            PackingError: the batch contradicts itself, or it is not proven that the model runs such batches.
        """
        return None

    @classmethod
    def case(cls, model: nn.Module, batch: Mapping[str, Any], training: bool) -> BatchCase | None:  # noqa: ARG003
        """Return the case that proves isolation on a training batch; None if the batch is of another kind."""
        return None

    @classmethod
    def install(cls, model: PreTrainedModel) -> None:
        """Install in a patched model what batches of this kind need, if they are proven."""

    def check(self, forward: Any, inputs: Inputs) -> None:
        """Raise PackingError if the model cannot run the batch with these arguments beside it."""

    def lay_end_to_end(self, value: Any) -> Any:
        """Return nested arguments for a single row without padding."""
        return value

    def run(self, forward: Any, inputs: Arguments) -> Any:
        """Run the forward, and return the output for the batch."""
        return forward.run_row(inputs, self.layout)

    def run_inner(self, forward: Any, args: Any, kwargs: Arguments) -> Any:
        """Run the forward of an inner model, which the forward of the model calls."""
        return forward.forward(*args, **forward.hiding_the_mask(kwargs))


ROW = Batch()
"""A single row, which does nothing with what a model passes to its inner models."""

current_batch: ContextVar[Batch] = ContextVar("current_batch")
"""The batch whose forward is running, which may do something with what the model passes to its inner models."""


def refuse_missing_weights(model: PreTrainedModel, kind: str, advice: str) -> None:
    """Raise ModelNotSupportedError if a proof would need weights that are not in memory."""
    if not has_local_weights(model):
        raise ModelNotSupportedError(
            f"{type(model).__name__}: {kind} were not proven while the weights were in memory; call {advice} before "
            "the model is sharded"
        )


def tokens_of(inputs: Inputs) -> Tensor:
    """Return input_ids, or a value of inputs_embeds for each token."""
    ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if isinstance(ids, Tensor):
        return ids
    if isinstance(embeddings, Tensor):
        return embeddings[..., 0]
    raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")


def refuse_earlier_tokens(inputs: Inputs) -> None:
    """Raise PackingError if all documents of a row would attend to the tokens of a cache or to states of an encoder."""
    for name in ("encoder_hidden_states", "use_cache", *CACHES):
        if (value := inputs.get(name)) is not None and value is not False:
            raise PackingError(
                f"{name}: expected no cache and no states of an encoder on a patched model, got "
                f"{value if isinstance(value, bool) else type(value).__name__}; to generate text, use model.generate, "
                "or rows of one document, without cu_seq_lens_q, seq_idx and seq_lengths, and in evaluation mode"
            )
