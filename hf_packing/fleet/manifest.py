"""The output folder of a fleet, whose files appear whole or not at all, and the manifest of what belongs together.

    run.json                        what is packed, and how; whoever comes first writes it
    packed-00003-of-00064.parquet   the rows of a task
    tasks/00003.json                what is known of them, such as their number and sha256
    manifest.json                   written last: all of this together

No file is ever replaced. A process that wants to write a file that exists must have made the same content, or it raises
an error: so processes may die at any time, and may do the same task at the same time. A file of an object store is
uploaded in one piece, and a local file is written under another name and then linked.
"""

import glob
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from fsspec.implementations.local import LocalFileSystem

from hf_packing.errors import PackingError
from hf_packing.files import UNFINISHED, file_system, remove_unfinished, size_and_version, writing_to
from hf_packing.rows.changes import describe_changes

RUN, MANIFEST = "run.json", "manifest.json"
Identity = list[Any]
"""What differs between two versions of a file: the size, and the time of the last change or the etag."""
_ABANDONED = 600.0
"""The seconds without a write to an unfinished file after which its process has died."""


def url_of(system: Any, path: str) -> str:
    """Return the name of a file for users and other programs: a local path, or a URL."""
    return path if is_local(system) else str(system.unstrip_protocol(path))


def is_local(system: Any) -> bool:
    """Return whether a file system of fsspec is that of this machine."""
    return isinstance(system, LocalFileSystem)


def identity_of(system: Any, path: str) -> Identity:
    """Return what differs between two versions of a file to pack."""
    system.invalidate_cache(path)  # of the time when files were listed
    return list(size_and_version(system, path, times=True))


