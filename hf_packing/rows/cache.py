"""Store packed rows on disk with the data that `unpack` needs, and check whether stored rows are complete.

Rows are written to a temporary work folder, and renamed to their final path when complete. If a run is interrupted, its
work folder stays on disk until a later run removes the folder.
"""

import atexit
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable
from filelock import FileLock

import hf_packing
from hf_packing.columns import INPUT_IDS, LABELS, SEQ_LENGTHS, TREE_INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.planning.plan import ARRAYS, SEGMENT_SHARED, PackingPlan
from hf_packing.planning.storage import load_arrays, put_in_place
from hf_packing.rows.label_counts import LabelCounts
from hf_packing.rows.packed_rows import FACT_NAMES, LABELS_LEFT, SPLITS, Origin, describe_changes
from hf_packing.rows.packing_trace import with_trace

PLAN_KEY = b"hf_packing.plan"
"""A key in the metadata of an Arrow stream. The value is the fingerprint of the plan that the rows were packed with."""

_PLAN = "plan"

_FIRST_LABELS = "first_labels.npy"

_FACTS = "packing.json"

_LOCK = "lock"

_UNFINISHED = re.compile(r"\.cache-[0-9a-f]+\.(arrow|plan|lazy)[.-].+")

UNTOUCHED_FOR = 3600.0
"""A work file or folder without a lock is removed after this many seconds without a write."""


@dataclass(frozen=True)
class CachedPacks:
    """The paths of a packed dataset on disk: an Arrow stream of rows, and a folder that stores their `Origin`.

    The origin is the plan and other facts about the rows. The files may be missing or incomplete.
    """

    rows: Path
    """The Arrow stream of packed rows."""

    @property
    def origin(self) -> Path:
        """The path of the folder with the plan and everything else that `unpack` needs."""
        return self.rows.with_suffix(".plan")

    def exists(self) -> bool:
        """Return whether the file of rows and the origin folder exist, even if they are incomplete."""
        return self.rows.is_file() and self.origin.is_dir()

    def open(self) -> MemoryMappedTable | None:
        """Return the packed rows as a memory-mapped table; None if the rows or the origin folder are incomplete."""
        try:
            rows = MemoryMappedTable.from_file(str(self.rows))
            facts, (arrays, plan) = self._facts(), load_arrays(self.origin / _PLAN, _names_of(rows.schema))
            labels = np.load(self.origin / _FIRST_LABELS, mmap_mode="r") if facts["first_labels"] else None
        except (OSError, ValueError, EOFError, pa.ArrowException):  # a file is missing or truncated
            return None
        complete = len(arrays["pack_capacity"]) == rows.num_rows and plan["fingerprint"] == _plan_of(rows.schema)
        return rows if complete and (labels is None or len(labels) == len(arrays["segment_length"])) else None

    @contextmanager
    def create(self, schema: pa.Schema) -> Iterator[tuple[pa.ipc.RecordBatchStreamWriter, Path]]:
        """Context manager: open an Arrow stream to which the block writes the packed rows.

        If the block ends without an error, the file with the new rows is moved to the path `rows`.

        Args:
            schema: schema of the rows.

        Yields:
            The stream, and the work folder to pass to `save_origin`.
        """
        with work_folder(self.rows) as folder:
            unfinished = folder / self.rows.name
            with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
                yield stream, folder
            unfinished.replace(self.rows)

    def save_origin(self, origin: Origin, folder: Path) -> None:
        """Write the plan and other facts about the rows to the work folder, then move them to the folder `self.origin`.

        If that folder already holds the same data, it is kept, since other processes may be reading its files.

        Args:
            origin: the plan and the other facts.
            folder: the work folder that `create` yielded.
        """
        fresh = folder / self.origin.name
        fresh.mkdir()
        origin.plan.save(fresh / _PLAN)
        if origin.first_labels is not None:
            np.save(fresh / _FIRST_LABELS, origin.first_labels)
        (fresh / _FACTS).write_text(json.dumps(origin.facts()) + "\n")
        put_in_place(fresh, self.origin, unless=lambda: self._holds(origin))

    def load_origin(self) -> Origin:
        """Read the origin of the rows from disk and return it: the plan and other facts about the rows.

        Raises:
            PackingError: the stored origin is damaged, or belongs to other rows.
        """
        again = "load_from_cache_file=False"
        try:
            facts, plan = self._facts(), PackingPlan.load(self.origin / _PLAN)
            labels = np.load(self.origin / _FIRST_LABELS, mmap_mode="r") if facts["first_labels"] else None
            with pa.memory_map(str(self.rows)) as file, pa.ipc.open_stream(file) as stream:
                plan_of_rows = _plan_of(stream.schema)
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            raise PackingError(
                f"packed: expected the files that pack() saved in {str(self.origin)!r}, got the error: {error}; pack "
                f"the documents again with {again}"
            ) from error
        if plan.fingerprint != plan_of_rows:
            raise PackingError(
                f"packed: expected {str(self.origin)!r} to hold the plan {plan_of_rows}, with which these rows were "
                f"packed, but it holds the plan {plan.fingerprint}; pack the documents again with {again}"
            )
        masks, trained = tuple(facts["loss_masks"]), facts["trained_tokens"]
        left = LabelCounts(*facts[LABELS_LEFT]) if LABELS_LEFT in facts else None
        return Origin(plan, facts["strategy"], facts["labels_made"], labels, masks, trained, facts.get(SPLITS), left)

    def describe_changes(self) -> list[str]:
        """Return what `pack` did to the documents, as `describe_changes` of hf_packing.data.origin words it."""
        return describe_changes(self._facts())

    def _holds(self, origin: Origin) -> bool:
        """Return whether the origin folder on disk is complete and holds the same data as `origin`."""
        try:
            same_plan = PackingPlan.load(self.origin / _PLAN) == origin.plan
            same_facts = self._facts() == origin.facts()
            labels = origin.first_labels
            same_labels = labels is None or np.array_equal(np.load(self.origin / _FIRST_LABELS), labels)
        except (OSError, ValueError, EOFError):  # missing or damaged; PackingError is a ValueError
            return False
        return same_plan and same_facts and same_labels

    def _facts(self) -> dict[str, Any]:
        """Read the JSON file that `save_origin` wrote, and return the dict that `Origin.facts` made.

        Raises:
            OSError, ValueError: the file is missing or damaged.
        """
        facts: dict[str, Any] = json.loads((self.origin / _FACTS).read_text())
        if not isinstance(facts, dict) or facts.keys() - {SPLITS, LABELS_LEFT} != FACT_NAMES:
            raise ValueError(
                f"expected the fields {', '.join(sorted(FACT_NAMES))} in {str(self.origin / _FACTS)!r}, got {facts!r}"
            )
        return facts


