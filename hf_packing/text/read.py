"""Read documents of files, saved datasets and the hub, and turn them into tokens.

JSON and text are read here, line by line, so that an error names the line, and reading can go on with the next one. The
JSON builder of `datasets` can do neither, and changes values: integers become floats if another row has a float, the
arguments of tool calls are reordered as in the first row, and text such as "2024-01-01" becomes a date. Everything else
is read with `datasets`. The tokens of texts and chats take 8 bytes on disk for each token with its label.
"""

import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa

from hf_packing.columns import INPUT_IDS
from hf_packing.errors import PackingError
from hf_packing.text.render import BadRowError, Rendered, reason_of
from hf_packing.text.tokenize import TOKEN_COLUMNS, TextTokenizer

_Rows = Iterable[tuple[str, dict[str, Any]]]
"""Rows with their places, such as ("a.jsonl, line 3", {"text": "..."})."""

_JSON, _TEXT = "JSON", "text"
_KINDS = {".jsonl": _JSON, ".ndjson": _JSON, ".json": _JSON}
_KINDS |= {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "tsv"}
"""Kinds of files by suffix. Files with another suffix are text."""
_OF_LINES = ".txt"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BUILDERS: dict[str, dict[str, Any]] = {
    _JSON: {"path": "json"},
    "parquet": {"path": "parquet"},
    "arrow": {"path": "arrow"},
    "csv": {"path": "csv", "keep_default_na": False},
    "tsv": {"path": "csv", "keep_default_na": False, "sep": "\t"},
}
"""How `datasets` reads files by kind; in tables, text such as NA stays text."""
_TRAIN = "train"
_CHARACTERS_AT_ONCE = 2_000_000
"""Approximate number of characters to tokenize in one call, enough to use all cores."""
_SHOWN = 80
"""The number of characters of a value that a message shows."""


@dataclass
class Documents:
    """The documents of one source.

    Args:
        data: a file or a URL; a folder; a saved dataset; or the name of a dataset on the hub. Files are JSON lines, a
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
    lacking: int = field(default=0, init=False)
    """Number of chats with text that the chat template has left out."""
    texts: int = field(default=0, init=False)
    """Number of documents that no chat template has written."""

    def __post_init__(self) -> None:
        self.files = find_files(self.data, self.glob)
        kinds = sorted({kind_of(file) for file in self.files})
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
        rows = self._lines() if dataset is None else _numbered(self.data, dataset)
        first = list(islice(rows, 1))
        names = first[0][1] if first else {}
        if INPUT_IDS in names and (tokenizer is None or tokenizer.renderer.text_field is None):
            if tokenizer is not None or self.skip_bad:
                argument = "skip_bad" if tokenizer is None else "tokenizer"
                raise PackingError(
                    f"{argument}: expected none for documents with input_ids, which are tokens already; text_field "
                    "names a field to tokenize instead"
                )
            return self._load() if dataset is None else dataset
        if tokenizer is None:
            raise PackingError(
                f"tokenizer: expected one for documents with {', '.join(names) or 'no fields'}, got none"
            )
        schema = TOKEN_COLUMNS.arrow_schema
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for block in self._blocks(chain(first, rows), tokenizer):
                tokens = dict(zip(schema.names, tokenizer.tokens(block), strict=True))
                stream.write_table(pa.table(tokens, schema=schema))
                seen(len(block))
        return datasets.Dataset.from_file(str(file))

    def _blocks(self, rows: _Rows, tokenizer: TextTokenizer) -> Iterator[list[Rendered]]:
        """Yield lists of rendered documents, large enough to keep all threads of the tokenizer busy."""
        block: list[Rendered] = []
        size = 0
        for place, row in rows:
            try:
                document = tokenizer.renderer.render(row)
            except BadRowError as error:
                self._leave_out(f"{place}: {error}")
                continue
            self.lacking += document.lacks_text
            self.texts += not document.complete
            block.append(document)
            size += len(document.text)
            if size >= _CHARACTERS_AT_ONCE:
                yield block
                block, size = [], 0
        if block:
            yield block

    def _leave_out(self, why: str) -> None:
        """Record that a line or a row is left out, with its place and the reason; raise an error without `skip_bad`."""
        if not self.skip_bad:
            raise PackingError(f"{why}; skip_bad=True leaves out what cannot be read, and counts it")
        self.skipped.append(why)

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows of JSON files and text files."""
        for file in self.files:
            whole = _begins_array(file) if self.kind == _JSON else _suffix_of(file) != _OF_LINES
            for place, part in _parts(file, whole):
                try:
                    text = part.decode("utf-8-sig")
                    if "\0" in text:
                        raise ValueError("NUL bytes, which are typical of arrays and UTF-16")
                    found = {"text": text if whole else text.rstrip("\r\n")} if self.kind == _TEXT else json.loads(text)
                except (ValueError, RecursionError) as error:
                    self._leave_out(f"{place}: expected {self.kind} in UTF-8, got {part.strip()[:_SHOWN]!r} ({error})")
                    continue
                for where, row in _numbered(place, found) if isinstance(found, list) else [(place, found)]:
                    if isinstance(row, dict):
                        yield where, row
                    else:
                        self._leave_out(f"{where}: expected a JSON object with fields, got {str(row)[:_SHOWN]!r}")

    def _load(self) -> datasets.Dataset:
        """Return the rows of everything that `datasets` reads, without the format of a saved dataset."""
        try:
            if self.kind is not None:
                found = datasets.load_dataset(data_files=self.files, split=_TRAIN, **_BUILDERS[self.kind])
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


