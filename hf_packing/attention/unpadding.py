"""Run a patched model on padded batches, whose backbone gets the tokens without padding, and with caches.

All other modules of the model, such as its head, run on the padded batch, and so does the model's loss.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_packing.attention.by_segment import ReplacedForward
from hf_packing.attention.inspect_model import Signature, has_local_weights, has_vocabulary, pad_token_of
from hf_packing.attention.label_check import refuse_copied_labels
from hf_packing.attention.layout import CACHES, Layout, filled_cache, use_layout
from hf_packing.attention.loader_check import check_loader
from hf_packing.attention.padded_rows import (
    PaddedRows,
    Unpadding,
    has_axes_first,
    media_of,
    read_padded_rows,
    refuse_media,
    rows_without_padding,
    use_rows,
)
from hf_packing.attention.route import BORDER_ARGUMENTS, PATCH, READ_ARGUMENTS, Route
from hf_packing.attention.row_readers import RowReader, RowsInBackbone
from hf_packing.attention.shared_rows import SharedRows
from hf_packing.attention.snapshot import use_attention
from hf_packing.attention.token_axes import Path, leaves, map_leaves
from hf_packing.columns import PARENTS
from hf_packing.errors import ModelNotSupportedError, PackingError

PADDING_OR_CACHE = ("attention_mask", "use_cache", *CACHES)
"""Names of arguments that are missing in a call with packed rows and without a cache."""

_WHERE = {"right": "after", "left": "before", "both": "on both sides of"}


def needs_cache(inputs: Mapping[str, Any], training: bool) -> bool:
    """Return whether a call generates text, so that it runs as without the patch: whether it has a cache, or asks for
    one explicitly in evaluation mode, and has no borders between packed documents."""
    if any(inputs.get(name) is not None for name in BORDER_ARGUMENTS):
        return False
    if inputs.get("position_ids") is not None and inputs.get("attention_mask") is None and not filled_cache(inputs):
        return False
    return any(inputs.get(name) is not None for name in CACHES) or (bool(inputs.get("use_cache")) and not training)


class UnpaddedForward(ReplacedForward, ABC):
    """The part of a patched model's forward that runs calls other than those with packed rows and without a cache."""

    model: PreTrainedModel
    """The patched model."""
    patch: Any
    route: Route
    signature: Signature
    sees_media: bool
    """True if the model takes pictures or sound."""
    is_backbone = False
    """True if the module gets the tokens of padded batches without padding."""

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def run_unusual(self, inputs: dict[str, Any], rows: PaddedRows | None) -> Any:
        """Run the forward on a padded batch, with a cache, or on packed rows with a mask of ones. Within the forward of
        the patched model, `rows` are the places of the tokens in the batch that the model got."""
        if rows is None:
            if needs_cache(inputs, self.module.training):
                with self.patch.suspended():
                    return self.forward(**inputs)
            rows = self._read_rows(inputs)
        if rows is None:
            return self.run_packed(inputs)
        if not self.is_backbone:
            with self.running(), use_attention(self.patch.attention_before), use_layout(None), use_rows(rows):
                return self.forward(**self._taken(_with_pad_tokens(self.model, inputs, rows)))
        inputs = inputs_of_backbone(self.module, inputs, rows)
        assert self.patch.facts.unpadding is not None
        if self.patch.facts.unpadding.by_length:
            _refuse_sharded(self.model)
            with self.patch.suspended(), use_rows(None):
                return run_by_length(self.forward, self._taken(inputs), rows)
        with use_attention(self.patch.attention_during), use_rows(None):
            return rows.put_back(self._run_laid_end_to_end(rows.lay_end_to_end(inputs), rows.row))

    def _run_laid_end_to_end(self, inputs: dict[str, Any], row: Layout) -> Any:
        """Run the backbone on the rows of a padded batch, laid end to end. If the rows may share prefixes, these are
        computed once."""
        fewest = self.patch.facts.fewest_shared
        shared = None if fewest is None else SharedRows.find(inputs, row.lengths, fewest)
        if shared is None:
            return self.run_packed(inputs, row)
        return shared.give(self.run_packed(shared.take(inputs), shared.row))

    @abstractmethod
    def run_packed(self, inputs: dict[str, Any], row: Layout | None = None) -> Any:
        """Run the forward on packed rows, and return the output. If `row` is None, the borders are in the inputs."""

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Return a context manager: within the block, the model's forward is running."""

    @abstractmethod
    def check_patch(self, inputs: Mapping[str, Any]) -> None:
        """Raise PackingError if the model was changed after it was patched, and the patch would no longer work; or if a
        call asks for attention weights."""

    def _taken(self, inputs: dict[str, Any]) -> dict[str, Any]:
        takes = self.signature.takes
        return {name: value for name, value in inputs.items() if name not in READ_ARGUMENTS or takes(name)}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _read_rows(self, inputs: dict[str, Any]) -> PaddedRows | None:
        """Return the places of the tokens in a padded batch, or None for packed rows. Prove before that the model
        supports padded batches."""
        self.check_patch(inputs)
        if media := self.sees_media and media_of(inputs):
            self._check_rows_with_media(inputs, media[0])
        if (rows := read_padded_rows(inputs)) is None:
            if not media and (self.patch.facts.takes_packed_rows or self.module is not self.model):
                return None
            borders = (*BORDER_ARGUMENTS, *(["position_ids"] if inputs.get("attention_mask") is None else []))
            if not media and any(inputs.get(name) is not None for name in borders):
                raise PackingError(
                    "model: expected a padded batch with an attention_mask, got packed rows; "
                    f"{type(self.model).__name__} returns outputs for whole rows, not for the documents in a row. Its "
                    "backbone gets the tokens of a padded batch without padding"
                )
            rows = rows_without_padding(inputs)
        check_loader(self.model, rows.row, inputs.get("labels"))
        if self.patch.facts.unpadding is None:
            self.patch.prove_unpadding(self.model)
        _check_rows(self.model, rows, inputs, self.route)
        return rows

    def _check_rows_with_media(self, inputs: Mapping[str, Any], name: str) -> None:
        """Raise PackingError if the rows of a batch with pictures or sound may be packed rows. `name` is the argument
        that has the pictures or the sound."""
        given = next((each for each in (*BORDER_ARGUMENTS, PARENTS) if inputs.get(each) is not None), None)
        if given is not None:
            raise PackingError(
                f"{given}: expected no borders between documents beside {name}, since a row with pictures or sound has "
                "to be one document; pass a padded batch with an attention_mask"
            )
        if self.module.training and all(inputs.get(each) is None for each in ("attention_mask", "position_ids")):
            raise PackingError(
                f"attention_mask: expected an attention_mask or position_ids beside {name} in training mode, got "
                "neither, so it is not known whether each row is one document; pass a mask of ones if it is"
            )


