"""PackingPlan, which assigns slices of documents to packs, and the checks that every plan must pass."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.checks import INT32_MAX, check_seed, set_fields
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray, smallest_index_type
from hf_packing.planning.metrics import PackingMetrics, measure_plan
from hf_packing.planning.permutation import shuffle_trees
from hf_packing.planning.storage import load_arrays, save_arrays

ARRAYS = ("document_length", "segment_document", "segment_start", "segment_length", "pack_offsets", "pack_capacity")
SEGMENT_SHARED = "segment_shared"
"""The array that only plans of documents with shared prefixes have."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PackingPlan:
    """The assignment of documents to packs. A pack consists of segments, and a segment is a slice of one document.

    Segments are listed pack by pack: the segments of pack p are `pack_offsets[p]:pack_offsets[p + 1]`. The constructor
    accepts arrays and lists of integers, checks them, converts them to the dtypes below, and makes the arrays
    read-only. Two plans are equal if their fingerprints are equal.

    Raises:
        PackingError: a segment is empty or extends beyond its document, two segments share a token, a pack is empty or
            has more tokens than its capacity, a segment takes more tokens from the segment before it than both have, an
            array has the wrong size, or a value is not an integer or does not fit into the dtype.

    Example:
        >>> import hf_packing as hfp
        >>> plan = hfp.plan_packing([5, 3, 6, 2], hfp.BestFit(8))
        >>> plan
        PackingPlan(4 documents, 4 segments, 2 packs, efficiency 1.0000)
        >>> plan.metrics().padding_ratio
        0.0
    """

    document_length: IntArray
    """int32 [documents], or int64 if a length exceeds int32: length of the document before cutting, in tokens."""
    segment_document: IntArray
    """int32 or int64 [segments]: index of the document that the segment is cut from."""
    segment_start: IntArray
    """int32 or int64 [segments]: index of the segment's first token in the document."""
    segment_length: IntArray
    """int32 [segments]: length of the segment, in tokens."""
    pack_offsets: IntArray
    """int64 [packs + 1]: the segments of pack p are pack_offsets[p]:pack_offsets[p + 1]."""
    pack_capacity: IntArray
    """int32 [packs]: capacity of the pack, in tokens."""
    segment_shared: IntArray | None = None
    """int32 [segments]: number of tokens that the segment takes from the segment before it in the pack, or None.

    A document that begins with the same tokens as the document before it needs only the rest of its tokens in the row.
    Segments that share tokens form a tree; a 0 begins a tree. None means that every segment is in the row as a whole.
    """
    proven_lower_bound: int = 0
    """Lower bound on the number of packs, proven by the strategy; 0 if the strategy proves no bound.

    The bound holds for packs that respect the limits of the strategy, such as `max_documents`.
    """
    note: str = ""
    """Remark of the strategy, such as that the time limit was too short, or an empty string.

    The note is not part of the fingerprint.
    """

    def __post_init__(self) -> None:
        for name in self._names():
            array = np.asanyarray(getattr(self, name))
            # unsigned integers have no negative differences, so the checks would not detect offsets that descend
            array = array.astype(np.int64) if array.dtype.kind == "u" else array.view()
            array.flags.writeable = False
            set_fields(self, **{name: array})
        _check_laws(self.arrays())
        types = _stored_types(self.arrays())
        for name, array in self.arrays().items():
            array = array.astype(types[name], copy=False)
            array.flags.writeable = False
            set_fields(self, **{name: array})

    @property
    def num_documents(self) -> int:
        return len(self.document_length)

    @property
    def num_segments(self) -> int:
        return len(self.segment_document)

    @property
    def num_packs(self) -> int:
        return len(self.pack_capacity)

    def _names(self) -> tuple[str, ...]:
        return ARRAYS if self.segment_shared is None else (*ARRAYS, SEGMENT_SHARED)

    def arrays(self) -> dict[str, IntArray]:
        """Return the arrays of the plan as a dict from name to array; `segment_shared` only if it is not None."""
        return {name: getattr(self, name) for name in self._names()}

    def segment_own(self) -> IntArray:
        """Return the number of tokens that each segment adds to its pack, int32 [segments].

        This is the length of the segment, without the tokens that it takes from the segment before it.
        """
        return self.segment_length if self.segment_shared is None else self.segment_length - self.segment_shared

    def pack_tokens(self) -> IntArray:
        """Return the number of tokens in each pack, int64 [packs]. Tokens that segments share are counted once."""
        if not self.num_packs:
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(self.segment_own(), self.pack_offsets[:-1], dtype=np.int64)

    def tree_offsets(self) -> IntArray:
        """Return where trees begin, int64 [trees + 1]: the segments of tree t are tree_offsets[t]:tree_offsets[t + 1].

        A tree is made of segments that share tokens. A segment that shares no token is a tree of its own.
        """
        if self.segment_shared is None:
            return np.arange(self.num_segments + 1)
        return np.append(np.flatnonzero(self.segment_shared == 0), self.num_segments)

    def pack_of_segment(self) -> IntArray:
        """Return the index of each segment's pack, int64 [segments]."""
        return np.repeat(np.arange(self.num_packs), np.diff(self.pack_offsets))

    @cached_property
    def _metrics(self) -> PackingMetrics:
        return measure_plan(
            self.document_length,
            self.segment_document,
            self.segment_length,
            self.pack_capacity,
            self.proven_lower_bound,
            self.segment_shared,
        )

    def metrics(self) -> PackingMetrics:
        """Return the metrics of the plan, such as padding and truncation. The metrics are computed only once."""
        return self._metrics

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the plan's arrays and lower bound, as 32 hex digits.

        Equal plans have the same fingerprint in every process and on every machine.
        """
        digest = hashlib.blake2b(str(self.proven_lower_bound).encode(), digest_size=16)
        for name, array in self.arrays().items():
            digest.update(f"{name} {array.dtype.str} {len(array)}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def shuffle(self, seed: int) -> PackingPlan:
        """Return a plan with the same packs in a new random order, for example for the next epoch.

        The segments in each pack are shuffled, too. No segment moves to another pack. Segments that share tokens stay
        together, in their order.

        Args:
            seed: integer from 0 to 2**63 - 1. The new order depends on the seed and on the current order.

        Returns:
            PackingPlan of the same documents and packs.

        Raises:
            PackingError: the seed is not an integer from 0 to 2**63 - 1.
        """
        order, offsets, place = shuffle_trees(self.tree_offsets(), self.pack_offsets, check_seed(seed))
        return replace(
            self,
            segment_document=self.segment_document[order],
            segment_start=self.segment_start[order],
            segment_length=self.segment_length[order],
            pack_offsets=offsets,
            pack_capacity=self.pack_capacity[place],
            segment_shared=None if self.segment_shared is None else self.segment_shared[order],
        )

    def save(self, path: str | Path) -> None:
        """Save the plan to a folder, as .npy files and a plan.json. A plan that is already in the folder is replaced.

        Args:
            path: folder to create or to replace.

        Raises:
            PackingError: the path exists, and either is not a saved plan or contains other files, too.
        """
        facts = {
            "fingerprint": self.fingerprint,
            "proven_lower_bound": self.proven_lower_bound,
            "note": self.note,
        }
        save_arrays(Path(path), self.arrays(), facts, replaceable=(*ARRAYS, SEGMENT_SHARED))

    @classmethod
    def load(cls, path: str | Path) -> PackingPlan:
        """Load a saved plan. The arrays are memory-mapped.

        Processes on one machine that load the plan share the memory of the arrays.

        Args:
            path: folder that `save` has created.

        Raises:
            PackingError: the path is not a saved plan, or the saved plan is damaged.
        """
        arrays, facts = load_arrays(Path(path), ARRAYS, optional=(SEGMENT_SHARED,))
        plan = cls(**arrays, proven_lower_bound=facts["proven_lower_bound"], note=facts["note"])
        if plan.fingerprint != facts["fingerprint"]:
            raise PackingError(
                f"path: expected a plan with fingerprint {facts['fingerprint']}, as recorded in plan.json, but the "
                f"arrays in {str(path)!r} have fingerprint {plan.fingerprint}; save the plan again"
            )
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor with its arguments, so that a plan is checked when it is copied or unpickled."""
        arrays = {name: np.asarray(array) for name, array in self.arrays().items()}
        return partial(PackingPlan, **arrays, proven_lower_bound=self.proven_lower_bound, note=self.note), ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackingPlan) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        metrics = self.metrics()
        return (
            f"PackingPlan({self.num_documents} documents, {self.num_segments} segments, {self.num_packs} packs, "
            f"efficiency {metrics.packing_efficiency:.4f})"
        )

    def __str__(self) -> str:
        trees = None if self.segment_shared is None else len(self.tree_offsets()) - 1
        return describe_plan(self.metrics(), np.diff(self.pack_offsets), self.pack_capacity, trees, self.note)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _check_laws(arrays: Mapping[str, IntArray]) -> None:
    """Raise PackingError if the arrays of a plan are invalid.

    In a valid plan, no token is in two segments, and no pack has more tokens than its capacity. A token may be in no
    segment; the metrics count such tokens as dropped.
    """
    _check_shapes(arrays)
    offsets, capacity, documents = arrays["pack_offsets"], arrays["pack_capacity"], arrays["document_length"]
    document, start, length = (arrays[f"segment_{name}"] for name in ("document", "start", "length"))
    segments = len(document)
    if offsets[0] != 0 or offsets[-1] != segments or (np.diff(offsets) < 1).any():
        raise PackingError(
            f"pack_offsets: expected offsets that rise from 0 to {segments}, the number of segments, with at least one "
            f"segment in each pack, got {offsets}"
        )
    if not segments:
        return
    if length.min() < 1:
        raise PackingError(
            f"segment_length: expected no empty segment, got length {length.min()} at index {int(length.argmin())}"
        )
    if document.min() < 0 or document.max() >= len(documents):
        raise PackingError(
            f"segment_document: expected document indices of at least 0 and below {len(documents)}, the number of "
            f"documents, got indices from {document.min()} to {document.max()}"
        )
    own = length
    if SEGMENT_SHARED in arrays:
        check_shared(arrays[SEGMENT_SHARED], length, offsets)
        own = length - arrays[SEGMENT_SHARED]
    fill = np.add.reduceat(own, offsets[:-1], dtype=np.int64)
    if (overfull := fill > capacity).any():
        pack = int(overfull.argmax())
        raise PackingError(
            f"segment_length: expected at most {capacity[pack]} tokens in pack {pack}, the capacity of the "
            f"pack, got {fill[pack]} tokens"
        )
    _check_slices(document, start, length, documents)


