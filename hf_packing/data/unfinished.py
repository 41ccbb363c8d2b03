"""Files that are still being written: no other process sees them, and leftovers of killed processes are removed.

A file is made in a hidden folder beside its final place. The folder is locked, and the operating system releases the
lock when the process ends, however it ends. So leftovers of a process that was killed differ from the files of one that
still runs, also if it runs on another machine that shares the file system.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

UNTOUCHED_FOR = 3600.0
"""Seconds without a write after which something without a lock, as on a file system without locks, is a leftover."""

_LOCK = "lock"
_UNFINISHED = re.compile(r"\.cache-[0-9a-f]+\.(arrow|plan)[.-].+")


@contextmanager
def work_folder(place: Path) -> Iterator[Path]:
    """Make a locked folder in which to write a file; it is removed at the end.

    Args:
        place: where the file goes when it is complete, `cache-*.arrow`; the folder is made beside it.
    """
    folder, lock = _locked_folder(place)
    try:
        yield folder
    finally:
        if lock is not None:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def clear_unfinished(folder: Path) -> None:
    """Remove what processes that no longer run have left unfinished in a folder of `cache-*.arrow` files."""
    with suppress(OSError):
        for unfinished in folder.iterdir():
            if _UNFINISHED.fullmatch(unfinished.name):
                with suppress(OSError, NotImplementedError):  # filelock's Timeout is an OSError
                    _remove_leftover(unfinished)


def _locked_folder(place: Path) -> tuple[Path, FileLock | None]:
    """Return a new folder and its lock, or None on a file system without locks."""
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
    """Remove a file or folder, unless its process still runs.

    Raises:
        OSError: its process still runs.
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
    """Return when a file, or any file in a folder, was last written to, in seconds since 1970."""
    return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
