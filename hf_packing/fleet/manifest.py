"""The manifest, written last: the output files that belong together, and what they were made of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import hf_packing
from hf_packing.errors import PackingError
from hf_packing.fleet.gather import PackedFile
from hf_packing.fleet.inputs import Identity
from hf_packing.fleet.store import Store
from hf_packing.planning.metrics import PackingMetrics, make_metrics
from hf_packing.rows.changes import describe_changes

MANIFEST = "manifest.json"
_MANY = 0.01
"""The share of tokens, repeated since files share them with each other, from which on there is a warning."""


@dataclass(frozen=True, kw_only=True)
class PackedCorpus:
    """A packed corpus: output files, of which the rows in order are the packed rows.

    Example:
        >>> import datasets, tempfile, hf_packing as hfp
        >>> folder = tempfile.mkdtemp()
        >>> documents = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5], [6]]})
        >>> _ = documents.to_parquet(f"{folder}/documents.parquet")
        >>> packed = hfp.fleet.pack(f"{folder}/*.parquet", hfp.BestFit(4), f"{folder}/packed")
        >>> packed.num_rows
        2
    """

    output: str
    """The output folder."""
    key: str
    """A hash of what was packed and how. The names of output files have it."""
    version: str
    """The version of hf_packing."""
    strategy: str
    """The strategy's repr."""
    exchange: bool
    """True if all files share packs."""
    files: Sequence[PackedFile]
    inputs: Sequence[tuple[str, Identity]]
    """The files that were packed, with their sizes and last changes."""
    totals: Mapping[str, Any]
    packs_together: int
    """The number of packs of one plan for all files."""
    columns: Sequence[str]
    left_out: Sequence[str]
    """Columns of the files that are not in the packed rows."""
    loss_masks: Sequence[str]
    """Masks that were applied to the labels."""
    share_prefixes: int | None = None
    """The fewest tokens that documents of a file share, so that rows are trees; None if documents share no prefixes."""
    splits: Mapping[str, int] = field(default_factory=dict)
    """By the name of a column: how many shared prefixes ended early because values in this column differ."""
    shared_between: int = 0
    """An estimate of the tokens that files share with each other, which rows repeat."""
    skipped: int
    """The number of rows that were left out since they cannot be used."""
    first_skipped: str
    note: str

    @property
    def num_rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def data_files(self) -> list[str]:
        """Paths or URLs of the output files that have rows, in order, for `datasets.load_dataset("parquet", ...)`."""
        store = Store(self.output)
        return [store.path_of(file.name) for file in self.files if file.rows]

    def metrics(self) -> PackingMetrics:
        """Return the metrics of the plan, such as the share of padding."""
        return make_metrics(**self.totals)

    def changes(self) -> list[str]:
        """Return phrases that say, in warnings, what packing did to the documents, such as "drops 5 of 11 tokens"."""
        metrics = self.metrics()
        facts = {
            "loss_masks": self.loss_masks,
            "trained_tokens": sum(file.trained_tokens for file in self.files),
            "packed_tokens": self.totals["packed_tokens"],
            "tokens": metrics.num_tokens,
            "strategy": self.strategy,
            "empty_documents": metrics.num_empty_documents,
            "splits": self.splits,
            "labels_left": None,
        }
        said = describe_changes(facts)
        if self.shared_between > _MANY * sum(file.tokens for file in self.files):
            said.append(f"repeats {self._shared_between()}; put documents that share prefixes into the same file")
        if self.skipped:
            said.append(f"leaves out {self.skipped:,} rows that cannot be used; the first one: {self.first_skipped}")
        if self.left_out:
            said.append(f"leaves out columns without one number for each token: {', '.join(self.left_out)}")
        return said

    def _shared_between(self) -> str:
        share = self.shared_between / sum(file.tokens for file in self.files)
        tokens = f"{self.shared_between:,} tokens ({share:.2%} of the rows)"
        return f"about {tokens} that documents of different files share"

    def __str__(self) -> str:
        metrics = self.metrics()
        lines = [
            f"{metrics.num_documents:,} documents of {len(self.inputs):,} files, {metrics.num_tokens:,} tokens, in "
            f"{metrics.num_packs:,} packs in {len(self.files):,} files",
            f"padding {metrics.padding_ratio:.2%}, {metrics.concatenation_ratio:.2f} documents per pack",
            f"{metrics.num_cut_documents:,} documents cut ({metrics.truncation_ratio:.2%}), "
            f"{metrics.num_dropped_tokens:,} tokens dropped, {metrics.num_empty_documents:,} empty documents skipped",
        ]
        trained = sum(file.trained_tokens for file in self.files)
        lines.append(f"{trained:,} of {metrics.num_tokens:,} tokens are trained on")
        if self.share_prefixes is not None:
            lines.append(f"prefixes shared: {metrics.shared_ratio:.2f} times fewer tokens in packs")
            lines += [f"repeated: {self._shared_between()}"] if self.shared_between else []
        if not self.exchange:
            more = metrics.num_packs / self.packs_together - 1
            than = (
                f"{abs(more):.2%} {'fewer' if more < 0 else 'more'} packs than the {self.packs_together:,} of one plan"
            )
            lines.append(f"each file packed by itself: {than}")
        if self.loss_masks:
            lines.append(f"loss masks applied to labels: {', '.join(self.loss_masks)}")
        if self.left_out:
            lines.append(f"columns left out: {', '.join(self.left_out)}")
        if self.skipped:
            lines.append(f"rows left out: {self.skipped:,}; the first one: {self.first_skipped}")
        return "\n".join(lines + ([self.note] if self.note else []))