def _check_slices(document: IntArray, start: IntArray, length: IntArray, documents: IntArray) -> None:
    """Raise PackingError if a segment extends beyond its document, or if segments of a document overlap."""
    outside = start > documents[document] - length
    if start.any():
        outside |= start < 0
    if outside.any():
        segment = int(outside.argmax())
        raise PackingError(
            f"segment_start: expected segments within their documents, but segment {segment} covers tokens "
            f"{start[segment]}:{int(start[segment]) + int(length[segment])} of document {document[segment]}, which has "
            f"{documents[document[segment]]} tokens"
        )
    is_packed = np.zeros(len(documents), dtype=bool)
    is_packed[document] = True
    if np.count_nonzero(is_packed) < len(document):  # a document has several segments
        check_disjoint(document, start, length)


def _check_shapes(arrays: Mapping[str, IntArray]) -> None:
    documents, segments = arrays["document_length"], len(arrays["segment_document"])
    offsets, capacities = arrays["pack_offsets"], arrays["pack_capacity"]
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PackingError(f"{name}: expected 1-d integers, got an array of {array.dtype} with shape {array.shape}")
    if len(documents) and documents.min() < 0:
        raise PackingError(f"document_length: expected no negative length, got {documents.min()}")
    for name in ("segment_length", "pack_capacity"):
        if (largest := arrays[name].max(initial=0)) > INT32_MAX:
            raise PackingError(f"{name}: expected at most {INT32_MAX} tokens, got {largest}")
    for name in ("segment_start", "segment_length", SEGMENT_SHARED):
        if name in arrays and len(arrays[name]) != segments:
            raise PackingError(
                f"{name}: expected one value for each of the {segments} segments in segment_document, got "
                f"{len(arrays[name])} values"
            )
    if len(offsets) != len(capacities) + 1:
        raise PackingError(
            f"pack_offsets: expected one offset more than packs, got {len(offsets)} offsets for the "
            f"{len(capacities)} packs in pack_capacity"
        )


