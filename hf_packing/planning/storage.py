"""Save and load a plan as a folder. The folder has one .npy file for each array, and a plan.json for other values."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.files import new_folder
from hf_packing.planning.lengths import IntArray

ARRAYS = ("document_length", "segment_document", "segment_start", "segment_length", "pack_offsets", "pack_capacity")
SEGMENT_SHARED = "segment_shared"
"""The array that only plans of documents with shared prefixes have."""

_FORMAT = 1
_INDEX = "plan.json"
_FACTS = ("fingerprint", "proven_lower_bound", "note")
_FILES = {_INDEX, *(f"{name}.npy" for name in (*ARRAYS, SEGMENT_SHARED))}


def save_arrays(folder: Path, arrays: dict[str, IntArray], facts: dict[str, Any]) -> None:
    """Save the arrays and the other values of a plan to a folder. No process ever reads an incomplete folder.

    The files are first written to a temporary folder, which is then renamed to `folder`.

    Args:
        folder: folder to create; a saved plan in this folder is replaced.
        arrays: arrays to save, by name.
        facts: values to write to plan.json, by name.

    Raises:
        PackingError: the path exists, and either is not a saved plan or contains other files, too.
    """
    folder = folder.resolve()  # a folder cannot be renamed onto a symbolic link
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder, f".{folder.name}-") as fresh:
        for name, array in arrays.items():
            np.save(fresh / f"{name}.npy", array, allow_pickle=False)
        (fresh / _INDEX).write_text(json.dumps({"format": _FORMAT, **facts}, indent=1) + "\n")


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


def load_arrays(folder: Path) -> tuple[dict[str, IntArray], dict[str, Any]]:
    """Load the arrays and the other values of a plan that `save_arrays` has saved.

    Returns:
        A dict from name to memory-mapped array; and a dict with the values `fingerprint`, `proven_lower_bound` and
        `note` from plan.json.

    Raises:
        PackingError: the folder is not a saved plan, or the saved plan is damaged.
    """
    index = folder / _INDEX
    if not index.is_file():
        raise PackingError(f"path: expected a folder with a saved plan, but {str(folder)!r} has no {_INDEX}")
    try:
        saved = json.loads(index.read_text())
        found, facts = saved["format"], {name: saved[name] for name in _FACTS}
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(
            f"path: expected a valid {_INDEX}, but reading {str(index)!r} raised {error!r}; save the plan again"
        ) from error
    if found != _FORMAT:
        raise PackingError(f"path: expected a plan of format {_FORMAT}, but {str(index)!r} has format {found!r}")
    arrays = {}
    for name in (*ARRAYS, SEGMENT_SHARED):
        file = folder / f"{name}.npy"
        if name == SEGMENT_SHARED and not file.exists():
            continue
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise PackingError(
                f"path: expected a saved plan with a readable array file {file.name}, but reading {str(file)!r} "
                f"failed: {error}"
            ) from error
    return arrays, facts
