"""`hf-packing pack` with many files, which are packed by many processes, or one task at a time in array jobs."""

import argparse
import warnings

from hf_packing.cli.flags import positive
from hf_packing.cli.given import strategy_named
from hf_packing.cli.screen import out, print_json, say
from hf_packing.errors import PackingError
from hf_packing.fleet import PackedCorpus, pack

_FLAGS = ("workers", "ray", "task")
"""With any of these, files are packed as by `hf_packing.fleet.pack`."""


def add_fleet(command: argparse.ArgumentParser) -> None:
    """Add the flags for many files."""
    many = command.add_argument_group(
        "many files", "DATA are files, a folder, or a pattern such as 's3://bucket/*.parquet'; DIR gets parquet files"
    )
    many.add_argument("--workers", type=positive, metavar="N", help="pack with N processes of this machine")
    many.add_argument("--ray", action="store_true", help="pack with the Ray cluster that ray.init() finds")
    many.add_argument("--task", type=_task, metavar="K/N", help="do task K of N, as in array jobs")


def is_fleet(given: argparse.Namespace) -> bool:
    """Return whether a flag for many files is given.

    Raises:
        PackingError: a flag has no effect.
    """
    if fleet := any(getattr(given, flag) for flag in _FLAGS):
        for flag in ("split", "glob", "overwrite"):
            if getattr(given, flag):
                raise PackingError(f"--{flag}: expected no --{flag} with --workers, --ray or --task")
    elif len(given.data) > 1:
        raise PackingError("DATA: expected one file, folder or dataset, or --workers, --ray or --task with several")
    return fleet


def run_fleet(given: argparse.Namespace) -> None:
    """Pack the files of `hf-packing pack`, and print what was packed."""
    task, tasks = given.task or (None, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "pack ", UserWarning)  # they are printed below
        packed = pack(
            given.data,
            strategy_named(given.strategy, given.max_length),
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
    say(out, str(packed))
    say(out, f"written: {packed.folder.url}")


def _task(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"expected K/N, such as 3/64 for the third of 64 tasks, got {text!r}")
    return int(number), int(of)
