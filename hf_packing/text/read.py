"""Read documents of files, saved datasets and the hub, and turn them into tokens.

JSON and text are read here, line by line, so that an error names the line, and reading can go on with the next one. The
JSON builder of `datasets` can do neither, and changes values: integers become floats if another row has a float, the
arguments of tool calls are reordered as in the first row, and text such as "2024-01-01" becomes a date. Everything else
is read with `datasets`. The tokens of texts and chats take 8 bytes on disk for each token with its label.
"""

import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.files import file_system, is_hidden
from hf_packing.text.render import reason_of
from hf_packing.text.tokenize import TOKEN_COLUMNS, Placed, TextTokenizer, numbered, usable
from hf_packing.upstream.datasets import name_of_file

_JSON, _TEXT = "JSON", "text"
_KINDS = {".jsonl": _JSON, ".ndjson": _JSON, ".json": _JSON}
_KINDS |= {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "tsv"}
"""Kinds of files by suffix. Files with another suffix are text."""
_COMPRESSED = r"\.(gz|bz2|xz|zst)$"
_OPTIONS: dict[str, Any] = {
    "csv": {"keep_default_na": False},
    "tsv": {"keep_default_na": False, "path": "csv", "sep": "\t"},
}
"""Options for `datasets` by kind of files; in tables, text such as NA stays text."""
_TRAIN = "train"
_DOCUMENTS_AT_ONCE = 512
"""Documents to tokenize in one call, enough to use all cores, and few enough to fit in memory."""
_SHOWN = 80
"""The number of characters of a value that a message shows."""


