"""Documents as they lie in files, folders, saved datasets or on the hub, row by row, and what could not be read."""

import codecs
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from hf_packing.errors import PackingError
from hf_packing.report.files import (
    PACKED_UP,
    ROWS,
    TABLES,
    find_files,
    has_rows,
    is_saved_dataset,
    is_text,
    kind_of,
    open_file,
    refuse_glob,
)

Row = dict[str, Any]

TRAIN = "train"
NO_TEXT = "expected text in UTF-8, it has zero bytes, as archives, arrays and UTF-16 have"
SHOWN = 80
"""Characters of a value that a message shows."""
MOST_OF_A_REASON = 1000
"""Characters of what another library says."""


@dataclass
class Documents:
    """Rows from one place, read anew in every iteration.

    Args:
        data: a .jsonl, .json or .parquet file, also compressed; a text file, whose lines are documents; a folder of
            either kind of file, where each text file is one document; a folder that `save_to_disk` made; or the name of
            a dataset on the hub.
        split: of a dataset with several; None for "train". Files have none.
        glob: of the files of a folder that are read, such as "*.py"; None for all.
        skip_bad: whether rows that cannot be read are left out, and counted in `skipped`.
    """

    data: str
    split: str | None = None
    glob: str | None = None
    skip_bad: bool = False
    skipped: list[str] = field(default_factory=list, init=False)
    """What was left out in the last iteration, and why."""
    files: list[Path] = field(init=False)
    """Empty for a dataset that `datasets` reads."""
    other_files: list[str] = field(init=False)
    """Files of the folder that are not read, and why."""
    broken: list[str] = field(init=False)
    """Files of the folder that ought to be read, and cannot be."""

    def __post_init__(self) -> None:
        path = Path(self.data)
        if is_saved_dataset(path):
            refuse_glob(path, self.glob)
            self.files, self.other_files, self.broken = [], [], []
            return
        self.files, self.other_files, self.broken = find_files(path, self.glob)
        if self.split and path.exists():
            raise PackingError(
                f"--split: expected a saved dataset or a name on the hub, {self.data!r} has files and no splits; name "
                "the files of the split, in a folder by --glob"
            )
        with_rows = [file for file in self.files if kind_of(file) in ROWS]
        others = [file for file in self.files if kind_of(file) not in ROWS] if with_rows else []
        self.other_files += [f"{file}: not read beside files with rows" for file in others]
        self.files = with_rows or self.files

    def __iter__(self) -> Iterator[Row]:
        for _, row in self.with_places():
            yield row

    def with_places(self) -> Iterator[tuple[str, Row]]:
        """Every row, and where it is, for messages."""
        self.skipped[:] = self.other_files
        for why in self.broken:
            self.leave_out(why)
        if not self.files:
            for number, row in enumerate(load(self.data, self.split)):
                yield f"{self.data}, row {number}", row
        one_each = Path(self.data).is_dir() and not all(has_rows(file) for file in self.files)
        for file in self.files:
            for place, row in self.rows_of(file, one_each):
                yield f"{file}, {place}" if place else str(file), row

    def rows_of(self, file: Path, one_each: bool) -> Iterator[tuple[str, Row]]:
        """What is in a file; one that is damaged ends where the damage begins."""
        try:
            yield from self.rows_of_kind(file, one_each)
        except (zlib.error, lzma.LZMAError, EOFError, OSError) as error:
            self.leave_out(f"{file}: expected a file that can be read to its end, {error}")

    def rows_of_kind(self, file: Path, one_each: bool) -> Iterator[tuple[str, Row]]:
        kind = kind_of(file)
        if kind in TABLES or (kind in PACKED_UP and not one_each):
            self.leave_out(f"{file}: expected JSONL, parquet or text, a {kind} file is none of them")
        elif one_each:
            yield from self.text(file)
        elif not has_rows(file):
            if is_text(file):
                yield from self.lines(file)
            else:
                self.leave_out(f"{file}: {NO_TEXT}")
        elif kind == ".parquet":
            for number, row in enumerate(parquet_rows(file)):
                yield f"row {number}", row
        else:
            yield from self.json_rows(file)

    def json_rows(self, file: Path) -> Iterator[tuple[str, Row]]:
        with open_file(file) as stream:
            first = stream.read(1)
            while first.isspace() or (first and first in codecs.BOM_UTF8):
                first = stream.read(1)
        with open_file(file) as stream:
            if first == b"[":
                yield from self.array(file, stream.read())
                return
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    self.leave_out(f"{file}, line {number}: expected JSON, {error}, got {shown(line)}")
                    continue
                if not isinstance(row, dict):
                    self.leave_out(f"{file}, line {number}: expected an object with fields, got {shown(line)}")
                    continue
                yield f"line {number}", row

    def array(self, file: Path, content: bytes) -> Iterator[tuple[str, Row]]:
        try:
            rows = json.loads(content.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise PackingError(f"{file}: expected a JSON array, {error}") from None
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                self.leave_out(f"{file}, row {number}: expected an object with fields, got {str(row)[:SHOWN]}")
                continue
            yield f"row {number}", row

    def lines(self, file: Path) -> Iterator[tuple[str, Row]]:
        """A document in each line of a text."""
        with open_file(file) as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    self.leave_out(f"{file}, line {number}: expected text in UTF-8, {error}")
                    continue
                yield f"line {number}", {"text": text.removesuffix("\n").removesuffix("\r")}

    def text(self, file: Path) -> Iterator[tuple[str, Row]]:
        """One document, if the file is a text; folders have pictures and archives as well."""
        if not is_text(file):
            self.skipped.append(f"{file}: {NO_TEXT}")
            return
        with open_file(file) as stream:
            content = stream.read()
        try:
            yield "", {"text": content.decode("utf-8-sig")}
        except UnicodeDecodeError as error:
            self.skipped.append(f"{file}: expected text in UTF-8, {error}")

    def leave_out(self, why: str) -> None:
        """Count a row that cannot be read, or refuse it.

        Raises:
            PackingError: bad rows are not to be skipped.
        """
        if not self.skip_bad:
            raise PackingError(f"{why}; --skip-bad leaves such rows out, and counts them")
        self.skipped.append(why)

    def identity(self) -> list[Any]:
        """What changes when the documents do: files with sizes and times, or the fingerprint of a dataset.

        The time of the last change of any kind is among them, since copying can set the other one to what it was.
        """
        if not self.files:
            return [self.data, self.split or TRAIN, load(self.data, self.split)._fingerprint]
        stats = [(str(file), file.stat()) for file in self.files]
        return [self.data, *([name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats)]


def parquet_rows(file: Path) -> Iterator[Row]:
    try:
        table = pq.ParquetFile(file)
    except Exception as error:  # pyarrow raises its own
        raise PackingError(f"{file}: expected a parquet file, {error}") from None
    for batch in table.iter_batches(batch_size=1024):
        yield from batch.to_pylist()


def load(data: str, split: str | None) -> Any:
    """A saved dataset, or one of the hub; its rows are Python's, whatever format it was saved with."""
    import datasets

    try:
        found = datasets.load_from_disk(data) if is_saved_dataset(Path(data)) else datasets.load_dataset(data)
    except Exception as error:  # of the hub, of the network, of a script
        raise PackingError(f"DATA: {data!r} is no file, no folder and no dataset: {one_line(error)}") from None
    if isinstance(found, dict):
        if (split or TRAIN) not in found:
            raise PackingError(f"--split: expected one of {', '.join(map(str, found))}, got {split or TRAIN!r}")
        found = found[split or TRAIN]
    elif split and split != str(found.split):
        raise PackingError(f"--split: expected none or {found.split}, since {data!r} is a single split, got {split!r}")
    shown = found.format["columns"]
    found = found.with_format(None)
    return found if shown == found.column_names else found.select_columns(shown)


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_OF_A_REASON else f"{text[:MOST_OF_A_REASON]}..."


def shown(line: bytes) -> str:
    return repr(line.decode("utf-8", errors="replace").strip()[:SHOWN])
