"""A plan on disk: a folder with one .npy file for each array, and plan.json, written last, that says what they are."""

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

FORMAT = 1
INDEX = "plan.json"


def save_arrays(folder: Path, arrays: dict[str, IntArray], facts: dict[str, Any]) -> None:
    """Write into a new folder beside `folder` and rename it, so that no reader ever sees half a plan."""
    folder = folder.resolve()  # no folder can be renamed to a link
    check_replaceable(folder, {f"{name}.npy" for name in arrays} | {INDEX})
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as around:
        fresh = Path(around) / folder.name
        fresh.mkdir()  # readable for whom the user's umask says, where `around` is for this user alone
        for name, array in arrays.items():
            np.save(fresh / f"{name}.npy", array, allow_pickle=False)
        (fresh / INDEX).write_text(json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")
        put_in_place(fresh, folder)


def check_replaceable(folder: Path, files: set[str]) -> None:
    """Refuse what is no plan of these files. Where another rank replaces it meanwhile, look again.

    Raises:
        PackingError: something else stands there.
    """
    while (standing := identity(folder)) is not None:
        with suppress(FileNotFoundError):
            if is_saved_plan(folder) and {file.name for file in folder.iterdir()} <= files:
                return
        if identity(folder) == standing:
            raise PackingError(f"path: expected a new folder or a saved plan to replace, {str(folder)!r} is neither")


def identity(folder: Path) -> tuple[int, int] | None:
    """Of what stands at a path; None where there is nothing."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_ctime_ns


def put_in_place(fresh: Path, folder: Path, unless: Callable[[], bool] = lambda: False) -> None:
    """Rename a finished folder to its place; what stands there is removed.

    Args:
        fresh: the finished folder.
        folder: its place.
        unless: asked whenever something stands there: whether it may stay, and `fresh` is not needed.
    """
    replaced = []
    while not renamed(fresh, folder):
        if unless():
            break
        replaced.append(Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-")))
        with suppress(FileNotFoundError):  # another process may have moved it
            folder.rename(replaced[-1] / folder.name)
    for old in replaced:  # not before, since its place is empty until the new one stands there
        shutil.rmtree(old)


def renamed(fresh: Path, folder: Path) -> bool:
    """Whether nothing stood in the way."""
    try:
        fresh.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def is_saved_plan(folder: Path) -> bool:
    try:
        read_index(folder)
    except PackingError:
        return False
    return True


def read_index(folder: Path) -> dict[str, Any]:
    index = folder / INDEX
    if not index.is_file():
        raise PackingError(f"path: expected a folder with a saved plan, {str(folder)!r} has no {INDEX}")
    try:
        facts = json.loads(index.read_text())
        if facts["format"] != FORMAT:
            raise PackingError(f"path: expected a plan of format {FORMAT}, {str(index)!r} has {facts['format']!r}")
        return {
            "fingerprint": str(facts["fingerprint"]),
            "proven_lower_bound": int(facts["proven_lower_bound"]),
            "note": str(facts.get("note", "")),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise PackingError(f"path: expected the index of a saved plan in {str(index)!r}: {error!r}") from error


def load_arrays(folder: Path, names: Iterable[str]) -> tuple[dict[str, IntArray], dict[str, Any]]:
    facts = read_index(folder)
    arrays = {}
    for name in names:
        file = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise PackingError(f"path: expected the array of a saved plan in {str(file)!r}: {error}") from error
    return arrays, facts
