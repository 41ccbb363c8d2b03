"""Print errors and warnings, each in one line, and JSON."""

import json
import re
import sys
from typing import Any

WIDE = 100
"""Number of terminal columns that the table of a report needs. Text is wrapped to the same width."""

_FLAGS = {
    r"^(tokenizer|split|glob|share_prefixes|task)(?=: )": r"--\1",
    r"^data(?=: )": "DATA",
    r"\btext_field\b": "--field",
    r"\bskip_bad(=True)?\b": "--skip-bad",
    r"\b(train|share)_(on|prefixes)\b": r"--\1-\2",
    r"\bglob=": "--glob ",
}
"""Flags of the command by patterns of the Python arguments that they stand for."""


def in_flags(text: str) -> str:
    """Return an error message with flags of the command in place of Python arguments."""
    for argument, flag in _FLAGS.items():
        text = re.sub(argument, flag, text)
    return text


def say(text: str) -> None:
    """Print an error or a warning in one line, on the error stream."""
    print(" ".join(text.split()), file=sys.stderr)


def say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line. The other arguments of `warnings.showwarning`, such as the file, are ignored."""
    say(f"warning: {message}")


def print_json(facts: dict[str, Any]) -> None:
    """Print a dict as JSON. NaN and infinity, which JSON does not have, become null."""
    known = json.loads(json.dumps(facts), parse_constant=lambda _: None)
    print(json.dumps(known, indent=1))
