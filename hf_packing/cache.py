"""Where a packed dataset lies on disk, and how its file is made so that no other process ever sees half of it."""

import atexit
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable

from hf_packing.errors import PackingError
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.storage import put_in_place

FACTS = "packing.json"
FIRST_LABELS = "first_labels.npy"
PLAN_KEY = b"hf_packing.plan"
"""In the metadata of an Arrow stream: the fingerprint of the plan its rows were packed with."""


@dataclass(frozen=True)
class CachedPacks:
    """A packed dataset on disk: an Arrow stream, and beside it a folder with the plan it was made by."""

    rows: Path
    """The Arrow stream of packed rows."""

    @property
    def origin(self) -> Path:
        """The folder with the saved plan and what else `unpack` needs."""
        return self.rows.with_suffix(".plan")

    def open(self) -> MemoryMappedTable | None:
        """The packed rows, memory-mapped; None where they, or what they were made from, are not there in full."""
        if not (self.rows.is_file() and (self.origin / FACTS).is_file()):
            return None
        try:
            return MemoryMappedTable.from_file(str(self.rows))
        except (pa.ArrowInvalid, OSError):  # somebody cut the file short
            return None

    def save_origin(self, origin: "Origin") -> None:
        """Make the folder beside its place and rename it. One that is there, and whole, stays: others may read it."""
        fresh = Path(tempfile.mkdtemp(dir=self.origin.parent, prefix=f".{self.origin.name}-"))
        try:
            origin.plan.save(fresh / "plan")
            if origin.first_labels is not None:
                np.save(fresh / FIRST_LABELS, origin.first_labels)
            (fresh / FACTS).write_text(json.dumps(origin.facts()) + "\n")
            put_in_place(fresh, self.origin, unless=lambda: self.holds(origin))
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def holds(self, origin: "Origin") -> bool:
        """Whether the folder is there, whole, and tells of this origin."""
        try:
            same_plan = PackingPlan.load(self.origin / "plan") == origin.plan
            same_facts = json.loads((self.origin / FACTS).read_text()) == origin.facts()
            labels = origin.first_labels
            same_labels = labels is None or np.array_equal(np.load(self.origin / FIRST_LABELS), labels)
        except (OSError, ValueError, EOFError):  # missing or damaged; PackingError is a ValueError
            return False
        return same_plan and same_facts and same_labels

    def what_was_lost(self) -> list[str]:
        """In words, for the user."""
        facts = json.loads((self.origin / FACTS).read_text())
        lost = []
        if facts["dropped_tokens"]:
            lost.append(f"drops {facts['dropped_tokens']:,} of {facts['tokens']:,} tokens, as {facts['strategy']} asks")
        if facts["empty_documents"]:
            lost.append(f"skips {facts['empty_documents']:,} documents without a token")
        return lost

    def load_origin(self) -> "Origin":
        """What the rows were made from.

        Raises:
            PackingError: it is damaged, or belongs to other rows.
        """
        facts = json.loads((self.origin / FACTS).read_text())
        labels = self.origin / FIRST_LABELS
        first_labels = np.load(labels, mmap_mode="r") if labels.is_file() else None
        plan = PackingPlan.load(self.origin / "plan")
        with pa.memory_map(str(self.rows)) as file, pa.ipc.open_stream(file) as stream:
            made_with = (stream.schema.metadata or {}).get(PLAN_KEY, b"").decode()
        if plan.fingerprint != made_with:
            raise PackingError(
                f"plan: expected the one these rows were packed with, {made_with}, got {plan.fingerprint} in "
                f"{str(self.origin)!r}; pack again with load_from_cache_file=False"
            )
        return Origin(plan, facts["strategy"], facts["labels_made"], first_labels)


@dataclass(frozen=True)
class Origin:
    """What packed rows were made from, kept beside them so that they can be unpacked."""

    plan: PackingPlan
    strategy: str
    labels_made: bool
    """Whether the documents had no labels of their own."""
    first_labels: npt.NDArray[np.int32] | None
    """int32 [segments]: the labels that -100 replaced; None where there were none."""

    def facts(self) -> dict[str, Any]:
        """What is said of it without reading the plan."""
        metrics = self.plan.metrics()
        return {
            "strategy": self.strategy,
            "labels_made": self.labels_made,
            "dropped_tokens": metrics.num_dropped_tokens,
            "tokens": metrics.num_tokens,
            "empty_documents": metrics.num_empty_documents,
        }


def fingerprint_of(dataset: datasets.Dataset, *how: Any) -> str:
    """What packed rows depend on: the data, and how it is packed; a strategy's fields include the package's version."""
    return str(Hasher.hash((dataset._fingerprint, how)))


def cache_for(dataset: datasets.Dataset, fingerprint: str) -> CachedPacks:
    """Beside the dataset's own files, as `Dataset.map` does; in datasets' cache where it has none it may write to."""
    name = f"cache-{fingerprint}.arrow"
    if not datasets.is_caching_enabled():
        folder = Path(tempfile.mkdtemp(prefix="hf_packing-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return CachedPacks(folder / name)
    own_files = [Path(file["filename"]).parent for file in dataset.cache_files]
    if own_files and os.access(own_files[0], os.W_OK):
        return CachedPacks(own_files[0] / name)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_packing"
    folder.mkdir(parents=True, exist_ok=True)
    return CachedPacks(folder / name)


@contextmanager
def new_stream(path: Path, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchStreamWriter]:
    """An Arrow stream that appears under its name when it is complete."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with pa.OSFile(str(fresh), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            yield writer
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
