"""The output folder of a fleet, whose files appear whole or not at all, and the manifest of what belongs together.

    run.json                        what is packed, and how; whoever comes first writes it
    packed-00003-of-00064.parquet   the rows of a task
    tasks/00003.json                what is known of them, such as their number and sha256
    manifest.json                   written last: all of this together

No file is ever replaced. A process that wants to write a file that exists must have made the same content, or it raises
an error: so processes may die at any time and may do the same task at the same time. A file of an object store is
uploaded in one piece, and a local file is written under another name and then linked.
"""

import hashlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from hf_packing.errors import PackingError
from hf_packing.rows.packed_rows import describe_changes

RUN, MANIFEST = "run.json", "manifest.json"
_UNFINISHED, _ABANDONED = ".unfinished-", 600.0
"""How names of unfinished local files begin, and the seconds without a write after which their process has died."""
_CHANGES = ("ETag", "etag", "blob_id", "sha256", "md5Hash", "content_md5", "LastModified", "updated", "mtime")
"""Values of fsspec's `info` that change with a file's content; the first that a file system has is taken."""


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


@dataclass(frozen=True)
class InputFile:
    """A file to pack, as it was when it was found."""

    name: str
    size: int
    changed: str
    """The time of the last change, or the etag of an object store."""

    @classmethod
    def find(cls, name: str, options: Mapping[str, Any]) -> "InputFile":
        """Return the file with this path or URL. Raise PackingError if there is none."""
        system, path = file_system(name, options)
        try:
            if is_local(system):
                stat = os.stat(path)
                return cls(path, stat.st_size, str(stat.st_mtime_ns))
            system.invalidate_cache(path)  # of the time when files were listed
            info = system.info(path)
        except FileNotFoundError:
            raise PackingError(f"files: expected a file that exists, got {name!r}") from None
        changed = next((str(info[each]) for each in _CHANGES if info.get(each)), "")
        return cls(system.unstrip_protocol(path), info["size"], changed)

    def check_unchanged(self, now: "InputFile") -> None:
        """Raise PackingError if the file is not what it was."""
        if now != self:
            raise PackingError(
                f"{self.name}: expected the file as it was when packing began, with the size {self.size} and the last "
                f"change {self.changed}, got the size {now.size} and the last change {now.changed}; pack changed files "
                "into a new folder"
            )


