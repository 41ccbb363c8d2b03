"""Folders that appear whole or not at all, and whether a file is still the same.

A folder is written under another name, and renamed when it is complete.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from hf_packing.errors import PackingError

_TAGS = ("ETag", "etag", "xet_hash", "blob_id", "version_id", "sha256", "md5Hash", "content_md5")
"""Names, in fsspec's `info`, of what an object store says of the content of a file."""
_TIMES = ("LastModified", "updated", "mtime")
"""Names, in fsspec's `info`, of the time when a file was changed."""

UNFINISHED = ".packing-"
"""How the name of a file or a folder begins that is not complete."""
UNTOUCHED_FOR = 3600.0
"""An unfinished file or folder is removed after this many seconds without a write."""


def file_system(name: str, **options: Any) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path within it. A name in a folder that exists is a path.

    Args:
        name: a path or URL.
        options: arguments for file systems that are not local.
    """
    if os.path.isdir(os.path.dirname(name) or "."):
        return LocalFileSystem(), os.path.abspath(name)
    try:
        system, path = url_to_fs(name, **options)
    except (ValueError, ImportError) as error:
        raise PackingError(f"expected a local path or a URL that fsspec can open, got {name!r}: {error}") from None
    return system, path


def size_and_version(system: Any, path: str, times: bool) -> tuple[int | None, str]:
    """Return what differs between two versions of a file: the size in bytes if known, and the tag of an object store.

    Args:
        system: the file system of fsspec.
        path: the path in the file system.
        times: whether the time of the last change stands for the tag where there is none, as in local folders. Copies
            of a file differ in it.
    """
    info = system.info(path)
    names = (*_TAGS, *_TIMES) if times else _TAGS
    return info["size"], next((str(info[name]) for name in names if info.get(name)), "")


def is_hidden(path: str) -> bool:
    """Return whether a path below a folder is hidden, or is a mark of Spark without a suffix, such as _SUCCESS."""
    name = path.rpartition("/")[2]
    return "/." in f"/{path}" or (name.startswith("_") and "." not in name)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager: make a folder to write to. At the end of the block, it gets its final path.

    Args:
        folder: the final path. A folder there is replaced. If the process is killed, the unfinished folder stays
            beside it.
    """
    fresh = folder.parent / f"{UNFINISHED}{uuid4().hex}"
    fresh.mkdir()
    try:
        yield fresh
        put_in_place(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def remove_unfinished(home: Path, untouched_for: float = UNTOUCHED_FOR) -> None:
    """Remove the unfinished files and folders in a folder to which nobody has written for so many seconds."""
    for work in home.glob(f"{UNFINISHED}{'[0-9a-f]' * 32}*"):  # as `new_folder` names them
        with suppress(OSError):  # another process has removed it
            if time.time() - max(each.stat().st_mtime for each in (work, *work.rglob("*"))) <= untouched_for:
                continue
            if work.is_dir():
                shutil.rmtree(work, ignore_errors=True)
            else:
                work.unlink()


@contextmanager
def writing_to(argument: str, place: Path | str, remedy: str = "") -> Iterator[None]:
    """Context manager: raise PackingError, with an argument and a place, for an error in writing to the place."""
    try:
        yield
    except OSError as error:
        raise PackingError(
            f"{argument}: expected to write to {str(place)!r}, got the error: {error}{remedy}"
        ) from error


def put_in_place(fresh: Path, folder: Path) -> None:
    """Rename a finished folder to its final path. A folder that exists there is removed."""
    replaced: list[Path] = []
    while True:
        try:
            fresh.rename(folder)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        replaced.append(fresh.with_name(f"{fresh.name}-{len(replaced)}"))
        with suppress(FileNotFoundError):  # raised if another process has moved the folder
            folder.rename(replaced[-1])
    for old in replaced:  # removed only now, since removing takes time, and `folder` does not exist until the rename
        shutil.rmtree(old, ignore_errors=True)
