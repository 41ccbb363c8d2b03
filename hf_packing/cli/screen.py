"""Print lines, progress and JSON, even if stdout or stderr is closed, or cannot encode a character."""

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hf_packing.text.corpus import Seen

WIDE = 100
"""Number of terminal columns that the table of a report needs. Text is wrapped to the same width."""


class ReaderGoneError(Exception):
    """An error raised if the program that reads the output, such as `head`, has closed the pipe."""


class _Screen(Console):
    """A console that prints lines unchanged: no colors for numbers, no emoji for words between colons."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, emoji=False, **settings)

    def on_broken_pipe(self) -> None:
        """Raise ReaderGoneError when the program that reads the output has closed the pipe.

        Without this method, Rich would exit with code 1, which `hf-packing check` uses for a model that does not
        isolate documents.
        """
        raise ReaderGoneError


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


out = _Screen(width=None if _is_terminal() else 2 * WIDE)
err = _Screen(stderr=True)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text unchanged: it is not wrapped, and not interpreted as markup."""
    console.print(text, style=style, markup=False, soft_wrap=True)


_FLAGS = {
    r"\b(tokenizer|separator)(?=: expected)": r"--\1",
    r"\btext_field\b": "--field",
    r"\bskip_bad=True\b": "--skip-bad",
}
"""Flags of the command by patterns of the Python arguments that they stand for."""


def in_flags(text: str) -> str:
    """Return an error message with flags of the command in place of Python arguments."""
    for argument, flag in _FLAGS.items():
        text = re.sub(argument, flag, text)
    return text


def say_error(text: str) -> None:
    """Print an error in one line."""
    say(err, f"error: {' '.join(text.split())}", style="red")


def say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line. The other arguments of `warnings.showwarning`, such as the file, are ignored."""
    say(err, f"warning: {' '.join(str(message).split())}", style="yellow")


def print_json(facts: dict[str, Any]) -> None:
    """Print a dict as JSON. NaN and infinity become null."""
    text = json.dumps(_finite(facts), indent=1, default=plain, allow_nan=False)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise ReaderGoneError from None


def plain(value: Any) -> Any:
    """Return a NumPy number or array as a Python value, and any other value as text. For `default` of `json.dumps`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextmanager
def counting_documents(description: str) -> Iterator[Seen]:
    """Context manager: within the block, show a count of documents.

    Yields:
        A function that adds a number of documents to the count.
    """
    columns = (SpinnerColumn(), TextColumn(description), MofNCompleteColumn(), TextColumn("documents"))
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda number: progress.advance(task, number)


def prepare_streams() -> None:
    """Make stdout and stderr discard output if they are closed, and escape characters that they cannot encode."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def swallow_the_rest() -> None:
    """Discard output that is not yet written, since Python would try to write it at exit, and print an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None, also in dicts and lists, and return the result."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
