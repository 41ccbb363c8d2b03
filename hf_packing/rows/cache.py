"""Packed rows on disk: a folder with the rows, the plan, and what else `unpack` and the warnings of `pack` need.

A folder is named after a hash of the documents, the packing and the version of hf_packing. It is written under another
name, and renamed when it is complete. What a killed process leaves is removed by a later run, after an hour.
"""

import atexit
import json
import os
import shutil
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.files import new_folder
from hf_packing.planning.plan import PackingPlan

ROWS = "rows.arrow"
PLAN = "plan"
_FACTS = "packing.json"
_FIRST_LABELS = "first_labels.npy"

_UNFINISHED = ".packing-"
UNTOUCHED_FOR = 3600.0
"""An unfinished folder is removed after this many seconds without a write."""


@dataclass(frozen=True)
class Origin:
    """The plan from which packed rows were made, and what packing did."""

    plan: PackingPlan
    facts: dict[str, Any]
    """What packing did; see `hf_packing.rows.changes`."""
    first_labels: npt.NDArray[np.int32] | None = None
    """int32 [segments]: the original label of each segment's first token, now -100; None without labels and masks."""


@dataclass(frozen=True)
class StoredRows:
    """A folder with packed rows. Lazy rows have no file of rows."""

    folder: Path

    def load(self) -> Origin:
        """Return what the rows were made from.

        Raises:
            PackingError: a file is missing or damaged.
        """
        try:
            facts = json.loads((self.folder / _FACTS).read_text())
            labels = np.load(self.folder / _FIRST_LABELS, mmap_mode="r") if facts["first_labels"] else None
            origin = Origin(PackingPlan.load(self.folder / PLAN), facts, labels)
            if labels is not None and len(labels) != origin.plan.num_segments:
                raise ValueError(f"{_FIRST_LABELS} has {len(labels)} labels for {origin.plan.num_segments} segments")
            if (origin.plan.segment_shared is None) == facts["share_prefixes"]:
                raise ValueError("the plan lacks segment_shared")
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise PackingError(
                f"packed: expected the files that pack() saved in {str(self.folder)!r}, got the error: {error}; pack "
                "the documents again with load_from_cache_file=False"
            ) from error
        return origin

    def rows(self, num_packs: int) -> MemoryMappedTable:
        """Return the rows, which are memory-mapped.

        Raises:
            PackingError: the file of rows is missing or damaged.
        """
        try:
            rows = MemoryMappedTable.from_file(str(self.folder / ROWS))
        except (OSError, pa.ArrowException) as error:
            raise PackingError(f"packed: expected the rows that pack() saved, got the error: {error}") from error
        if rows.num_rows != num_packs:
            raise PackingError(f"packed: expected {num_packs} rows that pack() saved, got {rows.num_rows}")
        return rows

    def create(self) -> AbstractContextManager[Path]:
        """Return a context manager that makes a folder to write to, which gets its final path at the end."""
        return new_folder(self.folder, _UNFINISHED)


def save_origin(folder: Path, origin: Origin) -> None:
    """Write what rows were made from to the folder that `StoredRows.create` has made."""
    origin.plan.save(folder / PLAN)
    if origin.first_labels is not None:
        np.save(folder / _FIRST_LABELS, origin.first_labels)
    stored = {"first_labels": origin.first_labels is not None, "share_prefixes": origin.plan.segment_shared is not None}
    (folder / _FACTS).write_text(json.dumps(origin.facts | stored) + "\n")


def fingerprint_of(dataset: datasets.Dataset, *how: Any) -> str:
    """Return a hash of the documents, the packing settings and the version of hf_packing."""
    return str(Hasher.hash((dataset._fingerprint, hf_packing.__version__, how)))


def stored_rows(dataset: datasets.Dataset, fingerprint: str) -> StoredRows:
    """Return where the rows of a dataset are stored.

    As with `Dataset.map`, this is beside the dataset's own files; in the cache folder of `datasets` if the dataset has
    no files, or their folder is not writable; and in a temporary folder if caching is disabled.
    """
    if not datasets.is_caching_enabled():
        home = Path(tempfile.mkdtemp(prefix="hf_packing-"))
        atexit.register(_remove_at_exit_of, os.getpid(), home)
    else:
        own_files = [Path(file["filename"]).absolute().parent for file in dataset.cache_files]
        if own_files and os.access(own_files[0], os.W_OK):
            home = own_files[0]
        else:
            home = Path(datasets.config.HF_DATASETS_CACHE) / "hf_packing"
            home.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(home)
    return StoredRows(home / f"packed-{fingerprint}")


def _remove_at_exit_of(process: int, folder: Path) -> None:
    """Remove a folder when the process that made it exits, and not when forks of it do."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(home: Path) -> None:
    """Remove the unfinished folders to which nobody has written for an hour."""
    for work in home.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):  # another process has removed it
            if time.time() - max(each.stat().st_mtime for each in (work, *work.rglob("*"))) > UNTOUCHED_FOR:
                shutil.rmtree(work, ignore_errors=True)