def _stored_types(arrays: Mapping[str, IntArray]) -> dict[str, Any]:
    """Return the dtype in which each array of a valid plan is stored."""
    tokens = smallest_index_type(int(arrays["document_length"].max(initial=0)))
    return {
        "document_length": tokens,
        "segment_document": smallest_index_type(len(arrays["document_length"])),
        "segment_start": tokens,
        "segment_length": np.int32,
        "pack_offsets": np.int64,
        "pack_capacity": np.int32,
        SEGMENT_SHARED: np.int32,
    }


def check_shared(shared: IntArray, length: IntArray, offsets: IntArray) -> None:
    """Raise PackingError if a segment shares more tokens with the segment before it than both have.

    The first segment of a pack shares nothing.
    """
    most = np.minimum(length, np.concatenate([[0], length[:-1]]))
    most[offsets[:-1]] = 0
    if (wrong := (shared < 0) | (shared > most)).any():
        segment = int(wrong.argmax())
        if shared[segment] < 0:
            reason = "no negative number"
        elif not most[segment]:
            reason = "0 at the first segment of a pack"
        else:
            reason = (
                f"at most {most[segment]}, since segment {segment} has {length[segment]} tokens and the segment before "
                f"it has {length[segment - 1]}"
            )
        raise PackingError(f"segment_shared: expected {reason}, got {shared[segment]} at index {segment}")