def _check_rows(model: Any, rows: PaddedRows, inputs: Mapping[str, Any], route: Route) -> None:
    """Raise an error if the padding of a batch is where the model reads it, or if the labels repeat the input.

    Raises:
        ModelNotSupportedError: it was not proven that the model ignores padding in these places.
        PackingError: the model is trained to copy its input (see `refuse_copied_labels`).
    """
    assert route.facts.unpadding is not None
    decoder = next((name for name, value in inputs.items() if name.startswith("decoder_") and value is not None), "")
    if decoder or (model.config.is_encoder_decoder and has_vocabulary(model)):
        raise PackingError(
            f"{decoder or 'model'}: expected a padded batch of one text for each row, but {type(model).__name__} takes "
            "two texts, an encoder's and a decoder's; call unpatch_model"
        )
    takes_embeddings = route.facts.takes_packed_rows or route.facts.unpadding.takes_embeddings
    if inputs.get("input_ids") is None and not takes_embeddings and min(rows.lengths) < rows.kept.shape[1]:
        raise PackingError(
            f"inputs_embeds: expected input_ids in a padded batch, since {type(model).__name__} may find the padding "
            "by its token, got inputs_embeds"
        )
    if reason := dict(route.facts.unpadding.refused).get(rows.side):
        raise ModelNotSupportedError(
            f"{type(model).__name__}: padding {_WHERE[rows.side]} the tokens is not supported, since {reason}"
        )
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if not route.facts.sees_labels or not model.training or ids is None or not isinstance(labels, Tensor):
        return
    if labels.shape == ids.shape == rows.kept.shape:
        ids, labels = rows.lay_end_to_end([ids, labels])
        refuse_copied_labels(model, ids, labels, rows.row.cu_seq_lens)


