"""Find the files that documents are read from, and say which files of a folder are not read, and why.

`datasets` could list the files of a folder, but it follows no links to folders, reads a file twice if it has
two names there, and does not say what it leaves out.
"""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from hf_packing.errors import PackingError

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LEFT_OUT = ("__pycache__", "site-packages", "node_modules")
"""Folders that are skipped, as are those that begin with a dot."""
JSON = ".json"
"""A file with rows, or one text document if it is in a folder with text files."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
ROWS = (".jsonl", ".ndjson", ".parquet", *SEPARATORS)
"""Files with a row for each document. In a folder that has one, no other files are read."""


class FoundFiles(NamedTuple):
    """The files of a place."""

    to_read: list[Path]
    """In order; none for a saved dataset, or for what may be a name on the hub."""
    not_read: list[str]
    """Files that are left out, and why."""
    broken: list[str]
    """Files that should be read but cannot be, and why."""


def find_files(path: Path, glob: str | None) -> FoundFiles:
    """Find the files to read in a place.

    Args:
        path: a file, a folder, a saved dataset, or the name of a dataset on the hub.
        glob: a pattern of names of files in the folder, at any depth, such as "*.py"; None for all.

    Raises:
        PackingError: there are no files; a pattern without a folder to look in; a folder that cannot be read.
    """
    may_be_on_hub = not (path.exists() or path.suffix or path.is_absolute() or str(path).startswith("."))
    if not path.exists() and not may_be_on_hub:
        raise PackingError(f"DATA: expected a file, a folder or a dataset's name, {str(path)!r} does not exist")
    if path.is_dir() and not is_saved_dataset(path):
        return _files_of_folder(path, glob)
    if glob:
        raise PackingError(f"--glob: expected a folder to look in, got {str(path)!r}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise PackingError(
            f"DATA: expected a file or a folder, {str(path)!r} is neither, and cannot be read twice; write it to a file"
        )
    return FoundFiles([path] if path.is_file() else [], [], [])


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` made the folder."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def kind_of_file(file: Path) -> str:
    """Return the suffix that says what is in a file, compressed or not, in lower case."""
    return (Path(file.stem).suffix if file.suffix.lower() in _OPENERS else file.suffix).lower()


def open_file(file: Path) -> IO[bytes]:
    """Open a file that may be compressed."""
    opened: IO[bytes] = _OPENERS.get(file.suffix.lower(), open)(file, "rb")
    return opened


def _files_of_folder(folder: Path, glob: str | None) -> FoundFiles:
    if glob and (Path(glob).is_absolute() or "**" in glob.removeprefix("**/")):
        raise PackingError(
            f"--glob: expected a pattern of file names, such as *.py, matched at any depth, got {glob!r}"
        )
    saved: list[Path] = []
    files = sorted(file for file in _walk(folder, saved) if file.match(glob or "*"))
    not_read = [f"{each}: not read, a saved dataset within a folder" for each in sorted(saved)]
    broken = [f"{file}: expected a file, got a broken link" for file in files if not file.exists()]
    not_read += [f"{file}: not read, not a regular file" for file in files if file.exists() and not file.is_file()]
    files = [file for file in files if file.is_file()]
    targets = {file.resolve() for file in files if not file.is_symlink()}
    again = {file for file in files if file.is_symlink() and file.resolve() in targets}
    not_read += [f"{file}: not read, a link to another file in the folder" for file in files if file in again]
    files = [file for file in files if file not in again]
    if not files:
        reason = "; name a saved dataset in it directly" if saved else f"; {broken[0]}" if broken else ""
        raise PackingError(
            f"DATA: expected files{f' like {glob}' if glob else ''}, the folder {str(folder)!r} has none{reason}"
        )
    with_rows = [file for file in files if kind_of_file(file) in ROWS]
    if with_rows:
        not_read += [f"{file}: not read beside files with rows" for file in files if kind_of_file(file) not in ROWS]
    return FoundFiles(with_rows or files, not_read, broken)


def _walk(top: Path, saved: list[Path]) -> Iterator[Path]:
    """Yield the files of a folder and of the folders that links in it lead to, each folder once.

    Args:
        top: the folder.
        saved: filled with the saved datasets in it, whose files are not yielded.
    """

    def refuse(error: OSError) -> None:
        raise PackingError(f"DATA: expected folders that can be read, {error.filename!r}: {error.strerror}")

    pending, seen = [top], set[str]()
    for start in pending:  # grows: links come last, so that files keep the names that they have in the folder itself
        for where, folders, files in os.walk(start, onerror=refuse):
            folder, real = Path(where), os.path.realpath(where)
            if folder != top and is_saved_dataset(folder):
                saved.append(folder)
            if real in seen or folder in saved:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if not (name in _LEFT_OUT or name.startswith(".")))
            pending += [folder / name for name in folders if (folder / name).is_symlink()]
            yield from (folder / name for name in files if not name.startswith("."))
