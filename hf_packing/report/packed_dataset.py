"""Documents -> a packed dataset on disk: tokenised in shards that outlive an interruption, put in place when done."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from filelock import FileLock, Timeout

import hf_packing
from hf_packing.data.pack import pack_split
from hf_packing.errors import PackingError
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.storage import put_in_place
from hf_packing.report.corpus import Corpus, Seen
from hf_packing.strategies.base import Strategy, plan_packing

JOB = "job.json"
PLAN = "plan"
REPLACED = "replaced"
"""Where the dataset that is overwritten stands until the new one is in place."""
SHARDS, TOKENISED = "shards", "[0-9]*.arrow"
"""The folder, and its files; `pack` keeps its own cache beside them."""
SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})


@dataclass(frozen=True)
class PackedDataset:
    """What was made."""

    folder: Path
    plan: PackingPlan
    rows: int
    documents: int
    tokenised_before: int
    """Documents whose tokens an interrupted run had left."""

    @property
    def plan_folder(self) -> Path:
        """For PackingPlan.load, and with it for unpack."""
        return self.folder / PLAN


def partial_folder(output: Path) -> Path:
    """Where an unfinished run keeps its shards: beside its output, so that nobody takes them for it."""
    return output.parent / f".{output.name}.partial"


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse to write where something is.

    Raises:
        PackingError: the folder exists, and is not to be replaced, or is no dataset.
    """
    if not output.exists():
        return
    if not overwrite:
        raise PackingError(
            f"--output: expected a folder that does not exist, {str(output)!r} does; --overwrite replaces it"
        )
    if not (output / "dataset_info.json").is_file():
        raise PackingError(f"--overwrite: expected a saved dataset to replace, {str(output)!r} is none")


def make_packed_dataset(
    corpus: Corpus, strategy: Strategy, output: Path, seen: Seen, *, overwrite: bool = False
) -> PackedDataset:
    """Tokenise, pack and save; a run that was interrupted goes on with what it has.

    Args:
        corpus: documents and their tokenizer.
        strategy: that packs them.
        output: the folder to make, for `datasets.load_from_disk`.
        seen: is told how many documents were tokenised.
        overwrite: whether a dataset there is replaced, once the new one is complete.

    Raises:
        PackingError: something is in the way; rows that cannot be read; no document with a token.
    """
    output = output.resolve() if output.is_symlink() else output  # written where the link points
    check_output(output, overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.parent / f".{output.name}.lock", timeout=0)
    try:
        with lock:
            aside = partial_folder(output) / REPLACED
            if aside.exists() and not output.exists():  # a run was killed between two renames
                aside.rename(output)
            check_output(output, overwrite)  # which another run may have made since
            made = make(corpus, strategy, output, seen)
            Path(lock.lock_file).unlink(missing_ok=True)
            return made
    except Timeout:
        raise PackingError(f"--output: expected one that no other run writes, one writes {str(output)!r}") from None


def make(corpus: Corpus, strategy: Strategy, output: Path, seen: Seen) -> PackedDataset:
    """The job, while no other run does it."""
    partial = partial_folder(output)
    job = job_of(corpus)
    begin(partial, job)
    documents, before = tokenise(corpus, partial / SHARDS, seen)
    if corpus.documents.files and job_of(corpus) != job:
        raise PackingError(
            "DATA: expected files that stay as they are, some changed while they were read; run it again"
        )
    shards = sorted((partial / SHARDS).glob(TOKENISED))
    if not shards:
        shutil.rmtree(partial)
        raise PackingError("DATA: expected documents with tokens, got none")
    tokens = datasets.concatenate_datasets([datasets.Dataset.from_file(str(shard)) for shard in shards])
    lengths = pa.compute.list_value_length(tokens.data.column("input_ids")).to_numpy()
    if len(lengths) != documents:
        raise PackingError(f"{partial}: expected the tokens of {documents} documents, got {len(lengths)}; remove it")
    if not lengths.any():
        shutil.rmtree(partial)
        raise PackingError(f"DATA: expected documents with tokens, got {len(lengths)} without")
    fresh = partial / "packed"
    shutil.rmtree(fresh, ignore_errors=True)
    plan = plan_packing(lengths, strategy)
    packed = pack_split(tokens, strategy, position_ids=True, load_from_cache_file=False, plan=plan)
    packed.save_to_disk(fresh)
    rows = len(packed)
    plan.save(fresh / PLAN)
    replace(output, fresh, partial / REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    return PackedDataset(output, plan, rows, len(lengths), before)


def job_of(corpus: Corpus) -> dict[str, Any]:
    """Everything that the tokens depend on."""
    backend = corpus.tokenizer.backend.to_str() if corpus.tokenizer else ""
    return {
        "version": hf_packing.__version__,
        "documents": corpus.documents.identity(),
        "split": corpus.documents.split,
        "skip_bad": corpus.documents.skip_bad,
        "field": corpus.text_field,
        "separator": corpus.separator,
        "end": corpus.tokenizer.end if corpus.tokenizer and corpus.end_documents else None,
        "template": corpus.tokenizer.template_text if corpus.tokenizer else "",
        "tokenizer": hashlib.sha256(backend.encode()).hexdigest(),
    }


def begin(partial: Path, job: dict[str, Any]) -> None:
    """A folder for the shards of this job; those of another one are thrown away."""
    written = json.dumps(job, sort_keys=True)
    if partial.exists() and (not (partial / JOB).is_file() or (partial / JOB).read_text() != written):
        shutil.rmtree(partial)
    (partial / SHARDS).mkdir(parents=True, exist_ok=True)
    (partial / JOB).write_text(written)


def replace(output: Path, fresh: Path, aside: Path) -> None:
    """Put a finished folder in place; what was there stands aside until it is, and comes back if it cannot be."""
    shutil.rmtree(aside, ignore_errors=True)
    if output.exists():
        output.rename(aside)
    try:
        put_in_place(fresh, output)
    except BaseException:
        if aside.exists() and not output.exists():
            aside.rename(output)
        raise


def tokenise(corpus: Corpus, folder: Path, seen: Seen) -> tuple[int, int]:
    """One shard for each block of documents, written under another name first; all documents, and those found done."""
    done = {int(shard.stem): shard for shard in folder.glob(TOKENISED)}
    documents, before = 0, 0
    for number, block in enumerate(corpus.blocks()):
        documents += len(block)
        if number in done:
            before += len(block)
        else:
            write_shard(folder / f"{number:06d}.arrow", *corpus.tokens_of(block))
        seen(len(block))
    return documents, before


def write_shard(file: Path, input_ids: list[list[int]], labels: list[list[int]]) -> None:
    table = pa.table({"input_ids": input_ids, "labels": labels}, schema=SCHEMA)
    unfinished = file.with_suffix(".unfinished")
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as stream:
        stream.write_table(table)
    unfinished.rename(file)
