"""Where the segments of a batch are, which of them share prefixes, and how this is read from a model's inputs.

A packed row is a forest of roots: each segment is a document of its own, or a part of one. In a row of trees, segments
have parents, and a document is a path from a root down to a segment. Modules that are not segment-local run on whole
paths; in a packed row, each path is one segment. A batch costs one read of its borders, which waits for the device.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_packing.attention.token_axes import Place, length_of, map_leaves
from hf_packing.batch.segments import LongestSegment
from hf_packing.columns import (
    CU_SEQ_LENS,
    ENDS,
    INPUT_IDS,
    LABELS,
    MAX_LENGTHS,
    PADDING_SEGMENT,
    PARENTS,
    POSITION_IDS,
    SEGMENT_LENGTHS,
    SEQ_IDX,
    SEQ_LENGTHS,
    TRAINED,
    TREE_LABELS,
)
from hf_packing.errors import PackingError
from hf_packing.trees.segments import TreeSegments

CACHES = ("cache", "past_key_values", "cache_params", "mems", "state", "past_buckets_states")
"""Names of the arguments in which models of transformers take caches. Models have them under these names in their
outputs too. transformers 5.24 renamed past_key_values and cache_params to cache, and still takes the old names."""

Sharing = Literal["ragged", "equal", "none"]
"""The rule for running several segments in one call of a module. "ragged": a call may contain segments of similar
length, padded on the right. "equal": a call may contain only segments of equal length. "none": a call contains only one
segment."""

MOST_TOKENS_OF_CALL = 4096
"""Paths that share prefixes share a call of a module up to this number of tokens. Together they may have many times the
tokens of the row, and large tensors are slow: with all paths in one call, Mamba ran at a third of its speed."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the segments of one or more rows are, and which of them share prefixes. It does not have the tokens.

    Args:
        cu_seq_lens: int32 [segments + 1], cumulative segment lengths, starting at 0. Several rows are counted as one
            long row. In a batch of fixed shapes, the last border is repeated, which makes empty segments at the end.
        trees: the lengths and parents of the segments that are not empty.
        rows: number of rows. All rows have the same number of tokens.
        bound: the max_length of a batch of fixed shapes, which is the same in every batch and may be larger than the
            longest segment; None for a batch of any shape.
        padding: number of tokens at the end that only fill a batch of fixed shapes. They are the last segment.
        is_unpadded: whether the segments are the rows of a padded batch.
    """

    cu_seq_lens: Tensor
    trees: TreeSegments
    rows: int = 1
    bound: int | None = None
    padding: int = 0
    is_unpadded: bool = False

    @classmethod
    def of(
        cls, segments: Sequence[int] | TreeSegments, device: torch.device | None = None, rows: int = 1, **more: Any
    ) -> "Layout":
        """Return the Layout of segments of these lengths, which share no prefixes, or of trees."""
        trees = segments if isinstance(segments, TreeSegments) else roots(segments)
        borders = torch.tensor([0, *accumulate(trees.lengths)], dtype=torch.int32, device=device)
        return cls(borders, trees, rows, **more)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens in each segment that is not empty."""
        return self.trees.lengths

    @cached_property
    def tokens(self) -> int:
        """The number of tokens in each row."""
        return sum(self.lengths) // self.rows

    @cached_property
    def has_branches(self) -> bool:
        """True if a segment has a parent, so that documents share a prefix."""
        return self.trees.has_branches

    @cached_property
    def path_lengths(self) -> list[int]:
        """The number of tokens in each path, from a root to a segment that has nothing below it."""
        if not self.has_branches:
            return list(self.lengths)
        ends = self.trees.depths + self.lengths
        return [int(ends[leaf]) for leaf in self.trees.leaves]

    @cached_property
    def longest(self) -> int:
        """The number of tokens in the longest path, which is the longest segment of packed rows."""
        return max(self.path_lengths)

    @property
    def max_length(self) -> int:
        """The value of max_length_q/k for the model: the length of the longest segment, or a constant above it."""
        return self.longest if self.bound is None else self.bound

    @property
    def has_fixed_shape(self) -> bool:
        """True for a batch of fixed shapes, which has a constant max_length or empty segments at the end."""
        return self.bound is not None or len(self.lengths) < len(self.cu_seq_lens) - 1

    @property
    def num_paths(self) -> int:
        """The number of parts on which modules run that are not segment-local."""
        return len(self.trees.leaves)

    @property
    def is_one_path_per_row(self) -> bool:
        """True if every module may run on the rows as they are."""
        return self.num_paths == self.rows

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """The token indices (start, end) of each segment, end excluded. Several rows are counted as one long row."""
        return list(pairwise(self.trees.begins.tolist()))

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each token in its document, int64 [rows, tokens]. Positions start at 0 in every root. In
        padding, they start again before they exceed those of all documents: some models depend on the largest one."""
        positions = self.trees.position_ids.astype(np.int64)
        return self._on_device(positions % max(self.lengths[:-1]) if self.padding else positions)

    @cached_property
    def seq_idx(self) -> Tensor:
        """The index of the segment that contains each token, int32 [rows, tokens]."""
        return self._on_device(np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths))

    def _on_device(self, values: npt.NDArray[Any]) -> Tensor:
        """Return a value for each token as a tensor [rows, tokens]."""
        return on_device(values.reshape(self.rows, -1), self.cu_seq_lens.device)

    def place_of(self, segment: int) -> Place:
        """Return where the tokens from a root down to a segment are: first and last + 1, or int64 [tokens]."""
        if self.trees.parents[segment] < 0:
            return self.slices[segment]
        if segment not in self.cache:
            tokens = self.trees.path_of(segment)
            is_slice = int(tokens[-1]) - int(tokens[0]) == len(tokens) - 1  # slices are not copied
            place = (int(tokens[0]), int(tokens[-1]) + 1) if is_slice else torch.from_numpy(tokens)
            self.cache[segment] = place.to(self.cu_seq_lens.device) if isinstance(place, Tensor) else place
        found: Place = self.cache[segment]
        return found

    @cached_property
    def first_places(self) -> Tensor:
        """The index of each token among the tokens of all paths, laid end to end, on the first path that has it, int64
        [tokens]."""
        paths = torch.cat([torch.from_numpy(self.trees.path_of(leaf)) for leaf in self.trees.leaves])
        first = torch.empty(self.tokens, dtype=torch.long)
        first[paths.flip(0)] = torch.arange(len(paths)).flip(0)
        return first.to(self.cu_seq_lens.device)

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """Calls, places, masks and indices that were made of this layout. The layers of a model ask for the same."""
        return {}

    def calls(self, sharing: Sharing) -> list["SharedCall"]:
        """Divide all paths among module calls, and return the calls. Each path is in exactly one call."""
        if sharing not in self.cache:
            groups = group_lengths(self.path_lengths, sharing)
            if self.has_branches:
                groups = [part for group in groups for part in self._divided(group)]
            places = [self.place_of(leaf) for leaf in self.trees.leaves]
            device = self.cu_seq_lens.device
            self.cache[sharing] = [SharedCall.of(paths, [places[path] for path in paths], device) for paths in groups]
        calls: list[SharedCall] = self.cache[sharing]
        return calls

    def _divided(self, paths: list[int]) -> list[list[int]]:
        """Divide the paths of a call into several calls of at most MOST_TOKENS_OF_CALL tokens."""
        most = max(MOST_TOKENS_OF_CALL // max(self.path_lengths[path] for path in paths), 1)
        return [paths[first : first + most] for first in range(0, len(paths), most)]


def on_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, without waiting for the device."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def roots(lengths: Sequence[int]) -> TreeSegments:
    """Return segments of these lengths that share no prefixes."""
    return TreeSegments(tuple(lengths), (-1,) * len(lengths))


@dataclass(frozen=True, eq=False)
class SharedCall:
    """A module call that processes one or more paths. Each path is a separate row in the batch of the call."""

    segments: list[int]
    """The indices of the paths in this call, which are the segments of packed rows."""
    places: Sequence[Place]
    """Where the tokens of each path are."""
    lengths: list[int]
    batch: Layout
    """The batch of this call, with one row for each path, padded to the length of the longest one."""

    @classmethod
    def of(cls, segments: list[int], places: Sequence[Place], device: torch.device) -> "SharedCall":
        lengths = list(map(length_of, places))
        batch = Layout.of([max(lengths)] * len(lengths), device, rows=len(lengths))
        return cls(segments, places, lengths, batch)


CALL_OVERHEAD = 8
"""The fixed cost of a module call, expressed as a number of additional segments. A small module spends most of its time
on kernel launches, and a scan on sequential steps. Neither time depends on the number of segments in the call."""

MAX_PADDING = 4
"""A segment is padded to at most this many times its own length."""


def group_lengths(lengths: Sequence[int], sharing: Sharing) -> list[list[int]]:
    """Group segments by length, and return the segment indices of each group, which is run in one module call.

    Groups of similar length minimize the total cost of the calls. A call with n segments costs
    `longest * (CALL_OVERHEAD + n)`, since all segments are padded to the length of the longest one. The segments are
    sorted by length, and dynamic programming finds where to cut the sorted list into groups.
    """
    if sharing == "none":
        return [[segment] for segment in range(len(lengths))]
    of_length: dict[int, list[int]] = {}
    for segment, length in enumerate(lengths):
        of_length.setdefault(length, []).append(segment)
    if sharing == "equal":
        return list(of_length.values())
    equal = sorted(of_length.items())
    least = [0.0] + [float("inf")] * len(equal)
    cut = [0] * (len(equal) + 1)
    for end in range(1, len(equal) + 1):
        longest, segments = equal[end - 1][0], 0
        for start in reversed(range(end)):
            segments += len(equal[start][1])
            if equal[start][0] * MAX_PADDING < longest:
                break
            cost = least[start] + longest * (CALL_OVERHEAD + segments)
            if cost < least[end]:
                least[end], cut[end] = cost, start
    groups = []
    end = len(equal)
    while end:
        groups.append([segment for _, group in equal[cut[end] : end] for segment in group])
        end = cut[end]
    return groups


T = TypeVar("T")


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Context manager: within the block, a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


current_layout: ContextVar[Layout | None] = ContextVar("current_layout", default=None)
"""The layout that a patched model's forward is processing; None if no such forward is running."""