def _with_pad_tokens(model: PreTrainedModel, inputs: dict[str, Any], rows: PaddedRows) -> dict[str, Any]:
    """Return the arguments with the model's own pad token in padding, by which classifiers find the last token."""
    ids, pad = inputs.get("input_ids"), pad_token_of(model)
    if ids is None or pad is None or ids.numel() != rows.kept.numel():
        return inputs
    return {**inputs, "input_ids": ids.masked_fill(~rows.kept.view(ids.shape), pad)}


def inputs_of_backbone(backbone: nn.Module, inputs: Mapping[str, Any], rows: PaddedRows) -> dict[str, Any]:
    """Return the arguments of a backbone's forward for a padded batch, without caches and without attention_mask.

    Position ids that only the model itself has made are left out, since they may count padding.

    Raises:
        PackingError: the backbone does not get the tokens of the padded batch; or encoder_hidden_states are given.
        ModelNotSupportedError: the model makes masks of its own for pictures, or the backbone gets pictures.
    """
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor) or tokens.shape[:2] != rows.kept.shape:
        found = list(tokens.shape[:2]) if isinstance(tokens, Tensor) else "no tokens"
        raise PackingError(
            f"attention_mask: expected a mask for all tokens of {type(backbone).__name__}, got a mask of shape "
            f"{list(rows.kept.shape)} for {found}"
        )
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == rows.kept.shape and not torch.equal(mask != 0, rows.kept):
        raise PackingError(
            f"attention_mask: expected the same mask for {type(backbone).__name__} as for the whole model, which has "
            "changed it; call unpatch_model"
        )
    refuse_media(type(backbone).__name__, inputs, rows)
    if inputs.get("encoder_hidden_states") is not None:
        raise PackingError("encoder_hidden_states: expected None on a patched model, got encoder states")
    left_out = set(PADDING_OR_CACHE)
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2:
        if rows.has_positions:
            inputs = {**inputs, "position_ids": positions.expand(rows.kept.shape)}
        else:
            left_out.add("position_ids")
    return {name: value for name, value in inputs.items() if name not in left_out}


def _refuse_sharded(model: nn.Module) -> None:
    """Raise ModelNotSupportedError if the weights of a model whose backbone runs by length are sharded. Processes would
    call the backbone a different number of times, and wait for each other forever."""
    if not has_local_weights(model):
        raise ModelNotSupportedError(
            f"{type(model).__name__}: expected all weights on every process, but they are sharded; the backbone of "
            "this model runs once for each length of document, so processes would wait for each other forever"
        )


def run_by_length(forward: Callable[..., Any], inputs: Mapping[str, Any], rows: PaddedRows) -> Any:
    """Call a forward once for all rows with the same number of tokens, without padding, and return its output for the
    padded batch, with zeros in padding.

    Args:
        forward: forward of a module that takes no packed rows.
        inputs: the arguments, for a padded batch.
        rows: the places of the tokens in the batch.
    """
    shape, lengths = rows.kept.shape, rows.lengths
    found: dict[Path, list[tuple[Tensor, Tensor, Tensor]]] = {}
    output: Any = None
    for length in sorted(set(lengths) - {0}):
        numbers = torch.tensor([number for number, other in enumerate(lengths) if other == length])
        numbers = numbers.to(rows.kept.device)
        places = rows.kept[numbers].nonzero()[:, 1].view(len(numbers), length)
        at = numbers[:, None], places

        def cut(path: Path, leaf: Any, at: tuple[Tensor, Tensor] = at) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if has_axes_first(path, leaf, shape):
                return leaf[:, at[0], at[1]]
            return leaf[at] if leaf.shape[:2] == shape else leaf

        output = _without_caches(forward(**map_leaves(dict(inputs), cut)))
        for path, leaf in leaves(output):
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == len(numbers):
                found.setdefault(path, []).append((numbers, places, leaf))
            elif isinstance(leaf, Tensor) and leaf.is_floating_point():
                raise ModelNotSupportedError(
                    f"its backbone computes a tensor of shape {list(leaf.shape)} from all rows of a batch, and would "
                    "run on the rows of each length separately"
                )
    whole = {path: _join_groups(parts, shape) for path, parts in found.items()}
    return map_leaves(output, lambda path, leaf: whole.get(path, leaf))


