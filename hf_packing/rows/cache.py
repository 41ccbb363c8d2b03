"""Packed rows on disk: a folder with the rows, the plan, and what else `unpack` and the warnings of `pack` need.

A folder is named after a hash of the documents, the packing and the version of hf_packing. It is written under another
name, and renamed when it is complete. What a killed process leaves is removed by a later run, after an hour.
"""

import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher, get_temporary_cache_files_directory
from numpy.lib.format import open_memmap

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.files import remove_unfinished, writing_to
from hf_packing.planning.lengths import Int32Array
from hf_packing.planning.plan import PackingPlan
from hf_packing.upstream.datasets import content_of

ROWS = "rows.arrow"
SAVED_ROWS = "data-00000-of-00001.arrow"
"""The rows that the command writes; `save_to_disk` gives a single file this name."""
PLAN = "plan"
_FACTS = "packing.json"
_FIRST_LABELS = "first_labels.npy"
FILES = PLAN, _FACTS, _FIRST_LABELS
"""What `Origin.save` writes beside the rows."""


@dataclass(frozen=True)
class Origin:
    """The plan from which packed rows were made, and what packing did."""

    plan: PackingPlan
    facts: dict[str, Any]
    """What packing did; see `hf_packing.rows.changes`."""
    first_labels: Int32Array | None = None
    """int32 [segments]: the original label of each segment's first token, now -100; None without labels and masks."""

    def save(self, folder: Path) -> None:
        """Write the files that `load` reads."""
        self.plan.save(folder / PLAN)
        if self.first_labels is not None:
            np.save(folder / _FIRST_LABELS, self.first_labels, allow_pickle=False)
        (folder / _FACTS).write_text(json.dumps(self.facts | {"first_labels": self.first_labels is not None}) + "\n")

    @classmethod
    def beside(cls, folder: Path) -> "Origin | None":
        """Return what the rows in a folder were made from; None if `save` has not written it there.

        Raises:
            PackingError: a file is missing or damaged.
        """
        return cls.load(folder) if (folder / _FACTS).exists() else None

    @classmethod
    def load(cls, folder: Path) -> "Origin":
        """Return what the rows in a folder were made from.

        Raises:
            PackingError: a file is missing or damaged.
        """
        try:
            facts = json.loads((folder / _FACTS).read_text())
            labels = open_memmap(folder / _FIRST_LABELS, mode="r") if facts["first_labels"] else None
            return cls(PackingPlan.load(folder / PLAN), facts, labels)
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise PackingError(
                f"packed: expected the files that pack() saved in {str(folder)!r}, got the error: {error}; pack "
                "the documents again with load_from_cache_file=False"
            ) from error


def fingerprint_of(dataset: datasets.Dataset, *how: Any) -> str:
    """Return a hash of the documents, the packing settings and the version of hf_packing."""
    return str(Hasher.hash((content_of(dataset), hf_packing.__version__, how)))


def folder_for(dataset: datasets.Dataset, fingerprint: str) -> Path:
    """Return where the rows of a dataset are stored.

    As with `Dataset.map`, this is beside the dataset's own files; in the cache folder of `datasets` if the dataset has
    no files, or their folder is not writable; and in a folder that is removed at exit if caching is disabled.
    """
    own_files = [Path(file["filename"]).absolute().parent for file in dataset.cache_files]
    if not datasets.is_caching_enabled():
        home = Path(get_temporary_cache_files_directory())
    elif own_files and os.access(own_files[0], os.W_OK):
        home = own_files[0]
    else:
        home = Path(datasets.config.HF_DATASETS_CACHE) / "hf_packing"
        with writing_cache(home):
            home.mkdir(parents=True, exist_ok=True)
    remove_unfinished(home)
    return home / f"packed-{fingerprint}"


def writing_cache(place: Path) -> AbstractContextManager[None]:
    """Return a context manager: an error in writing to the cache is a PackingError that says how to choose a place."""
    elsewhere = "; datasets.disable_caching() writes to a temporary folder instead, which TMPDIR chooses"
    return writing_to("dataset", place, elsewhere)
