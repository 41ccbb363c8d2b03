"""Where the segments of a batch are, which of them share prefixes, and how this is read from a model's inputs.

A packed row is a forest of roots: each segment is a document of its own, or a part of one. In a row of trees, segments
have parents, and a document is a path from a root down to a segment. Modules that are not segment-local run on whole
paths; in a packed row, each path is one segment. A batch costs one read of its borders, which waits for the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_packing.attention.model import Arguments, Inputs
from hf_packing.attention.token_axes import Place, length_of
from hf_packing.batch.segments import LongestSegment, fillers_in, lengths_between, positions_of, read_borders
from hf_packing.checks import expect
from hf_packing.columns import (
    CU_SEQ_LENS,
    IGNORED_LABEL,
    MAX_LENGTHS,
    PARENTS,
    SEGMENT_LENGTHS,
    SEQ_IDX,
)
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of
from hf_packing.trees.segments import Places, TreeSegments

CACHES = ("cache", "past_key_values", "cache_params", "mems", "state", "past_buckets_states")
"""Names of the arguments in which models of transformers take caches. Models have them under these names in their
outputs too. transformers 5.24 renamed past_key_values and cache_params to cache, and still takes the old names."""

T = TypeVar("T")

Sharing = Literal["ragged", "equal", "none"]
"""The rule for running several segments in one call of a module. "ragged": a call may contain segments of similar
length, padded on the right. "equal": a call may contain only segments of equal length. "none": a call contains only one
segment."""

MOST_TOKENS_OF_CALL = 4096
"""Paths that share prefixes share a call of a module up to this number of tokens. Together they may have many times the
tokens of the row, and large tensors are slow: with all paths in one call, Mamba ran at a third of its speed."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of the segments of one or more rows, and which of them share prefixes, without the tokens.

    Args:
        cu_seq_lens: int32 [segments + 1], cumulative segment lengths, starting at 0. Several rows are counted as one
            long row. In a batch of fixed shapes, the last border is repeated, which makes empty segments at the end.
        trees: the lengths and parents of the segments that are not empty.
        rows: number of rows. All rows have the same number of tokens.
        bound: the max_length that comes with the batch. Batches of fixed shapes have the same one, which may be larger
            than the longest segment.
        fillers: number of these segments that only fill up the batch, at its end.
        is_unpadded: whether the segments are the rows of a padded batch.
    """

    cu_seq_lens: Tensor
    trees: TreeSegments
    rows: int = 1
    bound: int = 0
    fillers: int = 0
    is_unpadded: bool = False

    @classmethod
    def of(
        cls, segments: Sequence[int] | TreeSegments, device: torch.device | None = None, rows: int = 1, **more: Any
    ) -> Self:
        """Return the Layout of segments of these lengths, which share no prefixes, or of trees."""
        trees = segments if isinstance(segments, TreeSegments) else roots(segments)
        return cls(torch.tensor([0, *accumulate(trees.lengths)], dtype=torch.int32, device=device), trees, rows, **more)

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

    @property
    def has_prefixes(self) -> bool:
        """True if a segment may have keys that are not its own."""
        return self.has_branches

    @cached_property
    def path_lengths(self) -> list[int]:
        """The number of tokens in each path, from a root to a segment that has nothing below it."""
        ends: list[int] = (self.trees.depths + self.lengths)[[*self.trees.leaves]].tolist()
        return ends

    @cached_property
    def longest(self) -> int:
        """The number of tokens in the longest path, which is the longest segment of packed rows."""
        return max(self.path_lengths)

    @property
    def max_length(self) -> int:
        """The value of max_length_q/k for the model: the length of the longest segment, or a constant above it."""
        return max(self.longest, self.bound)

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """The token indices (start, end) of each segment, end excluded. Several rows are counted as one long row."""
        return list(pairwise(self.trees.begins.tolist()))

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each token in its document, int64 [rows, tokens]. Positions start at 0 in every root."""
        if not self.fillers:
            return self._of_tokens(self.trees.position_ids.astype(np.int64))
        return self._of_tokens(positions_of(self.lengths, self.fillers))

    @cached_property
    def seq_idx(self) -> Tensor:
        """The index of the segment that contains each token, int32 [rows, tokens]."""
        return self._of_tokens(np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths))

    def _of_tokens(self, values: npt.NDArray[Any]) -> Tensor:
        """Return a value for each token as a tensor [rows, tokens]."""
        return on_device(values.reshape(self.rows, -1), self.cu_seq_lens.device)

    @cached_property
    def places(self) -> Sequence[Place]:
        """The places of the tokens of each path: first and last + 1, or, of several segments, int64 [tokens]."""
        if not self.has_branches:
            return self.slices
        return torch.split(on_device(self.tokens_of_paths, self.cu_seq_lens.device), self.path_lengths)

    @cached_property
    def tokens_of_paths(self) -> Places:
        """The index of each token of all paths, laid end to end, int64 [tokens of paths]."""
        return np.concatenate([*map(self.trees.path_of, self.trees.leaves)])

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """The results that `once_for_all_layers` keeps."""
        return {}

    @cached_property
    def first_places(self) -> Tensor:
        """The index of each token among the tokens of all paths, laid end to end, on the first path that has it, int64
        [tokens]."""
        _, first = np.unique(self.tokens_of_paths, return_index=True)
        return on_device(first, self.cu_seq_lens.device)

    @property
    def pieces_of_paths(self) -> IntArray:
        """The tokens of the row, in pieces that are next to each other both in the row and on a path: where each piece
        begins on its path, and ends; the length of the path; and the number of tokens in the paths before it, int64
        [pieces, 4].

        Each path has one piece, the tokens that are on no path before it. So keys are gathered once for a chat whose
        documents are its turns.
        """
        sizes, ends = np.array(self.path_lengths), self.trees.begins[1:][[*self.trees.leaves]]
        return np.stack([sizes - np.diff(ends, prepend=0), sizes, sizes, offsets_of(sizes)[:-1]], axis=1)

    def find_keys(self, places: IntArray, *_: Any) -> IntArray:
        """Return where some tokens of all paths, laid end to end, are among the keys that attention gets."""
        return self.tokens_of_paths[places]


