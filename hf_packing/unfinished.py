"""Files in the making: no other process sees half of one, and what a killed process has left is removed by the next.

A folder in the making holds a lock that the operating system gives back when its process ends, however it ends. So a
process that was killed is told from one that runs, on this machine or on another one that shares the file system.
"""

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

LOCK = "lock"
IN_THE_MAKING = re.compile(r"\.cache-[0-9a-f]+\.(arrow|plan)[.-].+")
UNTOUCHED_FOR = 3600.0
"""Seconds without a write after which what has no lock, as on a file system without locks, counts as left over."""


@contextmanager
def work_folder(place: Path) -> Iterator[Path]:
    """A locked folder beside a file, to make it in; removed in the end.

    Args:
        place: `cache-*.arrow`, what will be made.
    """
    folder, lock = locked_folder(place)
    try:
        yield folder
    finally:
        if lock is not None:
            lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def locked_folder(place: Path) -> tuple[Path, FileLock | None]:
    """A new folder and its lock; none where the file system has no locks."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire()
        except FileNotFoundError:  # cleared by another process before it was locked
            continue
        except (OSError, NotImplementedError):
            return folder, None
        if (folder / LOCK).exists():
            return folder, lock
        lock.release()


def clear_unfinished(folder: Path) -> None:
    """Remove what processes that no longer run were making in a folder.

    Args:
        folder: that has `cache-*.arrow` files.
    """
    with suppress(OSError):
        for unfinished in folder.iterdir():
            if IN_THE_MAKING.fullmatch(unfinished.name):
                with suppress(OSError, NotImplementedError):  # filelock's Timeout is an OSError
                    clear(unfinished)


def clear(unfinished: Path) -> None:
    """Remove it, unless its process runs.

    Raises:
        OSError: its process runs.
    """
    if (unfinished / LOCK).is_file():
        with FileLock(unfinished / LOCK, timeout=0):
            shutil.rmtree(unfinished, ignore_errors=True)
    elif time.time() - last_write(unfinished) > UNTOUCHED_FOR:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink()


def last_write(path: Path) -> float:
    """When a file, or any file of a folder, was written to; seconds since 1970."""
    return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
