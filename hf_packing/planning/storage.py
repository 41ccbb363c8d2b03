"""A plan on disk: a folder with one .npy file for each array, and plan.json, written last, that says what they are."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hf_packing.errors import PackingError
from hf_packing.planning.lengths import IntArray

FORMAT = 1
INDEX = "plan.json"


def save_arrays(folder: Path, arrays: dict[str, IntArray], facts: dict[str, Any]) -> None:
    """Write into a new folder beside `folder` and rename it, so that no reader ever sees half a plan."""
    if folder.exists() and not (folder / INDEX).is_file():
        raise PackingError(f"path: expected a new folder or a saved plan to replace, {str(folder)!r} is neither")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, array in arrays.items():
            np.save(fresh / f"{name}.npy", array, allow_pickle=False)
        (fresh / INDEX).write_text(json.dumps({"format": FORMAT, **facts}, indent=1) + "\n")
        fresh.chmod(0o777 & ~current_umask())
        if folder.exists():
            shutil.rmtree(folder)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def load_arrays(folder: Path, names: Iterable[str]) -> tuple[dict[str, IntArray], dict[str, Any]]:
    index = folder / INDEX
    if not index.is_file():
        raise PackingError(f"path: expected a folder with a saved plan, {str(folder)!r} has no {INDEX}")
    facts = json.loads(index.read_text())
    if facts.get("format") != FORMAT:
        raise PackingError(
            f"path: expected a plan of format {FORMAT}, {str(index)!r} has format {facts.get('format')!r}"
        )
    arrays = {}
    for name in names:
        file = folder / f"{name}.npy"
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise PackingError(f"path: expected the array of a saved plan in {str(file)!r}: {error}") from error
    return arrays, facts


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
