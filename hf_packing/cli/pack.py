"""`hf-packing pack`: write documents to disk as a packed dataset.

Tokens are first written to shards in a temporary folder. If a run is interrupted, the next run reuses these shards. The
dataset is moved to the output folder when it is complete.
"""

import argparse
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
from hf_packing.cli.given import (
    check_that_it_plans,
    corpus_of,
    fewest_shared_of,
    print_skipped,
    strategy_named,
    warn_of_texts,
)
from hf_packing.cli.screen import counting_documents, out, print_json, say, say_warning
from hf_packing.errors import PackingError
from hf_packing.planning.lengths import Pieces
from hf_packing.planning.plan import PackingPlan
from hf_packing.planning.storage import put_in_place
from hf_packing.rows.changes import count_labels
from hf_packing.rows.pack import pack_split
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import find_token_columns
from hf_packing.strategies.base import Strategy
from hf_packing.strategies.compare import name_of
from hf_packing.text.corpus import Corpus, Seen

_JOB = "job.json"
_PLAN = "plan"
_REPLACED = "replaced"
"""Name of the folder that holds the overwritten dataset until the new dataset is in the output folder."""
_SHARDS, _TOKENIZED = "shards", "[0-9]*.arrow"
"""Name of the folder of shards, and pattern of shard names. The pattern excludes the cache files in this folder."""
_SCHEMA = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})


def run_pack(given: argparse.Namespace) -> int:
    """Tokenize and pack documents into a saved dataset.

    Args:
        given: the parsed command line flags.

    Returns:
        The exit code, 0.
    """
    if given.engine:
        from hf_packing.cli.fleet import pack_with_engine

        pack_with_engine(given)
        return 0
    _check_no_engine(given)
    strategy = strategy_named(given.strategy, given.max_length)
    check_that_it_plans(strategy)
    fewest_shared = fewest_shared_of(given, strategy)
    _check_output(given.output, given.overwrite)
    corpus = corpus_of(given)
    with counting_documents("Tokenizing") as seen:
        made = _make_packed_dataset(corpus, strategy, given.output, seen, given.overwrite, fewest_shared)
    warn_of_texts(corpus)
    if corpus.left_out:
        instead = "the Python function hf_packing.pack keeps columns with one number for each token"
        say_warning(f"columns left out of the packed dataset: {', '.join(corpus.left_out)}; {instead}")
    skipped = corpus.documents.skipped
    if given.json:
        facts = {
            "output": str(given.output),
            "strategy": name_of(strategy),
            "rows": made.rows,
            "trained_tokens": made.trained,
        }
        facts |= {"tokenized_before": made.tokenized_before, "skipped": skipped, "loss_masks": corpus.loss_masks}
        facts |= {"left_out": corpus.left_out}
        print_json(facts | vars(made.plan.metrics()))
        return 0
    say(out, str(made.plan))
    say(out, f"{made.trained:,} of {made.plan.metrics().num_tokens:,} tokens are trained on")
    if made.tokenized_before:
        say(out, f"{made.tokenized_before:,} documents had already been tokenized by an interrupted run")
    if corpus.loss_masks:
        say(out, f"loss masks applied to labels: {', '.join(corpus.loss_masks)}")
    print_skipped(skipped)
    say(out, f"written: {given.output}, with the packing plan in {made.folder / _PLAN}")
    return 0


def _check_no_engine(given: argparse.Namespace) -> None:
    """Raise PackingError if a flag for engines is given without an engine."""
    for flag in ("workers", "address", "shards", "alone", "storage_option"):
        if getattr(given, flag):
            name = f"--{flag.replace('_', '-')}"
            raise PackingError(f"{name}: expected {name} only with --engine, which packs many files")


@dataclass(frozen=True)
class _PackedDataset:
    """The result of one run of `hf-packing pack`."""

    folder: Path
    plan: PackingPlan
    rows: int
    trained: int
    """Number of tokens in the rows that are trained on."""
    tokenized_before: int
    """Number of documents that an earlier, interrupted run had tokenized."""


def _check_output(output: Path, overwrite: bool) -> None:
    """Check that the output folder does not exist, or is a saved dataset that may be overwritten.

    Raises:
        PackingError: the folder exists, and either `overwrite` is False, or the folder is not a saved dataset.
    """
    if not output.exists():
        return
    if not overwrite:
        raise PackingError(
            f"--output: expected a folder that does not exist, but {str(output)!r} exists; --overwrite replaces a "
            "saved dataset"
        )
    if not (output / "dataset_info.json").is_file():
        raise PackingError(f"--overwrite: expected a saved dataset to replace, but {str(output)!r} is not one")


def _make_packed_dataset(
    corpus: Corpus, strategy: Strategy, output: Path, seen: Seen, overwrite: bool, fewest_shared: int | None
) -> _PackedDataset:
    """Tokenize documents, pack the tokens and save the result. Tokens of an interrupted run are reused.

    Args:
        corpus: the documents and their tokenizer.
        strategy: the strategy that packs the documents.
        output: the folder to create, for `datasets.load_from_disk`.
        seen: a function to call with the number of documents that were processed since the last call.
        overwrite: whether to replace an existing dataset, once the new dataset is complete.
        fewest_shared: the fewest tokens of a prefix that documents share; None to share no prefixes.

    Returns:
        The saved dataset's folder, plan and counts.

    Raises:
        PackingError: the output folder exists and must not be replaced; another run is writing to the folder; rows
            cannot be read, or files change during reading; or no document has a token.
    """
    output = output.resolve() if output.is_symlink() else output  # write to the folder that the link points to
    _check_output(output, overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.parent / f".{output.name}.lock", timeout=0)
    try:
        with lock:
            aside = _partial_folder(output) / _REPLACED
            if aside.exists() and not output.exists():  # a run was killed during `_replace`
                aside.rename(output)
            _check_output(output, overwrite)  # another run may have made the output meanwhile
            made = _make_while_locked(corpus, strategy, output, seen, fewest_shared)
            Path(lock.lock_file).unlink(missing_ok=True)
            return made
    except Timeout:
        raise PackingError(
            f"--output: expected a folder that no other run writes to, but another run is writing to {str(output)!r}"
        ) from None