def fingerprint_of(dataset: datasets.Dataset, *how: Any) -> str:
    """Return a hash of the documents, the packing settings and the version of hf_packing.

    Args:
        dataset: the documents.
        how: the packing settings, among them the strategy.
    """
    return str(Hasher.hash((dataset._fingerprint, hf_packing.__version__, how)))


def cache_for(dataset: datasets.Dataset, fingerprint: str) -> CachedPacks:
    """Return the paths at which packed rows are stored.

    As with `Dataset.map`, packed rows are stored beside the dataset's own files. If the dataset has no files, or the
    folder of its files is not writable, the rows go into the cache folder of `datasets`. In either folder, unfinished
    files of killed processes are removed. If caching is disabled, the rows go into a new temporary folder instead.

    Args:
        dataset: the documents.
        fingerprint: the result of `fingerprint_of`, which becomes part of the file name.
    """
    name = f"cache-{fingerprint}.arrow"
    if not datasets.is_caching_enabled():
        folder = Path(tempfile.mkdtemp(prefix="hf_packing-"))
        atexit.register(_remove_at_exit_of, os.getpid(), folder)
        return CachedPacks(folder / name)
    own_files = [Path(file["filename"]).parent for file in dataset.cache_files]
    if own_files and os.access(own_files[0], os.W_OK):
        folder = own_files[0]
    else:
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_packing"
        folder.mkdir(parents=True, exist_ok=True)
    clear_unfinished(folder)
    return CachedPacks(folder / name)


def _names_of(schema: pa.Schema) -> tuple[str, ...]:
    """Return the names of the arrays of the plan that rows were packed with, given the schema of the rows."""
    return (*ARRAYS, SEGMENT_SHARED) if TREE_INPUT_IDS in schema.names else ARRAYS


