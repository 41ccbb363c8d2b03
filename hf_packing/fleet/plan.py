"""The second stage: one plan for all files, made of the counts of all files.

The plan does not hold anything of the size of the corpus: a table of patterns, and beside it, in a file of its own, the
documents of each length in all earlier files, for those lengths that a file has.
"""

import io
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from hf_packing.columns import BUCKET, INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.fleet.count import Counted, arrow_type, check_unchanged, count, load_count, schema_of_columns
from hf_packing.fleet.in_order import in_order
from hf_packing.fleet.parts import DamagedFileError, bytes_of_parts, int64, read_part, read_parts, write_parts
from hf_packing.fleet.run import Run
from hf_packing.fleet.shared_between import SharedBetween
from hf_packing.planning.lengths import IntArray, LengthCounts
from hf_packing.planning.metrics import PackingMetrics, make_metrics
from hf_packing.planning.patterns import Cuts, Patterns
from hf_packing.planning.table import PatternTable
from hf_packing.strategies.base import CountingStrategy

TOKENS_IN_A_SHARD = 1 << 25
"""Tokens of an output file, if the user has not chosen the number of output files."""
_DENSE = 1 << 22
"""Documents of fewer tokens are counted in an array, longer ones in a dict."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run."""

    shards: int
    """The number of output files."""
    columns: Mapping[str, str]
    """The types of the token columns by name, input_ids first, as in `Counted`."""
    totals: Mapping[str, Any]
    """The arguments of `make_metrics`."""
    together: Mapping[str, Any]
    """The totals of one plan for all files; equal to `totals` unless each file is packed by itself."""
    shared_between: int
    """An estimate of the tokens that files share with each other, which rows repeat; 0 if no prefixes are shared."""
    note: str
    table: PatternTable | None
    """The packs; None if each file is packed by itself."""
    checksum: int
    """A checksum of the plan, by which results of another plan are told apart."""

    @property
    def num_packs(self) -> int:
        return int(self.totals["packs"])

    @property
    def metrics(self) -> PackingMetrics:
        return make_metrics(**self.totals)

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the token columns."""
        return schema_of_columns(self.columns)

    def first_pack(self, number: int) -> int:
        """Return the index of the first pack of an output file."""
        return number * self.num_packs // self.shards


def make_plan(run: Run, seen: Callable[[int], None]) -> Plan:
    """Make the plan of a run, or load it if it is there.

    Args:
        run: the run.
        seen: called with 1 for each file whose counts were read.

    Raises:
        PackingError: a file has changed, or files have different columns.
    """
    damaged = run.store.exists(run.file("plan"))
    with suppress(DamagedFileError):
        plan = load_plan(run)
        _check_before(run)
        return plan
    total, alone, segments = _Totals(), _Sums(), _Sums()
    between = SharedBetween(run.settings.share_prefixes or 1)
    columns = _Columns(run)
    sizes = [0, 0]

    def before(counted: Counted, counts: LengthCounts) -> list[IntArray]:
        columns.add(counted)
        alone.add(counted.alone)
        segments.add(counted.segments)
        between.add(counted.prefixes)
        sizes[0] += counted.documents
        seen(1)
        head = np.array([_checksum_of(counted)], dtype="<i8")
        return [head, counts.length.astype("<i8"), total.add(counts).astype("<i8")]

    found = in_order(lambda number: counts_of(run, number), range(run.num_inputs))
    parts = (before(*each) for each in found)
    write_parts(run.store, run.file("before"), parts, run.num_inputs)
    counts = total.counts()
    strategy = run.settings.build_strategy()
    assert isinstance(strategy, CountingStrategy)
    table = strategy.plan_counts(counts)
    together = table.totals() | segments.sums  # the documents of the table are trees, if documents share prefixes
    totals = together if run.settings.exchange else alone.sums
    if not totals["packs"]:
        raise PackingError(f"files: expected documents with tokens, but all {sizes[0]} documents are empty")
    known = {
        "shards": _shards(run, totals),
        "columns": columns.merged(),
        "totals": totals,
        "together": together,
        "shared_between": between.tokens(),
        "note": table.note,
    }
    parts_of_plan = [[json.dumps(known).encode()], [_bytes_of_table(table) if run.settings.exchange else b""]]
    write = run.store.put if damaged else run.store.put_new  # of two drivers, the first one's plan holds
    write(run.file("plan"), bytes_of_parts(parts_of_plan))
    return load_plan(run)


def load_plan(run: Run) -> Plan:
    """Return the plan of a run.

    Raises:
        DamagedFileError: the plan is gone or damaged.
    """
    facts, table = read_parts(run.store, run.file("plan"), 2)
    checksum = zlib.crc32(facts + table)
    return Plan(**json.loads(facts), table=_table_of(table) if table else None, checksum=checksum)


def dealt_before(run: Run, number: int, counted: Counted) -> LengthCounts:
    """Return the number of documents in earlier files, for each length in a file.

    Raises:
        PackingError: the file has changed since the plan was made.
        DamagedFileError: the file of these numbers is gone or damaged.
    """
    values = int64(read_part(run.store, run.file("before"), number))
    if values[0] != _checksum_of(counted):
        raise PackingError(
            f"{counted.name}: expected the file of which the plan was made, but it has changed, and now has size and "
            f"last change {list(counted.identity)}; pack changed files into a new folder"
        )
    length, documents = values[1:].reshape(2, -1)
    return LengthCounts(length, documents)


def _checksum_of(counted: Counted) -> int:
    """Return a checksum of what a file was when it was counted."""
    return zlib.crc32(json.dumps(list(counted.identity)).encode())


def _check_before(run: Run) -> None:
    """Check the documents in earlier files, which `deal` needs, and that no file was counted again with other counts.

    Raises:
        PackingError: a file has changed.
        DamagedFileError: the file of these numbers is gone or damaged.
    """
    if run.settings.exchange:
        for _ in in_order(lambda number: dealt_before(run, number, counts_of(run, number)[0]), range(run.num_inputs)):
            pass


def counts_of(run: Run, number: int) -> tuple[Counted, LengthCounts]:
    """Return what `count` has written for a file, which is counted again if that is gone or damaged.

    Raises:
        PackingError: the file has changed.
    """
    try:
        counted, counts = load_count(run, number)
    except DamagedFileError:
        count(run, number)
        counted, counts = load_count(run, number)
    check_unchanged(run, counted)
    return counted, counts


def _shards(run: Run, totals: Mapping[str, Any]) -> int:
    if not run.settings.exchange:
        return run.num_inputs
    wanted = run.settings.shards or -(-(totals["packed_tokens"] - totals.get("shared_tokens", 0)) // TOKENS_IN_A_SHARD)
    return int(min(max(wanted, 1), totals["packs"]))


class _Totals:
    """The number of documents of each length in the files so far."""

    def __init__(self) -> None:
        self._dense = np.zeros(1, dtype=np.int64)
        self._long: dict[int, int] = {}

    def add(self, counts: LengthCounts) -> IntArray:
        """Add the documents of a file, and return how many there were before of each of its lengths."""
        short = int(np.searchsorted(counts.length, _DENSE))
        length, documents = counts.length[:short], counts.documents[:short]
        if short and length[-1] >= len(self._dense):
            self._dense = np.concatenate([self._dense, np.zeros(length[-1] + 1 - len(self._dense), np.int64)])
        before = np.zeros(len(counts.length), dtype=np.int64)
        before[:short] = self._dense[length]
        self._dense[length] += documents
        for place in range(short, len(counts.length)):
            each = int(counts.length[place])
            before[place] = self._long.get(each, 0)
            self._long[each] = int(before[place] + counts.documents[place])
        return before

    def counts(self) -> LengthCounts:
        short, long = np.flatnonzero(self._dense), sorted(self._long)
        length = np.concatenate([short, np.array(long, dtype=np.int64)])
        documents = np.concatenate([self._dense[short], np.array([self._long[each] for each in long], dtype=np.int64)])
        return LengthCounts(length, documents)


class _Sums:
    """Totals of plans, added up."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}

    def add(self, totals: Mapping[str, Any] | None) -> None:
        for name, value in (totals or {}).items():
            self.sums[name] = self.sums.get(name, 0) + value


