"""PackingPlan, which assigns slices of documents to packs, and the checks that every plan must pass."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import INT32_MAX, IntArray, smallest_index_type
from hf_packing.planning.metrics import PackingMetrics, measure_plan
from hf_packing.planning.permutation import check_seed, shuffle_packs
from hf_packing.planning.storage import load_arrays, save_arrays

ARRAYS = ("document_length", "segment_document", "segment_start", "segment_length", "pack_offsets", "pack_capacity")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PackingPlan:
    """The assignment of documents to packs. A pack consists of segments, and a segment is a slice of one document.

    Segments are listed pack by pack: the segments of pack p are `pack_offsets[p]:pack_offsets[p + 1]`. The constructor
    accepts arrays and lists of integers, checks them, converts them to the dtypes below, and makes the arrays
    read-only. Two plans are equal if their fingerprints are equal.

    Raises:
        PackingError: a segment is empty or extends beyond its document, two segments share a token, a pack is empty or
            has more tokens than its capacity, an array has the wrong size, or a value is not an integer or does not fit
            into the dtype.

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
    proven_lower_bound: int = 0
    """Lower bound on the number of packs, proven by the strategy; 0 if the strategy proves no bound.

    The bound holds for packs that respect the limits of the strategy, such as `max_documents`.
    """
    note: str = ""
    """Remark of the strategy, such as that the time limit was too short, or an empty string.

    The note is not part of the fingerprint.
    """

    def __post_init__(self) -> None:
        for name in ARRAYS:
            array = np.asanyarray(getattr(self, name))
            # unsigned integers have no negative differences, so the checks would not detect offsets that descend
            array = array.astype(np.int64) if array.dtype.kind == "u" else array.view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        _check_laws(self)
        for name, dtype in _stored_types(self).items():
            array = getattr(self, name).astype(dtype, copy=False)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @property
    def num_documents(self) -> int:
        return len(self.document_length)

    @property
    def num_segments(self) -> int:
        return len(self.segment_document)

    @property
    def num_packs(self) -> int:
        return len(self.pack_capacity)

    def arrays(self) -> dict[str, IntArray]:
        """Return the six arrays of the plan as a dict from name to array."""
        return {name: getattr(self, name) for name in ARRAYS}

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

        The segments in each pack are shuffled, too. No segment moves to another pack.

        Args:
            seed: integer from 0 to 2**63 - 1. The new order depends on the seed and on the current order.

        Returns:
            PackingPlan of the same documents and packs.

        Raises:
            PackingError: the seed is not an integer from 0 to 2**63 - 1.
        """
        order, offsets, place = shuffle_packs(self.pack_offsets, check_seed(seed))
        return PackingPlan(
            document_length=self.document_length,
            segment_document=self.segment_document[order],
            segment_start=self.segment_start[order],
            segment_length=self.segment_length[order],
            pack_offsets=offsets,
            pack_capacity=self.pack_capacity[place],
            proven_lower_bound=self.proven_lower_bound,
            note=self.note,
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
        save_arrays(Path(path), self.arrays(), facts)

    @classmethod
    def load(cls, path: str | Path) -> PackingPlan:
        """Load a saved plan. The arrays are memory-mapped.

        Processes on one machine that load the plan share the memory of the arrays.

        Args:
            path: folder that `save` has created.

        Raises:
            PackingError: the path is not a saved plan, or the saved plan is damaged.
        """
        arrays, facts = load_arrays(Path(path), ARRAYS)
        plan = cls(**arrays, proven_lower_bound=facts["proven_lower_bound"], note=facts["note"])
        if plan.fingerprint != facts["fingerprint"]:
            raise PackingError(
                f"path: expected a plan with fingerprint {facts['fingerprint']}, as recorded in plan.json, but the "
                f"arrays in {str(path)!r} have fingerprint {plan.fingerprint}; save the plan again"
            )
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the function and the arguments that rebuild the plan when the plan is copied or unpickled.

        That function calls the constructor, which checks the plan.
        """
        arrays = {name: np.asarray(array) for name, array in self.arrays().items()}
        return _rebuild_plan, (arrays, self.proven_lower_bound, self.note)

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
        return _describe(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(_describe(self))}</pre>"


def _rebuild_plan(arrays: dict[str, IntArray], proven_lower_bound: int, note: str) -> PackingPlan:
    return PackingPlan(**arrays, proven_lower_bound=proven_lower_bound, note=note)