def _plan_of(schema: pa.Schema) -> str:
    """Return the fingerprint of the plan that rows were packed with, read from their schema; "" without a plan."""
    return str((schema.metadata or {}).get(PLAN_KEY, b"").decode())


def _remove_at_exit_of(process: int, folder: Path) -> None:
    """Remove a folder when the process that made it exits. Forks of the process call this too, but remove nothing.

    Args:
        process: id of the process that made the folder.
        folder: the folder to remove.
    """
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def info_of_packed(dataset: datasets.Dataset, column_names: list[str], rows: pa.Table) -> datasets.DatasetInfo:
    """Return the DatasetInfo of packed rows: the description of the documents, and the features of packed rows.

    If a row has several segments, the description also has a trace of packing. Rows of trees need none, since trainers
    cannot take them for documents.

    Args:
        dataset: the documents.
        column_names: names of the documents' columns that the dataset's format shows.
        rows: the packed rows.
    """
    known = dataset.info
    features = datasets.Features.from_arrow_schema(rows.schema)
    description = known.description
    if SEQ_LENGTHS in rows.column_names:
        lengths = pc.list_flatten(rows.column(SEQ_LENGTHS))
        if hasattr(features[INPUT_IDS], "decode_example"):  # lazy packs, which datasets joins if their infos are equal
            description = with_trace(description)
        elif len(lengths) > rows.num_rows:
            description = with_trace(description, pc.sum(lengths.cast(pa.int64())).as_py(), len(lengths))
    others = {
        name
        for name, each in features.items()
        if name not in (INPUT_IDS, LABELS) and not hasattr(each, "decode_example")
    }
    kept = {name: _of_any_length(dataset.features[name]) for name in column_names if name in others}
    return datasets.DatasetInfo(
        description=description,
        citation=known.citation,
        homepage=known.homepage,
        license=known.license,
        features=datasets.Features({**features, **kept}),
    )


def _of_any_length(feature: Any) -> Any:
    """Return a feature without its fixed list length, if any, since packed rows are longer than the documents."""
    return replace(feature, length=-1) if getattr(feature, "length", -1) != -1 else feature


@contextmanager
def work_folder(place: Path) -> Iterator[Path]:
    """Context manager: make a locked work folder for unfinished files; remove the folder at the end of the block.

    Args:
        place: final path of the finished file, such as `cache-*.arrow`. The work folder is made beside this path.

    Yields:
        The work folder.
    """
    folder, lock = _locked_folder(place)
    try:
        yield folder
    finally:
        if lock is not None:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def clear_unfinished(folder: Path) -> None:
    """Remove unfinished files and work folders from a folder of packed datasets, unless a running process uses them."""
    with suppress(OSError):
        for unfinished in folder.iterdir():
            if _UNFINISHED.fullmatch(unfinished.name):
                with suppress(OSError, NotImplementedError):  # filelock's Timeout is an OSError
                    _remove_leftover(unfinished)


def _locked_folder(place: Path) -> tuple[Path, FileLock | None]:
    """Make and lock a work folder beside the file `place`.

    Returns:
        The folder and its lock. The lock is None if the file system does not support locks.
    """
    while True:
        folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
        lock = FileLock(folder / _LOCK)
        try:
            lock.acquire()
        except FileNotFoundError:  # another process removed the folder before it was locked
            continue
        except (OSError, NotImplementedError):
            return folder, None
        if (folder / _LOCK).exists():
            return folder, lock
        lock.release()


def _remove_leftover(unfinished: Path) -> None:
    """Remove an unfinished file or work folder, unless the process that made it still runs.

    A file, or a folder without a lock file, is removed only if the last write was more than an hour ago.

    Raises:
        OSError: the process that made the folder still runs.
    """
    if (unfinished / _LOCK).is_file():
        with FileLock(unfinished / _LOCK, timeout=0):
            shutil.rmtree(unfinished, ignore_errors=True)
    elif time.time() - _last_write(unfinished) > UNTOUCHED_FOR:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink()


def _last_write(path: Path) -> float:
    """Return the time of the last write to a file, or to any file in a folder, in seconds since 1970."""
    return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
