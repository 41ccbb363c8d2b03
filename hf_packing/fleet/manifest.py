"""The output folder of a fleet, whose files appear whole or not at all, and the manifest of what belongs together.

    run.json                        what is packed, and how; whoever comes first writes it
    packed-00003-of-00064.parquet   the rows of a task
    tasks/00003.json                what is known of them, such as their number and sha256
    manifest.json                   written last: all of this together

No file is ever replaced. A process that wants to write a file that exists must have made the same content, or it raises
an error: so processes may die at any time, and may do the same task at the same time. A file of an object store is
uploaded in one piece, and a local file is written under another name and then linked.
"""

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from hf_packing.errors import PackingError
from hf_packing.files import size_and_version
from hf_packing.rows.changes import describe_changes

RUN, MANIFEST = "run.json", "manifest.json"
Identity = list[Any]
"""What differs between two versions of a file: the size, and the time of the last change or the etag."""
_UNFINISHED, _ABANDONED = ".unfinished-", 600.0
"""How names of unfinished local files begin, and the seconds without a write after which their process has died."""


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path within it. Local file systems take no options."""
    try:
        system, path = url_to_fs(url, **(options if "://" in url and not url.startswith("file://") else {}))
    except (ValueError, ImportError) as error:
        raise PackingError(f"expected a local path or a URL that fsspec can open, got {url!r}: {error}") from None
    return system, path


def is_local(system: Any) -> bool:
    """Return whether a file system of fsspec is that of this machine."""
    return isinstance(system, LocalFileSystem)


def identity_of(name: str, options: Mapping[str, Any]) -> Identity:
    """Return what differs between two versions of a file to pack."""
    system, path = file_system(name, options)
    system.invalidate_cache(path)  # of the time when files were listed
    return list(size_and_version(system, path, times=True))


def check_unchanged(name: str, before: Identity, now: Identity) -> None:
    """Raise PackingError if a file is not what it was when packing began."""
    if now != before:
        raise PackingError(
            f"{name}: expected the file as it was when packing began, with size and last change {before}, got {now}; "
            "pack changed files into a new folder"
        )


@dataclass(frozen=True)
class Folder:
    """An output folder: a path or URL, and arguments for its file system if that is not local."""

    url: str
    options: Mapping[str, Any]

    def at(self, name: str) -> tuple[Any, str]:
        """Return the file system of the folder, and the path of a file within it."""
        system, root = file_system(self.url, self.options)
        return system, f"{root}/{name}"

    def path(self, name: str) -> str:
        """Return the path or URL of a file, for other programs."""
        system, path = self.at(name)
        return path if is_local(system) else str(system.unstrip_protocol(path))

    def names(self) -> list[str]:
        """Return the names of the files in the folder."""
        system, root = file_system(self.url, self.options)
        system.invalidate_cache(root)
        return [Path(each).name for each in system.ls(root, detail=False)] if system.isdir(root) else []

    def read(self, name: str) -> Any:
        """Return the content of a JSON file; None if there is no such file."""
        system, path = self.at(name)
        try:
            return json.loads(system.cat_file(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise PackingError(f"output: expected JSON in {self.path(name)!r}, got the error: {error}") from None

    def digest(self, name: str) -> str | None:
        """Return the sha256 of a file; None if there is no such file."""
        system, path = self.at(name)
        system.invalidate_cache(path)
        try:
            with system.open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return None

    @contextmanager
    def unfinished(self) -> Iterator[Path]:
        """Context manager: yield the path of a new local file, which is removed at the end.

        Raises:
            PackingError: the block cannot write a file, as when the disk is full.
        """
        system, parent = self.at("")
        path = Path(parent if is_local(system) else tempfile.gettempdir(), f"{_UNFINISHED}{uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield path
        except OSError as error:
            raise PackingError(f"output: expected to write to {self.url!r}, got the error: {error}") from error
        finally:
            path.unlink(missing_ok=True)

    def put(self, fresh: Path, name: str) -> str:
        """Put a finished file in place, unless there is one of this content; return the sha256.

        Raises:
            PackingError: there is a file of this name with another content.
        """
        system, path = self.at(name)
        with open(fresh, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            if is_local(system):
                Path(path).parent.mkdir(exist_ok=True)
                _link(fresh, path)
            else:
                system.put_file(str(fresh), path, mode="create")
        except OSError as error:
            if (found := self.digest(name)) is None:
                raise
            if found != digest:
                raise PackingError(
                    f"output: expected {self.path(name)!r} as this run writes it, but the file has another content: it "
                    "is damaged, or of another run; remove it, and start this run again"
                ) from error
        return digest

    def put_json(self, name: str, content: Any) -> None:
        """Put a JSON file in place, as `put` does."""
        with self.unfinished() as fresh:
            fresh.write_text(json.dumps(content, indent=1))
            self.put(fresh, name)

    def claim(self, run: Mapping[str, Any]) -> None:
        """Write what is packed, and how, into a new folder; or check that this run has begun in the folder.

        Raises:
            PackingError: the folder has rows of another run, or a file to pack has changed.
        """
        others = [name for name in self.names() if name.endswith(".parquet")]
        if (found := self.read(RUN)) is None:
            if others:
                raise PackingError(f"output: expected a new folder, but {self.url!r} has the file {others[0]!r}")
            self.put_json(RUN, run)
            found = run
        for name, value in run.items():
            before = found.get(name)
            if name == "inputs" and before.keys() == value.keys():
                for file, now in value.items():
                    check_unchanged(file, before[file], now)
            elif before != value:
                other = "other files to pack" if name == "inputs" else f"{name} {before!r}, not {value!r}"
                raise PackingError(
                    f"output: expected a new folder, or the folder of this run, but the run in {self.url!r} has "
                    f"{other}; choose another folder"
                )

    def finish(self, run: Mapping[str, Any], files: Sequence["PackedFile"]) -> None:
        """Write the manifest, and remove what killed processes have left of unfinished files."""
        self.put_json(MANIFEST, {**run, "files": [asdict(file) for file in files]})
        for name in self.names():
            system, path = self.at(name)
            if name.startswith(_UNFINISHED) and time.time() - os.stat(path).st_mtime > _ABANDONED:
                system.rm_file(path)


def _link(fresh: Path, path: str) -> None:
    """Give a file its name, which raises OSError if the name is taken."""
    try:
        os.link(fresh, path)
    except OSError:
        if os.path.exists(path):
            raise
        os.rename(fresh, path)  # on a file system without hard links


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """Facts about the rows of a task."""

    name: str
    inputs: Sequence[str]
    """Names of the files whose documents were packed."""
    rows: int
    sha256: str
    columns: Mapping[str, str]
    """Types of the columns of the documents by name."""
    counts: Mapping[str, int]
    """What was packed and what was not; see `PackedCorpus.counts`."""
    splits: Mapping[str, int]
    """By the name of a column: how many shared prefixes ended early because values in this column differ."""
    loss_masks: Sequence[str]
    """Masks that were applied to the labels."""
    left_out: Sequence[str]
    """Columns that are not packed."""
    skipped: Sequence[str]
    """The first row that was left out since it cannot be used, with the reason."""


@dataclass(frozen=True)
class PackedCorpus:
    """Packed files, whose rows are read with `load_dataset("parquet", data_files=packed.data_files)`.

    Example:
        >>> import datasets, tempfile, hf_packing as hfp
        >>> folder = tempfile.mkdtemp()
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> _ = documents.to_parquet(f"{folder}/documents.parquet")
        >>> packed = hfp.fleet.pack(f"{folder}/*.parquet", hfp.BestFit(4), f"{folder}/packed")
        >>> packed.num_rows
        2
    """

    folder: Folder
    strategy: str
    """The strategy's repr."""
    files: Sequence[PackedFile]

    @property
    def data_files(self) -> list[str]:
        """Paths or URLs of the files of rows, in order."""
        return [self.folder.path(file.name) for file in self.files]

    @property
    def num_rows(self) -> int:
        """The number of packed rows."""
        return sum(file.rows for file in self.files)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of what was packed and what was not: the numbers of `plan.metrics()`, from "num_documents" to
        "num_padding_slots", and those of "trained_tokens", of "skipped_rows", which cannot be used, and of
        "shortened_chats", of which the template leaves something out."""
        return sum_of(file.counts for file in self.files)

    def changes(self) -> list[str]:
        """Return phrases that say, in warnings, what packing did to the documents, such as "drops 5 of 11 tokens"."""

        def all_of(name: str) -> list[str]:
            return list(dict.fromkeys(value for file in self.files for value in getattr(file, name)))

        counts = self.counts
        facts = {
            "strategy": self.strategy,
            "loss_masks": all_of("loss_masks"),
            "splits": sum_of(file.splits for file in self.files),
            "trained_tokens": counts["trained_tokens"],
            "packed_tokens": counts["num_tokens"] - counts["num_dropped_tokens"],
            "tokens": counts["num_tokens"],
            "empty_documents": counts["num_empty_documents"],
        }
        said = describe_changes(facts, left_out=all_of("left_out"))
        if number := counts["skipped_rows"]:
            said.append(f"leaves out {number:,} rows that cannot be used; the first one: {all_of('skipped')[0]}")
        if number := counts["shortened_chats"]:
            said.append(f"has {number:,} chats without content, thinking or tool calls, which the template leaves out")
        return said

    def __str__(self) -> str:
        counts, inputs = self.counts, sum(len(file.inputs) for file in self.files)
        lines = [
            f"{counts['num_documents']:,} documents of {inputs:,} files, {counts['num_tokens']:,} tokens, in "
            f"{self.num_rows:,} packs in {len(self.files):,} files",
            f"padding {counts['num_padding_slots'] / max(1, counts['slots']):.2%}, {counts['num_cut_documents']:,} "
            f"documents cut, {counts['trained_tokens']:,} of {counts['num_tokens']:,} tokens are trained on",
        ]
        unique = counts["slots"] - counts["num_padding_slots"]
        if unique < (packed := counts["num_tokens"] - counts["num_dropped_tokens"]):
            lines.append(f"prefixes shared: {packed / unique:.2f} times fewer tokens in packs")
        return "\n".join([*lines, *(f"pack {change}" for change in self.changes())])


def sum_of(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sum of counts; unlike that of counters, it has the counts that are 0."""
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return total


def read_manifest(output: str, options: Mapping[str, Any] | None = None) -> PackedCorpus | None:
    """Return what the manifest of an output folder says; None if there is none, since tasks are missing."""
    folder = Folder(output, options or {})
    if (known := folder.read(MANIFEST)) is None:
        return None
    try:
        return PackedCorpus(folder, known["strategy"], [PackedFile(**file) for file in known["files"]])
    except (KeyError, TypeError) as error:
        raise PackingError(f"output: expected the manifest of a fleet in {output!r}, got another: {error!r}") from None
