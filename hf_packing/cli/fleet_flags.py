"""The flags of `hf-packing fleet`, and those of `hf-packing pack` that choose an engine."""

import argparse

from hf_packing.cli.flags import STRATEGIES, add_max_length, add_share_prefixes, add_texts, positive


def add_fleet(top: argparse.ArgumentParser) -> None:
    """Add the commands of `hf-packing fleet`."""
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
        command.set_defaults(module="fleet")


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
