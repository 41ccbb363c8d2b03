"""Where a packed dataset lies on disk, and whether all of it is there."""

import atexit
import json
import os
import shutil
import tempfile
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
from hf_packing.planning.plan import ARRAYS, PackingPlan
from hf_packing.planning.storage import load_arrays, put_in_place
from hf_packing.unfinished import clear_unfinished, work_folder

FACTS = "packing.json"
FACTS_OF_ORIGIN = (
    *("strategy", "labels_made", "first_labels", "loss_masks", "trained_tokens", "packed_tokens"),
    *("dropped_tokens", "tokens", "empty_documents"),
)
FIRST_LABELS = "first_labels.npy"
PLAN = "plan"
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

    def is_there(self) -> bool:
        """Whether `pack` has made it, in full or not."""
        return self.rows.is_file() and self.origin.is_dir()

    def open(self) -> MemoryMappedTable | None:
        """The packed rows, memory-mapped; None where they, or what they were made from, are not there in full."""
        try:
            rows = MemoryMappedTable.from_file(str(self.rows))
            facts, (arrays, plan) = self.facts(), load_arrays(self.origin / PLAN, ARRAYS)
            labels = np.load(self.origin / FIRST_LABELS, mmap_mode="r") if facts["first_labels"] else None
        except (OSError, ValueError, EOFError, pa.ArrowException):  # missing or cut short
            return None
        whole = len(arrays["pack_capacity"]) == rows.num_rows and plan["fingerprint"] == made_with(rows.schema)
        return rows if whole and (labels is None or len(labels) == len(arrays["segment_length"])) else None

    @contextmanager
    def being_made(self, schema: pa.Schema) -> Iterator[tuple[pa.ipc.RecordBatchStreamWriter, Path]]:
        """An Arrow stream that appears under its name when it is complete, and the folder that it is made in."""
        with work_folder(self.rows) as folder:
            unfinished = folder / self.rows.name
            with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
                yield stream, folder
            unfinished.replace(self.rows)

    def save_origin(self, origin: "Origin", folder: Path) -> None:
        """Make it in a folder and rename it to its place. One that is there, and whole, stays: others may read it."""
        fresh = folder / self.origin.name
        fresh.mkdir()
        origin.plan.save(fresh / PLAN)
        if origin.first_labels is not None:
            np.save(fresh / FIRST_LABELS, origin.first_labels)
        (fresh / FACTS).write_text(json.dumps(origin.facts()) + "\n")
        put_in_place(fresh, self.origin, unless=lambda: self.holds(origin))

    def holds(self, origin: "Origin") -> bool:
        """Whether the folder is there, whole, and tells of this origin."""
        try:
            same_plan = PackingPlan.load(self.origin / PLAN) == origin.plan
            same_facts = self.facts() == origin.facts()
            labels = origin.first_labels
            same_labels = labels is None or np.array_equal(np.load(self.origin / FIRST_LABELS), labels)
        except (OSError, ValueError, EOFError):  # missing or damaged; PackingError is a ValueError
            return False
        return same_plan and same_facts and same_labels

    def facts(self) -> dict[str, Any]:
        """What was saved of the origin beside its plan.

        Raises:
            OSError, ValueError: it is missing or damaged.
        """
        facts: dict[str, Any] = json.loads((self.origin / FACTS).read_text())
        if not isinstance(facts, dict) or facts.keys() != set(FACTS_OF_ORIGIN):
            raise ValueError(f"expected {', '.join(FACTS_OF_ORIGIN)} in {str(self.origin / FACTS)!r}, got {facts!r}")
        return facts

    def what_was_lost(self) -> list[str]:
        """In words, for the user."""
        facts = self.facts()
        lost = []
        if facts["loss_masks"]:
            names, trained, packed = " and ".join(facts["loss_masks"]), facts["trained_tokens"], facts["packed_tokens"]
            lost.append(f"applies {names} to labels: {trained:,} of {packed:,} tokens are trained on")
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
        again = f"in {str(self.origin)!r}; pack again with load_from_cache_file=False"
        try:
            facts, plan = self.facts(), PackingPlan.load(self.origin / PLAN)
            labels = np.load(self.origin / FIRST_LABELS, mmap_mode="r") if facts["first_labels"] else None
            with pa.memory_map(str(self.rows)) as file, pa.ipc.open_stream(file) as stream:
                of_rows = made_with(stream.schema)
        except (OSError, ValueError, EOFError, pa.ArrowException) as error:
            raise PackingError(f"packed: expected what pack has saved beside its rows, got {error} {again}") from error
        if plan.fingerprint != of_rows:
            raise PackingError(
                f"plan: expected the one these rows were packed with, {of_rows}, got {plan.fingerprint} {again}"
            )
        masks, trained = tuple(facts["loss_masks"]), facts["trained_tokens"]
        return Origin(plan, facts["strategy"], facts["labels_made"], labels, masks, trained)


@dataclass(frozen=True)
class Origin:
    """What packed rows were made from, kept beside them so that they can be unpacked."""

    plan: PackingPlan
    strategy: str
    labels_made: bool
    """Whether the documents had neither labels nor loss masks."""
    first_labels: npt.NDArray[np.int32] | None
    """int32 [segments]: the labels that -100 replaced; None where labels were made."""
    loss_masks: tuple[str, ...]
    """Columns that were applied to the labels, and dropped."""
    trained_tokens: int
    """Labels of the rows that are not -100."""

    def facts(self) -> dict[str, Any]:
        """What is said of it without reading the plan."""
        metrics = self.plan.metrics()
        return {
            "strategy": self.strategy,
            "labels_made": self.labels_made,
            "loss_masks": list(self.loss_masks),
            "trained_tokens": self.trained_tokens,
            "packed_tokens": int(self.plan.segment_length.sum(dtype=np.int64)),
            "dropped_tokens": metrics.num_dropped_tokens,
            "tokens": metrics.num_tokens,
            "empty_documents": metrics.num_empty_documents,
            "first_labels": self.first_labels is not None,
        }


def made_with(schema: pa.Schema) -> str:
    """The fingerprint of the plan that rows were packed with; empty where they were not packed here."""
    return str((schema.metadata or {}).get(PLAN_KEY, b"").decode())


def fingerprint_of(dataset: datasets.Dataset, *how: Any) -> str:
    """What packed rows depend on: the data, and how it is packed; a strategy's fields include the package's version."""
    return str(Hasher.hash((dataset._fingerprint, how)))


def cache_for(dataset: datasets.Dataset, fingerprint: str) -> CachedPacks:
    """Beside the dataset's own files, as `Dataset.map` does; in datasets' cache where it has none it may write to."""
    name = f"cache-{fingerprint}.arrow"
    if not datasets.is_caching_enabled():
        folder = Path(tempfile.mkdtemp(prefix="hf_packing-"))
        atexit.register(remove_when_ends, os.getpid(), folder)
        return CachedPacks(folder / name)
    own_files = [Path(file["filename"]).parent for file in dataset.cache_files]
    if own_files and os.access(own_files[0], os.W_OK):
        folder = own_files[0]
    else:
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_packing"
        folder.mkdir(parents=True, exist_ok=True)
    clear_unfinished(folder)
    return CachedPacks(folder / name)


def remove_when_ends(process: int, folder: Path) -> None:
    """Remove a folder at the end of the process that made it; processes forked from it end by the same functions."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
