"""PackingPlan: which slice of which document goes into which pack. The one object that every floor knows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.laws import check_laws
from hf_packing.planning.lengths import IntArray
from hf_packing.planning.metrics import PackingMetrics, measure
from hf_packing.planning.shuffle import check_seed, shuffle_packs
from hf_packing.planning.storage import load_arrays, save_arrays

ARRAYS = ("document_length", "segment_document", "segment_start", "segment_length", "pack_offsets", "pack_capacity")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PackingPlan:
    """Which slice of which document goes into which pack.

    Segments stand in pack order: those of pack p are `pack_offsets[p]:pack_offsets[p + 1]`. The arrays are read-only
    and checked on construction. Two plans are equal when their fingerprints are.

    Raises:
        PackingError: a segment outside its document, a token in two segments, an empty segment, an overfull pack.

    Example:
        >>> import hf_packing as hfp
        >>> plan = hfp.plan_packing([5, 3, 6, 2], hfp.BestFit(8))
        >>> plan
        PackingPlan(4 documents, 4 segments, 2 packs, efficiency 1.0000)
        >>> plan.metrics().padding_ratio
        0.0
    """

    document_length: IntArray
    """integers [documents], tokens, of the whole documents."""
    segment_document: IntArray
    """integers [segments]: the document a segment is cut from."""
    segment_start: IntArray
    """integers [segments], tokens: where in its document it begins."""
    segment_length: IntArray
    """int32 [segments], tokens."""
    pack_offsets: IntArray
    """int64 [packs + 1]: where the segments of each pack begin and end."""
    pack_capacity: IntArray
    """int32 [packs], tokens each pack may hold."""
    proven_lower_bound: int = 0
    """Packs that any plan under the strategy's limits needs, where it has proven more than the lengths tell."""
    note: str = ""
    """What the strategy has to say about how it went; no part of the fingerprint."""

    def __post_init__(self) -> None:
        for name in ARRAYS:
            array = np.asanyarray(getattr(self, name))
            # differences of unsigned integers are never negative, so that no law would find what is out of bounds
            array = array.astype(np.int64) if array.dtype.kind == "u" else array.view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        check_laws(self)

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
        """The six arrays by name."""
        return {name: getattr(self, name) for name in ARRAYS}

    def pack_of_segment(self) -> IntArray:
        """int64 [segments]: the pack each segment stands in."""
        return np.repeat(np.arange(self.num_packs), np.diff(self.pack_offsets))

    @cached_property
    def _metrics(self) -> PackingMetrics:
        return measure(self)

    def metrics(self) -> PackingMetrics:
        """What the plan gains and what it costs; computed once."""
        return self._metrics

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the plan's content: equal for equal plans, in any process and on any machine."""
        digest = hashlib.blake2b(str(self.proven_lower_bound).encode(), digest_size=16)
        for name, array in self.arrays().items():
            digest.update(f"{name} {array.dtype.str} {len(array)}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def shuffle(self, seed: int) -> PackingPlan:
        """The same packs in another seeded random order, and the segments of each in another order: the next epoch.

        Args:
            seed: 0 to 2**63 - 1; the order depends on it and on the order here.

        Returns:
            PackingPlan, with no planning done again.

        Raises:
            PackingError: a seed that is not as above.
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
        """Write the plan as a folder of .npy files with a plan.json; an older plan there is replaced.

        Args:
            path: the folder to make.

        Raises:
            PackingError: something that is not a saved plan is in the way.
        """
        facts = {
            "fingerprint": self.fingerprint,
            "proven_lower_bound": self.proven_lower_bound,
            "note": self.note,
        }
        save_arrays(Path(path), self.arrays(), facts)

    @classmethod
    def load(cls, path: str | Path) -> PackingPlan:
        """A saved plan, its arrays memory-mapped: read from the disk as they are used, shared between processes.

        Args:
            path: the folder that `save` made.

        Raises:
            PackingError: no plan there, or a damaged one.
        """
        arrays, facts = load_arrays(Path(path), ARRAYS)
        plan = cls(**arrays, proven_lower_bound=facts["proven_lower_bound"], note=facts["note"])
        if plan.fingerprint != facts["fingerprint"]:
            raise PackingError(
                f"path: expected a plan with fingerprint {facts['fingerprint']}, the arrays in {str(path)!r} have "
                f"{plan.fingerprint}"
            )
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and unpickled plans are made, and checked, anew."""
        arrays = {name: np.asarray(array) for name, array in self.arrays().items()}
        return rebuild, (arrays, self.proven_lower_bound, self.note)

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
        return described(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(described(self))}</pre>"


def described(plan: PackingPlan) -> str:
    """A plan in a few lines for people."""
    metrics, per_pack = plan.metrics(), np.diff(plan.pack_offsets)
    capacities, packs = np.unique(plan.pack_capacity, return_counts=True)
    each = [f"{number:,} of {capacity:,} tokens" for capacity, number in zip(capacities, packs, strict=True)]
    holding = f" of {capacities[0]:,} tokens" if len(each) == 1 else f": {', '.join(each) or 'none'}"
    lines = [
        f"{metrics.num_documents:,} documents, {metrics.num_tokens:,} tokens, in {metrics.num_packs:,} packs{holding}",
        f"padding {metrics.padding_ratio:.2%}, {metrics.concatenation_ratio:.2f} documents per pack, "
        f"{per_pack.min(initial=metrics.num_segments):,} to {per_pack.max(initial=0):,} in one",
        f"{metrics.num_cut_documents:,} documents cut ({metrics.truncation_ratio:.2%}), "
        f"{metrics.num_dropped_tokens:,} tokens dropped, {metrics.num_empty_documents:,} empty documents skipped",
    ]
    if len(capacities) == 1:
        lines.append(
            f"no plan for the same segments has fewer than {metrics.lower_bound:,} packs of this size: at most "
            f"{metrics.num_packs / max(metrics.lower_bound, 1) - 1:.2%} could be saved"
        )
    return "\n".join(lines + ([plan.note] if plan.note else []))


def rebuild(arrays: dict[str, IntArray], proven_lower_bound: int, note: str) -> PackingPlan:
    return PackingPlan(**arrays, proven_lower_bound=proven_lower_bound, note=note)