def _make_while_locked(
    corpus: Corpus, strategy: Strategy, output: Path, seen: Seen, fewest_shared: int | None
) -> _PackedDataset:
    partial = _partial_folder(output)
    job = _job_of(corpus)
    _begin(partial, job)
    documents, before = _tokenize(corpus, partial / _SHARDS, seen)
    if corpus.documents.files and _job_of(corpus) != job:
        raise PackingError(
            "DATA: expected files that do not change, but some files changed during reading; run the command again"
        )
    shards = sorted((partial / _SHARDS).glob(_TOKENIZED))
    if not shards:
        shutil.rmtree(partial)
        raise PackingError("DATA: expected documents with tokens, but there are no documents")
    tokens = datasets.concatenate_datasets([datasets.Dataset.from_file(str(shard)) for shard in shards])
    lengths = pa.compute.list_value_length(tokens.data.column("input_ids")).to_numpy()
    if len(lengths) != documents:
        raise PackingError(
            f"{partial}: expected the tokens of {documents} documents, got the tokens of {len(lengths)} documents; "
            "remove this folder, and run the command again"
        )
    if not lengths.any():
        shutil.rmtree(partial)
        raise PackingError(f"DATA: expected documents with tokens, but all {len(lengths)} documents are empty")
    fresh = partial / "packed"
    shutil.rmtree(fresh, ignore_errors=True)
    columns, packing = find_token_columns(tokens.data.table), Packing(strategy, fewest_shared=fewest_shared)
    made = packing.plan(columns)
    plan = made.plan
    packed = pack_split(tokens, packing, load_from_cache_file=False, planned=made)
    packed.save_to_disk(fresh)
    rows = len(packed)
    trained = count_labels(columns, Pieces(plan.segment_document, plan.segment_start, plan.segment_length))
    plan.save(fresh / _PLAN)
    _replace(output, fresh, partial / _REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    return _PackedDataset(output, plan, rows, trained, before)


def _partial_folder(output: Path) -> Path:
    """Return the folder for the shards of an unfinished run.

    The folder is next to the output folder, not in it, so that the shards are not mistaken for a finished dataset.
    """
    return output.parent / f".{output.name}.partial"


def _job_of(corpus: Corpus) -> dict[str, Any]:
    """Return a dict, for JSON, of everything that the tokens of the documents depend on.

    A run can reuse the shards of an earlier run if the dict is the same.
    """
    backend = corpus.tokenizer.backend.to_str() if corpus.tokenizer else ""
    return {
        "version": hf_packing.__version__,
        "documents": corpus.documents.identity(),
        "split": corpus.documents.split,
        "skip_bad": corpus.documents.skip_bad,
        "field": corpus.text_field,
        "separator": corpus.separator,
        "train_on": corpus.train_on,
        "end": corpus.tokenizer.end if corpus.tokenizer and corpus.end_documents else None,
        "template": corpus.tokenizer.template_text if corpus.tokenizer else "",
        "tokenizer": hashlib.sha256(backend.encode()).hexdigest(),
    }


def _begin(partial: Path, job: dict[str, Any]) -> None:
    """Create the folder for the shards of a run, or keep the folder of an interrupted run if its shards can be reused.

    Args:
        partial: the folder. Shards of a run with a different `job` are deleted.
        job: everything that the tokens depend on, as `_job_of` returns it.
    """
    written = json.dumps(job, sort_keys=True)
    if partial.exists() and (not (partial / _JOB).is_file() or (partial / _JOB).read_text() != written):
        shutil.rmtree(partial)
    (partial / _SHARDS).mkdir(parents=True, exist_ok=True)
    (partial / _JOB).write_text(written)


def _tokenize(corpus: Corpus, folder: Path, seen: Seen) -> tuple[int, int]:
    """Tokenize documents block by block, and write one shard for each block. Blocks that already have one are skipped.

    Args:
        corpus: the documents and their tokenizer.
        folder: the folder of the shards.
        seen: a function to call with the number of documents in each block.

    Returns:
        The number of all documents, and the number of documents in skipped blocks.
    """
    done = {int(shard.stem): shard for shard in folder.glob(_TOKENIZED)}
    documents, before = 0, 0
    for number, block in enumerate(corpus.blocks()):
        documents += len(block)
        if number in done:
            before += len(block)
        else:
            _write_shard(folder / f"{number:06d}.arrow", *corpus.tokens_of(block))
        seen(len(block))
    return documents, before


def _write_shard(file: Path, input_ids: list[list[int]], labels: list[list[int]]) -> None:
    """Write a shard of tokens to a temporary file and rename the file, so that every existing shard is complete."""
    table = pa.table({"input_ids": input_ids, "labels": labels}, schema=_SCHEMA)
    unfinished = file.with_suffix(".unfinished")
    with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as stream:
        stream.write_table(table)
    unfinished.rename(file)


def _replace(output: Path, fresh: Path, aside: Path) -> None:
    """Move the finished folder `fresh` to `output`. The old output is moved to `aside`, and moved back on failure."""
    shutil.rmtree(aside, ignore_errors=True)
    if output.exists():
        output.rename(aside)
    try:
        put_in_place(fresh, output)
    except BaseException:
        if aside.exists() and not output.exists():
            aside.rename(output)
        raise
