"""Read documents row by row from files, folders, saved datasets and the hub, and list the rows that cannot be read.

This module reads JSON lines, text and parquet without `datasets`, so that an error can name the line that cannot be
read, and reading can continue with the next line. The JSON builder of `datasets` can do neither. That builder also
changes rows: integers become floats if another row has a float, the arguments of tool calls are reordered as in the
first row, and text such as "2024-01-01" becomes a date. CSV files, saved datasets and datasets on the hub are read with
`datasets`.
"""

import codecs
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hf_packing.errors import PackingError
from hf_packing.text.files import (
    ARCHIVES,
    JSON,
    ROWS,
    SEPARATORS,
    SPREADSHEET,
    FoundFiles,
    find_files,
    is_saved_dataset,
    kind_of_file,
    open_file,
)

DocumentRow = dict[str, Any]

_NO_TEXT = "expected text in UTF-8, got NUL bytes, which are typical of archives, arrays and UTF-16"

_TRAIN = "train"
_BEGINNING = 8192
"""Number of bytes read from the start of a file, to tell text from binary content and a JSON array from JSON lines."""
_SHOWN = 80
"""The number of characters of a value that a message shows."""
_MOST_OF_A_REASON = 1000
"""The most characters of another library's error that a message shows."""
_PATIENCE = 5
"""Seconds to wait for the hub's answer."""


class _UnreadableError(Exception):
    """The error for a file whose rows cannot be read. The message gives what was expected, and the reason."""