def _without_caches(output: Any) -> Any:
    if not isinstance(output, ModelOutput):
        return output
    return type(output)(**{name: value for name, value in output.items() if name not in CACHES})


def _join_groups(parts: list[tuple[Tensor, Tensor, Tensor]], shape: torch.Size) -> Tensor:
    """Join the outputs of groups of rows, and return an output for all rows, with zeros in padding.

    Args:
        parts: for each group, the numbers of its rows, the places of their tokens, and its output.
        shape: numbers of rows and of tokens in the padded batch.
    """
    first = parts[0][2]
    may_have_tokens = first.ndim > 2 or len(parts) > 1  # otherwise, its size may be that of a pooled state
    if may_have_tokens and all(leaf.shape[1:2] == places.shape[1:] for _, places, leaf in parts):
        whole = first.new_zeros(*shape, *first.shape[2:])
        for numbers, places, leaf in parts:
            whole = whole.index_put((numbers[:, None], places), leaf)
        return whole
    if first.ndim > 2:  # an axis of tokens that were pooled, as in Funnel, whose first one stays the first
        longest = max(leaf.shape[1] for _, _, leaf in parts)
        after = [0, 0] * (first.ndim - 2)
        parts = [(rows, at, F.pad(leaf, [*after, 0, longest - leaf.shape[1]])) for rows, at, leaf in parts]
    whole = first.new_zeros(shape[0], *parts[0][2].shape[1:])
    for numbers, _, leaf in parts:
        whole = whole.index_copy(0, numbers, leaf)
    return whole


def install_unpadding(model: PreTrainedModel, unpadding: Unpadding | None) -> None:
    """Set the way in which a patched model runs padded batches, instead of the way that was set before."""
    patch: Any = getattr(model, PATCH)
    for forward in [each for each in patch.replaced if isinstance(each, (RowReader, RowsInBackbone))]:
        patch.replaced.remove(forward)
        forward.remove()
    patch.facts.unpadding = unpadding
    for forward in patch.replaced:
        if isinstance(forward, UnpaddedForward):
            forward.is_backbone = unpadding is not None and forward.module is model.get_submodule(unpadding.backbone)
    if unpadding is None:
        return
    for name, sharing in unpadding.readers:
        patch.replace(RowReader(model.get_submodule(name), sharing))
    if unpadding.rows_after is not None:
        patch.replace(RowsInBackbone(model.get_submodule(unpadding.rows_after)))


def check_readers(model: PreTrainedModel, unpadding: Unpadding) -> None:
    """Raise PackingError if a module that gets every document in a row of its own was replaced."""
    for name in (*(name for name, _ in unpadding.readers), *([unpadding.rows_after] if unpadding.rows_after else [])):
        modules = model.get_submodule(name).modules()
        if not any(isinstance(vars(each).get("forward"), (RowReader, RowsInBackbone)) for each in modules):
            raise PackingError(
                f"{name}: expected the same module as when the model was patched, got another "
                f"{type(model.get_submodule(name)).__name__}; call unpatch_model before you replace a module, and "
                "patch_model afterwards"
            )


@dataclass(eq=False)
class StockGenerate:
    """A replacement for the method `generate` of a patched model. While it runs, the model runs as without the patch.

    Args:
        model: the patched model.
        before: the method that other code had already set on the model object; None if there is none.
    """

    model: nn.Module
    before: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        patch = getattr(self.model, PATCH, None)
        with nullcontext() if patch is None else patch.suspended():
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]
