"""`hf-packing pack`: write documents to disk as a packed dataset, or many files as packed parquet files."""

import argparse
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_packing.cli.flags import print_json, read_documents, strategies_named, text_settings
from hf_packing.errors import PackingError
from hf_packing.files import new_folder, remove_unfinished, writing_to
from hf_packing.fleet import PackedCorpus
from hf_packing.fleet import pack as pack_files
from hf_packing.rows.cache import FILES, PLAN, Origin
from hf_packing.rows.changes import describe_counts
from hf_packing.rows.pack import pack_to_disk
from hf_packing.rows.packing import Packing
from hf_packing.rows.token_columns import is_token_type
from hf_packing.strategies.base import Strategy
from hf_packing.strategies.compare import name_of

_SAVED = ("dataset_info.json", "state.json", "*.arrow", *FILES)
"""Patterns for the names in the folder of a saved dataset, packed or not."""
_ONE_DAY = 86_400.0
"""An unfinished folder beside the output, of a process that was killed, is removed after so many seconds."""


def run(given: argparse.Namespace) -> int:
    """Pack documents and save the rows, and return the exit code, 0."""
    many = given.workers or given.ray or given.task or given.tasks
    for flag in ("split", "glob", "overwrite"):
        if many and getattr(given, flag):
            raise PackingError(f"--{flag}: expected no --{flag} with --workers, --ray, --task or --tasks")
    if len(given.data) > 1 and not many:
        raise PackingError("DATA: expected one file, folder or dataset, or --workers, --ray or --task with several")
    strategy, *others = strategies_named([given.strategy], given.max_length or [4096])
    if others:
        raise PackingError(f"--max-length: expected a single number with {given.strategy}, got {given.max_length}")
    if many:
        _pack_files(given, strategy)
    else:
        _pack_dataset(given, strategy, given.data[0], Path(given.output))
    return 0


def _pack_dataset(given: argparse.Namespace, strategy: Strategy, data: str, output: Path) -> None:
    """Read, tokenize and pack documents, and save the rows with their plan. The output appears whole or not at all."""
    folder = output.resolve()  # a folder cannot be renamed onto a link
    packing = Packing.of(strategy, share_prefixes=given.share_prefixes, keep_first_labels=given.keep_first_labels)
    with writing_to("--output", output):
        _check_output(folder, given.overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder.parent, _ONE_DAY)
        with (
            new_folder(folder) as fresh,
            TemporaryDirectory(dir=fresh, ignore_cleanup_errors=True) as tokens,
        ):
            documents, skipped = read_documents(data, given, tokens)
            fields = documents.features.arrow_schema
            origin = pack_to_disk(documents, packing, fresh)
            plan = origin.plan
            if not plan.num_packs:
                raise PackingError(f"data: expected documents with tokens, got none in {data!r}")
            del documents  # Windows removes no file that is open
            _check_output(folder, given.overwrite)  # another run may have made the output meanwhile
    say_plan(
        origin,
        given.json,
        output=str(output),
        strategy=name_of(strategy),
        rows=plan.num_packs,
        skipped=skipped,
        loss_masks=origin.facts["loss_masks"],
        left_out=[field.name for field in fields if not is_token_type(field.type)],
    )
    if not given.json:
        print(f"written: {output}, with the packing plan in {output / PLAN}")


def say_plan(origin: Origin, as_json: bool, **more: Any) -> None:
    """Print the plan of packed rows and their numbers, as text, or as JSON with more facts."""
    metrics, trained = origin.plan.metrics(), origin.facts["trained_tokens"]
    if as_json:
        print_json({**more, "trained_tokens": trained, **vars(metrics)})
        return
    print(origin.plan)
    print(*describe_counts(trained, metrics.num_tokens, more.get("skipped", ())), sep="\n")


def _pack_files(given: argparse.Namespace, strategy: Strategy) -> None:
    """Pack many files by many processes, or one task of them."""
    task, tasks = given.task or (None, given.tasks)
    if given.tasks not in (None, tasks):
        raise PackingError(f"--tasks: expected {tasks}, as in --task {task}/{tasks}, got {given.tasks}")
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
            keep_first_labels=given.keep_first_labels,
            skip_bad=given.skip_bad,
            trust_remote_code=given.trust_remote_code,
            **text_settings(given),
        )
    say_packed(packed, given.json)


def say_packed(packed: PackedCorpus, as_json: bool) -> None:
    """Print what was packed: as text, or as JSON."""
    if as_json:
        print_json(
            {
                "rows": packed.num_rows,
                "strategy": packed.strategy,
                "changes": packed.changes(),
                **packed.counts,
                "data_files": packed.data_files,
            }
        )
        return
    print(packed)
    print(f"written: {packed.folder.url}")


def _check_output(output: Path, overwrite: bool) -> None:
    """Raise PackingError unless the output is new, or a saved dataset that may be overwritten."""
    if not output.exists():
        return
    if not overwrite:
        raise PackingError(
            f"--output: expected a folder that does not exist, but {str(output)!r} exists; --overwrite replaces a "
            "saved dataset"
        )
    if not (output / "dataset_info.json").is_file():
        raise PackingError(f"--overwrite: expected a saved dataset to replace, but {str(output)!r} is not one")
    if others := sorted(each.name for each in output.iterdir() if not any(map(each.match, _SAVED))):
        raise PackingError(
            f"--overwrite: expected a saved dataset to replace, and no other files, but {str(output)!r} also has "
            f"{others[0]!r}"
        )
