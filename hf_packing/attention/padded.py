"""Take the tokens out of a padded batch, lay them end to end, and put the outputs back where the tokens were.

Rows may share prefixes, such as the prompt of a pair of answers, which then run once. A backbone that takes no packed
rows runs on the rows of equal length together. Reading a batch waits for the device once.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_packing.attention.inspect_model import pad_token_of
from hf_packing.attention.layout import CACHES, Layout, Sharing, borders_from_positions, on_device
from hf_packing.attention.token_axes import Path, leaves, map_leaves
from hf_packing.columns import CU_SEQ_LENS, SEQ_IDX, SEQ_LENGTHS
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.trees.find import find_in_batch

Side = Literal["right", "left", "both"]
"""Where the padding of a batch is: after the tokens of every row, before the tokens of every row, or elsewhere, such as
before the tokens of one row and after the tokens of another row."""

SIDES: tuple[Side, ...] = ("right", "left", "both")


@dataclass(frozen=True)
class Unpadding:
    """The way in which a patched model runs padded batches. The backbone gets the tokens without padding as a packed
    row, and its outputs are put back where the tokens were. All other modules run on the padded batch.

    Args:
        backbone: name of the backbone; an empty string for the model itself.
        readers: names of the modules that get every document in a row of its own, with the rule for running several
            documents in one call.
        rows_after: name of a module in the backbone; what follows it gets every document in a row of its own.
        by_length: whether the backbone, which takes no packed rows, runs on the rows of equal length together.
        refused: where padding may not be, with the reason.
    """

    backbone: str
    readers: tuple[tuple[str, Sharing], ...] = ()
    rows_after: str | None = None
    by_length: bool = False
    refused: tuple[tuple[Side, str], ...] = ()

    def describe(self) -> str:
        """Return a description in one line."""
        how = "rows of equal length run together" if self.by_length else "its tokens run as one packed row"
        refused = {side for side, _ in self.refused}
        sides = " or ".join(side for side in SIDES[:2] if side not in refused)
        return f"{how}; padding on the {sides} is taken out"


_BORDERS = (*CU_SEQ_LENS, SEQ_IDX, SEQ_LENGTHS)


@dataclass(frozen=True, eq=False)
class PaddedRows:
    """The places of the tokens in a padded batch. Every row has the tokens of one document, or no tokens.

    Args:
        real: True for every token that is not padding, bool [rows, tokens].
        device: where the batch is.
        side: where the padding is.
        has_positions: whether the caller of the model has passed position_ids.
        media: names of the caller's arguments with pictures or sound.
    """

    real: npt.NDArray[np.bool_]
    device: torch.device
    side: Side = "right"
    has_positions: bool = False
    media: tuple[str, ...] = ()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each row that are not padding."""
        return tuple(self.real.sum(1).tolist())

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of tokens in each row, with padding."""
        rows, tokens = self.real.shape
        return rows, tokens

    @property
    def has_padding(self) -> bool:
        return not self.real.all()

    @cached_property
    def kept(self) -> Tensor:
        """True for every token that is not padding, bool [rows, tokens]."""
        return on_device(self.real, self.device)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the packed row that `lay_end_to_end` makes."""
        return Layout.of([length for length in self.lengths if length], self.device, is_unpadded=True)

    @cached_property
    def _places(self) -> Tensor:
        """The index of each token in the flattened batch, int64 [tokens]."""
        return on_device(np.flatnonzero(self.real), self.device)

    def lay_end_to_end(self, value: Any) -> Any:
        """Return nested arguments, with every tensor of shape [rows, tokens, ...] replaced by a tensor of shape
        [1, tokens without padding, ...]. Position ids of shape [axes, rows, tokens] are changed in the same way."""
        shape, places = self.shape, self._places

        def lay(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if has_axes_first(path, leaf, shape):
                return leaf.flatten(1)[:, places][:, None]
            if leaf.shape == (1, shape[1]):  # the same for all rows
                leaf = leaf.expand(shape)
            return leaf.flatten(0, 1)[places][None] if leaf.shape[:2] == shape else leaf

        return map_leaves(value, lay)

    def put_back(self, value: Any) -> Any:
        """Return the outputs of a packed row in the shapes that they have for the padded batch, with zeros in padding.

        The result has [rows, tokens, ...] instead of [1, tokens without padding, ...], [rows * tokens, ...] instead of
        [tokens without padding, ...], and [rows, ...] instead of [documents, ...].
        """
        layout = self.layout

        def put(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim < 2:
                return leaf
            if path[:1] == ("router_logits",) and len(leaf) == layout.tokens:
                return self._spread(leaf).flatten(0, 1)
            may_have_tokens = leaf.ndim > 2 or len(layout.lengths) > 1  # else it may be a pooled state of the same size
            if may_have_tokens and leaf.shape[:2] == (1, layout.tokens):
                return self._spread(leaf[0])
            if leaf.ndim > 2 and leaf.shape[:2] == (
                len(layout.lengths),
                layout.longest,
            ):  # RowsInBackbone has made rows
                return self._spread(leaf[_real_tokens(layout)])
            if len(leaf) == len(layout.lengths):
                return self.with_empty_rows(leaf)
            return self._spread(leaf).flatten(0, 1) if len(leaf) == layout.tokens else leaf

        return map_leaves(value, put)

    def _spread(self, values: Tensor) -> Tensor:
        """Return values [tokens without padding, ...] as [rows, tokens, ...], with zeros in padding."""
        spread = values.new_zeros(self.real.size, *values.shape[1:]).index_copy(0, self._places, values)
        return spread.view(*self.shape, *values.shape[1:])

    def with_empty_rows(self, values: Tensor) -> Tensor:
        """Return values [documents, ...] as [rows, ...], with zeros for rows without tokens."""
        if len(values) == len(self.lengths):
            return values
        places = on_device(np.flatnonzero(self.lengths), values.device)
        return values.new_zeros(len(self.lengths), *values.shape[1:]).index_copy(0, places, values)


def has_axes_first(path: Path, leaf: Tensor, shape: tuple[int, int]) -> bool:
    """Return whether an argument has position_ids of shape [axes, rows, tokens], as models that see images have."""
    return path[-1:] == ("position_ids",) and leaf.ndim == 3 and leaf.shape[1:] == shape


def _real_tokens(layout: Layout) -> Tensor:
    """Return which tokens of a batch with one segment per row, padded on the right, are not padding."""
    lengths = torch.tensor(layout.lengths, device=layout.cu_seq_lens.device)
    return torch.arange(layout.longest, device=lengths.device) < lengths[:, None]


current_rows: ContextVar[PaddedRows | None] = ContextVar("current_rows", default=None)
"""The padded batch that a patched model's forward is processing outside of its backbone; None if no such forward is
running."""


def read_padded_rows(inputs: Mapping[str, Any]) -> PaddedRows | None:
    """Read the places of the tokens from the attention_mask in a model's inputs.

    Args:
        inputs: keyword arguments of a model's forward.

    Returns:
        None if the inputs are packed rows: if there is no attention_mask, or if there are borders between documents and
        attention_mask is all ones.

    Raises:
        PackingError: attention_mask is not a mask of ones and zeros for the tokens of each row; it hides all tokens of
            the batch, or tokens between other tokens; or the position_ids do not rise by 1 from token to token.
    """
    mask, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is None:
        return None
    shape = _shape_of_tokens(inputs)
    if not isinstance(mask, Tensor) or mask.shape != shape or mask.is_floating_point():
        shown = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise PackingError(
            f"attention_mask: expected integers of shape {list(shape)} on a patched model, 1 for tokens and 0 for "
            f"padding, got {shown}; call unpatch_model to use other masks"
        )
    given = mask.flatten(0, -2).cpu().numpy()  # which waits for the device
    real = given != 0
    if (given != real).any():
        raise PackingError(
            "attention_mask: expected only 1 for tokens and 0 for padding on a patched model, got other values; pass "
            "the borders between packed documents as position_ids or seq_idx"
        )
    has_positions = isinstance(position_ids, Tensor) and position_ids.ndim == 2  # others are those of pictures
    borders = next((name for name in _BORDERS if inputs.get(name) is not None), None)
    if (has_positions or borders) and real.all():
        return None
    if not real.any():
        raise PackingError("attention_mask: expected at least one token in a batch, got a mask of zeros")
    tokens, lengths = real.shape[1], real.sum(1)
    start, end = real.argmax(1), tokens - real[:, ::-1].argmax(1)
    if (torn := (lengths > 0) & (end - start != lengths)).any():
        number = int(torn.argmax())
        raise PackingError(
            f"attention_mask: expected no padding between the tokens of a row, but row {number} has {lengths[number]} "
            f"tokens between {start[number]} and {end[number]}; move its padding to one side"
        )
    if borders is not None:
        raise PackingError(
            f"{borders}: expected no borders beside an attention_mask with padding; pass only one of them"
        )
    start, end = start[lengths > 0], end[lengths > 0]
    side: Side = "right" if not start.any() else "left" if (end == tokens).all() else "both"
    rows = PaddedRows(real, mask.device, side, position_ids is not None, media_of(inputs))
    if position_ids is not None:
        _check_positions(position_ids, rows)
    return rows


def media_of(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a model's arguments that have pictures or sound: floats that are neither embeddings, labels,
    numbers for whole rows, nor one number for each token."""
    floats = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]
    shapes = {name: inputs[name].shape for name in floats if name not in ("inputs_embeds", "labels")}
    return tuple(name for name, shape in shapes.items() if len(shape) > 1 and shape != _shape_of_tokens(inputs))


def refuse_media(backbone: str, inputs: Mapping[str, Any], rows: PaddedRows) -> None:
    """Raise ModelNotSupportedError if a batch has pictures or sound, and a backbone gets more of them than embeddings
    of tokens: attention masks, or floats that have no axes of rows and tokens.

    Args:
        backbone: name of the backbone's class.
        inputs: keyword arguments of the backbone's forward, for the padded batch.
        rows: the places of the tokens in the batch.
    """
    if not rows.media:
        return
    refused = f"{backbone}: padded batches with pictures or sound are not supported for this model, since it"
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        raise ModelNotSupportedError(
            f"{refused} makes attention masks of its own for them, which a batch without padding does not have; call "
            "unpatch_model"
        )
    for path, leaf in leaves({name: value for name, value in inputs.items() if name != "attention_mask"}):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or has_axes_first(path, leaf, rows.shape):
            continue
        is_of_tokens = leaf.shape[:2] == rows.shape and "cross_attention" not in str(path[0])
        if not is_of_tokens and leaf.ndim >= (2 if path[0] in rows.media else 3):
            raise ModelNotSupportedError(
                f"{refused} reads them beside the tokens: it got {path[0]} of shape {list(leaf.shape)} for rows and "
                f"tokens of shape {list(rows.shape)}; call unpatch_model"
            )


def rows_without_padding(inputs: Mapping[str, Any]) -> PaddedRows:
    """Return the places of the tokens in a batch without padding, in which every row is a document.

    Raises:
        PackingError: the position_ids restart in a row, so that it may be a packed row.
    """
    *others, tokens = _shape_of_tokens(inputs)
    position_ids = inputs.get("position_ids")
    device = next(each.device for each in inputs.values() if isinstance(each, Tensor))
    real = np.ones((math.prod(others), tokens), dtype=np.bool_)
    rows = PaddedRows(real, device, "right", position_ids is not None, media_of(inputs))
    if position_ids is not None:
        _check_positions(position_ids, rows)
    return rows


def _shape_of_tokens(inputs: Mapping[str, Any]) -> torch.Size:
    ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if isinstance(ids, Tensor):
        return ids.shape
    if isinstance(embeddings, Tensor):
        return embeddings.shape[:-1]
    raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")


def _check_positions(position_ids: Tensor, rows: PaddedRows) -> None:
    """Raise PackingError if a row of a padded batch has position ids that restart, so that it may be a packed row."""
    axes = position_ids.ndim == 3
    laid = rows.lay_end_to_end((position_ids[0] if axes else position_ids).expand(rows.shape))
    if axes and len(position_ids) < 4:  # of pictures, whose places share positions; the first axis is that of time
        starts = (laid.diff() < 0).flatten().nonzero()[:, 0] + 1
    else:
        starts = borders_from_positions(laid)
    if not set(starts.tolist()) <= set(rows.layout.cu_seq_lens.tolist()):
        raise PackingError(
            "position_ids: expected positions that rise by 1 from token to token beside an attention_mask with "
            "padding, or beside pictures or sound, got positions that restart; pass packed rows of texts without "
            "padding, and without an attention_mask"
        )


def with_pad_tokens(model: PreTrainedModel, inputs: dict[str, Any], rows: PaddedRows) -> dict[str, Any]:
    """Return the arguments with the model's own pad token in padding, by which classifiers find the last token."""
    ids, pad = inputs.get("input_ids"), pad_token_of(model)
    if ids is None or pad is None or ids.numel() != rows.real.size:
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
    if not isinstance(tokens, Tensor) or tokens.shape[:2] != rows.shape:
        found = list(tokens.shape[:2]) if isinstance(tokens, Tensor) else "no tokens"
        raise PackingError(
            f"attention_mask: expected a mask for all tokens of {type(backbone).__name__}, got a mask of shape "
            f"{list(rows.shape)} for {found}"
        )
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == rows.shape and not torch.equal(mask != 0, rows.kept):
        raise PackingError(
            f"attention_mask: expected the same mask for {type(backbone).__name__} as for the whole model, which has "
            "changed it; call unpatch_model"
        )
    refuse_media(type(backbone).__name__, inputs, rows)
    if inputs.get("encoder_hidden_states") is not None:
        raise PackingError("encoder_hidden_states: expected None on a patched model, got encoder states")
    left_out = {"attention_mask", "use_cache", *CACHES}
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 2:
        if rows.has_positions:
            inputs = {**inputs, "position_ids": positions.expand(rows.shape)}
        else:
            left_out.add("position_ids")
    return {name: value for name, value in inputs.items() if name not in left_out}


@dataclass(frozen=True, eq=False)
class SharedRows:
    """The trees of the rows of a padded batch, whose tokens are laid end to end.

    Args:
        layout: the segments of the trees.
        taken: for each token of the trees, its index among the tokens of all rows, int64 [tokens of the trees].
        given: for each token of all rows, its index in the trees, int64 [tokens of all rows].
    """

    layout: Layout
    taken: Tensor
    given: Tensor

    @classmethod
    def find(cls, inputs: Mapping[str, Any], lengths: tuple[int, ...], min_shared: int) -> "SharedRows | None":
        """Return the trees of a batch; None if its rows share no prefix.

        Rows also share none if the model gets labels, or anything for each token but integers, such as embeddings. A
        warning then says so.

        Args:
            inputs: the arguments of a backbone, with tokens laid end to end.
            lengths: number of tokens in each row that has tokens.
            min_shared: the fewest tokens that rows share.
        """
        raw = sum(lengths)
        values = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and raw in each.shape}
        if kept := _not_shared(values, raw):
            warnings.warn(  # Python shows the same warning once
                f"share_prefixes: expected input_ids and other integers of the same shape, got {kept}; the prefixes of "
                "such a batch are computed for each row",
                stacklevel=2,
            )
            return None
        others = {name: each[0].cpu().numpy() for name, each in values.items()}
        tokens = values["input_ids"]
        found = find_in_batch(others.pop("input_ids"), others, lengths, min_shared)
        if not found.trees.has_branches and found.trees.tokens == raw:
            return None
        taken, given = (on_device(each, tokens.device) for each in (found.taken, found.given))
        return cls(Layout.of(found.trees, tokens.device), taken, given)

    def take(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a backbone for the trees, given those for all rows laid end to end."""
        taken: dict[str, Any] = _gather(dict(inputs), len(self.given), self.taken)
        return taken

    def give(self, outputs: Any) -> Any:
        """Return the outputs of a backbone for all rows laid end to end, given those for the trees."""
        return _gather(outputs, self.layout.tokens, self.given)


def _gather(value: Any, tokens: int, places: Tensor) -> Any:
    """Return nested tensors, with the values at some places instead of those of all tokens."""

    def gather(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, tokens):
            return leaf[:, places]
        return leaf[places] if path[:1] == ("router_logits",) and len(leaf) == tokens else leaf

    return map_leaves(value, gather)


def _not_shared(values: Mapping[str, Tensor], tokens: int) -> str:
    """Return what keeps the rows of a batch from sharing their prefixes; an empty string if nothing does.

    Args:
        values: the arguments of a backbone that have a value for each token.
        tokens: number of tokens in all rows.
    """
    if "input_ids" not in values:
        return "inputs_embeds"
    if "labels" in values:
        return "labels, with which the model computes a loss by itself"
    other = next((n for n, each in values.items() if each.shape != (1, tokens) or each.is_floating_point()), None)
    return "" if other is None else f"{values[other].dtype} {other} of shape {list(values[other].shape)}"


def run_by_length(forward: Callable[..., Any], inputs: Mapping[str, Any], rows: PaddedRows) -> Any:
    """Call a forward once for all rows with the same number of tokens, without padding, and return its output for the
    padded batch, with zeros in padding.

    Args:
        forward: forward of a module that takes no packed rows.
        inputs: the arguments, for a padded batch.
        rows: the places of the tokens in the batch.
    """
    shape, lengths = rows.shape, rows.lengths
    found: dict[Path, list[tuple[Tensor, Tensor, Tensor]]] = {}
    output: Any = None
    for length in sorted(set(lengths) - {0}):
        chosen = np.flatnonzero(np.array(lengths) == length)
        numbers = on_device(chosen, rows.device)
        places = on_device(rows.real[chosen].nonzero()[1].reshape(-1, length), rows.device)
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


def _join_groups(parts: list[tuple[Tensor, Tensor, Tensor]], shape: tuple[int, int]) -> Tensor:
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
