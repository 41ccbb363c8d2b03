"""A plan on disk: a folder with one .npy file for each array, and plan.json, which is written last."""

import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

_FORMAT = 1
_INDEX = "plan.json"


def save_arrays(folder: Path, arrays: dict[str, IntArray], facts: dict[str, Any]) -> None:
    """Write into a new folder beside `folder` and rename it, so that no reader ever sees half a plan.

    Args:
        folder: the plan's folder; a saved plan there is replaced.
        arrays: to save, by name.
        facts: what to write to plan.json.

    Raises:
        PackingError: the path exists, and is not a saved plan.
    """
    folder = folder.resolve()  # a folder cannot be renamed onto a symbolic link
    _check_replaceable(folder, {f"{name}.npy" for name in arrays} | {_INDEX})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as around:
        fresh = Path(around) / folder.name
        fresh.mkdir()  # with the permissions of the user's umask; `around` is readable by this user alone
        for name, array in arrays.items():
            np.save(fresh / f"{name}.npy", array, allow_pickle=False)
        (fresh / _INDEX).write_text(json.dumps({"format": _FORMAT, **facts}, indent=1) + "\n")
        put_in_place(fresh, folder)


def _check_replaceable(folder: Path, files: set[str]) -> None:
    """Raise PackingError if there is something at the path that is not a saved plan with these files.

    Another rank may be replacing the plan at this moment; if so, look again.
    """
    while (found := _identity(folder)) is not None:
        with suppress(FileNotFoundError):
            if _is_saved_plan(folder) and {file.name for file in folder.iterdir()} <= files:
                return
        if _identity(folder) == found:
            raise PackingError(f"path: expected a new folder or a saved plan to replace, got {str(folder)!r}")


def _identity(folder: Path) -> tuple[int, int] | None:
    """Identify what is at a path by inode and time of change; None if there is nothing."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_ctime_ns


def put_in_place(fresh: Path, folder: Path, unless: Callable[[], bool] = lambda: False) -> None:
    """Rename a finished folder to its place, and remove what was there.

    Args:
        fresh: the finished folder.
        folder: its place.
        unless: called if its place is taken; if it returns True, what is there stays and `fresh` is not moved.
    """
    replaced = []
    while not _try_rename(fresh, folder):
        if unless():
            break
        replaced.append(Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-")))
        with suppress(FileNotFoundError):  # another process may have moved it
            folder.rename(replaced[-1] / folder.name)
    for old in replaced:  # last, since removing takes time, and the place is empty until the rename
        shutil.rmtree(old)


def _try_rename(fresh: Path, folder: Path) -> bool:
    """Rename, and return False if something is in the way."""
    try:
        fresh.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _is_saved_plan(folder: Path) -> bool:
    try:
        _read_index(folder)
    except PackingError:
        return False
    return True


def _read_index(folder: Path) -> dict[str, Any]:
    index = folder / _INDEX
    if not index.is_file():
        raise PackingError(f"path: expected a folder with a saved plan, {str(folder)!r} has no {_INDEX}")
    try:
        facts = json.loads(index.read_text())
        if facts["format"] != _FORMAT:
            raise PackingError(f"path: expected a plan of format {_FORMAT}, {str(index)!r} has {facts['format']!r}")
        return {
            "fingerprint": str(facts["fingerprint"]),
            "proven_lower_bound": int(facts["proven_lower_bound"]),
            "note": str(facts.get("note", "")),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(f"path: expected the index of a saved plan in {str(index)!r}: {error!r}") from error


def load_arrays(folder: Path, names: Iterable[str]) -> tuple[dict[str, IntArray], dict[str, Any]]:
    """Load what `save_arrays` wrote, the arrays memory-mapped.

    Returns:
        The arrays by name, and the facts: fingerprint, proven_lower_bound and note.

    Raises:
        PackingError: no saved plan there, or a damaged one.
    """
    facts = _read_index(folder)
    arrays = {}
    for name in names:
        file = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise PackingError(f"path: expected the array of a saved plan in {str(file)!r}: {error}") from error
    return arrays, facts
