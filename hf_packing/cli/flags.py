"""The documents and strategies that the flags of a command describe, and how results and errors are printed."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_packing.checks import expect
from hf_packing.strategies.base import Strategy, plan_packing, registered_strategies

STRATEGIES = tuple(registered_strategies())

_TEXT_SETTINGS = ("text_field", "end_documents", "add_special_tokens", "separator", "train_on")

_FLAGS = {
    "text_field": "--field",
    "skip_bad=True": "--skip-bad",
    "skip_bad: ": "--skip-bad: ",
    "separator: ": "--separator: ",
    "train_on": "--train-on",
    "add_special_tokens=False": "--no-special-tokens",
    "share_prefixes": "--share-prefixes",
    "keep_first_labels": "--keep-first-labels",
    "glob=": "--glob ",
    "trust_remote_code=True": "--trust-remote-code",
    "tokenizer: ": "--tokenizer: ",
}
"""Flags of the command whose names differ from those of the Python arguments that they stand for."""


def read_documents(data: str, given: argparse.Namespace, folder: str) -> tuple[Any, list[str]]:
    """Read and tokenize the documents that the flags describe, and warn of what they lack.

    Args:
        data: a file, a folder or a dataset.
        given: the parsed command line flags.
        folder: an empty folder, in which tokens are stored.

    Returns:
        A Dataset with input_ids; and the lines and rows that were left out, with the reasons.

    Raises:
        PackingError: the documents cannot be read, or a flag does not fit them.
    """
    from hf_packing.text.read import Documents  # imported here, since --help needs no datasets

    documents = Documents(data, given.split, given.glob, given.skip_bad)
    tokenizer = _tokenizer_of(given)
    with tqdm(desc="Tokenizing", unit=" documents", delay=1, leave=False, disable=None) as progress:
        tokens = documents.tokens(tokenizer, Path(folder, "tokens.arrow"), progress.update)
    for remark, number in documents.remarks.items():
        say_warning(f"{number:,} rows {remark}")
    return tokens, documents.skipped


def _tokenizer_of(given: argparse.Namespace) -> Any:
    """Return the TextTokenizer that the flags describe; None without a tokenizer."""
    from hf_packing.text.tokenize import TextTokenizer, load_tokenizer

    if given.tokenizer is None:
        unused = {"text_field": given.text_field, "separator": given.separator, "train_on": given.train_on}
        expect(None, "without a tokenizer", **unused)
        return None
    return TextTokenizer(load_tokenizer(given.tokenizer, given.trust_remote_code), **text_settings(given))


def text_settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return how the flags say that rows become tokens, as arguments of `TextTokenizer` and `fleet.pack`."""
    return {name: getattr(given, name) for name in _TEXT_SETTINGS}


def strategies_named(names: Sequence[str], max_lengths: Sequence[int]) -> list[Strategy]:
    """Return one strategy for each name and each maximum row length; with buckets, one for each name with all lengths.

    Raises:
        MissingDependencyError: a package that a strategy needs is not installed.
    """
    strategies: list[Strategy] = []
    lengths = sorted(set(max_lengths))
    for name in dict.fromkeys(names):
        strategy: Any = registered_strategies()[name]
        strategies += [strategy(lengths)] if strategy.has_buckets else map(strategy, lengths)
    for each in strategies:
        plan_packing([1], each)  # raises MissingDependencyError before documents are read
    return strategies


def in_flags(text: str) -> str:
    """Return an error message with flags of the command in place of Python arguments."""
    for argument, flag in _FLAGS.items():
        text = text.replace(argument, flag)
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