def find_files(data: str, glob: str | None = None) -> list[str]:
    """Return the files to read; none for a saved dataset, and for a name on the hub. Hidden files are left out.

    Args:
        data: as for `Documents`.
        glob: as for `Documents`.

    Raises:
        PackingError: there are no files, or a pattern is given without a folder.
    """
    path = Path(data)
    is_saved = (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()
    if path.is_dir() and not is_saved:
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.match(glob or "*")]
        shown = [str(file) for file in files if not any(part[0] == "." for part in file.relative_to(path).parts)]
        if not shown:
            raise PackingError(f"data: expected files{f' like {glob}' if glob else ''} in {data!r}, got none")
        return shown
    if glob:
        raise PackingError(f"glob: expected a folder as data, got {data!r}")
    if path.is_file() or "://" in data:
        return [data]
    if not path.exists() and (path.is_absolute() or kind_of(data) != _TEXT):
        raise PackingError(f"data: expected a file, a folder or a dataset's name, but {data!r} does not exist")
    return []


def kind_of(file: str) -> str:
    """Return how a file is read: as "JSON", "parquet", "arrow", "csv", "tsv" or "text"."""
    return _KINDS.get(_suffix_of(file), _TEXT)


def _suffix_of(file: str) -> str:
    """Return the suffix of a file in lower case, without that of its compression; an empty text if there is none."""
    return next((each for each in reversed(Path(file.lower()).suffixes) if each not in _COMPRESSED), "")


def _numbered(place: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{place}, row {number}", row) for number, row in enumerate(rows))


def _begins_array(file: str) -> bool:
    """Return whether a JSON file has an array of rows, and not a row in each line."""
    _, first = next(_parts(file, whole=False), ("", b""))
    return first.decode("utf-8-sig", errors="replace").lstrip().startswith("[")


def _parts(file: str, whole: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, or the whole file, with their places. What is blank is left out.

    Raises:
        PackingError: the file cannot be read to its end.
    """
    # an archive is no compressed file: of a .zip, fsspec would open the first file alone
    compression = "infer" if file.lower().endswith(_COMPRESSED) else None
    try:
        with fsspec.open(file, "rb", compression=compression) as stream:
            for number, part in enumerate([stream.read()] if whole else stream, start=1):
                if part.strip():
                    yield file if whole else f"{file}, line {number}", part
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise PackingError(
            f"{file}: expected a file that can be read to its end, got the error: {reason_of(error)}"
        ) from None
