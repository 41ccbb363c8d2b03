"""Print errors and warnings in one line each, and JSON."""

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


def say_error(text: str) -> None:
    """Print an error in one line."""
    print(f"error: {' '.join(text.split())}", file=sys.stderr)


def say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning in one line. The other arguments of `warnings.showwarning`, such as the file, are ignored."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def print_json(facts: dict[str, Any]) -> None:
    """Print a dict as JSON, which has no NaN and no infinity."""
    print(json.dumps(facts, indent=1, default=plain, allow_nan=False))


def plain(value: Any) -> Any:
    """Return a NumPy number or array as a Python value, and any other value as text. For `default` of `json.dumps`."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