def check_disjoint(document: IntArray, start: IntArray, length: IntArray) -> None:
    """Raise PackingError if two segments have the same token of a document.

    Documents with a single segment are skipped. The segments of all other documents are sorted and compared.
    """
    segments_of = np.bincount(document)
    several = np.flatnonzero(segments_of[document] > 1)
    several = several[np.lexsort((start[several], document[several]))]
    left, right = several[:-1], several[1:]
    end = start[left].astype(np.int64) + length[left]
    if (twice := (document[left] == document[right]) & (start[right] < end)).any():
        first = int(twice.argmax())
        raise PackingError(
            f"segment_start: expected segments that share no token, but segments {left[first]} and {right[first]} of "
            f"document {document[left[first]]} overlap: segment {left[first]} ends before token {end[first]}, and "
            f"segment {right[first]} starts at token {start[right[first]]}"
        )


def describe_plan(
    metrics: PackingMetrics, segments_per_pack: IntArray, pack_capacity: IntArray, trees: int | None, note: str
) -> str:
    """Return a description of a plan in a few lines of text.

    Args:
        metrics: the metrics of the plan.
        segments_per_pack: integers [packs]: number of segments in each pack.
        pack_capacity: integers [packs]: capacity of each pack, in tokens.
        trees: number of trees of segments that share tokens; None if no segments share tokens.
        note: remark of the strategy; an empty string if there is none.
    """
    capacities, packs = np.unique(pack_capacity, return_counts=True)
    each = [f"{number:,} of {capacity:,} tokens" for capacity, number in zip(capacities, packs, strict=True)]
    holding = f" of {capacities[0]:,} tokens" if len(each) == 1 else f": {', '.join(each) or 'none'}"
    fewest, most = segments_per_pack.min(initial=metrics.num_segments), segments_per_pack.max(initial=0)
    lines = [
        f"{metrics.num_documents:,} documents, {metrics.num_tokens:,} tokens, in {metrics.num_packs:,} packs{holding}",
        f"padding {metrics.padding_ratio:.2%}, {metrics.concatenation_ratio:.2f} documents per pack, "
        f"{fewest:,} to {most:,} segments in a pack",
        f"{metrics.num_cut_documents:,} documents cut ({metrics.truncation_ratio:.2%}), "
        f"{metrics.num_dropped_tokens:,} tokens dropped, {metrics.num_empty_documents:,} empty documents skipped",
    ]
    if trees is not None:
        lines.append(f"prefixes shared: {metrics.shared_ratio:.2f} times fewer tokens in packs, in {trees:,} trees")
    if len(capacities) == 1:
        same = "segments" if trees is None else "trees"
        lines.append(
            f"no plan for the same {same} has fewer than {metrics.lower_bound:,} packs of this size; "
            f"this plan has {metrics.num_packs / max(metrics.lower_bound, 1) - 1:.2%} more"
        )
    return "\n".join(lines + ([note] if note else []))