@dataclass
class Documents:
    """The documents of one source.

    Args:
        data: a file or a URL; "-" for JSON lines from standard input; a folder; a saved dataset; or the name of a
            dataset on the hub. A name that exists is no pattern and no URL. Files are JSON lines, a
            JSON array, parquet, Arrow, CSV, TSV, or text; each line of a .txt file is a document, and each file with
            another suffix. JSON and text may be compressed. All files of a folder must be of the same kind.
        split: name of the split to read of a saved dataset or a dataset on the hub; None for "train".
        glob: pattern for the names of the files to read in a folder, such as "*.py"; None for all files.
        skip_bad: True to leave out lines and rows that cannot be used, and to list them in `skipped`; False to raise an
            error.

    Raises:
        PackingError: there is nothing to read in `data`, or an option does not fit `data`.
    """

    data: str
    split: str | None = None
    glob: str | None = None
    skip_bad: bool = False
    skipped: list[str] = field(default_factory=list, init=False)
    """Lines and rows that were left out, with the reasons."""
    remarks: Counter[str] = field(default_factory=Counter, init=False)
    """What users should know of rows, and of how many of them."""

    def __post_init__(self) -> None:
        path, self.files = Path(self.data), list[str]()  # no files of a saved dataset, and of a name on the hub
        is_saved = (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
        if path.is_dir() and not is_saved:
            found = [file for file in sorted(path.rglob("*")) if file.is_file() and file.match(self.glob or "*")]
            self.files = [str(file) for file in found if not is_hidden(file.relative_to(path).as_posix())]
            if not self.files:
                raise PackingError(f"data: expected files like {self.glob or '*'} in {self.data!r}, got none")
        elif self.glob:
            raise PackingError(f"glob: expected a folder as data, got {self.data!r}")
        elif self.data == "-" or "://" in self.data or (path.exists() and not is_saved):
            self.files = [self.data]
        elif not path.exists() and _suffix_of(self.data) in (*_KINDS, ".txt"):
            raise PackingError(f"data: expected a file, a folder or a dataset's name, but {self.data!r} does not exist")
        self.is_stream = self.data == "-" or self.data.startswith("/dev/")  # of other programs, which write JSON lines
        kinds = sorted({_JSON if self.is_stream else _KINDS.get(_suffix_of(file), _TEXT) for file in self.files})
        if len(kinds) > 1:
            raise PackingError(
                f"data: expected files of one kind, got {' and '.join(kinds)} in {self.data!r}; glob='*.jsonl' chooses "
                "files"
            )
        if self.split and kinds:
            raise PackingError(f"split: expected a saved dataset or a name on the hub, got the files of {self.data!r}")
        self.kind = kinds[0] if kinds else None

    def tokens(
        self, tokenizer: TextTokenizer | None, file: Path, seen: Callable[[int], None] = lambda _: None
    ) -> datasets.Dataset:
        """Return the documents as a Dataset with `input_ids`, and with `labels` if they were texts or chats.

        Args:
            tokenizer: the tokenizer for texts and chats; None if the rows have input_ids.
            file: the Arrow file to which tokens of texts and chats are written.
            seen: called after every block with the number of its documents.

        Raises:
            PackingError: rows cannot be read or used, and `skip_bad` is False; or an argument does not fit the rows.
        """
        dataset = None if self.kind in (_JSON, _TEXT) else self._load()
        rows = self._lines() if dataset is None else numbered(self.data, dataset, dataset.features)
        first = list(islice(rows, 1))
        names = first[0][1] if first else {}
        if INPUT_IDS in names and (tokenizer is None or tokenizer.text_field is None):
            if unused := "tokenizer" * (tokenizer is not None) or "skip_bad" * self.skip_bad:
                raise PackingError(
                    f"{unused}: expected none for documents with input_ids, which are tokens already; text_field names "
                    "a field to tokenize instead"
                )
            if first and self.is_stream:  # which cannot be read again
                return datasets.Dataset.from_list([row for _, row in chain(first, rows)])
            return self._load() if dataset is None else dataset
        if tokenizer is None:
            raise PackingError(
                f"tokenizer: expected one for documents with {', '.join(names) or 'no fields'}, got none"
            )
        schema = TOKEN_COLUMNS.arrow_schema
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            documents = usable(chain(first, rows), tokenizer.render, self._leave_out)
            while block := list(islice(documents, _DOCUMENTS_AT_ONCE)):
                stream.write_table(pa.table(tokenizer.tokens(block, self.remarks), schema=schema))
                seen(len(block))
        return datasets.Dataset.from_file(str(file))

    def _leave_out(self, why: str) -> None:
        """Record that a line or a row is left out, with its place and the reason; raise an error without `skip_bad`."""
        if not self.skip_bad:
            raise PackingError(f"{why}; skip_bad=True leaves out what cannot be read, and counts it")
        self.skipped.append(why)

    def _lines(self) -> Iterator[Placed]:
        """Yield the rows of JSON files and text files."""
        for file in self.files:
            for place, part in _parts(file, self.kind == _JSON):
                try:
                    text = part.decode("utf-8-sig")
                    if "\0" in text:
                        raise ValueError("NUL bytes, which are typical of arrays and UTF-16")
                    found = json.loads(text) if self.kind == _JSON else {"text": text}
                except (ValueError, RecursionError) as error:
                    self._leave_out(f"{place}: expected {self.kind} in UTF-8, got {part.strip()[:_SHOWN]!r} ({error})")
                    continue
                for where, row in numbered(place, found) if isinstance(found, list) else [(place, found)]:
                    if isinstance(row, dict):
                        yield where, row
                    else:
                        self._leave_out(f"{where}: expected a JSON object with fields, got {str(row)[:_SHOWN]!r}")

    def _load(self) -> datasets.Dataset:
        """Return the rows of everything that `datasets` reads, without the format of a saved dataset."""
        try:
            if self.kind is not None:
                files = self.files
                if os.path.exists(files[0]):  # names that exist are no patterns
                    files = [name_of_file(os.path.abspath(file)) for file in files]
                options = {"path": self.kind.lower(), **_OPTIONS.get(self.kind, {})}
                found = datasets.load_dataset(data_files=files, split=_TRAIN, **options)
            elif not Path(self.data).exists():
                found = datasets.load_dataset(self.data, split=self.split or _TRAIN)
            else:
                found = datasets.load_from_disk(self.data)
                if isinstance(found, dict):
                    found = found[self.split or _TRAIN]
                elif self.split not in (None, str(found.split)):
                    raise PackingError(f"its only split is {found.split}, not {self.split}")
        except Exception as error:  # errors of the hub, the network or files
            raise PackingError(
                f"data: expected a file, a folder or a dataset, got {self.data!r}: {reason_of(error)}"
            ) from None
        return found.with_format(columns=found.format["columns"])


def _suffix_of(file: str) -> str:
    """Return the suffix of a file in lower case, without that of its compression; an empty text if there is none."""
    return Path(re.sub(_COMPRESSED, "", file.lower())).suffix


def _parts(file: str, is_json: bool) -> Iterator[Placed]:
    """Yield the lines of a file, with their places; or the whole file, if it is an array of JSON, or text that is not
    .txt. What is blank is left out.

    Raises:
        PackingError: the file cannot be read to its end.
    """
    try:
        with io.BufferedReader(_open(file)) as stream:
            head = stream.peek().lstrip(b"\xef\xbb\xbf \t\r\n")  # without a byte order mark and blanks
            whole = head.startswith(b"[") if is_json else _suffix_of(file) != ".txt"
            for number, part in enumerate([stream.read()] if whole else stream, start=1):
                if part.strip():
                    yield (file, part) if whole else (f"{file}, line {number}", part.rstrip(b"\r\n"))
    except Exception as error:  # errors of files, the network and what was compressed
        raise PackingError(
            f"{file}: expected a file that can be read to its end, got the error: {reason_of(error)}"
        ) from None


def _open(file: str) -> Any:
    """Open a file, decompressed by its suffix."""
    if file == "-":
        return sys.stdin.buffer
    if file.startswith("/dev/"):  # of which fsspec would ask for the size
        return Path(file).open("rb")
    system, path = file_system(file)
    if file.lower().endswith(".zst"):
        return pa.CompressedInputStream(system.open(path), "zstd")
    # an archive is no compressed file: of a .zip, fsspec would open the first file alone
    return system.open(path, compression="infer" if re.search(_COMPRESSED, file.lower()) else None)
