"""Which files documents are read from, and which files of a folder are not, with the reason."""

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from hf_packing.errors import PackingError

COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ROWS = (".jsonl", ".ndjson", ".parquet")
"""Files with a row for each document; in a folder that has any, nothing else is read."""
TABLES = (".csv", ".tsv", ".xlsx")
"""Files whose lines are no documents."""
PACKED_UP = (".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".arrow", ".feather")
"""Files to unpack or to convert first; some of their bytes could be taken for text."""
JSON = ".json"
"""The same, but in a folder with texts these are texts, too."""
LEFT_OUT = ("__pycache__", "site-packages", "node_modules")
"""Folders that have no documents of their own, as those that begin with a dot."""
BEGINNING = 8192
"""Bytes by which a text is told from something else."""


class Found(NamedTuple):
    """What is in a place."""

    files: list[Path]
    """To read, in order; none for what is no path."""
    not_read: list[str]
    """Others, and why."""
    broken: list[str]
    """What ought to be read, and cannot be."""


def find_files(path: Path, glob: str | None) -> Found:
    """The files to read in a place.

    Raises:
        PackingError: there are none; a pattern where there is nothing to look in; a folder that cannot be read.
    """
    if path.is_file():
        refuse_glob(path, glob)
        return Found([path], [], [])
    if path.exists() and not path.is_dir():
        raise PackingError(
            f"DATA: expected a file or a folder, which are read twice, {str(path)!r} is neither; write it to a file"
        )
    if not path.is_dir():
        if path.suffix or path.is_absolute() or str(path).startswith("."):
            raise PackingError(f"DATA: expected a file, a folder or a dataset's name, {str(path)!r} does not exist")
        refuse_glob(path, glob)
        return Found([], [], [])
    try:
        found = {file for folder in _folders_of(path) for file in folder.rglob(glob or "*")}
    except (NotImplementedError, ValueError) as error:
        if isinstance(error, PackingError):
            raise
        raise PackingError(f"--glob: expected a pattern of names in the folder, such as *.py, {error}") from None
    named = [file for file in sorted(found) if not file.is_dir() and not _is_left_out(file, path)]
    saved = {folder for folder in {file.parent for file in named} if _in_saved_dataset(folder, path)}
    not_read = [f"{folder}: not read, a saved dataset within a folder" for folder in sorted(saved)]
    named = [file for file in named if file.parent not in saved]
    broken = [f"{file}: expected a file, the link leads nowhere" for file in named if not file.exists()]
    not_read += [f"{file}: not read, no file" for file in named if file.exists() and not file.is_file()]
    files = [file for file in named if file.is_file()]
    again = _read_already(files)
    not_read += [f"{file}: not read, a link to a file of the folder" for file in sorted(again)]
    files = [file for file in files if file not in again]
    if not files:
        reason = "; a saved dataset in it can be named by itself" if saved else f"; {broken[0]}" if broken else ""
        raise PackingError(
            f"DATA: expected files{f' like {glob}' if glob else ''}, the folder {str(path)!r} has none{reason}"
        )
    return Found(files, not_read, broken)


def refuse_glob(path: Path, glob: str | None) -> None:
    if glob:
        raise PackingError(f"--glob: expected a folder to look in, got {str(path)!r}")


def _folders_of(path: Path) -> Iterator[Path]:
    """The folder, and what links within it lead to, unless it is read already; rglob itself follows no links."""

    def refuse(error: OSError) -> None:
        if not _is_left_out(Path(error.filename), path):
            raise PackingError(f"DATA: expected folders that can be read, {error.filename!r}: {error.strerror}")

    pending, read = [path], list[Path]()
    while pending:
        folder = pending.pop(0)
        target = folder.resolve()
        if any(target.is_relative_to(other) or other.is_relative_to(target) for other in read):
            continue
        read.append(target)
        yield folder
        walked = os.walk(folder, onerror=refuse)  # rglob passes over what it may not read
        links = (Path(name, each) for name, below, _ in walked for each in sorted(below))
        pending += [link for link in links if link.is_symlink() and not _is_left_out(link, path)]


def _is_left_out(file: Path, folder: Path) -> bool:
    return any(part in LEFT_OUT or part.startswith(".") for part in file.relative_to(folder).parts)


def _in_saved_dataset(folder: Path, top: Path) -> bool:
    above = [folder, *folder.parents]
    return any(is_saved_dataset(each) for each in above[: above.index(top)])


def _read_already(files: Sequence[Path]) -> set[Path]:
    """Links to others among them. Links that lead elsewhere stay: a cache has equal files once, under two names."""
    links = [file for file in files if file.is_symlink()]
    targets = {file.resolve() for file in files if not file.is_symlink()} if links else set()
    return {link for link in links if link.resolve() in targets}


def is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def has_rows(file: Path) -> bool:
    return kind_of(file) in (*ROWS, JSON)


def kind_of(file: Path) -> str:
    """The ending that says what is in a file, compressed or not."""
    return (Path(file.stem).suffix if file.suffix.lower() in COMPRESSED else file.suffix).lower()


def open_file(file: Path) -> IO[bytes]:
    opened: IO[bytes] = COMPRESSED.get(file.suffix.lower(), open)(file, "rb")
    return opened


def is_text(file: Path) -> bool:
    """Whether it looks like one. Archives, arrays and UTF-16 have zero bytes, which UTF-8 would let pass."""
    with open_file(file) as stream:
        return b"\0" not in stream.read(BEGINNING)
