"""Keep files by name in one folder, local or in an object store. A file is there as a whole, or not at all.

A local file is written under a temporary name and then renamed. A file of an object store is written to a local
temporary file and then uploaded, which object stores show only when it is complete. Nothing here lists a folder or
renames an object, so stores whose listings lag behind their writes will do.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from hf_packing.errors import PackingError

_UNFINISHED = ".unfinished"
"""The folder of temporary files of a local store."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Store:
    """A folder with files.

    Args:
        url: a local path, or a URL of fsspec such as s3://bucket/folder.
        options: arguments for the file system of fsspec, such as endpoint_url; called storage_options elsewhere.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def _system(self) -> tuple[Any, str]:
        return file_system(self.url, self.options)

    @property
    def is_local(self) -> bool:
        return isinstance(self._system[0], LocalFileSystem)

    def path_of(self, name: str) -> str:
        """Return the path or the URL of a file, for other programs."""
        system, root = self._system
        return f"{root}/{name}" if self.is_local else str(system.unstrip_protocol(f"{root}/{name}"))

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, or None if there is no such file."""
        system, root = self._system
        if self.is_local:
            with suppress(FileNotFoundError):
                return os.stat(f"{root}/{name}").st_size
            return None
        with suppress(FileNotFoundError):
            return int(system.info(f"{root}/{name}")["size"])
        return None

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes begin:end of a file; fewer bytes if the file is shorter.

        Raises:
            FileNotFoundError: there is no such file.
        """
        system, root = self._system
        if self.is_local:
            with open(f"{root}/{name}", "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(min(begin, size))
                return file.read(max(0, (size if end is None else min(end, size)) - begin))
        if end is not None and end <= begin:
            return b""
        try:
            return bytes(system.cat_file(f"{root}/{name}", start=begin or None, end=end))
        except OSError:  # S3 refuses to read after the end of a file
            if (found := self.size(name)) is not None and found <= begin:
                return b""
            raise

    @contextmanager
    def create(self, name: str) -> Iterator[Path]:
        """Context manager: write a file, and put it in place at the end of the block, where it replaces an older one.

        If the block raises an error, no file is put in place.

        Yields:
            The path at which to write the file.
        """
        system, root = self._system
        with self._unfinished() as folder:
            fresh = folder / Path(name).name
            yield fresh
            if self.is_local:
                os.replace(fresh, self._place(name))
            else:
                system.put_file(str(fresh), f"{root}/{name}")

    def put(self, name: str, content: bytes) -> None:
        """Write a file with this content. An older file of this name is replaced."""
        with self.create(name) as fresh:
            fresh.write_bytes(content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a file with this content, unless there is a file of this name; return whether it was written.

        Of several processes that try this at the same time, one succeeds, if the file system can do that.
        """
        system, root = self._system
        if not self.is_local:
            return _upload_new(system, f"{root}/{name}", content)
        with self._unfinished() as folder:
            fresh, place = folder / "file", self._place(name)
            fresh.write_bytes(content)
            try:
                os.link(fresh, place)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links
                if place.exists():
                    return False
                os.replace(fresh, place)
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        system, root = self._system
        with suppress(FileNotFoundError):
            if self.is_local:
                os.remove(f"{root}/{name}")
            else:
                system.rm_file(f"{root}/{name}")

    def remove_local_folders(self, *names: str) -> None:
        """Remove folders, and files that killed processes have left unfinished. Object stores have no folders."""
        if self.is_local:
            for name in (*names, _UNFINISHED):
                shutil.rmtree(f"{self._system[1]}/{name}", ignore_errors=True)

    def _place(self, name: str) -> Path:
        place = Path(self._system[1], name)
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        """Context manager: yield a temporary folder, on the disk of the store if it is local."""
        parent = self._place(_UNFINISHED) if self.is_local else None
        while True:
            try:
                if parent is not None:
                    parent.mkdir(parents=True, exist_ok=True)
                folder = tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True)
                break
            except FileNotFoundError:  # another process has removed the parent
                continue
        with folder as path:
            try:
                yield Path(path)
            except OSError as error:
                if error.errno in _NO_ROOM and not error.filename:  # a write does not say where
                    raise OSError(error.errno, error.strerror, path) from None
                raise


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and the path within it.

    Args:
        url: a local path, or a URL of fsspec.
        options: arguments for file systems that are not local.

    Raises:
        PackingError: fsspec does not know the protocol, or needs a package for it that is not installed.
    """
    try:
        system, path = url_to_fs(url, **(options if "://" in url and not url.startswith("file://") else {}))
    except (ValueError, ImportError) as error:
        raise PackingError(f"expected a local path or a URL that fsspec can open, got {url!r}: {error}") from None
    return system, path


def _upload_new(system: Any, path: str, content: bytes) -> bool:
    try:
        system.pipe_file(path, content, mode="create")
    except OSError:  # FileExistsError, but not of all stores
        if system.exists(path):
            return False
        raise
    except (TypeError, NotImplementedError):  # a file system that cannot put if absent
        if system.exists(path):
            return False
        system.pipe_file(path, content)
    return True
