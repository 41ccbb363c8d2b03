"""PackingPlan, which assigns slices of documents to packs, and the checks that every plan must pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from hf_packing.checks import INT32_MAX, check_seed, set_fields
from hf_packing.errors import PackingError
from hf_packing.files import new_folder
from hf_packing.planning.lengths import IntArray, Pieces, indices_in_groups, offsets_of, smallest_index_type, sums_of
from hf_packing.planning.metrics import PackingMetrics, make_metrics, pack_lower_bound, sum_of_squares
from hf_packing.planning.permutation import shuffle_trees

ARRAYS = ("document_length", "segment_document", "segment_start", "segment_length", "pack_offsets", "pack_capacity")
SEGMENT_SHARED = "segment_shared"
"""The array that only plans of documents with shared prefixes have."""

_FORMAT = 1
_INDEX = "plan.json"
_FACTS = ("fingerprint", "proven_lower_bound", "note")
_FILES = {_INDEX, *(f"{name}.npy" for name in (*ARRAYS, SEGMENT_SHARED))}


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
        # unsigned integers have no negative differences, so the checks would not detect offsets that descend
        arrays = {name: np.asanyarray(array) for name, array in self.arrays().items()}
        arrays = {name: array.astype(np.int64) if array.dtype.kind == "u" else array for name, array in arrays.items()}
        _check_laws(arrays)
        tokens = smallest_index_type(int(arrays["document_length"].max(initial=0)))
        documents = smallest_index_type(len(arrays["document_length"]))
        types: dict[str, Any] = {
            "document_length": tokens,
            "segment_start": tokens,
            "segment_document": documents,
            "pack_offsets": np.int64,
        }
        for name, array in arrays.items():
            stored = array.astype(types.get(name, np.int32), copy=False).view()
            stored.flags.writeable = False
            set_fields(self, **{name: stored})

    @property
    def num_documents(self) -> int:
        return len(self.document_length)

    @property
    def num_segments(self) -> int:
        return len(self.segment_document)

    @property
    def segments(self) -> Pieces:
        """The slices of documents that are packed, in the order of the packs."""
        return Pieces(self.segment_document, self.segment_start, self.segment_length)

    @property
    def num_packs(self) -> int:
        return len(self.pack_capacity)

    def arrays(self) -> dict[str, IntArray]:
        """Return the arrays of the plan as a dict from name to array; `segment_shared` only if it is not None."""
        names = ARRAYS if self.segment_shared is None else (*ARRAYS, SEGMENT_SHARED)
        return {name: getattr(self, name) for name in names}

    def segment_own(self) -> IntArray:
        """Return the number of tokens that each segment adds to its pack, int32 [segments].

        This is the length of the segment, without the tokens that it takes from the segment before it.
        """
        return self.segment_length if self.segment_shared is None else self.segment_length - self.segment_shared

    def pack_tokens(self) -> IntArray:
        """Return the number of tokens in each pack, int64 [packs]. Tokens that segments share are counted once."""
        return sums_of(self.segment_own(), self.pack_offsets)

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
        documents, document, length = self.num_documents, self.segment_document, self.segment_length
        capacity, own = self.pack_capacity, self.segment_own()
        shared, sizes = length - own, sums_of(own, self.tree_offsets())
        bound = pack_lower_bound(np.bincount(sizes), int(capacity.max(initial=1)))
        return make_metrics(
            documents=np.ones(documents, dtype=np.int64),
            document_length=self.document_length,
            segments_each=np.bincount(document, minlength=documents),
            tokens_kept=np.bincount(document, length, minlength=documents).astype(np.int64),
            packs=self.num_packs,
            slots=int(capacity.sum(dtype=np.int64)),
            squared_segments=sum_of_squares(length) - sum_of_squares(shared),
            squared_capacities=sum_of_squares(capacity),
            lower_bound=max(bound, self.proven_lower_bound),
            shared_tokens=int(shared.sum(dtype=np.int64)),
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
        return self.take(*shuffle_trees(self.tree_offsets(), self.pack_offsets, check_seed(seed)))

    def take(self, segments: IntArray, offsets: IntArray, packs: IntArray) -> PackingPlan:
        """Return the plan of some packs, with their segments in a new order or exchanged between packs.

        Every pack that is left out may save a pack of the rest, so the lower bound falls by the number of these packs.

        Args:
            segments: int64 [new segments]: indices of segments, in the new order. Trees stay whole and in order.
            offsets: int64 [new packs + 1]: `pack_offsets` of the new plan.
            packs: int64 [new packs]: for each new pack, the index of the pack whose capacity it has.
        """
        new: dict[str, Any] = {
            name: array[segments] for name, array in self.arrays().items() if name.startswith("segment")
        }
        bound = max(0, self.proven_lower_bound - (self.num_packs - len(packs)))
        capacity = self.pack_capacity[packs]
        return replace(self, **new, pack_offsets=offsets, pack_capacity=capacity, proven_lower_bound=bound)

    def take_packs(self, packs: IntArray) -> PackingPlan:
        """Return the plan of some packs, in the order of their indices in `packs`, int64 [packs]."""
        segments, sizes = indices_in_groups(self.pack_offsets, packs)
        return self.take(segments, offsets_of(sizes), packs)

    def save(self, path: str | Path) -> None:
        """Save the plan to a folder, as .npy files and a plan.json. A plan that is already in the folder is replaced.

        No process ever reads an incomplete folder.

        Args:
            path: folder to create or to replace.

        Raises:
            PackingError: the path exists, and either is not a saved plan or contains other files, too.
        """
        folder = Path(path).resolve()  # a folder cannot be renamed onto a symbolic link
        _check_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        facts = {"format": _FORMAT, **{name: getattr(self, name) for name in _FACTS}}
        with new_folder(folder) as fresh:
            for name, array in self.arrays().items():
                np.save(fresh / f"{name}.npy", array, allow_pickle=False)
            (fresh / _INDEX).write_text(json.dumps(facts, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PackingPlan:
        """Load a saved plan. The arrays are memory-mapped.

        Processes on one machine that load the plan share the memory of the arrays.

        Args:
            path: folder that `save` has created.

        Raises:
            PackingError: the path is not a saved plan, or the saved plan is damaged.
        """
        arrays, facts = _load_arrays(Path(path))
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
        m, segments = self.metrics(), np.diff(self.pack_offsets)
        capacities, packs = np.unique(self.pack_capacity, return_counts=True)
        each = [f"{number:,} of {capacity:,} tokens" for capacity, number in zip(capacities, packs, strict=True)]
        holding = f" of {capacities[0]:,} tokens" if len(each) == 1 else f": {', '.join(each) or 'none'}"
        fewest, most = segments.min(initial=m.num_segments), segments.max(initial=0)
        lines = [
            f"{m.num_documents:,} documents, {m.num_tokens:,} tokens, in {m.num_packs:,} packs{holding}",
            f"padding {m.padding_ratio:.2%}, {m.concatenation_ratio:.2f} documents per pack, "
            f"{fewest:,} to {most:,} segments in a pack",
            f"{m.num_cut_documents:,} documents cut ({m.truncation_ratio:.2%}), "
            f"{m.num_dropped_tokens:,} tokens dropped, {m.num_empty_documents:,} empty documents skipped",
        ]
        same = "segments"
        if self.segment_shared is not None:
            trees, same = len(self.tree_offsets()) - 1, "trees"
            lines.append(f"prefixes shared: {m.shared_ratio:.2f} times fewer tokens in packs, in {trees:,} trees")
        if len(capacities) == 1:
            lines.append(
                f"no plan for the same {same} has fewer than {m.lower_bound:,} packs of this size; "
                f"this plan has {m.num_packs / max(m.lower_bound, 1) - 1:.2%} more"
            )
        return "\n".join([*lines, self.note]).strip()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _check_laws(arrays: Mapping[str, IntArray]) -> None:
    """Raise PackingError if the arrays of a plan are invalid.

    In a valid plan, no token is in two segments, and no pack has more tokens than its capacity. A token may be in no
    segment; the metrics count such tokens as dropped.
    """
    documents, document, start, length, offsets, capacity = (arrays[name] for name in ARRAYS)
    shared = arrays.get(SEGMENT_SHARED)
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise PackingError(f"{name}: expected 1-d integers, got an array of {array.dtype} with shape {array.shape}")
        if name.startswith("segment") and len(array) != len(document):
            raise PackingError(
                f"{name}: expected one value for each of the {len(document)} segments in segment_document, got "
                f"{len(array)} values"
            )
    rises = len(offsets) == len(capacity) + 1 and offsets[0] == 0 and offsets[-1] == len(document)
    if not rises or (np.diff(offsets) < 1).any():
        raise PackingError(
            f"pack_offsets: expected {len(capacity) + 1} offsets for the {len(capacity)} packs in pack_capacity, which "
            f"rise from 0 to {len(document)}, the number of segments, got {offsets}"
        )
    _check_values("document_length", documents, 0, 2**63 - 1)
    _check_values("segment_document", document, 0, len(documents) - 1)
    _check_values("segment_length", length, 1, INT32_MAX)
    _check_values("pack_capacity", capacity, 1, INT32_MAX)
    own = length
    if shared is not None:
        most = np.minimum(length, np.append(0, length[:-1]))
        most[offsets[:-1]] = 0
        _check_values("segment_shared", shared, 0, most)
        own = length - shared
    _check_values("segment_length", sums_of(own, offsets), 0, capacity, "as the sum in pack")
    if not start.any():  # as of whole documents, each in one segment
        kept = np.zeros(len(documents), dtype=np.int32)
        kept[document] = length
        if np.count_nonzero(kept) == len(document) and (kept <= documents).all():
            return
    # a segment begins where the one before it in its document ends, or later
    several = np.flatnonzero((np.bincount(document) > 1).take(document))
    several = several[np.lexsort((start[several], document[several]))]
    before, after = several[:-1], several[1:]
    ends = (document[before] == document[after]) * (start[before].astype(np.int64) + length[before])
    least: IntArray | int = 0
    if (start[after] < ends).any():
        least = np.zeros(len(document), dtype=np.int64)
        least[after] = ends
    _check_values("segment_start", start, least, documents.take(document) - length)


def _check_values(
    name: str, values: IntArray, least: IntArray | int, most: IntArray | int, where: str = "at index"
) -> None:
    """Raise PackingError unless all values of an array are from `least` to `most`, one number or one for each value."""
    wrong = (values < least) | (values > most)
    if wrong.any():
        at = int(wrong.argmax())
        accepted = " to ".join(str(np.broadcast_to(limit, values.shape)[at]) for limit in (least, most))
        raise PackingError(f"{name}: expected a number from {accepted} {where} {at}, got {values[at]}")


def _check_replaceable(folder: Path) -> None:
    """Raise PackingError if anything exists at a path, except a folder with files of a plan and no others."""
    with suppress(FileNotFoundError, NotADirectoryError):  # nothing is there, or another process just replaces the plan
        names = {folder.name} if folder.is_file() else {file.name for file in folder.iterdir()}
        if names <= _FILES and names != {_INDEX}:  # plan.json alone may be a file of another program
            return
        raise PackingError(
            f"path: expected a new folder or a saved plan to replace, but {str(folder)!r} exists and either is not a "
            "saved plan or contains other files"
        )


def _load_arrays(folder: Path) -> tuple[dict[str, IntArray], dict[str, Any]]:
    """Return the memory-mapped arrays of a saved plan, and its other values, by name; raise PackingError if damaged."""
    file = folder / _INDEX
    if not file.is_file():
        raise PackingError(f"path: expected a folder with a saved plan, but {str(folder)!r} has no {_INDEX}")
    arrays: dict[str, IntArray] = {}
    try:
        saved = json.loads(file.read_text())
        facts = {name: saved[name] for name in _FACTS}
        if saved["format"] != _FORMAT:
            raise ValueError(f"a plan of format {saved['format']!r}, not {_FORMAT}")
        for name in (*ARRAYS, SEGMENT_SHARED):
            file = folder / f"{name}.npy"
            if name in ARRAYS or file.exists():
                arrays[name] = open_memmap(file, mode="r")  # reads no pickle and no zip, as np.load might
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackingError(
            f"path: expected a valid {file.name}, but reading {str(file)!r} raised {error!r}; save the plan again"
        ) from error
    return arrays, facts
