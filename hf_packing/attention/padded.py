"""Take the tokens out of a padded batch, lay them end to end, and put the outputs back where the tokens were.

Rows may share prefixes, such as the prompt of a pair of answers, which then run once. A backbone that takes no packed
rows runs on the rows of equal length together. Reading a batch waits for the device once.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_packing.attention.layout import (
    CACHES,
    Layout,
    on_device,
    refuse_earlier_tokens,
    tokens_of,
)
from hf_packing.attention.model import Arguments, Inputs, failing_on, pad_token_of
from hf_packing.attention.token_axes import Path, leaves, map_tensors
from hf_packing.columns import CU_SEQ_LENS, PARENTS, SEQ_IDX, SEQ_LENGTHS
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.planning.lengths import BoolArray
from hf_packing.trees.find import BatchTrees, find_in_batch

Side = Literal["right", "left", "both"]
"""Where the padding of a batch is: after the tokens of every row, before the tokens of every row, or elsewhere, such as
before the tokens of one row and after the tokens of another row."""

SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class Unpadding:
    """The way in which a patched model runs padded batches. The backbone gets the tokens without padding as a packed
    row, and its outputs are put back where the tokens were. All other modules run on the padded batch.

    Args:
        backbone: name of the backbone; an empty string for the model itself.
        rows_after: name of a module in the backbone, after which poolers get every document in a row of its own.
        to: the side to which the padding of the batch is moved first, for a head that reads the first or the last place
            of a row; None if it stays where it is.
        by_length: whether the backbone, which takes no packed rows, runs on the rows of equal length together.
    """

    backbone: str
    rows_after: str | None = None
    to: Side | None = None
    by_length: bool = False

    def describe(self) -> str:
        """Return a description in one line."""
        return "rows of equal length run together" if self.by_length else "its tokens run as one packed row"


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """The places of the tokens in a padded batch. Every row has the tokens of one document, or no tokens.

    Args:
        real: True for every token that is not padding, bool [rows, tokens].
        device: where the batch is.
        side: where the padding is.
        has_positions: whether the caller of the model has passed position_ids.
        media: names of the caller's arguments with pictures or sound.
        shared: the trees of the rows, if they share prefixes.
    """

    real: BoolArray
    device: torch.device
    side: Side = "right"
    has_positions: bool = False
    media: tuple[str, ...] = ()
    shared: BatchTrees | None = None

    @classmethod
    def of(cls, layout: Layout) -> "PaddedRows":
        """Return rows that have the tokens of one segment each, with padding on the right."""
        return cls(np.arange(layout.longest) < np.array(layout.lengths)[:, None], layout.cu_seq_lens.device)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each row that are not padding."""
        return tuple(self.real.sum(1).tolist())

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers of rows and of tokens in each row, with padding."""
        return self.real.shape

    @property
    def has_padding(self) -> bool:
        return not self.real.all()

    @cached_property
    def kept(self) -> Tensor:
        """True for every token that is not padding, bool [rows, tokens]."""
        return on_device(self.real, self.device)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the row that `lay_end_to_end` makes."""
        if self.shared is not None:
            return Layout.of(self.shared.trees, self.device)
        return Layout.of([length for length in self.lengths if length], self.device, is_unpadded=True)

    @cached_property
    def _places(self) -> Tensor:
        """The index of each token in the flattened batch, int64 [tokens]."""
        return on_device(np.flatnonzero(self.real), self.device)

    def take(self, value: Any, places: Tensor) -> Any:
        """Return nested arguments, with every tensor of shape [rows, tokens, ...] replaced by its values at some places
        of the flattened batch, [*places.shape, ...]. The same is done to position ids of shape [axes, rows, tokens],
        and to all places of rows of several choices, [rows, choices, tokens, ...]."""

        def take(path: Path, leaf: Tensor) -> Tensor:
            if has_axes_first(path, leaf, self.shape):
                return leaf.flatten(1)[:, places]
            if leaf.shape == (1, self.shape[1]):  # the same for all rows
                leaf = leaf.expand(self.shape)
            if leaf.shape[:2] == self.shape:
                return leaf.flatten(0, 1)[places]
            if leaf.ndim > 2 and leaf.flatten(0, 1).shape[:2] == self.shape and places.shape == self.shape:
                return leaf.flatten(0, 2)[places].view_as(leaf)  # several choices in each row
            return leaf

        return map_tensors(value, take)

    def lay_end_to_end(self, value: Any) -> Any:
        """Return nested arguments, with every tensor of shape [rows, tokens, ...] replaced by a tensor of shape
        [1, tokens without padding, ...]."""
        places = self._places if self.shared is None else self._places[on_device(self.shared.taken, self.device)]
        return self.take(value, places[None])

    def put_back(self, value: Any) -> Any:
        """Return the outputs of the row in the shapes that they have for the padded batch, with zeros in padding.

        The result has [rows, tokens, ...] instead of [1, tokens without padding, ...], [rows * tokens, ...] instead of
        [tokens without padding, ...], and [rows, ...] instead of [documents, ...].
        """
        tokens, documents, longest = self.layout.tokens, len(self.layout.lengths), self.layout.longest

        def put(path: Path, leaf: Tensor) -> Tensor:
            if leaf.ndim < 2:
                return leaf
            if leaf.ndim > 2 and leaf.shape[:2] == (1, tokens):
                return self.spread(leaf[0])
            if leaf.ndim > 2 and leaf.shape[:2] == (documents, longest):  # RowsInBackbone has made rows
                return self.spread(leaf.flatten(0, 1)[PaddedRows.of(self.layout)._places])
            if len(leaf) == documents and path[:1] != ("router_logits",):
                places = on_device(np.flatnonzero(self.lengths), leaf.device)
                return leaf.new_zeros(self.shape[0], *leaf.shape[1:]).index_copy(0, places, leaf)
            return self.spread(leaf).flatten(0, 1) if len(leaf) == tokens else leaf

        return map_tensors(value, put)

    def spread(self, values: Tensor) -> Tensor:
        """Return values of the row, [tokens, ...], as [rows, tokens, ...], with zeros in padding."""
        if self.shared is not None:
            values = values[on_device(self.shared.given, values.device)]
        if self.has_padding:
            values = values.new_zeros(self.real.size, *values.shape[1:]).index_copy(0, self._places, values)
        return values.view(*self.shape, *values.shape[1:])

    def with_padding_on(self, side: Side) -> "PaddedRows":
        """Return the places of the tokens after all padding was moved to one side."""
        # what is sorted begins with what is False
        real = ~np.sort(~self.real, axis=1) if side == "right" else np.sort(self.real, axis=1)
        return replace(self, real=real, side=side)

    def move(self, value: Any, moved: "PaddedRows") -> Any:
        """Return nested tensors of shape [rows, tokens, ...] in which tokens have moved to their places in `moved`."""
        rows, tokens = self.shape
        steps = self.real.argmax(1) - moved.real.argmax(1)
        columns = (np.arange(tokens) + steps[:, None]) % tokens
        return self.take(value, on_device(np.arange(rows)[:, None] * tokens + columns, self.device))

    def sharing_prefixes(self, inputs: Inputs, fewest: int) -> "PaddedRows":
        """Return the rows as trees, if they share prefixes. They share none if a backbone gets labels, or anything for
        each token but integers, such as embeddings.

        Args:
            inputs: the arguments of the backbone for the padded batch.
            fewest: the fewest tokens that rows share.
        """
        values = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.ndim}
        known = all(each.shape == self.shape and not each.is_floating_point() for each in values.values())
        if not known or "input_ids" not in values or "labels" in values:
            return self
        tokens = {name: each.cpu().numpy()[self.real] for name, each in values.items()}
        found = find_in_batch(tokens.pop("input_ids"), tokens, self.layout.lengths, fewest)
        return replace(self, shared=found) if found.trees.tokens < self.layout.tokens else self


