"""The flags that several commands of `hf-packing` have, and those of `hf-packing fleet`."""

import argparse
from collections.abc import Callable

from hf_packing.cli.given import STRATEGIES
from hf_packing.text.rendering import TRAIN_ON


def add_fleet(top: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the commands of `hf-packing fleet`.

    Args:
        top: the parser of `hf-packing fleet`.
        run: the function that does a command.
    """
    commands = top.add_subparsers(
        required=True, dest="command", metavar="pack | begin | count | plan | deal | gather | finish | status"
    )
    pack = commands.add_parser("pack", help="pack many files, from the first stage to the last")
    _add_run(pack)
    add_engine(pack, "local", "who does the tasks: processes of this machine, or a Ray cluster (default: %(default)s)")
    begin = commands.add_parser("begin", help="begin a run whose tasks are done one by one, as in array jobs")
    _add_run(begin)
    _add_layout(begin)
    for stage, what in (
        ("count", "count the documents of one file, which may tokenize them"),
        ("deal", "sort the segments of one file by output file"),
        ("gather", "write one output file"),
    ):
        one = commands.add_parser(stage, help=what)
        _add_output(one)
        one.add_argument("--task", type=_natural, required=True, metavar="N", help="number of the task, from 0")
    for name, what in (
        ("plan", "make the plan, when all files are counted"),
        ("finish", "write the manifest, when all output files are there"),
        ("status", "show how many tasks are done"),
    ):
        _add_output(commands.add_parser(name, help=what))
    for command in commands.choices.values():
        command.set_defaults(run=run)


def add_engine(command: argparse.ArgumentParser, default: str | None, meaning: str) -> None:
    """Add the flags that choose an engine."""
    command.add_argument("--engine", choices=("local", "ray"), default=default, help=meaning)
    command.add_argument(
        "--workers", type=positive, metavar="N", help="processes of --engine local (default: one per core)"
    )
    command.add_argument(
        "--address", help="address of the cluster of --engine ray, such as auto (default: start Ray on this machine)"
    )
    _add_layout(command)


def _add_layout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--shards", type=positive, metavar="N", help="number of output files (default: one for 33 million tokens)"
    )
    command.add_argument(
        "--alone", action="store_true", help="pack each file by itself into one file (default: files share packs)"
    )
    _add_storage(command)


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "data",
        metavar="DATA",
        nargs="+",
        help="files to pack, or one folder or pattern such as 's3://bucket/*.parquet'",
    )
    add_texts(command)
    command.add_argument("--output", required=True, metavar="DIR", help="folder for the packed rows, or its URL")
    command.add_argument(
        "--strategy", default="best_fit", metavar="NAME", help=f"one of {', '.join(STRATEGIES)} (default: %(default)s)"
    )
    add_max_length(command, [4096], "the most tokens that a row may have; several numbers for strategies with buckets")
    add_share_prefixes(command)


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("output", metavar="OUTPUT", help="the output folder of a run, or its URL")
    _add_storage(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_storage(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument for file systems that are not local, such as endpoint_url=...; can be given several times",
    )


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text!r}")
    return int(text)


def add_documents(command: argparse.ArgumentParser) -> None:
    """Add the flags that say which documents to read."""
    command.add_argument(
        "data",
        metavar="DATA",
        help="a JSONL, parquet, CSV or text file, a folder of files, a saved dataset, or a dataset's name on the hub",
    )
    command.add_argument("--split", help="split of a dataset to read (default: train)")
    command.add_argument("--glob", metavar="PATTERN", help="files of a folder to read, such as '*.py' (default: all)")
    add_texts(command)


def add_texts(command: argparse.ArgumentParser) -> None:
    """Add the flags that say how rows become tokens."""
    command.add_argument(
        "--tokenizer",
        metavar="T",
        help="tokenizer: a name on the hub, a folder, or a tokenizer.json file; needed unless rows have input_ids",
    )
    command.add_argument(
        "--field", help="field with the text (default: the first found of text, prompt and completion, messages)"
    )
    command.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out rows that cannot be read, and count these rows (default: stop at the first such row)",
    )
    command.add_argument(
        "--no-eos",
        action="store_true",
        help="append no end-of-sequence token to texts (default: append an end-of-sequence token)",
    )
    command.add_argument("--separator", metavar="TEXT", help="text between a prompt and its completion (default: none)")
    command.add_argument(
        "--train-on",
        choices=TRAIN_ON,
        help="tokens to train on (default: the assistant's turns of messages, completions, and whole texts)",
    )
    add_usual(command)


def add_max_length(command: argparse.ArgumentParser, default: list[int], meaning: str) -> None:
    """Add the flag for the length of rows."""
    shown = " ".join(map(str, default))
    command.add_argument(
        "--max-length", type=positive, metavar="N", nargs="+", default=default, help=f"{meaning} (default: {shown})"
    )


def add_share_prefixes(command: argparse.ArgumentParser) -> None:
    """Add the flag that packs documents as trees."""
    command.add_argument(
        "--share-prefixes",
        type=positive,
        metavar="N",
        nargs="?",
        const=True,
        default=False,
        help="pack documents that begin with the same N tokens as trees (default of N: 16)",
    )


def add_usual(command: argparse.ArgumentParser) -> None:
    """Add the flags of all commands."""
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with a tokenizer or a model (default: refuse such code)",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def positive(text: str) -> int:
    """Return a text as an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)
