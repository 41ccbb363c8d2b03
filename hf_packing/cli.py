"""The command: hf-packing report, hf-packing pack, hf-packing check."""

import argparse
import json
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import hf_packing
from hf_packing.errors import MissingDependencyError, PackingError
from hf_packing.report.corpus import Corpus, Seen
from hf_packing.report.documents import Documents
from hf_packing.report.hub import look_for_hub
from hf_packing.report.names import STRATEGIES, strategies_named, strategy_named
from hf_packing.report.screen import ReaderGoneError, Screen, is_terminal, prepare_streams, swallow_the_rest
from hf_packing.report.tokenise import load_tokenizer
from hf_packing.strategies.base import Strategy

DONE, NOT_ISOLATED, BAD_INPUT, INTERRUPTED, READER_GONE = 0, 1, 2, 130, 141
"""Exit codes; the last is a shell's own for a pipe that was closed."""

WIDE = 100
"""Columns that the table of a report needs."""

out = Screen(width=None if is_terminal() else 2 * WIDE)
err = Screen(stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; what a user can mend is said in one line, without a traceback.

    Args:
        arguments: those of the command line, unless they are given.

    Returns:
        The exit code: 0, 1 for a model that is not isolated, 2 for bad input, 130 when interrupted, 141 when nobody
        reads what is printed.
    """
    prepare_streams()
    try:
        return run(arguments)
    except ReaderGoneError:
        swallow_the_rest()
        return READER_GONE


def run(arguments: Sequence[str] | None) -> int:
    """Run the command, errors told."""
    try:
        given = parser().parse_args(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = say_warning
            code: int = given.run(given)
    except (PackingError, MissingDependencyError) as error:
        say(err, f"error: {' '.join(str(error).split())}", style="red")
        return BAD_INPUT
    except (OSError, EOFError, UnicodeError, pa.ArrowException) as error:  # of files, and of the disk
        say(err, f"error: {type(error).__name__}: {' '.join(str(error).split())}", style="red")
        return BAD_INPUT
    except KeyboardInterrupt:
        say(err, "error: interrupted", style="red")
        return INTERRUPTED
    return code


class Parser(argparse.ArgumentParser):
    """One whose errors are one line, as those of everything else."""

    def error(self, message: str) -> NoReturn:
        raise PackingError(f"{message}; {self.prog} --help shows what there is")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        "hf-packing", description="What packing does for your data, and whether a model keeps documents apart."
    )
    top.add_argument("--version", action="version", version=f"hf-packing {hf_packing.__version__}")
    commands = top.add_subparsers(required=True, metavar="report | pack | check")
    add_report(commands.add_parser("report", help="strategies compared on your documents", description=report.__doc__))
    add_pack(commands.add_parser("pack", help="documents into a packed dataset", description=pack.__doc__))
    add_check(commands.add_parser("check", help="whether a model keeps documents apart", description=check.__doc__))
    return top


def add_documents(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "data",
        metavar="DATA",
        help="a JSONL, parquet or text file, a folder of them, a saved dataset, or a dataset's name on the hub",
    )
    command.add_argument("--tokenizer", metavar="T", help="name on the hub, folder, or tokenizer.json file")
    command.add_argument("--field", help="field with the text, if not text, messages, or prompt and completion")
    command.add_argument("--split", help="of a dataset with several; train")
    command.add_argument("--glob", metavar="PATTERN", help="files of a folder that are read, such as '*.py'")
    command.add_argument("--skip-bad", action="store_true", help="leave out rows that cannot be read, and count them")
    command.add_argument("--no-eos", action="store_true", help="no end-of-sequence token after a text")
    command.add_argument("--separator", metavar="TEXT", help="between a prompt and its completion; a line break")
    add_usual(command)


def add_usual(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trust-remote-code", action="store_true", help="run code that comes with T or MODEL")
    command.add_argument("--json", action="store_true", help="print JSON")


def add_report(command: argparse.ArgumentParser) -> None:
    add_documents(command)
    command.add_argument(
        "--max-length", type=positive, metavar="N", nargs="+", default=[2048, 4096, 8192], help="tokens of a row"
    )
    command.add_argument("--strategy", nargs="+", metavar="NAME", help=f"of {', '.join(STRATEGIES)}")
    command.add_argument("--output", type=Path, metavar="HTML", help="a page to write, with PNG pictures beside it")
    command.add_argument("--ranks", type=positive, metavar="N", default=8, help="processes that train at the same time")
    command.set_defaults(run=report)


def add_pack(command: argparse.ArgumentParser) -> None:
    add_documents(command)
    command.add_argument("--output", type=Path, required=True, metavar="DIR", help="for datasets.load_from_disk")
    command.add_argument("--strategy", default="best_fit", metavar="NAME", help=f"one of {', '.join(STRATEGIES)}")
    command.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        nargs="+",
        default=[4096],
        help="tokens of a row; several for buckets",
    )
    command.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")
    command.set_defaults(run=pack)


def add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="name on the hub, folder, or an architecture such as llama")
    command.add_argument(
        "--weights", action="store_true", help="load the model itself; without, a small one of its configuration"
    )
    add_usual(command)
    command.set_defaults(run=check)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer from 1, got {text!r}")
    return int(text)


def report(given: argparse.Namespace) -> int:
    """What packing does for these documents, strategy by strategy, and which to take."""
    from hf_packing.report.report import packing_report

    strategies = strategies_named(given.strategy, given.max_length) if given.strategy else None
    for strategy in strategies or ():
        check_that_it_plans(strategy)
    if given.output:
        from hf_packing.report.page import check_page

        check_page(given.output)
    corpus = corpus_of(given)
    with documents_bar("Tokenising") as seen:
        lengths = corpus.lengths(seen)
    say_without_end(corpus)
    found = packing_report(lengths, given.max_length, strategies=strategies, ranks=given.ranks, source=str(given.data))
    skipped = corpus.documents.skipped
    if not given.json:
        print_report(found)
        print_skipped(skipped)
    written = found.save(given.output) if given.output else []
    if given.json:
        print_json(found.to_dict() | {"skipped": skipped, "files": [str(file) for file in written]})
        return DONE
    for file in written:
        say(out, f"written: {file}")
    return DONE


def pack(given: argparse.Namespace) -> int:
    """Tokenise and pack documents into a saved dataset. Interrupted, it goes on where it was."""
    from hf_packing.report.packed_dataset import check_output, make_packed_dataset
    from hf_packing.strategies.compare import name_of

    strategy = strategy_named(given.strategy, given.max_length)
    check_that_it_plans(strategy)
    check_output(given.output, given.overwrite)
    corpus = corpus_of(given)
    with documents_bar("Tokenising") as seen:
        made = make_packed_dataset(corpus, strategy, given.output, seen, overwrite=given.overwrite)
    say_without_end(corpus)
    if corpus.left_out:
        along = "hf_packing.pack packs columns with one number for each token along"
        say_warning(f"left out beside input_ids: {', '.join(corpus.left_out)}; {along}")
    skipped = corpus.documents.skipped
    if given.json:
        facts = {"output": str(given.output), "strategy": name_of(strategy), "rows": made.rows}
        facts |= {"tokenised_before": made.tokenised_before, "skipped": skipped, "loss_masks": corpus.loss_masks}
        facts |= {"left_out": corpus.left_out}
        print_json(facts | vars(made.plan.metrics()))
        return DONE
    say(out, str(made.plan))
    if made.tokenised_before:
        say(out, f"{made.tokenised_before:,} documents had been tokenised before")
    if corpus.loss_masks:
        say(out, f"applied to labels: {', '.join(corpus.loss_masks)}")
    print_skipped(skipped)
    say(out, f"written: {given.output}, with the plan in {made.plan_folder}")
    return DONE


def check(given: argparse.Namespace) -> int:
    """Whether a model keeps packed documents apart, as it is and patched, and by which route. Exit code 1 if not."""
    look_for_hub(given.model)
    from hf_packing.report.checked_model import check_model

    with err.status("Looking for leaks, and for a route"):
        found = check_model(given.model, given.weights, given.trust_remote_code)
    if given.json:
        print_json(found.to_dict())
    else:
        say(out, str(found))
    return DONE if found.isolated else NOT_ISOLATED


def corpus_of(given: argparse.Namespace) -> Corpus:
    look_for_hub(given.data, given.tokenizer)
    documents = Documents(given.data, given.split, given.glob, given.skip_bad)
    tokenizer = load_tokenizer(given.tokenizer, given.trust_remote_code) if given.tokenizer else None
    return Corpus(documents, tokenizer, given.field, end_documents=not given.no_eos, separator=given.separator)


def check_that_it_plans(strategy: Strategy) -> None:
    """A strategy that needs a package says so before documents are read."""
    from hf_packing.strategies.base import plan_packing

    plan_packing([1], strategy)


def say_without_end(corpus: Corpus) -> None:
    if corpus.to_be_ended and not corpus.ended and corpus.tokenizer is not None:
        say_warning(f"{corpus.tokenizer.name} names no end-of-sequence token: documents end without one")


@contextmanager
def documents_bar(description: str) -> Iterator[Seen]:
    """Counts documents; how many there are is not known before they are read."""
    columns = (SpinnerColumn(), TextColumn(description), MofNCompleteColumn(), TextColumn("documents"))
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda number: progress.advance(task, number)


def print_report(found: Any) -> None:
    from hf_packing.report.tables import COLUMNS, cells_of, headline, lengths_line, setup_line
    from hf_packing.strategies.compare import aligned

    say(out, f"{found.source}: {headline(found)}")
    say(out, lengths_line(found))
    if out.width < WIDE:
        say(out, aligned([COLUMNS, *cells_of(found)]))
        say(out, setup_line(found))
        say(out, f"take {found.recommendation}")
        return
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for number, column in enumerate(COLUMNS):
        header = column.replace(" ", "\n").replace("/", "/\n")
        table.add_column(header, justify="right" if number else "left", no_wrap=True, vertical="bottom")
    for cells in cells_of(found):
        table.add_row(*cells, style="bold green" if cells[0] == found.recommendation.strategy else None)
    out.print(table)
    say(out, setup_line(found))
    say(out, f"take {found.recommendation}")


def print_skipped(skipped: Sequence[str]) -> None:
    if skipped:
        say(out, f"left out: {len(skipped):,}, the first: {skipped[0]}")


def say(console: Screen, text: str, style: str | None = None) -> None:
    """A line as it is: neither cut nor taken for markup."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Without the place in the code, which is not the user's."""
    say(err, f"warning: {' '.join(str(message).split())}", style="yellow")


def print_json(facts: dict[str, Any]) -> None:
    text = json.dumps(finite(facts), indent=1, default=plain, allow_nan=False)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise ReaderGoneError from None


def finite(value: Any) -> Any:
    """With null for what JSON has no number for, such as the leak of a model that cannot be called."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as Python has them; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    sys.exit(main())