class _Columns:
    """The token columns of all files, which must agree."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._types: dict[str, str] = {}
        self._first: Counted | None = None

    def add(self, counted: Counted) -> None:
        """Compare a file's columns with those of earlier files.

        Raises:
            PackingError: the file lacks a column that others have, or has another type or kind.
        """
        if not counted.documents:
            return
        if self._first is None:
            self._first, self._types = counted, dict(counted.columns)
            if self._run.settings.has_buckets and BUCKET in counted.columns:
                raise PackingError(
                    f"{counted.name}: column 'bucket': expected no such column, since packed rows get one"
                )
        first = self._first
        if other := sorted(first.columns.keys() ^ counted.columns.keys()):
            has, lacks = (counted, first) if other[0] in counted.columns else (first, counted)
            raise PackingError(
                f"files: expected the same columns with one number for each token in all files, but {has.name} has "
                f"{other[0]!r} and {lacks.name} has not"
            )
        if (first.kind, list(first.loss_masks)) != (counted.kind, list(counted.loss_masks)):
            raise PackingError(
                f"files: expected the same kind of rows in all files, but {first.name} has {_kind(first)} and "
                f"{counted.name} has {_kind(counted)}"
            )
        for name, kind in counted.columns.items():
            known = self._types[name] = self._types[name] or kind
            if kind and known.split()[-1] != kind.split()[-1] and not _both_integers(name, known, kind):
                raise PackingError(
                    f"files: expected the same type of the column {name!r} in all files, but {counted.name} has lists "
                    f"of {kind.split()[-1]} and {first.name} has lists of {known.split()[-1]}"
                )

    def merged(self) -> dict[str, str]:
        """Return the types of the columns that have values, by name."""
        return {name: kind or "int32" for name, kind in self._types.items()}


def _kind(counted: Counted) -> str:
    masks = f" and {', '.join(counted.loss_masks)}" if counted.loss_masks else ""
    return f"{counted.kind or 'no rows'}{masks}"


def _both_integers(name: str, *kinds: str) -> bool:
    """Return whether both types of a column become int32 in packed rows."""
    return name in (INPUT_IDS, "labels") and all(pa.types.is_integer(arrow_type(kind).value_type) for kind in kinds)


_TABLE: Sequence[type[Any]] = (Patterns, Cuts)


def _bytes_of_table(table: PatternTable) -> bytes:
    arrays: dict[str, Any] = {}
    for part in (table.patterns, table.cuts):
        arrays |= {f"{type(part).__name__}.{field.name}": getattr(part, field.name) for field in fields(part)}
    # seeds have up to 63 bits
    arrays["seed"] = np.array([-1 if table.seed is None else table.seed], dtype=np.int64)
    arrays["proven_lower_bound"] = np.array([table.proven_lower_bound], dtype=np.int64)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def _table_of(content: bytes) -> PatternTable:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        patterns, cuts = (
            kind(**{field.name: arrays[f"{kind.__name__}.{field.name}"] for field in fields(kind)}) for kind in _TABLE
        )
        seed = int(arrays["seed"][0])
        bound = int(arrays["proven_lower_bound"][0])
    return PatternTable(patterns=patterns, cuts=cuts, seed=None if seed < 0 else seed, proven_lower_bound=bound)
