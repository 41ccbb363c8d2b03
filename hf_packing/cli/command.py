"""The command line tool `hf-packing`: the parser, error messages and exit codes."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

import hf_packing
from hf_packing.cli.flags import STRATEGIES, in_flags, say, say_warning
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.text.render import TRAIN_ON

BAD_INPUT, INTERRUPTED, CLOSED_PIPE = 2, 130, 141
"""Exit codes for bad input, for Ctrl+C, and for a reader of the output that has closed it."""
_LENGTHS = "--max-length"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line tool. An error that a user can fix is printed in one line, without a traceback.

    Args:
        arguments: the command line arguments; None to take the arguments of this process.

    Returns:
        The exit code: 0 after success, 1 for a model that does not isolate documents, 2 for bad input, 130 after
            Ctrl+C, 141 if the reader of the output has closed it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        given = _parser().parse_args(_one_length_each(sys.argv[1:] if arguments is None else arguments))
        with warnings.catch_warnings():
            warnings.showwarning = say_warning
            # imported here, since --help needs neither torch nor transformers
            code: int = import_module(f"hf_packing.cli.{given.command}").run(given)
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except (PackingError, MissingDependencyError) as error:
        say(f"error: {in_flags(str(error))}")
    except (OSError, UnicodeError, pa.ArrowException) as error:  # errors of files or the disk
        say(f"error: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        say("error: interrupted")
        return INTERRUPTED
    return BAD_INPUT


def _one_length_each(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --max-length before each of its numbers, so that DATA may follow them."""
    found: list[str] = []
    in_lengths = False
    for each in arguments:
        in_lengths = each == _LENGTHS or (in_lengths and each.isdecimal())
        if in_lengths and each != _LENGTHS and found[-1] != _LENGTHS:
            found.append(_LENGTHS)
        found.append(each)
    return found


class _Parser(argparse.ArgumentParser):
    """A parser that raises PackingError for bad arguments, so that errors are printed in one line."""

    def error(self, message: str) -> NoReturn:
        raise PackingError(f"{message}; {self.prog} --help shows all options")


def _parser() -> argparse.ArgumentParser:
    top = _Parser(
        "hf-packing",
        description="Pack documents, see how much packing saves, and check whether models isolate packed documents.",
    )
    top.add_argument("--version", action="version", version=f"hf-packing {hf_packing.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="report | pack | check")
    _add_report(commands)
    _add_pack(commands)
    _add_check(commands)
    return top


def _add_report(commands: Any) -> None:
    command = commands.add_parser(
        "report",
        help="compare strategies on your documents",
        description="Compare packing strategies on your documents, and recommend one.",
    )
    _add_documents(command)
    _add_lengths(command, "one number or several (default: 2048 4096 8192)")
    command.add_argument(
        "--strategy",
        nargs="+",
        choices=STRATEGIES,
        metavar="NAME",
        help=f"strategies to compare, of {', '.join(STRATEGIES)} (default: fixed_length, first_come, best_fit, and "
        "bucket if --max-length has several numbers)",
    )
    command.add_argument("--output", type=Path, metavar="HTML", help="HTML page to write, with a picture")
    command.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        default=8,
        help="number of processes that train at the same time (default: %(default)s)",
    )


def _add_pack(commands: Any) -> None:
    command = commands.add_parser(
        "pack",
        help="pack your documents into a dataset",
        description="Tokenize and pack documents into a saved dataset.",
    )
    _add_documents(command, nargs="+")
    command.add_argument("--output", required=True, metavar="DIR", help="folder to create, for datasets.load_from_disk")
    command.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="best_fit",
        metavar="NAME",
        help=f"strategy, one of {', '.join(STRATEGIES)} (default: %(default)s)",
    )
    _add_lengths(command, "several numbers for strategies with buckets (default: 4096)")
    command.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    command.add_argument(
        "--share-prefixes",
        type=_positive,
        metavar="N",
        nargs="?",
        const=True,
        default=False,
        help="pack documents that begin with the same N tokens as trees (default of N: 16)",
    )
    command.add_argument(
        "--keep-first-labels",
        action="store_true",
        help="keep the label of each document's first token, for models that predict the token itself",
    )
    many = command.add_argument_group(
        "many files", "DATA are files, folders, or patterns such as 's3://bucket/*.parquet'; DIR gets parquet files"
    )
    many.add_argument("--workers", type=_positive, metavar="N", help="pack with N processes of this machine")
    many.add_argument("--ray", action="store_true", help="pack with the Ray cluster that ray.init() finds")
    many.add_argument(
        "--tasks", type=_positive, metavar="N", help="number of tasks (default: one for about 64 MiB of files)"
    )
    many.add_argument("--task", type=_task_of_tasks, metavar="K/N", help="do task K of N, as in array jobs")


def _add_check(commands: Any) -> None:
    command = commands.add_parser(
        "check",
        help="check whether a model isolates packed documents",
        description=(
            "Check whether a model isolates packed documents, before and after patch_model. The exit code is 1 if the "
            "model cannot be patched, or does not isolate documents after patch_model."
        ),
    )
    command.add_argument("model", metavar="MODEL", help="a name on the hub, a folder, or an architecture such as llama")
    command.add_argument(
        "--weights",
        action="store_true",
        help="load the model itself (default: make a small model of the same configuration)",
    )
    _add_usual(command)


def _add_lengths(command: argparse.ArgumentParser, numbers: str) -> None:
    command.add_argument(
        _LENGTHS,
        type=_positive,
        metavar="N",
        nargs=1,
        action="extend",
        help=f"the most tokens that a row may have; {numbers}",
    )


def _add_documents(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add the flags that say which documents to read, and how rows become tokens."""
    command.add_argument(
        "data",
        nargs=nargs,
        metavar="DATA",
        help="a JSONL, parquet, CSV or text file, a folder of files, a saved dataset, or a dataset's name on the hub",
    )
    command.add_argument("--split", help="split of a dataset to read (default: train)")
    command.add_argument("--glob", metavar="PATTERN", help="files of a folder to read, such as '*.py' (default: all)")
    command.add_argument(
        "--tokenizer",
        metavar="T",
        help="tokenizer: a name on the hub, a folder, or a tokenizer.json file; needed unless rows have input_ids",
    )
    command.add_argument(
        "--field",
        dest="text_field",
        help="field with the text or the messages (default: the first found of prompt and completion, messages, "
        "conversations, text)",
    )
    command.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out rows that cannot be read, and count these rows (default: stop at the first such row)",
    )
    command.add_argument(
        "--no-eos",
        dest="end_documents",
        action="store_false",
        help="append no end-of-sequence token to texts (default: append an end-of-sequence token)",
    )
    command.add_argument(
        "--no-special-tokens",
        dest="add_special_tokens",
        action="store_false",
        help="add no special tokens of the tokenizer to texts, which have them already (default: add them)",
    )
    command.add_argument("--separator", metavar="TEXT", help="text between a prompt and its completion (default: none)")
    command.add_argument(
        "--train-on",
        choices=TRAIN_ON,
        help="tokens to train on (default: the assistant's turns of messages, completions, and whole texts)",
    )
    _add_usual(command)


def _add_usual(command: argparse.ArgumentParser) -> None:
    """Add the flags of all commands."""
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with a tokenizer or a model (default: refuse such code)",
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _positive(text: str) -> int:
    """Return a text as an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def _task_of_tasks(text: str) -> tuple[int, int]:
    """Return a text such as 3/64 as two integers."""
    task, _, tasks = text.partition("/")
    return _positive(task), _positive(tasks)