def has_axes_first(path: Path, leaf: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether an argument has position_ids of shape [axes, rows, tokens], as models that see images have."""
    return path[-1:] == ("position_ids",) and leaf.shape[1:] == shape


current_rows: ContextVar[PaddedRows | None] = ContextVar("current_rows", default=None)
"""The padded batch that a patched model's forward is processing outside of its backbone; None if no such forward is
running."""


def read_padded_rows(inputs: Inputs, are_documents: bool = False) -> PaddedRows | None:
    """Read the places of the tokens from the attention_mask in a model's inputs.

    Args:
        inputs: keyword arguments of a model's forward.
        are_documents: whether every row is one document, also without an attention_mask.

    Returns:
        None if the inputs are packed rows: unless `are_documents`, if there is no attention_mask, or if there are
        borders between documents and attention_mask is all ones.

    Raises:
        PackingError: attention_mask is not a mask of ones and zeros for the tokens of each row; it hides all tokens of
            the batch, or tokens between other tokens; there are borders between documents beside padding, or if
            `are_documents`; or the position_ids do not rise by 1 from token to token.
    """
    mask, position_ids, tokens = inputs.get("attention_mask"), inputs.get("position_ids"), tokens_of(inputs)
    if mask is None and not are_documents:
        return None
    real = np.ones(tokens.flatten(0, -2).shape, np.bool_) if mask is None else _real(mask, tokens)
    has_positions = isinstance(position_ids, Tensor) and position_ids.ndim == 2  # others are those of pictures
    borders = next((name for name in _BORDERS if inputs.get(name) is not None), None)
    if (has_positions or borders) and real.all() and not are_documents:
        return None
    if borders is not None:
        raise PackingError(
            f"{borders}: expected no borders between documents beside an attention_mask with padding, beside pictures "
            "or sound, or for a model that returns outputs for whole rows"
        )
    if not real.any():
        raise PackingError("attention_mask: expected at least one token in a batch, got a mask of zeros")
    if (torn := np.diff(real, axis=1, prepend=False).sum(1) > 2).any():  # more than one begin and one end
        raise PackingError(
            f"attention_mask: expected no padding between the tokens of a row, got some in row {torn.argmax()}; move "
            "its padding to one side"
        )
    filled = real[real.any(1)]
    side: Side = "right" if filled[:, 0].all() else "left" if filled[:, -1].all() else "both"
    if position_ids is not None and _restart(position_ids, real):
        raise PackingError(
            "position_ids: expected positions that rise by 1 from token to token beside an attention_mask with "
            "padding, or beside pictures or sound, got positions that restart; pass packed rows of texts without "
            "padding, and without an attention_mask"
        )
    return PaddedRows(real, tokens.device, side, position_ids is not None, media_of(inputs))


def packed_rows(inputs: Inputs) -> PaddedRows | None:
    """Return the places of the tokens in several packed rows, which run as a single one; None for a single row.

    Raises:
        PackingError: the model would return the logits of some tokens only.
    """
    tokens = tokens_of(inputs)
    if len(tokens) == 1:
        return None
    if isinstance(keep := inputs.get("logits_to_keep"), Tensor) or keep:
        raise PackingError(
            "logits_to_keep: expected None or 0 for several packed rows, since a patched model runs the rows as a "
            f"single row; got {keep}"
        )
    return PaddedRows(np.ones(tokens.shape, np.bool_), tokens.device)


_BORDERS = (*CU_SEQ_LENS, SEQ_IDX, SEQ_LENGTHS, PARENTS)


def _real(mask: Any, tokens: Tensor) -> BoolArray:
    """Return which tokens an attention_mask does not hide, bool [rows, tokens]. This waits for the device."""
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape or mask.is_floating_point():
        shown = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise PackingError(
            f"attention_mask: expected integers of shape {list(tokens.shape)} on a patched model, 1 for tokens and 0 "
            f"for padding, got {shown}; call unpatch_model to use other masks"
        )
    given = mask.flatten(0, -2).cpu().numpy()
    real: BoolArray = given != 0
    if (given != real).any():
        raise PackingError(
            "attention_mask: expected only 1 for tokens and 0 for padding on a patched model, got other values; pass "
            "the borders between packed documents as position_ids or seq_idx"
        )
    return real


def _restart(position_ids: Tensor, real: BoolArray) -> bool:
    """Return whether position ids do not rise from one token of a row to the next."""
    # of pictures, whose places share positions, the first axis is that of time; or, of four axes, that of the text
    has_axes = position_ids.ndim == 3
    step = np.diff((position_ids[0] if has_axes else position_ids).expand(real.shape).cpu().numpy())
    rises = step >= 0 if has_axes and len(position_ids) < 4 else step == 1
    return not rises[real[:, 1:] & real[:, :-1]].all()


def may_be_packed(inputs: Inputs) -> bool:
    """Return whether position_ids or numbers in an attention_mask say that rows beside a cache have several documents.
    The mask also has the tokens of the cache, which come first."""
    mask, position_ids, tokens = inputs.get("attention_mask"), inputs.get("position_ids"), tokens_of(inputs)
    if tokens.shape[-1] == 1:  # most calls of a loop that generates text, which need not wait for the device
        return False
    real = np.ones(tokens.shape, np.bool_)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # for each pair of tokens
            return False
        if (mask > 1).any():
            return True
        real = mask[:, -tokens.shape[-1] :].cpu().numpy() != 0
    return position_ids is not None and _restart(position_ids, real)


def media_of(inputs: Inputs) -> tuple[str, ...]:
    """Return the names of a model's arguments that have pictures or sound: floats that are neither embeddings, labels,
    numbers for whole rows, nor one number for each token."""
    shape = tokens_of(inputs).shape
    return tuple(
        name
        for name, each in inputs.items()
        if isinstance(each, Tensor) and each.is_floating_point() and name not in ("inputs_embeds", "labels")
        if each.ndim > 1 and each.shape != shape
    )


def with_pad_tokens(model: PreTrainedModel, inputs: Arguments, rows: PaddedRows) -> Arguments:
    """Return the arguments with the model's own pad token in padding, by which classifiers find the last token."""
    ids, pad = inputs.get("input_ids"), pad_token_of(model)
    if ids is None or pad is None:
        return inputs
    return {**inputs, "input_ids": ids.masked_fill(~rows.kept.view(ids.shape), pad)}


def inputs_of_backbone(backbone: nn.Module, inputs: Inputs, rows: PaddedRows) -> Arguments:
    """Return the arguments of a backbone's forward for a padded batch, without caches and without attention_mask.

    Position ids that only the model itself has made are left out, since they may count padding.

    Raises:
        PackingError: the backbone does not get the tokens of the padded batch; or encoder_hidden_states are given.
        ModelNotSupportedError: the batch has pictures or sound, and the backbone gets more of them than embeddings of
            tokens: attention masks, or floats that have no axes of rows and tokens.
    """
    mask, positions, kind = inputs.get("attention_mask"), inputs.get("position_ids"), type(backbone).__name__
    is_other = isinstance(mask, Tensor) and mask.shape == rows.shape and not torch.equal(mask != 0, rows.kept)
    if is_other or tokens_of(inputs).shape != rows.shape:
        raise PackingError(
            f"attention_mask: expected the same mask for {kind} as for the whole model, which has changed it, or the "
            "tokens; call unpatch_model"
        )
    for path, leaf in leaves(dict(inputs)) if rows.media else ():
        if _is_of_media(path, leaf, rows):
            raise ModelNotSupportedError(
                f"{kind}: padded batches with pictures or sound are not supported for this model, since it reads them "
                f"beside the tokens: it got {path[0]} of shape {list(getattr(leaf, 'shape', ()))} for rows and tokens "
                f"of shape {list(rows.shape)}; call unpatch_model"
            )
    left_out = {"attention_mask", "use_cache", *CACHES}
    if isinstance(positions, Tensor) and positions.ndim == 2 and not rows.has_positions:
        left_out.add("position_ids")
    inputs = {name: value for name, value in inputs.items() if name not in left_out}
    refuse_earlier_tokens(inputs)
    return inputs


def _is_of_media(path: Path, leaf: Any, rows: PaddedRows) -> bool:
    """Return whether an argument of a backbone has pictures or sound, in more than the embeddings of tokens."""
    if path[0] == "attention_mask":
        return leaf is not None and getattr(leaf, "ndim", 0) != 2
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or has_axes_first(path, leaf, rows.shape):
        return False
    is_of_tokens = leaf.shape[:2] == rows.shape and "cross_attention" not in str(path[0])
    return not is_of_tokens and leaf.ndim >= (2 if path[0] in rows.media else 3)


def run_by_length(forward: Callable[..., Any], inputs: Inputs, rows: PaddedRows) -> Any:
    """Call a forward once for all rows with the same number of tokens, without padding, and return its output for the
    padded batch, with zeros in padding.

    Args:
        forward: forward of a module that takes no packed rows.
        inputs: the arguments, for a padded batch.
        rows: the places of the tokens in the batch.

    Raises:
        ModelNotSupportedError: the module computes something of all rows together, or takes no rows of some length.
    """
    groups = []
    for length in sorted({*rows.lengths} - {0}):
        group = replace(rows, real=rows.real & (rows.real.sum(1, keepdims=True) == length))
        places = group._places.view(-1, length)
        given = rows.take(dict(inputs), places)
        with failing_on(f"the rows of each length separately, {len(places)} rows of {length} tokens"):
            output = forward(**given)
        if isinstance(output, ModelOutput):
            output = type(output)(**{name: value for name, value in output.items() if name not in CACHES})
        groups.append((group, places.shape, dict(leaves(output))))

    def join(path: Path, leaf: Tensor) -> Any:
        if not leaf.is_floating_point():
            return leaf
        # of a single group, the second size may also be that of a pooled state
        is_of_tokens = len(groups) > 1 and all(found[path].shape[:2] == shape for _, shape, found in groups)
        whole = []
        for group, shape, found in groups:
            part = found[path]
            if part.ndim < 2 or len(part) != shape[0]:
                raise ModelNotSupportedError(
                    f"its backbone computes a tensor of shape {list(part.shape)} from all rows of a batch, and would "
                    "run on the rows of each length separately"
                )
            if is_of_tokens or (part.ndim > 2 and part.shape[1] == shape[1]):
                whole.append(group.spread(part.flatten(0, 1)))
                continue
            if part.ndim > 2:  # tokens that were pooled, as in Funnel
                part = F.pad(part, (*[0, 0] * (part.ndim - 2), 0, rows.shape[1] - part.shape[1]))
            whole.append(group.put_back(part))
        return sum(whole)  # each has zeros in the rows of the others

    return map_tensors(output, join)
