"""Find the files from which documents are read, and report which files of a folder are not read, and why.

`datasets` could list the files of a folder, but does not follow links to folders, reads a file with two names twice,
and does not report which files are left out.
"""

import bz2
import gzip
import lzma
import mimetypes
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from hf_packing.errors import PackingError

_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LEFT_OUT = ("__pycache__", "site-packages", "node_modules")
"""Names of folders that are skipped. Folders whose names begin with a dot are skipped too."""
JSON = ".json"
"""Suffix of a JSON file, which has rows. In a folder with text files, each JSON file is one text document instead."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
ROWS = (".jsonl", ".ndjson", ".parquet", *SEPARATORS)
"""Suffixes of files with one row per document. If a folder has such files, no other files of the folder are read."""


SPREADSHEET = ".xlsx"
ARCHIVES = (".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".arrow", ".feather")
"""Suffixes of files that the user must unpack or convert first. The content of such a file can look like text."""
_ON_HUB = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
"""The pattern of names of datasets on the hub."""


class FoundFiles(NamedTuple):
    """The files found at a path, as three lists: files to read, files left out on purpose, and unreadable files."""

    to_read: list[Path]
    """Files to read, in order; empty for a saved dataset, and for a path that may be a name on the hub."""
    not_read: list[str]
    """Files that are left out on purpose, with the reasons."""
    broken: list[str]
    """Files that cannot be read although they should be, with the reasons."""


def find_files(path: Path, glob: str | None) -> FoundFiles:
    """Return the files to read at a path, the files that are left out, and the files that cannot be read.

    Args:
        path: a file, a folder, a saved dataset, or the name of a dataset on the hub.
        glob: pattern for the files to read in the folder, such as "*.py", which matches at any depth; None for all.

    Raises:
        PackingError: there are no files, a pattern is given without a folder, or a folder cannot be read.
    """
    may_be_on_hub = not path.exists() and _ON_HUB.fullmatch(str(path)) and not _names_a_kind_of_file(path)
    if not path.exists() and not may_be_on_hub:
        raise PackingError(f"DATA: expected a file, a folder or a dataset's name, but {str(path)!r} does not exist")
    if path.is_dir() and not is_saved_dataset(path):
        return _files_of_folder(path, glob)
    if glob:
        raise PackingError(f"--glob: expected a folder as DATA, got {str(path)!r}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise PackingError(
            f"DATA: expected a file or a folder, but {str(path)!r} is neither and cannot be read twice; save the "
            "content in a file"
        )
    return FoundFiles([path] if path.is_file() else [], [], [])


def _names_a_kind_of_file(path: Path) -> bool:
    """Return whether the end of a name, such as .txt, says that it is a file, unlike that of org/Name-2.5."""
    known = (JSON, *ROWS, *_OPENERS, *ARCHIVES, SPREADSHEET)
    return path.suffix.lower() in known or mimetypes.guess_type(path.name)[0] is not None


def is_saved_dataset(path: Path) -> bool:
    """Return whether a path is a folder that `save_to_disk` of `datasets` made."""
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def kind_of_file(file: Path) -> str:
    """Return the suffix of a file in lower case, such as .jsonl, without a compression suffix such as .gz."""
    return (Path(file.stem).suffix if file.suffix.lower() in _OPENERS else file.suffix).lower()


def open_file(file: Path) -> IO[bytes]:
    """Open a file, compressed or not, and return a stream of the uncompressed bytes."""
    opened: IO[bytes] = _OPENERS.get(file.suffix.lower(), open)(file, "rb")
    return opened


def _files_of_folder(folder: Path, glob: str | None) -> FoundFiles:
    if glob and (Path(glob).is_absolute() or "**" in glob.removeprefix("**/")):
        raise PackingError(
            "--glob: expected a relative pattern without **, such as *.py, which matches files at any depth, got "
            f"{glob!r}"
        )
    saved: list[Path] = []
    files = sorted(file for file in _walk(folder, saved) if file.match(glob or "*"))
    not_read = [f"{each}: a saved dataset within a folder, so not read" for each in sorted(saved)]
    broken = [f"{file}: expected a file, got a broken link" for file in files if not file.exists()]
    not_read += [f"{file}: not a regular file, so not read" for file in files if file.exists() and not file.is_file()]
    files = [file for file in files if file.is_file()]
    targets = {file.resolve() for file in files if not file.is_symlink()}
    again = {file for file in files if file.is_symlink() and file.resolve() in targets}
    not_read += [f"{file}: a link to another file in the folder, so not read" for file in files if file in again]
    files = [file for file in files if file not in again]
    if not files:
        reason = "; for a saved dataset in the folder, pass its path" if saved else f"; {broken[0]}" if broken else ""
        raise PackingError(
            f"DATA: expected files{f' like {glob}' if glob else ''} in the folder {str(folder)!r}, got none{reason}"
        )
    with_rows = [file for file in files if kind_of_file(file) in ROWS]
    if with_rows:
        not_read += [f"{file}: not read beside files with rows" for file in files if kind_of_file(file) not in ROWS]
    return FoundFiles(with_rows or files, not_read, broken)


def _walk(top: Path, saved: list[Path]) -> Iterator[Path]:
    """Yield the files of a folder, of its subfolders and of folders that links point to. No folder is visited twice.

    Args:
        top: the folder.
        saved: list to which the function adds the saved datasets in the folder. Their files are not yielded.
    """

    def refuse(error: OSError) -> None:
        raise PackingError(
            f"DATA: expected folders that can be read, but reading {error.filename!r} failed: {error.strerror}"
        )

    pending, seen = [top], set[str]()
    for start in pending:  # linked folders come last, so a file is found by its direct path first
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