def _describe(plan: PackingPlan) -> str:
    """Return a description of a plan in a few lines of text."""
    metrics, per_pack = plan.metrics(), np.diff(plan.pack_offsets)
    capacities, packs = np.unique(plan.pack_capacity, return_counts=True)
    each = [f"{number:,} of {capacity:,} tokens" for capacity, number in zip(capacities, packs, strict=True)]
    holding = f" of {capacities[0]:,} tokens" if len(each) == 1 else f": {', '.join(each) or 'none'}"
    lines = [
        f"{metrics.num_documents:,} documents, {metrics.num_tokens:,} tokens, in {metrics.num_packs:,} packs{holding}",
        f"padding {metrics.padding_ratio:.2%}, {metrics.concatenation_ratio:.2f} documents per pack, "
        f"{per_pack.min(initial=metrics.num_segments):,} to {per_pack.max(initial=0):,} segments in a pack",
        f"{metrics.num_cut_documents:,} documents cut ({metrics.truncation_ratio:.2%}), "
        f"{metrics.num_dropped_tokens:,} tokens dropped, {metrics.num_empty_documents:,} empty documents skipped",
    ]
    if len(capacities) == 1:
        lines.append(
            f"no plan for the same segments has fewer than {metrics.lower_bound:,} packs of this size; "
            f"this plan has {metrics.num_packs / max(metrics.lower_bound, 1) - 1:.2%} more"
        )
    return "\n".join(lines + ([plan.note] if plan.note else []))


def _check_laws(plan: PackingPlan) -> None:
    """Raise PackingError if the arrays of the plan are invalid.

    In a valid plan, no token is in two segments, and no pack has more tokens than its capacity. A token may be in no
    segment; the metrics count such tokens as dropped.
    """
    _check_shapes(plan)
    segments = plan.num_segments
    offsets, length, start, document = plan.pack_offsets, plan.segment_length, plan.segment_start, plan.segment_document
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
    if document.min() < 0 or document.max() >= plan.num_documents:
        raise PackingError(
            f"segment_document: expected document indices of at least 0 and below {plan.num_documents}, the number of "
            f"documents, got indices from {document.min()} to {document.max()}"
        )
    fill = np.add.reduceat(length, offsets[:-1], dtype=np.int64)
    if (overfull := fill > plan.pack_capacity).any():
        pack = int(overfull.argmax())
        raise PackingError(
            f"segment_length: expected at most {plan.pack_capacity[pack]} tokens in pack {pack}, the capacity of the "
            f"pack, got {fill[pack]} tokens"
        )
    outside = start > plan.document_length[document] - length
    if start.any():
        outside |= start < 0
    if outside.any():
        segment = int(outside.argmax())
        raise PackingError(
            f"segment_start: expected segments within their documents, but segment {segment} covers tokens "
            f"{start[segment]}:{int(start[segment]) + int(length[segment])} of document {document[segment]}, which has "
            f"{plan.document_length[document[segment]]} tokens"
        )
    _check_disjoint(document, start, length, plan.num_documents)


def _stored_types(plan: PackingPlan) -> dict[str, Any]:
    """Return the dtype in which each array of a valid plan is stored."""
    longest = int(plan.document_length.max(initial=0))
    tokens = np.int32 if longest <= INT32_MAX else np.int64
    return {
        "document_length": tokens,
        "segment_document": smallest_index_type(plan.num_documents),
        "segment_start": tokens,
        "segment_length": np.int32,
        "pack_offsets": np.int64,
        "pack_capacity": np.int32,
    }


def _check_shapes(plan: PackingPlan) -> None:
    arrays = plan.arrays()
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PackingError(f"{name}: expected 1-d integers, got an array of {array.dtype} with shape {array.shape}")
    if len(plan.document_length) and plan.document_length.min() < 0:
        raise PackingError(f"document_length: expected no negative length, got {plan.document_length.min()}")
    for name in ("segment_length", "pack_capacity"):
        if (largest := arrays[name].max(initial=0)) > INT32_MAX:
            raise PackingError(f"{name}: expected at most {INT32_MAX} tokens, got {largest}")
    for name in ("segment_start", "segment_length"):
        if len(arrays[name]) != plan.num_segments:
            raise PackingError(
                f"{name}: expected one value for each of the {plan.num_segments} segments in segment_document, got "
                f"{len(arrays[name])} values"
            )
    if len(plan.pack_offsets) != len(plan.pack_capacity) + 1:
        raise PackingError(
            f"pack_offsets: expected one offset more than packs, got {len(plan.pack_offsets)} offsets for the "
            f"{len(plan.pack_capacity)} packs in pack_capacity"
        )


def _check_disjoint(document: IntArray, start: IntArray, length: IntArray, documents: int) -> None:
    """Raise PackingError if two segments share a token.

    Documents with a single segment are skipped. The segments of all other documents are sorted and compared.
    """
    seen = np.zeros(documents, dtype=bool)
    seen[document] = True
    if np.count_nonzero(seen) == len(document):
        return
    segments_of = np.bincount(document, minlength=documents)
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