@dataclass
class Documents:
    """An iterable over the rows of one source. Every iteration reads the source again.

    Args:
        data: a .jsonl, .json, .parquet, .csv or .tsv file; a text file, whose lines with text are documents; a folder
            of files with rows; a folder of text files, where every file is one document; a folder that `save_to_disk`
            made; or the name of a dataset on the hub. JSON files and text files may be compressed.
        split: name of the split to read from a dataset with several splits; None for "train". Files have no splits.
        glob: pattern for the names of the files to read in a folder, such as "*.py"; None for all files.
        skip_bad: True to leave out rows that cannot be read and list them in `skipped`; False to raise an error.

    Raises:
        PackingError: there is nothing to read in `data`, or an option does not fit `data`.
    """

    data: str
    split: str | None = None
    glob: str | None = None
    skip_bad: bool = False
    skipped: list[str] = field(default_factory=list, init=False)
    """Files and rows that the last iteration left out, with the reasons."""
    files: list[Path] = field(init=False)
    """The files to read; empty if `datasets` reads the data."""
    _found: FoundFiles = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if "://" in self.data:
            raise PackingError(
                f"DATA: expected a path or a name on the hub, got the URL {self.data!r}; "
                "hf_packing.fleet.pack, and hf-packing pack --workers, read URLs"
            )
        path = Path(self.data)
        self._found = find_files(path, self.glob)
        self.files = self._found.to_read
        if self.split and path.exists() and not is_saved_dataset(path):
            raise PackingError(
                f"--split: expected a saved dataset or a name on the hub, got {self.data!r}, a file or a folder "
                "without splits; leave --split out, and pass the files of the split as DATA or with --glob"
            )

    def __iter__(self) -> Iterator[DocumentRow]:
        for _, row in self.with_places():
            yield row

    def with_places(self) -> Iterator[tuple[str, DocumentRow]]:
        """Yield pairs (place, row). The place is a text for error messages, such as "a.jsonl, line 3".

        Raises:
            PackingError: a row or a file cannot be read, and `skip_bad` is False.
        """
        self.skipped[:] = self._found.not_read
        for why in self._found.broken:
            self.leave_out(why)
        if not self.files:
            for place, row in _numbered(load(self.data, self.split)):
                yield f"{self.data}, {place}", row
        are_texts = Path(self.data).is_dir() and not all(kind_of_file(file) in (*ROWS, JSON) for file in self.files)
        for file in self.files:
            for place, row in self._to_its_end(file, self._text if are_texts else self._rows):
                yield f"{file}, {place}" if place else str(file), row

    def leave_out(self, why: str) -> None:
        """Record in `skipped` that a row or a file is left out, because the row or file cannot be used.

        Args:
            why: text with the place of the row or file, and the reason.

        Raises:
            PackingError: `skip_bad` is False.
        """
        if not self.skip_bad:
            raise PackingError(f"{why}; skip_bad=True leaves out what cannot be read, and counts it")
        self.skipped.append(why)

    def identity(self) -> list[Any]:
        """Return values that change when the documents change: sizes and times of files, or a dataset's fingerprint.

        The time of a file's last status change (st_ctime) is included, since copying a file can restore the time of its
        last modification.
        """
        if not self.files:
            return [self.data, self.split or _TRAIN, load(self.data, self.split)._fingerprint]
        stats = [(str(file), file.stat()) for file in self.files]
        return [self.data, *([name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats)]

    def _to_its_end(
        self, file: Path, rows: Callable[[Path], Iterator[tuple[str, DocumentRow]]]
    ) -> Iterator[tuple[str, DocumentRow]]:
        """Yield the rows of a file. If the file is damaged, yield the rows before the damage, then call `leave_out`.

        Args:
            file: the file to read.
            rows: function that yields pairs (place, row) from a file.
        """
        try:
            yield from rows(file)
        except _UnreadableError as error:
            self.leave_out(f"{file}: {error}")
        except (zlib.error, lzma.LZMAError, EOFError, OSError, pa.ArrowException) as error:
            self.leave_out(f"{file}: expected a file that can be read to its end, got the error: {reason_of(error)}")

    def _rows(self, file: Path) -> Iterator[tuple[str, DocumentRow]]:
        """Yield pairs (place, row), such as ("line 3", row), from a file. Every line of a text file is a row."""
        kind = kind_of_file(file)
        if kind in (SPREADSHEET, *ARCHIVES):
            self.leave_out(f"{file}: expected JSONL, parquet, CSV or text, got a {kind} file")
        elif kind == ".parquet":
            yield from _numbered(_parquet_rows(file))
        elif kind in SEPARATORS:
            yield from _numbered(_table_rows(file, SEPARATORS[kind]))
        elif kind in (*ROWS, JSON):
            yield from self._json_rows(file)
        elif _is_text(file):
            yield from self._lines(file)
        else:
            self.leave_out(f"{file}: {_NO_TEXT}")

    def _json_rows(self, file: Path) -> Iterator[tuple[str, DocumentRow]]:
        with open_file(file) as stream:
            is_array = stream.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        for place, row in _numbered(_json_array(file)) if is_array else self._json_lines(file):
            if isinstance(row, dict):
                yield place, row
            else:
                self.leave_out(f"{file}, {place}: expected a JSON object with fields, got {_shown(json.dumps(row))}")

    def _json_lines(self, file: Path) -> Iterator[tuple[str, Any]]:
        with open_file(file) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    got = _shown(line.decode("utf-8", errors="replace"))
                    self.leave_out(f"{file}, line {number}: expected JSON, got {got} ({error})")
                    continue
                yield f"line {number}", row

    def _lines(self, file: Path) -> Iterator[tuple[str, DocumentRow]]:
        """Yield a pair (place, row), such as ("line 3", {"text": "..."}), for every line of a text file with text."""
        with open_file(file) as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    self.leave_out(f"{file}, line {number}: expected text in UTF-8, got the error: {error}")
                    continue
                if text.strip():
                    yield f"line {number}", {"text": text.removesuffix("\n").removesuffix("\r")}

    def _text(self, file: Path) -> Iterator[tuple[str, DocumentRow]]:
        """Yield one pair (place, row) for a whole text file. The place is an empty string.

        A file that is not text, such as an image, is added to `skipped`. A spreadsheet is passed to `leave_out`
        instead, which raises PackingError unless `skip_bad` is True.
        """
        if kind_of_file(file) == SPREADSHEET:
            yield from self._rows(file)
        elif not _is_text(file):
            self.skipped.append(f"{file}: {_NO_TEXT}")
        else:
            with open_file(file) as stream:
                content = stream.read()
            try:
                if (text := content.decode("utf-8-sig")).strip():
                    yield "", {"text": text}
                else:
                    self.skipped.append(f"{file}: expected text, got an empty file")
            except UnicodeDecodeError as error:
                self.skipped.append(f"{file}: expected text in UTF-8, got the error: {error}")


def load(data: str, split: str | None = None) -> Any:
    """Load a saved dataset, or a dataset from the hub.

    Args:
        data: a folder that `save_to_disk` made, or the name of a dataset on the hub. `datasets` keeps the files of a
            dataset from the hub in its cache.
        split: name of the split to load from a dataset with several splits; None for "train".

    Returns:
        A `datasets.Dataset` with the columns that the format of the saved dataset shows. The format itself is removed,
        so rows hold plain Python values.

    Raises:
        PackingError: there is no such dataset or split.
    """
    import datasets

    try:
        if is_saved_dataset(Path(data)):
            found = datasets.load_from_disk(data)
        else:
            with _from_cache_only(unless=Path(data).exists() or hub_answers(data, "dataset")):
                found = datasets.load_dataset(data)
    except Exception as error:  # errors of the hub, the network or files
        raise PackingError(f"DATA: expected a file, a folder or a dataset, got {data!r}: {reason_of(error)}") from None
    if isinstance(found, dict):
        if (split or _TRAIN) not in found:
            raise PackingError(f"--split: expected one of {', '.join(map(str, found))}, got {split or _TRAIN!r}")
        found = found[split or _TRAIN]
    elif split and split != str(found.split):
        raise PackingError(
            f"--split: expected {found.split} or no --split, since {data!r} has only one split, got {split!r}"
        )
    shown = found.format["columns"]
    found = found.with_format(None)
    return found if shown == found.column_names else found.select_columns(shown)


def hub_answers(name: str, kind: str = "model") -> bool:
    """Send one request to the hub and return whether the hub answers.

    Callers of this function use only cached files if the hub does not answer. Without this check, huggingface_hub would
    spend 24 s on retries for each uncached file, with a warning for every try.

    Args:
        name: name of the repository.
        kind: type of the repository, "model" or "dataset".
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_PATIENCE)
    except (HfHubHTTPError, HFValidationError):
        return True  # the hub answered; loading the files will report what is wrong
    except Exception:  # a network error, or HF_HUB_OFFLINE is set
        return False
    return True


@contextmanager
def _from_cache_only(unless: bool) -> Iterator[None]:
    """Context manager: within the block, `load_dataset` reads only from its cache.

    Args:
        unless: if True, the context manager changes nothing.
    """
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not unless
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def reason_of(error: Exception) -> str:
    """Return the message of an error as one line of limited length, or the error's type if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_OF_A_REASON else f"{text[:_MOST_OF_A_REASON]}..."


def _is_text(file: Path) -> bool:
    """Return whether a file looks like text, that is, whether the beginning of the file has no NUL bytes.

    NUL bytes are valid UTF-8, but are typical of archives, arrays and UTF-16.
    """
    with open_file(file) as stream:
        return b"\0" not in stream.read(_BEGINNING)


def _json_array(file: Path) -> list[Any]:
    with open_file(file) as stream:
        content = stream.read()
    try:
        return list(json.loads(content.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"expected a JSON array, got the error: {error}") from None


def _parquet_rows(file: Path) -> Iterator[DocumentRow]:
    try:
        table = pq.ParquetFile(file)
    except Exception as error:  # pyarrow raises errors of its own
        raise _UnreadableError(f"expected a parquet file, got the error: {error}") from None
    for batch in table.iter_batches(batch_size=1024):
        yield from batch.to_pylist()


def _table_rows(file: Path, separator: str) -> Iterator[DocumentRow]:
    """Yield the rows of a CSV or TSV file as dicts. Text such as NA stays text, and is not read as a missing value.

    The file is streamed, so that `datasets` does not store a copy in its cache.
    """
    import datasets

    options = {"sep": separator, "keep_default_na": False, "streaming": True}
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error raised below has the same information
    try:
        yield from datasets.load_dataset("csv", data_files=str(file), split=_TRAIN, **options)
    except (ValueError, OSError) as error:
        raise _UnreadableError(
            f"expected a table whose first line names the columns, got the error: {reason_of(error)}"
        ) from None
    finally:
        datasets.logging.set_verbosity(verbosity)


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {number}", row) for number, row in enumerate(rows))


def _shown(text: str) -> str:
    return repr(text.strip()[:_SHOWN])
