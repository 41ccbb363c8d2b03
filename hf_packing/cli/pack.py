"""`hf-packing pack`: write documents to disk as a packed dataset, or many files as packed parquet files."""

import argparse
import warnings
from pathlib import Path

from hf_packing.cli.flags import documents_of, print_skipped, strategies_named
from hf_packing.cli.screen import print_json
from hf_packing.errors import PackingError
from hf_packing.files import put_in_place
from hf_packing.fleet import PackedCorpus
from hf_packing.fleet import pack as pack_files
from hf_packing.rows.cache import Origin
from hf_packing.rows.pack import pack
from hf_packing.rows.token_columns import is_token_type
from hf_packing.strategies.base import Strategy
from hf_packing.strategies.compare import name_of

_PLAN = "plan"


def run(given: argparse.Namespace) -> int:
    """Pack documents and save the rows, and return the exit code, 0."""
    many = given.workers or given.ray or given.task
    for flag in ("split", "glob", "overwrite"):
        if many and getattr(given, flag):
            raise PackingError(f"--{flag}: expected no --{flag} with --workers, --ray or --task")
    if len(given.data) > 1 and not many:
        raise PackingError("DATA: expected one file, folder or dataset, or --workers, --ray or --task with several")
    strategies = strategies_named([given.strategy], given.max_length)
    if len(strategies) > 1:
        lengths = ", ".join(map(str, given.max_length))
        raise PackingError(f"--max-length: expected a single number with {given.strategy}, got {lengths}")
    pack_documents = _pack_files if many else _pack_dataset
    pack_documents(given, strategies[0])
    return 0


def _pack_dataset(given: argparse.Namespace, strategy: Strategy) -> None:
    """Read, tokenize and pack documents, and save the rows with their plan. The output appears whole or not at all."""
    given.data, given.output = given.data[0], Path(given.output)
    output = given.output.resolve()  # a folder cannot be renamed onto a link
    _check_output(output, given.overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    with documents_of(given, beside=output) as read:
        packed = pack(read.tokens, strategy, share_prefixes=given.share_prefixes)
        origin = Origin.load(Path(packed.cache_files[0]["filename"]).parent)
        if not origin.plan.num_packs:
            raise PackingError(f"data: expected documents with tokens, got none in {given.data!r}")
        packed.save_to_disk(read.folder / "packed")
        origin.plan.save(read.folder / "packed" / _PLAN)
        _check_output(output, given.overwrite)  # another run may have made the output meanwhile
        put_in_place(read.folder / "packed", output)
    if given.json:
        schema = read.tokens.features.arrow_schema
        facts = {
            "output": str(given.output),
            "strategy": name_of(strategy),
            "rows": len(packed),
            "trained_tokens": origin.facts["trained_tokens"],
            "skipped": read.skipped,
            "loss_masks": origin.facts["loss_masks"],
            "left_out": [field.name for field in schema if not is_token_type(field.type)],
        }
        print_json(facts | vars(origin.plan.metrics()))
        return
    print(origin.plan)
    print(f"{origin.facts['trained_tokens']:,} of {origin.plan.metrics().num_tokens:,} tokens are trained on")
    print_skipped(read.skipped)
    print(f"written: {given.output}, with the packing plan in {given.output / _PLAN}")


def _pack_files(given: argparse.Namespace, strategy: Strategy) -> None:
    """Pack many files by many processes, or one task of them."""
    task, tasks = given.task or (None, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pack ", UserWarning)  # they are printed below
        packed = pack_files(
            given.data,
            strategy,
            str(given.output),
            tokenizer=given.tokenizer,
            executor="ray" if given.ray else None,
            workers=given.workers,
            tasks=tasks,
            task=task,
            share_prefixes=given.share_prefixes,
            text_field=given.field,
            end_documents=not given.no_eos,
            separator=given.separator,
            train_on=given.train_on,
            skip_bad=given.skip_bad,
            trust_remote_code=given.trust_remote_code,
        )
    say_packed(packed, given.json)


def say_packed(packed: PackedCorpus, as_json: bool) -> None:
    """Print what was packed: as text, or as JSON."""
    if as_json:
        facts = {"rows": packed.num_rows, "strategy": packed.strategy, "changes": packed.changes()}
        print_json(facts | packed.counts | {"data_files": packed.data_files})
        return
    print(packed)
    print(f"written: {packed.folder.url}")


def _check_output(output: Path, overwrite: bool) -> None:
    """Raise PackingError unless the output is new, or a saved dataset that may be overwritten."""
    if output.exists() and not overwrite:
        raise PackingError(
            f"--output: expected a folder that does not exist, but {str(output)!r} exists; --overwrite replaces a "
            "saved dataset"
        )
    if output.exists() and not (output / "dataset_info.json").is_file():
        raise PackingError(f"--overwrite: expected a saved dataset to replace, but {str(output)!r} is not one")