def use_layout(layout: Layout | None) -> AbstractContextManager[None]:
    """Return a context manager: within the block, the value of `current_layout` is `layout`."""
    return within(current_layout, layout)


_needs_borders: ContextVar[bool] = ContextVar("_needs_borders", default=False)
"""Whether rows without borders are refused in evaluation mode, too."""


def borders_required() -> AbstractContextManager[None]:
    """Return a context manager: within the block, which runs models on packed rows, rows without borders are refused in
    every mode. A teacher in evaluation mode may get only some columns of a batch."""
    return within(_needs_borders, True)


_takes_labels: ContextVar[bool] = ContextVar("_takes_labels", default=False)


def labels_of_trees() -> AbstractContextManager[None]:
    """Return a context manager: within the block, models take labels of trees, since the caller replaces their
    cross-entropy."""
    return within(_takes_labels, True)


def has_trees(inputs: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a model's forward are a row of trees."""
    return inputs.get(PARENTS) is not None or inputs.get(SEGMENT_LENGTHS) is not None


def filled_cache(inputs: Mapping[str, Any]) -> str:
    """Return the name of the argument with a cache that may contain tokens, or an empty string if there is none."""
    return next((name for name in CACHES if inputs.get(name) is not None and _may_have_tokens(inputs[name])), "")


def _may_have_tokens(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except (AttributeError, ValueError):  # lists of states, and caches of states alone, do not count tokens
        return True


def read_layout(
    inputs: Mapping[str, Any], training: bool = False, trusts_collator: bool = False
) -> tuple[dict[str, Any], Layout]:
    """Read the segments of packed rows, or of a row of trees, from a model's inputs.

    The borders of packed rows are read from cu_seq_lens_q, position_ids, seq_idx or seq_lengths, and those of trees
    from segment_lengths and parents.

    Args:
        inputs: keyword arguments of a model's forward, with input_ids or inputs_embeds.
        training: whether the model is in training mode. In training mode, and within `borders_required`, borders are
            required. Otherwise, a row without borders counts as a single document.
        trusts_collator: whether the lengths that come with a batch of PackingCollator are taken as they are. Otherwise,
            and for batches from elsewhere, the borders are read from the tensors, which waits for the device.

    Returns:
        The arguments for the model itself, without attention_mask, and the layout.

    Raises:
        PackingError: input_ids and inputs_embeds are both missing; attention_mask is not all ones; a cache is not
            empty; encoder_hidden_states are given; borders are missing where they are required, contradict each
            other, or do not fit the tokens; or an argument is not supported with trees.
    """
    return _read_trees(inputs) if has_trees(inputs) else _read_rows(inputs, training, trusts_collator)


def _tokens_of(inputs: Mapping[str, Any]) -> Tensor:
    """Return input_ids or inputs_embeds."""
    for name in (INPUT_IDS, "inputs_embeds"):
        if isinstance(tokens := inputs.get(name), Tensor):
            return tokens
    raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")


_NOT_IN_TREES = {
    LABELS: "no model computes the loss of trees by itself; call hfp.compute_loss(model, batch)",
    "attention_mask": "a row of trees has no padding",
    **dict.fromkeys(CACHES, "a row of trees has no cache"),
    "encoder_hidden_states": "all documents in a row would attend to the same encoder states",
    **dict.fromkeys((*CU_SEQ_LENS, SEQ_IDX), f"the borders of trees are given by {SEGMENT_LENGTHS} and {PARENTS}"),
}


def _read_trees(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Layout]:
    for name in (SEGMENT_LENGTHS, PARENTS):
        if not isinstance(inputs.get(name), Tensor):
            raise PackingError(
                f"{name}: expected a tensor of integers beside a row of trees, got {type(inputs.get(name)).__name__}"
            )
    refused = {name: reason for name, reason in _NOT_IN_TREES.items() if name != LABELS or not _takes_labels.get()}
    for name, reason in refused.items():
        if inputs.get(name) is not None:
            raise PackingError(f"{name}: expected None with a row of trees, since {reason}")
    tokens = _tokens_of(inputs)
    trees = TreeSegments.from_arrays(inputs[SEGMENT_LENGTHS].cpu(), inputs[PARENTS].cpu())
    if tokens.shape[:2] != (1, trees.tokens):
        raise PackingError(
            f"{SEGMENT_LENGTHS}: expected lengths that add up to a single row of {list(tokens.shape[:2])} tokens, got "
            f"{trees.tokens}"
        )
    layout = Layout.of(trees, tokens.device)
    positions = inputs.get("position_ids")
    if positions is not None and not torch.equal(positions.to(tokens.device), layout.position_ids):
        raise PackingError(
            "position_ids: expected the depth of each token in its tree, or None, got positions that begin with "
            f"{positions.flatten().tolist()[:8]}"
        )
    left_out = (SEGMENT_LENGTHS, PARENTS, ENDS, TRAINED, TREE_LABELS, *refused)
    return {name: value for name, value in inputs.items() if name not in left_out}, layout


def _read_rows(inputs: Mapping[str, Any], training: bool, trusts_collator: bool) -> tuple[dict[str, Any], Layout]:
    tokens = _tokens_of(inputs)
    shape = tokens.shape[:2]
    if name := filled_cache(inputs):
        raise PackingError(
            f"{name}: expected no earlier tokens on a patched model, got {type(inputs[name]).__name__}. To generate "
            "text, use model.generate, or pass the cache without borders between documents"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == shape and bool((mask == 1).all())):
        shown = f"a mask of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise PackingError(
            f"attention_mask: expected None or a mask of ones on a patched model, got {shown}, which may hide tokens; "
            "pass documents without padding, as PackingCollator does, or call unpatch_model first"
        )
    if inputs.get("encoder_hidden_states") is not None:
        raise PackingError(
            "encoder_hidden_states: expected None on a patched model, got encoder states; all documents in a packed "
            "row would attend to the same encoder states"
        )
    given = {name: value for name, value in inputs.items() if name != "attention_mask"}
    if trusts_collator and (known := layout_of_collator(inputs)) is not None:
        return given, known
    borders = find_borders(shape, inputs)
    if borders is None:
        if training or _needs_borders.get():
            where = "in training mode" if training else "for packed rows of a trainer"
            raise PackingError(
                f"position_ids: expected position_ids, cu_seq_lens_q or seq_idx {where}, got none of them, so the "
                "borders between packed documents are not known. PackingCollator and SFTConfig(padding_free=True) add "
                "position_ids to every batch; pass them to all models that get the batch, such as a teacher"
            )
        return given, Layout.of([shape[1]] * shape[0], tokens.device, shape[0])
    layout, padding = layout_of(borders, shape[0], shape[1], tokens.device), _padding(shape, inputs)
    if padding not in (0, *layout.lengths[1:][-1:]):
        raise PackingError(f"seq_idx: expected {PADDING_SEGMENT} only in the last segment, got {padding} such tokens")
    bound = inputs.get(MAX_LENGTHS[0])
    bound = int(bound) if isinstance(bound, int) and bound > layout.longest else None
    return given, replace(layout, bound=bound, padding=padding)


def layout_of_collator(inputs: Mapping[str, Any]) -> Layout | None:
    """Return the layout of a batch of PackingCollator without reading its tensors; None for other batches."""
    longest, borders, tokens = inputs.get(MAX_LENGTHS[0]), inputs.get(CU_SEQ_LENS[0]), _tokens_of(inputs)
    if not isinstance(longest, LongestSegment) or not isinstance(borders, Tensor):
        return None
    shapes = {len(inputs[name]) for name in CU_SEQ_LENS if inputs.get(name) is not None}
    if tokens.shape[:2] != (1, sum(longest.lengths)) or shapes != {len(borders)} or borders.device != tokens.device:
        return None
    bound = int(longest) if longest > max(longest.lengths) else None
    return Layout(borders, roots(longest.lengths), 1, bound, longest.padding)


def layout_of(borders: Tensor | list[int], rows: int, tokens: int, device: torch.device | None = None) -> Layout:
    """Check the segment borders of a batch, and return its layout.

    Args:
        borders: cumulative segment lengths, integers [segments + 1]. Several rows are counted as one long row. The last
            border may be repeated, as PackingCollator does for fixed shapes.
        rows: number of rows in the batch.
        tokens: number of tokens in each row.
        device: where the layout's borders are needed; None for where they are.

    Raises:
        PackingError: the borders do not rise from 0 to `rows * tokens`, or the end of a row is not a border.
    """
    given = borders.tolist() if isinstance(borders, Tensor) else borders
    known = without_empty(given)
    if known[:1] != [0] or known[-1] != rows * tokens or any(a >= b for a, b in pairwise(known)):
        raise PackingError(
            f"cu_seq_lens_q: expected cumulative lengths that rise from 0 to {rows * tokens} tokens, got {given}"
        )
    if rows > 1 and (crossed := set(range(tokens, rows * tokens, tokens)) - set(known)):
        raise PackingError(
            f"cu_seq_lens_q: expected a segment border at the end of every row of {tokens} tokens, got no border at "
            f"{sorted(crossed)}"
        )
    lengths = [end - start for start, end in pairwise(known)]
    return Layout(torch.as_tensor(borders, dtype=torch.int32, device=device), roots(lengths), rows)


def without_empty(borders: list[int]) -> list[int]:
    """Return borders without the empty segments at the end."""
    segments = len(borders)
    while segments > 2 and borders[segments - 1] == borders[segments - 2]:
        segments -= 1
    return borders[:segments]


def borders_from_positions(position_ids: Tensor, step: int = 1) -> Tensor:
    """Find the segment borders from position_ids or, with a step of 0, from seq_idx. A new segment starts at the first
    token of every row, and at every token whose value is not the value of the previous token plus `step`.

    Args:
        position_ids: positions of the tokens, or indices of their segments, integers [rows, tokens].

    Returns:
        Cumulative segment lengths, int32 [segments + 1]. Several rows are counted as one long row.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + step
    return F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel()).to(torch.int32)


def find_borders(shape: torch.Size, inputs: Mapping[str, Any]) -> list[int] | None:
    """Read the segment borders of a batch from cu_seq_lens_q, cu_seq_lens_k, position_ids, seq_idx and seq_lengths.

    Args:
        shape: numbers of rows and tokens in the batch, (rows, tokens).
        inputs: keyword arguments of a model's forward, or a batch.

    Returns:
        Cumulative segment lengths, [segments + 1]; None if `inputs` contains none of these arguments.

    Raises:
        PackingError: an argument has a wrong type or shape, or two arguments have different borders.
    """
    rows, tokens = shape
    given: dict[str, list[int]] = {}
    for name in (*CU_SEQ_LENS, SEQ_LENGTHS):
        if not isinstance(inputs.get(name), Tensor | None):
            raise PackingError(f"{name}: expected an int32 tensor, got {type(inputs[name]).__name__}")
    for name in CU_SEQ_LENS:
        if inputs.get(name) is not None:
            given[name] = inputs[name].tolist() if inputs[name].ndim == 1 else [inputs[name].tolist()]
    positions, seq_idx, lengths = (inputs.get(name) for name in (POSITION_IDS, SEQ_IDX, SEQ_LENGTHS))
    if positions is not None and positions.ndim == 2:
        given[POSITION_IDS] = borders_from_positions(positions.expand(rows, -1)).tolist()
        if padding := _padding(shape, inputs):
            given[POSITION_IDS] = [*borders_from_positions(positions[:, : tokens - padding]).tolist(), tokens]
    elif positions is not None and not given:
        raise PackingError(
            f"position_ids: expected shape [rows, tokens], got shape {list(positions.shape)}; if the model needs "
            "position_ids of the latter shape, also pass cu_seq_lens_q"
        )
    if seq_idx is not None:
        given[SEQ_IDX] = borders_from_positions(seq_idx.expand(rows, -1), step=0).tolist()
    if lengths is not None:
        given[SEQ_LENGTHS] = [0, *accumulate(lengths.flatten().tolist())]
    if not given:
        return None
    first, *others = given
    for other in others:
        if without_empty(given[first]) != without_empty(given[other]):
            raise PackingError(
                f"{other}: expected the same segment borders as in {first}, {given[first]}, got {given[other]}; "
                "position_ids, if given, must restart in every segment"
            )
    return given[first]


def _padding(shape: torch.Size, inputs: Mapping[str, Any]) -> int:
    """Return the number of tokens at the end that only fill a batch of fixed shapes, as PackingCollator marks them.

    A batch of fixed shapes has a single row, and a max_length_q that is not less than its number of tokens.
    """
    seq_idx, longest = inputs.get(SEQ_IDX), inputs.get(MAX_LENGTHS[0])
    if shape[0] > 1 or not isinstance(seq_idx, Tensor) or (isinstance(longest, int) and longest < shape[1]):
        return 0
    return int((seq_idx == PADDING_SEGMENT).sum())


def lay_end_to_end(value: Any, layout: Layout) -> Any:
    """Return a tensor of shape [rows, tokens, ...] reshaped to [1, rows * tokens, ...]; other values are unchanged."""
    if not isinstance(value, Tensor) or value.shape[:2] != (layout.rows, layout.tokens):
        return value
    return value.reshape(1, layout.rows * layout.tokens, *value.shape[2:])


def fold_into_rows(value: Any, layout: Layout) -> Any:
    """Return a model's outputs, with every tensor of shape [1, rows * tokens, ...] reshaped to [rows, tokens, ...]."""

    def fold(_: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.shape[:2] == (1, layout.rows * layout.tokens):
            return leaf.reshape(layout.rows, layout.tokens, *leaf.shape[2:])
        return leaf

    return map_leaves(value, fold)