def sha256_of(system: Any, path: str) -> str:
    """Return the sha256 of a file."""
    with system.open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Folder:
    """An output folder.

    Args:
        url: a path or URL.
        options: arguments for file systems that are not local.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.options = options
        self.system, self.root = file_system(url, **options)
        self.url = url_of(self.system, self.root)

    def names(self) -> list[str]:
        """Return the names of the files in the folder, without those of `tasks/`."""
        self.system.invalidate_cache()
        return [Path(each).name for each in self.system.find(self.root, maxdepth=1)]

    def read(self, name: str) -> Any:
        """Return the content of a JSON file; None if there is no such file."""
        try:
            return json.loads(self.system.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise PackingError(f"output: expected JSON in {self.url}/{name}, got the error: {error}") from None

    def digest(self, name: str) -> str | None:
        """Return the sha256 of a file; None if there is no such file."""
        self.system.invalidate_cache()
        try:
            return sha256_of(self.system, f"{self.root}/{name}")
        except FileNotFoundError:
            return None

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Context manager: yield a local path to write to. At the end, the file gets its name in the folder.

        Raises:
            PackingError: the file cannot be written, as when the disk is full; or there is a file of this name with
                another content.
        """
        local, path = is_local(self.system), f"{self.root}/{name}"
        fresh = Path(self.root if local else tempfile.gettempdir(), f"{UNFINISHED}{uuid4().hex}")
        try:
            with writing_to("output", self.url):
                Path(path if local else fresh).parent.mkdir(parents=True, exist_ok=True)
                yield fresh
                try:
                    self.put(fresh, path)
                except OSError:
                    if (found := self.digest(name)) is None:
                        raise
                    if found != sha256_of(LocalFileSystem(), str(fresh)):
                        raise PackingError(
                            f"output: expected {self.url}/{name} as this run writes it, but the file has another "
                            "content: it is damaged, or of another run; remove it, and start this run again"
                        ) from None
        finally:
            fresh.unlink(missing_ok=True)

    def put(self, fresh: Path, path: str) -> None:
        """Give a finished file its name, which raises OSError if the name is taken."""
        if not is_local(self.system):
            self.system.put_file(str(fresh), path, mode="create")
            return
        try:
            os.link(fresh, path)
        except OSError:
            if os.path.exists(path):
                raise
            os.rename(fresh, path)  # on a file system without hard links

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file."""
        with self.new_file(name) as fresh:
            fresh.write_text(json.dumps(content, indent=1))

    def claim(self, run: Mapping[str, Any]) -> None:
        """Write what is packed, and how, into a new folder; or check that this run has begun in the folder.

        Raises:
            PackingError: the folder has rows of another run, or a file to pack has changed.
        """
        if (found := self.read(RUN)) is None:
            if others := [name for name in self.names() if name.endswith(".parquet")]:
                raise PackingError(f"output: expected a new folder, but {self.url!r} has the file {others[0]!r}")
            self.write(RUN, run)
        elif found != run:
            before, now = ({**each, **each["inputs"], "inputs": None} for each in (found, run))
            name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
            raise PackingError(
                f"output: expected a new folder, or that of a run with {name} {now.get(name)!r}, but the run in "
                f"{self.url!r} has {before.get(name)!r}; choose another folder"
            )

    def finish(self, run: Mapping[str, Any], files: Sequence["PackedFile"]) -> None:
        """Write the manifest, and remove what killed processes have left of unfinished files.

        Raises:
            PackingError: the documents of two tasks have other columns.
        """
        kinds = {file.columns: file.inputs[0] for file in files if file.rows}
        if len(kinds) > 1:
            raise PackingError(f"files: expected the same columns in all files, got {kinds}")
        self.write(MANIFEST, {**run, "files": [asdict(file) for file in files]})
        if is_local(self.system):
            remove_unfinished(Path(self.root), _ABANDONED)


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """Facts about the rows of a task."""

    name: str
    inputs: Sequence[str]
    """Names of the files whose documents were packed."""
    rows: int
    sha256: str
    columns: str
    """Names and types of the columns of the documents."""
    counts: Mapping[str, int]
    """What was packed and what was not; see `PackedCorpus.counts`."""
    remarks: Mapping[str, int]
    """What users should know of rows, and of how many of them."""
    loss_masks: Sequence[str]
    """Masks that were applied to the labels."""
    left_out: Sequence[str]
    """Columns that are not packed."""
    skipped: Sequence[str]
    """The first row that was left out since it cannot be used, with the reason."""

    def __post_init__(self) -> None:
        if Path(self.name).name != self.name:
            raise PackingError(f"output: expected manifests that name files of their own folder, got {self.name!r}")


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
        """The files of rows, in order, as patterns that match them alone: paths or URLs, with `[?]` for a `?`."""
        return [glob.escape(f"{self.folder.url}/{file.name}") for file in self.files]

    @property
    def num_rows(self) -> int:
        """The number of packed rows."""
        return sum(file.rows for file in self.files)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of what was packed and what was not: the numbers of `plan.metrics()`, from "num_documents" to
        "num_padding_slots", and those of "trained_tokens", and of "skipped_rows", which cannot be used."""
        return self._sum("counts")

    def _sum(self, name: str) -> Counter[str]:
        """Return the sum of the counts of this name of all files."""
        total = Counter[str]()
        for file in self.files:
            total.update(getattr(file, name))
        return total

    def changes(self) -> list[str]:
        """Return phrases that say, in warnings, what packing did to the documents, such as "drops 5 of 11 tokens"."""
        counts = self.counts
        facts = {
            "strategy": self.strategy,
            "loss_masks": list(self._sum("loss_masks")),
            "trained_tokens": counts["trained_tokens"],
            "tokens_not_shared": counts["tokens_not_shared"],
            "packed_tokens": counts["num_tokens"] - counts["num_dropped_tokens"],
            "tokens": counts["num_tokens"],
            "empty_documents": counts["num_empty_documents"],
        }
        said = describe_changes(facts, left_out=list(self._sum("left_out")))
        if number := counts["skipped_rows"]:
            first, *_ = self._sum("skipped")
            said.append(f"leaves out {number:,} rows that cannot be used; the first one: {first}")
        return [*said, *(f"finds {number:,} rows that {remark}" for remark, number in self._sum("remarks").items())]

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


def read_manifest(output: str) -> PackedCorpus | None:
    """Return what the manifest of an output folder says; None if there is no manifest of a fleet."""
    folder = Folder(output, {})
    known = folder.read(MANIFEST)
    if known is None or "hf_packing" not in known:
        return None
    try:
        files = [PackedFile(**file) for file in known["files"]]
    except TypeError:  # other fields
        raise PackingError(
            f"{output}: expected files that this version of fleet.pack has written, got those of another version; "
            "load them with load_dataset"
        ) from None
    return PackedCorpus(folder, known["strategy"], files)