def write_manifest(store: Store, packed: PackedCorpus) -> None:
    """Write the manifest of a run whose output files are all there."""
    known = {"format": 1, **asdict(packed)}
    known.pop("output")
    store.put_new(MANIFEST, json.dumps(known, indent=1).encode())


def read_manifest(store: Store) -> PackedCorpus | None:
    """Return what the manifest of an output folder says; None if there is no manifest yet.

    Raises:
        PackingError: the manifest cannot be read.
    """
    try:
        known = json.loads(store.read(MANIFEST))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PackingError(
            f"output: expected a readable manifest in {store.path_of(MANIFEST)!r}, got the error: {error}"
        ) from None
    try:
        if known.pop("format") != 1:
            raise ValueError("another format")
        known["files"] = [PackedFile(**file) for file in known["files"]]
        known["inputs"] = [(name, identity) for name, identity in known["inputs"]]
        return PackedCorpus(output=store.url, **known)
    except (KeyError, TypeError, ValueError) as error:
        raise PackingError(
            f"output: expected a manifest of hf_packing {hf_packing.__version__} in {store.path_of(MANIFEST)!r}, got "
            f"one that cannot be read: {error!r}"
        ) from None


def open_packed(output: str, *, streaming: bool = False, storage_options: Mapping[str, Any] | None = None) -> Any:
    """Return the packed rows of an output folder, as a dataset.

    Args:
        output: the output folder, a path or a URL.
        streaming: whether to return an IterableDataset, which reads rows as they are needed.
        storage_options: arguments for the file system of the folder, if it is not local.

    Returns:
        Dataset or IterableDataset, with the rows of all output files in order.

    Raises:
        PackingError: the folder has no manifest, so the run is not complete.
    """
    import datasets

    packed = read_manifest(Store(str(output), storage_options or {}))
    if packed is None:
        raise PackingError(
            f"output: expected a folder with a {MANIFEST}, which is written when all rows are packed, got {output!r}"
        )
    options = {"storage_options": dict(storage_options)} if storage_options else {}
    return datasets.load_dataset("parquet", data_files=packed.data_files, split="train", streaming=streaming, **options)
