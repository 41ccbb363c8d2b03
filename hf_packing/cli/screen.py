"""Print to streams that may be closed, may lack a character in their encoding, or may lose their reader."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hf_packing.data.corpus import Seen

WIDE = 100
"""Columns that the table of a report needs; text is wrapped to the same width."""


class ReaderGoneError(Exception):
    """Raised when whoever reads the output, such as `head`, has closed it."""


class _Screen(Console):
    """Prints lines as they are: no colors for numbers, and no emoji for words between colons, which paths may have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, emoji=False, **settings)

    def on_broken_pipe(self) -> None:
        """Rich would exit with 1, which means something else here."""
        raise ReaderGoneError


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


out = _Screen(width=None if _is_terminal() else 2 * WIDE)
err = _Screen(stderr=True)


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line as it is: neither cut nor taken for markup."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def say_error(text: str) -> None:
    """Print an error in one line."""
    say(err, f"error: {' '.join(text.split())}", style="red")


def say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line, without its place in the code, which is not the user's code."""
    say(err, f"warning: {' '.join(str(message).split())}", style="yellow")


def print_json(facts: dict[str, Any]) -> None:
    """Print JSON, with null for nan and infinity."""
    text = json.dumps(_finite(facts), indent=1, default=plain, allow_nan=False)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise ReaderGoneError from None


def plain(value: Any) -> Any:
    """Return numbers and arrays of NumPy as Python has them, anything else as text: a default for `json`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@contextmanager
def counting_documents(description: str) -> Iterator[Seen]:
    """Show a count of documents; the total is not known before they are read."""
    columns = (SpinnerColumn(), TextColumn(description), MofNCompleteColumn(), TextColumn("documents"))
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(description, total=None)
        yield lambda number: progress.advance(task, number)


def prepare_streams() -> None:
    """Discard output to closed streams, and escape characters that an encoding lacks."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def swallow_the_rest() -> None:
    """Discard the remaining output: Python flushes its streams at exit, and would print an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _finite(value: Any) -> Any:
    """Replace nan and infinity, such as the leak of a model that cannot be called, by None."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
