"""Where the command prints: streams that may be closed, that may not know a letter, and whose reader may go away."""

import os
import sys
from typing import Any

from rich.console import Console


class ReaderGoneError(Exception):
    """Who read the output, such as `head`, has closed it."""


class Screen(Console):
    """Prints lines as they are: no colours for numbers, and no pictures for words between colons, as paths may have."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, emoji=False, **settings)

    def on_broken_pipe(self) -> None:
        """Rich would exit with 1, which means something else here."""
        raise ReaderGoneError


def is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def prepare_streams() -> None:
    """Have streams that are closed swallow what is printed, and letters that an encoding lacks be escaped."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def swallow_the_rest() -> None:
    """Python flushes its streams when it ends, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
