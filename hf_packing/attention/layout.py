"""Where the segments of a batch are, which keys their tokens see, and how modules run on them.

A packed row is a forest of roots: each segment is a document of its own, or a part of one. In other kinds of batches,
segments may have parents, and a document is a path from a root down to a segment. Modules that are not segment-local
run on whole paths; in a packed row, each path is one segment. Attention and modules only ask the layout, whose class is
that of the kind of batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import accumulate, pairwise
from math import inf
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_packing.attention.model import Arguments
from hf_packing.attention.token_axes import Place, TokenAxes, length_of
from hf_packing.planning.lengths import IntArray, indices_in_ranges, offsets_of
from hf_packing.trees.segments import TreeSegments

CACHES = ("cache", "past_key_values", "cache_params", "mems", "state", "past_buckets_states")
"""Names of the arguments in which models of transformers take caches. Models have them under these names in their
outputs too. transformers 5.24 renamed past_key_values and cache_params to cache, and still takes the old names."""

T = TypeVar("T")

Sharing = Literal["ragged", "equal", "none"]
"""The rule for running several segments in one call of a module. "ragged": a call may contain segments of similar
length, padded on the right. "equal": a call may contain only segments of equal length. "none": a call contains only one
segment."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of the segments of one or more packed rows, without the tokens.

    A kind of batch whose segments see other keys than their own, or are run in another way, has a subclass.

    Args:
        cu_seq_lens: int32 [segments + 1], cumulative segment lengths, starting at 0. Several rows are counted as one
            long row. In a batch of fixed shapes, the last border is repeated, which makes empty segments at the end.
        trees: the lengths and parents of the segments that are not empty. In packed rows, no segment has a parent.
        rows: number of rows of equal size in a call of a module that gets several segments at once; otherwise 1.
    """

    cu_seq_lens: Tensor
    trees: TreeSegments
    rows: int = 1

    sees_others: ClassVar[bool] = False
    """Whether a segment may have keys that are not its own. Then no borders between segments describe its attention."""
    most_tokens_of_call: ClassVar[float] = inf
    """The most tokens of one call of a module on several segments or paths."""

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

    @property
    def documents(self) -> TreeSegments:
        """The segments that have tokens of documents."""
        return self.trees

    @cached_property
    def tokens(self) -> int:
        """The number of tokens in each row."""
        return sum(self.lengths) // self.rows

    @property
    def has_borders(self) -> bool:
        """True if a row has more than one segment, or other keys than its own."""
        return self.sees_others or len(self.lengths) > self.rows

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
        """The value of max_length_q/k for the model."""
        return self.longest

    @property
    def has_fixed_shapes(self) -> bool:
        """True for a batch that has as many tokens and borders as all others."""
        return len(self.lengths) < len(self.cu_seq_lens) - 1

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """The token indices (start, end) of each segment, end excluded. Several rows are counted as one long row."""
        return list(pairwise(self.trees.begins.tolist()))

    @cached_property
    def position_ids(self) -> Tensor:
        """The position of each token in its document, int64 [rows, tokens]. Positions start at 0 in every root."""
        return self._of_tokens(self.trees.position_ids.astype(np.int64))

    @cached_property
    def seq_idx(self) -> Tensor:
        """The index of the segment that contains each token, int32 [rows, tokens]."""
        return self._of_tokens(np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths))

    def _of_tokens(self, values: npt.NDArray[Any]) -> Tensor:
        """Return a value for each token as a tensor [rows, tokens]."""
        return on_device(values.reshape(self.rows, -1), self.cu_seq_lens.device)

    @property
    def places(self) -> Sequence[Place]:
        """The places of the tokens of each path."""
        return self.slices

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """The results that `once_for_all_layers` keeps."""
        return {}

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
        return places

    def runs(
        self, is_causal: bool, window: int | None, chunk: int | None, longest: int | None = None
    ) -> tuple[list["Run"], IntArray | None]:
        """Return the runs of the row, given arguments of `attend_exactly`. Those that need a mask have at most
        `longest` tokens.

        Returns:
            The runs, and where the keys of one run after the other are among those that attention gets, int64 [keys];
            None if they are these keys.
        """
        runs, begins = [], []
        for start, end, size, before in self.pieces_of_paths.tolist():
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
        if not self.sees_others and sum(keys) == sum(self.lengths):
            return runs, None
        return runs, self.find_keys(indices_in_ranges(np.array(begins), np.array(keys)), is_causal, window, chunk)

    def gather_keys(self, key: Tensor, value: Tensor, where: str, *how: Any) -> tuple[Tensor, Tensor, Arguments]:  # noqa: ARG002
        """Return the keys and values that attention gets, given those of the row's own tokens, and what the row asks of
        a kernel besides the arguments of attention.

        Args:
            key, value: [1, heads, tokens, dim].
            where: the class of the attention layer, for error messages.
            how: is_causal, window and chunk, as in `attend_exactly`.
        """
        return key, value, {}

    def gather_documents(self, given: Any, axes: TokenAxes) -> tuple[Any, "Layout", Tensor | None]:  # noqa: ARG002
        """Return what a module gets that has to run on whole documents.

        Args:
            given: nested arguments of the module, for the row.
            axes: the token axes of the arguments.

        Returns:
            The arguments for all tokens of the documents; the layout of the documents; and where the row's own tokens
            are among the tokens of all paths, laid end to end, int64 [tokens], or None if they are these tokens.
        """
        return given, self, None

    def into_rows(self, output: Any) -> Any:
        """Return nested outputs of the backbone as modules get them that make one output of all tokens of a row."""
        return output


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
    device, groups = layout.cu_seq_lens.device, group_lengths(layout.path_lengths, sharing, layout.most_tokens_of_call)
    return [SharedCall.of(each, layout.places, device) for each in groups]


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


running: ContextVar[tuple[int, ...]] = ContextVar("running", default=())
"""The `id()` of each patched model whose forward is running. A patch replaces the forwards of a model and of its inner
models, but only the outermost forward reads the inputs."""

current_layout: ContextVar[Layout | None] = ContextVar("current_layout", default=None)
"""The layout that a patched model's forward is processing; None if no such forward is running."""