def once_for_all_layers(make: Callable[..., T]) -> Callable[..., T]:
    """Decorator for a function of a Layout, which keeps the results: the layers of a model ask for the same."""

    @wraps(make)
    def kept(layout: Layout, *asked: Any) -> T:
        if (make, asked) not in layout.cache:
            layout.cache[make, asked] = make(layout, *asked)
        return layout.cache[make, asked]  # type: ignore[no-any-return]

    return kept


def on_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on a device, without waiting for the device."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def roots(lengths: Sequence[int]) -> TreeSegments:
    """Return segments of these lengths that share no prefixes."""
    return TreeSegments(tuple(lengths), (-1,) * len(lengths))


class Run(NamedTuple):
    """Tokens of a row that are next to each other, as are their keys on a path."""

    length: int
    """The number of its tokens."""
    keys: int
    before: int
    """The number of keys before the first token."""

    def needs_mask(self, is_causal: bool, window: int | None) -> bool:
        """Return whether its tokens see other keys than all of them or, if `is_causal`, all up to each token."""
        is_far = window is not None and max(self.before + self.length, self.keys - self.before) > window
        return is_far or (is_causal and self.before > 0)


def runs_of(
    layout: Layout, is_causal: bool, window: int | None, chunk: int | None, longest: int | None = None
) -> tuple[list[Run], IntArray | None]:
    """Return the runs of a row, given arguments of `attend_exactly`. Those that need a mask have at most `longest`
    tokens.

    Returns:
        The runs, and where the keys of one run after the other are among those that attention gets, int64 [keys]; None
        if they are these keys.
    """
    runs, begins = [], []
    for start, end, size, before in layout.pieces_of_paths.tolist():
        step, near = chunk or size, window or size
        for first, last in pairwise([start, *range((start // step + 1) * step, end, step), end]):
            low = first // step * step
            limits = low, min(low + step, size), near, is_causal
            _, whole = _run_between(first, last, *limits)
            most = longest if longest is not None and whole.needs_mask(is_causal, window) else whole.length
            for place in range(first, last, most):
                begin, run = _run_between(place, min(place + most, last), *limits)
                runs.append(run)
                begins.append(before + begin)
    keys = [run.keys for run in runs]
    if not layout.has_prefixes and sum(keys) == sum(layout.lengths):
        return runs, None
    places = indices_in_ranges(np.array(begins), np.array(keys))
    return runs, layout.find_keys(places, is_causal, window, chunk)


def _run_between(first: int, last: int, low: int, high: int, near: int, is_causal: bool) -> tuple[int, Run]:
    """Return the run of some tokens of a path, and its first key. No key is before `low` or from `high` on."""
    begin = max(first - near + 1, low)
    beyond = last if is_causal else min(last + near - 1, high)
    return begin, Run(last - first, beyond - begin, first - begin)


class SharedCall(NamedTuple):
    """A module call that processes one or more paths. Each path is a separate row in the batch of the call."""

    segments: list[int]
    """The indices of the paths in this call, which are the segments of packed rows."""
    places: list[Place]
    """Where the tokens of each path are."""
    lengths: list[int]
    batch: Layout
    """The batch of this call, with one row for each path, padded to the length of the longest one."""

    @classmethod
    def of(cls, segments: list[int], places: Sequence[Place], device: torch.device) -> "SharedCall":
        """Return the call of some of the paths in these places."""
        own = [places[each] for each in segments]
        lengths = [*map(length_of, own)]
        return cls(segments, own, lengths, Layout.of([max(lengths)] * len(own), device, rows=len(own)))


@once_for_all_layers
def calls_of(layout: Layout, sharing: Sharing) -> list[SharedCall]:
    """Return module calls that together run each path of a layout once."""
    most = MOST_TOKENS_OF_CALL if layout.has_branches else inf
    device = layout.cu_seq_lens.device
    return [SharedCall.of(each, layout.places, device) for each in group_lengths(layout.path_lengths, sharing, most)]


MAX_PADDING = 4
"""A segment is padded to at most this many times its own length."""

CALL_OVERHEAD = 16
"""The fixed cost of a module call, as a number of additional segments: a small module spends most of its time on kernel
launches, and a scan on sequential steps. All padding of a call costs at most as much as another call would."""


def group_lengths(lengths: Sequence[int], sharing: Sharing, most_tokens: float = inf) -> list[list[int]]:
    """Group segments by length, from the longest to the shortest, and return the segment indices of each group, which
    is run in one module call of at most `most_tokens` tokens."""
    groups: list[list[int]] = []
    most_padding = {"ragged": MAX_PADDING, "equal": 1, "none": 0}[sharing]
    longest = padding = 0
    for segment in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length, padding = lengths[segment], padding + longest - lengths[segment]
        is_similar = longest <= most_padding * length and padding <= CALL_OVERHEAD * length
        if groups and is_similar and longest * (len(groups[-1]) + 1) <= most_tokens:
            groups[-1].append(segment)
        else:
            groups.append([segment])
            longest, padding = length, 0
    return groups


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

needs_borders: ContextVar[bool] = ContextVar("needs_borders", default=False)
"""Whether rows without borders are refused in evaluation mode, too."""

_takes_labels: ContextVar[bool] = ContextVar("_takes_labels", default=False)
"""Whether models take labels of trees."""


def borders_required() -> AbstractContextManager[None]:
    """Return a context manager: within the block, which runs models on packed rows, rows without borders are refused in
    every mode. A teacher in evaluation mode may get only some columns of a batch."""
    return within(needs_borders, True)


def labels_of_trees() -> AbstractContextManager[None]:
    """Return a context manager: within the block, models take labels of trees, since the caller replaces their
    cross-entropy."""
    return within(_takes_labels, True)


def has_trees(inputs: Inputs) -> bool:
    """Return whether the arguments of a model's forward are a row of trees."""
    return inputs.get(PARENTS) is not None or inputs.get(SEGMENT_LENGTHS) is not None


def refuse_earlier_tokens(inputs: Inputs) -> None:
    """Raise PackingError if all documents of a row would attend to the tokens of a cache or to states of an encoder."""
    for name in ("encoder_hidden_states", "use_cache", *CACHES):
        if (value := inputs.get(name)) is not None and value is not False:
            raise PackingError(
                f"{name}: expected no cache and no states of an encoder on a patched model, got "
                f"{value if isinstance(value, bool) else type(value).__name__}; to generate text, use model.generate, "
                "or rows of one document, without cu_seq_lens_q, seq_idx and seq_lengths, and in evaluation mode"
            )


def tokens_of(inputs: Inputs) -> Tensor:
    """Return input_ids, or a value of inputs_embeds for each token."""
    ids, embeddings = inputs.get("input_ids"), inputs.get("inputs_embeds")
    if isinstance(ids, Tensor):
        return ids
    if isinstance(embeddings, Tensor):
        return embeddings[..., 0]
    raise PackingError("input_ids: expected input_ids or inputs_embeds, got neither")


def read_layout(inputs: Inputs, training: bool = False) -> Layout:
    """Read the segments of packed rows, or of a row of trees, from a model's inputs, which waits for the device.
    Several rows are counted as one long row.

    The borders of packed rows are read from cu_seq_lens_q, position_ids, seq_idx or seq_lengths, and those of trees
    from segment_lengths and parents.

    Args:
        inputs: keyword arguments of a model's forward, with input_ids or inputs_embeds, and without padding.
        training: whether the model is in training mode. In training mode, and within `borders_required`, borders are
            required. Otherwise, a row without borders counts as a single document.

    Raises:
        PackingError: input_ids and inputs_embeds are both missing; borders are missing where they are required,
            contradict each other, or do not fit the tokens; or an argument is not supported with trees.
    """
    tokens = tokens_of(inputs)
    if has_trees(inputs):
        return _read_trees(inputs, tokens)
    rows, length = tokens.shape
    borders = read_borders(rows, inputs)
    if borders is None:
        if training or needs_borders.get():
            raise PackingError(
                "position_ids: expected position_ids, cu_seq_lens_q or seq_idx in training mode and for packed rows of "
                "a trainer, got none of them, so the borders between documents are not known. PackingCollator and "
                "SFTConfig(padding_free=True) add position_ids to every batch; pass them to all models that get the "
                "batch, such as a teacher. If every row is one document, pass an attention_mask of ones"
            )
        return Layout.of([length] * rows, tokens.device)
    known, total, bound = borders.tolist(), rows * length, inputs.get(MAX_LENGTHS[0])
    lengths, ends = lengths_between(known), range(0, total + 1, length)
    if sum(lengths) != total or min(lengths) < 1 or not {*ends} <= {*known}:
        raise PackingError(
            f"cu_seq_lens_q: expected cumulative lengths that rise from 0 to {total} tokens, with a border at "
            f"the end of every row of {length} tokens, got {known}"
        )
    return Layout(
        borders.to(tokens.device, torch.int32),
        roots(lengths),
        bound=bound if isinstance(bound, int) else 0,
        fillers=fillers_in(inputs, known),
    )


def _read_trees(inputs: Inputs, tokens: Tensor) -> Layout:
    if inputs.get(SEGMENT_LENGTHS) is None or inputs.get(PARENTS) is None:
        raise PackingError("segment_lengths: expected both segment_lengths and parents beside a row of trees")
    if inputs.get("labels") is not None and not _takes_labels.get():
        raise PackingError(
            "labels: expected None with a row of trees, since no model computes the loss of trees by itself; call "
            "hfp.compute_loss(model, batch)"
        )
    if borders := [name for name in (*CU_SEQ_LENS, SEQ_IDX) if inputs.get(name) is not None]:
        raise PackingError(
            f"{borders[0]}: expected None with a row of trees, whose borders are given by segment_lengths and parents"
        )
    trees = TreeSegments.from_arrays(*(torch.as_tensor(inputs[name]).cpu() for name in (SEGMENT_LENGTHS, PARENTS)))
    if tokens.shape != (1, trees.tokens):
        raise PackingError(
            f"segment_lengths: expected lengths that add up to a single row of {list(tokens.shape)} tokens, got "
            f"{trees.tokens}"
        )
    layout, positions = Layout.of(trees, tokens.device), inputs.get("position_ids")
    if positions is not None and not torch.equal(positions.to(tokens.device), layout.position_ids):
        raise PackingError(
            "position_ids: expected the depth of each token in its tree, or None, got positions that begin with "
            f"{positions.flatten().tolist()[:8]}"
        )
    return layout


def layout_of_collator(inputs: Inputs) -> Layout | None:
    """Return the layout of a batch of PackingCollator without reading its tensors; None for other batches."""
    longest, borders, tokens = inputs.get(MAX_LENGTHS[0]), inputs.get(CU_SEQ_LENS[0]), tokens_of(inputs)
    if not isinstance(longest, LongestSegment) or borders is None or len(borders) <= len(longest.lengths):
        return None
    is_written = not borders.is_inference() and borders._version  # in place, so the lengths may be of an earlier batch
    if is_written or tokens.shape != (1, sum(longest.lengths)):
        return None
    borders = borders.to(tokens.device)
    return Layout(borders, roots(longest.lengths), bound=int(longest), fillers=longest.fillers)


def check_has_first_labels(inputs: Arguments) -> None:
    """Raise PackingError if PackingCollator has taken away labels of first tokens from a classifier of tokens."""
    longest = inputs.get(MAX_LENGTHS[0])
    if isinstance(longest, LongestSegment) and inputs.get("labels") is not None:
        of_model = "in PackingCollator, since the model does not predict tokens"
        expect(True, of_model, keep_first_labels=longest.first_labels)


def without_first_labels(inputs: Arguments, layout: Layout) -> Arguments:
    """Return the arguments for a packed row, in which no document has a label at its first token, which a model would
    predict from the document before. PackingCollator makes such labels only if it is told to."""
    labels = inputs.get("labels")
    is_ours = isinstance(inputs.get(MAX_LENGTHS[0]), LongestSegment)
    if is_ours or not isinstance(labels, Tensor) or labels.shape != (1, layout.tokens):
        return inputs
    first = layout.cu_seq_lens[: len(layout.lengths)].long().to(labels.device)
    return {**inputs, "labels": labels.index_fill(1, first, IGNORED_LABEL)}
