"""Save and load a plan as a folder. The folder has one .npy file for each array, and a plan.json for other values."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.files import new_folder
from hf_packing.planning.lengths import IntArray

_FORMAT = 1
_INDEX = "plan.json"


def save_arrays(
    folder: Path, arrays: dict[str, IntArray], facts: dict[str, Any], replaceable: Iterable[str] = ()
) -> None:
    """Save the arrays and the other values of a plan to a folder. No process ever reads an incomplete folder.

    The files are first written to a temporary folder, which is then renamed to `folder`.

    Args:
        folder: folder to create; a saved plan in this folder is replaced.
        arrays: arrays to save, by name.
        facts: values to write to plan.json, by name.
        replaceable: names of further arrays that a replaced plan may have.

    Raises:
        PackingError: the path exists, and either is not a saved plan or contains other files, too.
    """
    folder = folder.resolve()  # a folder cannot be renamed onto a symbolic link
    _check_replaceable(folder, {f"{name}.npy" for name in (*arrays, *replaceable)} | {_INDEX})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder, f".{folder.name}-") as fresh:
        for name, array in arrays.items():
            np.save(fresh / f"{name}.npy", array, allow_pickle=False)
        (fresh / _INDEX).write_text(json.dumps({"format": _FORMAT, **facts}, indent=1) + "\n")


def _check_replaceable(folder: Path, files: set[str]) -> None:
    """Raise PackingError if anything exists at a path, except a saved plan that may be replaced.

    A saved plan may be replaced if its folder contains only files with names in `files`. If another process replaces
    the plan during the check, the check is repeated.
    """
    while (found := _identity(folder)) is not None:
        with suppress(FileNotFoundError):
            if _is_saved_plan(folder) and {file.name for file in folder.iterdir()} <= files:
                return
        if _identity(folder) == found:
            raise PackingError(
                f"path: expected a new folder or a saved plan to replace, but {str(folder)!r} exists and either is not "
                "a saved plan or contains other files"
            )


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the inode and the change time in nanoseconds of a path, or None if nothing exists at the path."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_ctime_ns


def _is_saved_plan(folder: Path) -> bool:
    try:
        _read_index(folder)
    except PackingError:
        return False
    return True


def _read_index(folder: Path) -> dict[str, Any]:
    index = folder / _INDEX
    if not index.is_file():
        raise PackingError(f"path: expected a folder with a saved plan, but {str(folder)!r} has no {_INDEX}")
    try:
        saved = json.loads(index.read_text())
        facts = {
            "fingerprint": str(saved["fingerprint"]),
            "proven_lower_bound": int(saved["proven_lower_bound"]),
            "note": str(saved.get("note", "")),
        }
        found = saved["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(
            f"path: expected a valid {_INDEX}, but reading {str(index)!r} raised {error!r}; save the plan again"
        ) from error
    if found != _FORMAT:
        raise PackingError(f"path: expected a plan of format {_FORMAT}, but {str(index)!r} has format {found!r}")
    return facts


def load_arrays(
    folder: Path, names: Iterable[str], optional: Iterable[str] = ()
) -> tuple[dict[str, IntArray], dict[str, Any]]:
    """Load the arrays and the other values of a plan that `save_arrays` has saved.

    Args:
        folder: folder of the saved plan.
        names: names of the arrays to load.
        optional: names of arrays to load if the saved plan has them.

    Returns:
        A dict from name to memory-mapped array, for the arrays in `names` and `optional`; and a dict with the values
        `fingerprint`, `proven_lower_bound` and `note` from plan.json.

    Raises:
        PackingError: the folder is not a saved plan, or the saved plan is damaged.
    """
    facts = _read_index(folder)
    arrays = {}
    for name in (*names, *(name for name in optional if (folder / f"{name}.npy").exists())):
        file = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise PackingError(
                f"path: expected a saved plan with a readable array file {file.name}, but reading {str(file)!r} "
                f"failed: {error}"
            ) from error
    return arrays, facts