@dataclass(frozen=True)
class Folder:
    """An output folder. Args: a path or URL, and arguments for its file system if that is not local."""

    url: str
    options: Mapping[str, Any]

    def place(self, name: str) -> tuple[Any, str]:
        """Return the file system of the folder, and the path of a file within it."""
        system, root = file_system(self.url, self.options)
        return system, f"{root}/{name}"

    def path(self, name: str) -> str:
        """Return the path or URL of a file, for other programs."""
        system, path = self.place(name)
        return path if is_local(system) else str(system.unstrip_protocol(path))

    def read(self, name: str) -> Any:
        """Return the content of a JSON file; None if there is no such file."""
        system, path = self.place(name)
        try:
            with system.open(path, "rb") as file:
                return json.loads(file.read())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise PackingError(f"output: expected JSON in {self.path(name)!r}, got the error: {error}") from None

    def digest(self, name: str) -> str | None:
        """Return the sha256 of a file; None if there is no such file."""
        system, path = self.place(name)
        if not is_local(system):
            system.invalidate_cache(path)
        try:
            with system.open(path, "rb") as file:
                return digest_of(file)
        except FileNotFoundError:
            return None

    @contextmanager
    def unfinished(self) -> Iterator[Path]:
        """Context manager: yield the path of a new local file, which is removed at the end.

        Raises:
            PackingError: the block cannot write a file, as when the disk is full.
        """
        system, parent = self.place("")
        if is_local(system):
            os.makedirs(parent, exist_ok=True)
        path = Path(parent if is_local(system) else tempfile.gettempdir(), f"{_UNFINISHED}{uuid4().hex}")
        try:
            yield path
        except OSError as error:
            raise PackingError(f"output: expected to write to {self.url!r}, got the error: {error}") from error
        finally:
            path.unlink(missing_ok=True)

    def put(self, fresh: Path, name: str, expected: str) -> str:
        """Put a finished file in place, unless there is one of this content; return the sha256.

        Args:
            fresh: the finished file, in this machine.
            name: its name in the folder.
            expected: what the file is expected to be, for the error.

        Raises:
            PackingError: there is a file of this name with another content.
        """
        system, path = self.place(name)
        with open(fresh, "rb") as file:
            digest = digest_of(file)
        if not (_link if is_local(system) else _upload)(system, fresh, path) and self.digest(name) != digest:
            raise PackingError(
                f"output: expected {expected} in {self.path(name)!r}, but the file has another content: it is damaged, "
                "or of another run; remove it, and start this run again"
            )
        return digest

    def put_json(self, name: str, content: Any, expected: str) -> None:
        """Put a JSON file in place, as `put` does."""
        with self.unfinished() as fresh:
            fresh.write_text(json.dumps(content, indent=1))
            self.put(fresh, name, expected)

    def names(self) -> list[str]:
        """Return the names of the files in the folder."""
        system, root = file_system(self.url, self.options)
        if not is_local(system):
            system.invalidate_cache(root)
        try:
            return [Path(each).name for each in system.ls(root, detail=False)]
        except FileNotFoundError:
            return []

    def claim(self, run: Mapping[str, Any]) -> None:
        """Write what is packed, and how, into a new folder; or check that this run has begun in the folder.

        Raises:
            PackingError: the folder has rows of another run, or a file to pack has changed.
        """
        others = [name for name in self.names() if name.endswith(".parquet")]
        found = self.read(RUN)
        if found is None:
            if others:
                raise PackingError(f"output: expected a new folder, but {self.url!r} has the file {others[0]!r}")
            self.put_json(RUN, run, "this run")
            found = self.read(RUN)
        for name, value in run.items():
            if (before := found.get(name)) == value:
                continue
            if name == "inputs" and [each["name"] for each in before] == [each["name"] for each in value]:
                for each, now in zip(before, value, strict=True):
                    InputFile(**each).check_unchanged(InputFile(**now))
            other = "other files to pack" if name == "inputs" else f"{name} {before!r}, not {value!r}"
            raise PackingError(
                f"output: expected a new folder, or the folder of this run, but the run in {self.url!r} has {other}; "
                "choose another folder"
            )

    def finish(self, run: Mapping[str, Any], files: Sequence["PackedFile"]) -> "PackedCorpus":
        """Write the manifest, remove what killed processes have left of unfinished files, and return what is packed."""
        self.put_json(MANIFEST, {**run, "files": [asdict(file) for file in files]}, "the manifest of this run")
        for name in self.names():
            system, path = self.place(name)
            if name.startswith(_UNFINISHED) and time.time() - os.stat(path).st_mtime > _ABANDONED:
                system.rm_file(path)
        return PackedCorpus(self, run["strategy"], files)


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """What is known of the rows of a task."""

    name: str
    inputs: Sequence[str]
    """Names of the files whose documents were packed."""
    rows: int
    size: int
    """Bytes of the file of rows."""
    sha256: str
    columns: Mapping[str, str]
    """Names and types of the columns of the documents; of texts, what they were made of."""
    counts: Mapping[str, int]
    """What was packed and what was not: the numbers that `PackedCorpus.count` adds up."""
    splits: Mapping[str, int]
    """By the name of a column: how many shared prefixes ended early because values in this column differ."""
    loss_masks: Sequence[str]
    """Masks that were applied to the labels."""
    left_out: Sequence[str]
    """Columns that are not packed."""
    skipped: Sequence[str]
    """The first row that was left out since it cannot be used, with the reason; nothing if there is none."""


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
    def output(self) -> str:
        """The output folder."""
        return self.folder.url

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
        """What was packed and what was not: the numbers of "documents", "tokens", "dropped_tokens" and others."""
        counts = Counter[str]()
        for file in self.files:
            counts.update(file.counts)
        return counts

    def changes(self) -> list[str]:
        """Return phrases that say, in warnings, what packing did to the documents, such as "drops 5 of 11 tokens"."""
        if not self.files:
            return []
        counts, splits = self.counts, sum((Counter(file.splits) for file in self.files), Counter[str]())
        facts = {"strategy": self.strategy, "loss_masks": self._all("loss_masks"), "splits": splits}
        said = describe_changes({**counts, **facts})
        if number := counts["skipped_rows"]:
            said.append(f"leaves out {number:,} rows that cannot be used; the first one: {self._all('skipped')[0]}")
        if number := counts["shortened_chats"]:
            said.append(f"has {number:,} chats without content, thinking or tool calls, which the template leaves out")
        if left_out := self._all("left_out"):
            said.append(f"leaves out columns without one number for each token: {', '.join(left_out)}")
        return said

    def _all(self, name: str) -> list[str]:
        """Return the values that a list has in some file, each once."""
        return list(dict.fromkeys(value for file in self.files for value in getattr(file, name)))

    def __str__(self) -> str:
        counts, rows, inputs = self.counts, self.num_rows, sum(len(file.inputs) for file in self.files)
        lines = [
            f"{counts['documents']:,} documents of {inputs:,} files, {counts['tokens']:,} tokens, in {rows:,} packs in "
            f"{len(self.files):,} files",
            f"padding {counts['padding'] / max(1, counts['slots']):.2%}, "
            f"{counts['documents'] / max(1, rows):.2f} documents per pack",
            f"{counts['cut_documents']:,} documents cut, {counts['dropped_tokens']:,} tokens dropped, "
            f"{counts['empty_documents']:,} empty documents skipped",
            f"{counts['trained_tokens']:,} of {counts['tokens']:,} tokens are trained on",
        ]
        return "\n".join([*lines, *(f"pack {change}" for change in self.changes())])


def read_manifest(output: str, options: Mapping[str, Any] | None = None) -> PackedCorpus | None:
    """Return what the manifest of an output folder says; None if there is none, since tasks are missing.

    Raises:
        PackingError: the manifest cannot be read.
    """
    folder = Folder(output, options or {})
    if (known := folder.read(MANIFEST)) is None:
        return None
    try:
        return PackedCorpus(folder, known["strategy"], [PackedFile(**file) for file in known["files"]])
    except (KeyError, TypeError) as error:
        raise PackingError(
            f"output: expected a manifest of hf_packing in {folder.path(MANIFEST)!r}, got the error: {error!r}"
        ) from None


def digest_of(file: Any) -> str:
    """Return the sha256 of an open file."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _link(_: Any, fresh: Path, path: str) -> bool:
    """Give a local file its name, unless the name is taken; return whether it is given."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.link(fresh, path)
    except OSError:  # the name is taken, or the file system has no hard links
        if os.path.exists(path):
            return False
        os.rename(fresh, path)
    return True


def _upload(system: Any, fresh: Path, path: str) -> bool:
    """Upload a file, unless there is one of this name; return whether it is uploaded."""
    try:
        system.put_file(str(fresh), path, mode="create")
    except OSError:  # FileExistsError, but not of all stores
        if system.exists(path):
            return False
        raise
    except (TypeError, NotImplementedError):  # a store that cannot put if absent
        if system.exists(path):
            return False
        system.put_file(str(fresh), path)
    return True
